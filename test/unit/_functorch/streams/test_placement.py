"""`_functorch.streams.placement`: the streams and the order of a traced graph's nodes."""

import operator

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.source import CurrentStreamSource, LocalSource
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import NumberedCase
from torch_overlay._dynamo import registry
from torch_overlay._dynamo.ops import NVTX, range_pop, range_push
from torch_overlay._functorch.streams.epilogue import view_streams
from torch_overlay._functorch.streams.facts import (
    ExitWait,
    fact_of,
    ForeignRead,
    is_placed_program,
    note_fact,
    NOTHING,
    placement,
)
from torch_overlay._functorch.streams.fx import node_stream, place_on
from torch_overlay._functorch.streams.placement import place_streams, promise_parts, wait_for_parts
from torch_overlay._functorch.streams.program import Program
from torch_overlay._functorch.streams.tokens import blocking_copy, CALLER, caller_event, record, state, synchronization
from torch_overlay.frame_facts import FrameFacts


aten, higher, streams = torch.ops.aten, torch.ops.higher_order, torch.ops.streams
RECORD, WAIT = streams.record_event.default, streams.wait_event.default
WAIT_STREAM = streams.wait_stream.default
MODE = FakeTensorMode()
THEIRS, OURS = 3, 4  # events of the caller, and of the frame


def fake(device="cuda:0"):
    return FakeTensor(MODE, torch.empty(4, device="meta"), torch.device(device))


class PlacementCase(NumberedCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(setattr, registry, "_has_streams", registry._has_streams)
        device = torch.device("cuda", 0)
        self.objects = [torch.Stream(stream_id=i, device_index=0, device_type=1) for i in range(3)]
        numbering.register_user_object(self.objects[0], CurrentStreamSource(device))
        for index in (1, 2):
            source = LocalSource(f"s{index}")
            numbering.register_user_object(self.objects[index], source)
        self.objects.append(torch.Event("cuda"))
        numbering.register_user_object(self.objects[-1], LocalSource("e"))
        registry.add_owned(torch.Event("cuda"), torch.Event, (), {})
        self.begin()

    def begin(self):
        self.graph, self.root = Graph(), torch.nn.Module()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = fake()

    def call(self, target, *args, stream=None, val=None, **meta):
        node = self.graph.call_function(target, args)
        node.meta |= {"val": fake() if val is None else val, **meta}
        if stream is not None:
            node.meta["custom"] = {"stream": stream}
        return node

    def relu(self, *args, **kwargs):
        return self.call(aten.relu.default, *args, **kwargs)

    def place(self, *results):
        desc = [PlainAOTOutput(i) for i in range(len(results))]
        self.graph.output(results).meta["desc"] = desc
        self.gm = GraphModule(self.root, self.graph)
        self.graph = self.gm.graph
        place_streams(self.gm, registry.facts())
        self.graph.lint()

    def left(self):
        """The operations that are left, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def order(self, *nodes):
        facts = map(fact_of, nodes)
        return [(set(fact.after), set(fact.promised_to)) for fact in facts]


def forked(case):
    """A value on stream 1, between two waits of the caller's stream."""
    first = case.relu(case.x)
    case.call(WAIT_STREAM, 1, 0)
    side = case.relu(first, stream=1)
    case.call(RECORD, OURS, 1)
    case.call(WAIT, OURS, 0)
    return first, side, case.relu(side)


class TestForward(PlacementCase):
    def test_waits_become_what_is_noted(self):
        first, side, last = nodes = forked(self)
        self.place(last)
        self.assertEqual(self.left(), list(nodes))
        self.assertEqual(self.order(*nodes), [(set(), {state(1)}), ({CALLER}, {CALLER}), ({state(1)}, set())])
        self.assertEqual([node_stream(n) for n in nodes], [0, 1, 0])
        leave = (ExitWait(0, (state(1),)), ExitWait(1, (CALLER,)))
        self.assertEqual([fact_of(n).exit_waits for n in (self.x, *nodes)], [leave] * 4)

    def test_events_that_others_know_stay(self):
        self.call(WAIT, THEIRS, 1)
        side = self.relu(self.x, stream=1)
        kept = self.call(RECORD, THEIRS, 1)
        self.place(side)
        self.assertEqual(self.left(), [side, kept])
        after, before = {caller_event(THEIRS)}, {record(THEIRS, 0)}
        self.assertEqual(self.order(side), [(after, before)])
        fact = fact_of(kept)
        self.assertEqual((fact.requires, fact.order), (record(THEIRS, 0), 1))

    def test_waits_of_the_host_stay(self):
        side = self.relu(self.x, stream=1)
        kept = self.call(streams.synchronize_stream.default, 1)
        after = self.relu(self.x, stream=2)
        self.place(side, after)
        self.assertEqual(self.left(), [side, kept, after])
        token = synchronization(0)
        self.assertEqual(self.order(side, after), [(set(), {token}), ({state(1)}, set())])
        self.assertEqual(fact_of(kept).requires, token)

    def test_frees_that_wait_are_erased(self):
        side = self.relu(self.x, stream=1)
        self.call(streams.sync_dealloc.default, OURS, 0, side)
        self.place(side)
        self.assertEqual(self.left(), [side])

    def test_view_is_where_its_memory_is_filled(self):
        side = self.relu(self.x, stream=1)
        self.call(WAIT_STREAM, 2, 1)
        view = self.call(aten.t.default, side, stream=2)
        inner = self.call(aten.t.default, side, stream=2)
        self.place(view, self.relu(inner, stream=2))
        self.assertEqual([node_stream(n) for n in (view, inner)], [1, 2])
        self.assertEqual(self.order(view), self.order(side))
        # autograd's node of the view is still where the program made it
        self.assertEqual(view_streams(self.graph)[0], (0, 2))

    def test_reads_of_other_streams_memory(self):
        first, side, last = forked(self)
        self.place(last)
        kinds = [fact_of(node).reads for node in (first, side, last)]
        freed = ((), (ForeignRead(0, "freed"),), (ForeignRead(1, "freed"),))
        self.assertEqual(kinds, list(freed))

    def test_what_tracing_noted_for_memory_is_dropped(self):
        side = self.relu(self.x, stream=1)
        note_fact(side, eager_storage=(("relu", 1),), is_given=True)
        self.place(side)
        fact = fact_of(side)
        self.assertEqual((fact.eager_storage, fact.is_given), ((), False))

    def test_updates_of_an_input(self):
        copy = self.call(aten.clone.default, self.x)
        self.call(WAIT_STREAM, 1, 0)
        side = self.relu(copy, stream=1)
        self.call(WAIT_STREAM, 2, 1)
        written = self.call(aten.copy_.default, self.x, side)
        self.place()
        self.assertEqual(self.left(), [copy, side, written])
        self.assertEqual([node_stream(n) for n in self.left()], [1, 1, 1])
        self.assertEqual(self.order(written), [({CALLER}, {state(2)})])

    def updated(self, base):
        """New values of the first half, on stream 1: those, the whole, and the other half."""
        half = torch.empty(2, device="meta")
        part = self.relu(self.x, stream=1, val=half)
        new = self.call(aten.slice_scatter.default, base, part, 0, 0, 2, stream=1)
        return part, new, self.call(aten.slice.Tensor, new, 0, 2, 4, stream=1, val=half)

    def test_elements_that_an_update_left_alone(self):
        made = self.relu(self.x)
        self.call(WAIT_STREAM, 2, 0)
        self.call(WAIT_STREAM, 1, 0)
        _, new, rest = self.updated(made)
        self.place(rest)
        (after, before), _ = self.order(new, rest)
        self.assertEqual((after, before), ({CALLER}, {CALLER, state(2)}))

    def test_host_waits_for_elements_that_an_update_left_alone(self):
        made = self.relu(self.x, stream=2)
        kept = self.call(streams.synchronize_stream.default, 2)
        part, new, rest = self.updated(made)
        self.place(rest)
        *others, wait = self.left()
        self.assertEqual(others, [made, kept, part, new, rest])
        self.assertEqual((wait.target, wait.args), (kept.target, (1,)))

    def test_copy_that_is_left_out_before_a_graph_break(self):
        registry.current().goes_on = True
        copy = self.call(aten._to_copy.default, self.x, stream=1, val=fake("cpu"))
        self.place(self.relu(self.x))
        wait, *_ = self.left()
        self.assertEqual(wait.target, streams.synchronize_stream.default)
        self.assertIs(wait.next, copy)
        self.assertEqual(fact_of(wait).requires, synchronization(0))

    def test_copies_of_lists_between_devices(self):
        registry.note_streams()
        cpu = self.graph.placeholder("cpu")
        cpu.meta["val"] = fake("cpu")
        copies = self.call(
            aten._foreach_copy.default, *([self.x, self.x], [self.x, cpu]), stream=1, val=[fake(), fake()]
        )
        self.place(self.call(operator.getitem, copies, 1, stream=1))
        targets = [node.target for node in self.left()]
        self.assertEqual(targets, [aten.copy.default] * 2)

    def test_streams_recorded_for_an_input(self):
        side = self.relu(self.x, stream=1)
        record = self.call(streams.record_stream.default, side, 1)
        self.call(aten.copy_.default, self.x, side)
        self.place()
        self.assertIs(record.args[0], self.x)

    def test_view_of_a_constant(self):
        zeros = self.call(aten.zeros.default, [4], stream=1)
        view = self.call(aten.t.default, zeros, stream=2)
        self.place(self.relu(view))
        self.assertEqual(node_stream(view), 1)

    def test_memory_of_results(self):
        _, side, _ = forked(self)
        self.place(side)
        (result,) = fact_of(side).results
        self.assertIn(1, result.streams)
        self.assertEqual(fact_of(self.x).results, (result,))

    def test_code_is_that_of_the_graph(self):
        *_, last = forked(self)
        self.place(last)
        self.assertNotIn("streams.", self.gm.code)

    def test_ranges_are_counted(self):
        before = self.relu(self.x, stream=1)
        push = self.call(range_push, NVTX, "a", None)
        inside = self.relu(self.x, stream=1)
        self.call(range_pop, NVTX)
        self.place(before, inside, last := self.relu(self.x))
        self.assertIs(before.next, push)
        found = [fact_of(node).range for node in (before, inside, last)]
        self.assertEqual(found, [0, 1, 2])


class TestWholeGraphs(PlacementCase):
    def test_graph_without_streams(self):
        node = self.relu(self.x, stream=0)
        self.place(node)
        self.assertNotIn("custom", node.meta)
        self.assertFalse(is_placed_program(self.graph))
        self.assertEqual(placement(self.gm), ())

    def test_graph_without_streams_that_blocks_the_host(self):
        for has_streams in (False, True):
            self.begin()
            registry._has_streams = has_streams
            copy = self.call(aten._to_copy.default, self.x, val=fake("cpu"))
            self.place(copy)
            self.assertEqual(fact_of(copy).is_placed, has_streams)

    def test_graph_that_launches_nothing(self):
        waits = [self.call(WAIT_STREAM, 1, 0), self.call(RECORD, OURS, 1)]
        self.place(self.x)
        self.assertEqual(self.left(), waits)
        self.assertEqual(self.order(waits[1]), [(set(), set())])
        self.assertFalse(fact_of(self.x).exit_waits)

    def test_subgraph(self):
        body = Graph()
        inner = body.placeholder("y")
        same, other = (body.call_function(aten.relu.default, (inner,)) for _ in "ab")
        body.call_function(WAIT_STREAM, (2, 1))
        kept = body.call_function(RECORD, (THEIRS, 1))
        place_on(same, 1)
        place_on(other, 2)
        body.output((same, other))
        self.root.body = GraphModule(torch.nn.Module(), body)
        attribute = self.graph.get_attr("body")
        both = self.call(higher.invoke_subgraph, attribute, "body", self.x, stream=1, val=())
        self.place(self.call(operator.getitem, both, 0, stream=1))
        nodes = self.gm.body.graph.nodes
        self.assertEqual([node_stream(n) for n in nodes], [0, 0, 2, 0, 0])
        self.assertIn(kept, nodes)

    def test_placement_of_a_module(self):
        *_, last = forked(self)
        self.place(last)
        found = placement(self.gm)
        positions = [(name, position) for name, position, _ in found]
        self.assertEqual(positions, [("", i) for i in range(4)])
        again = placement(self.gm)
        self.assertEqual(found, again)
        place_on(last, 2)
        last.meta["custom"] |= {"other": 1}
        changed = placement(self.gm)
        self.assertEqual(changed[:3], found[:3])
        self.assertNotEqual(changed[3], found[3])
        self.assertNotIn("other", changed[3][2])


class TestBackward(PlacementCase):
    def test_backward_has_none_of_the_forwards_waits(self):
        *_, last = forked(self)
        back = {"partitioner_tag": "is_backward"}
        gradient = self.relu(last, **back)
        side = self.relu(gradient, stream=1, **back)
        end = self.relu(side, **back)
        self.place(last, end)
        self.assertEqual(self.order(gradient, side, end), [(set(), set()), ({CALLER}, {CALLER}), (set(), set())])
        for node in (gradient, side, end):
            fact = fact_of(node)
            self.assertEqual((fact.exit_waits, fact.reads, fact.results), (None,) * 3)
        self.assertEqual(len(self.left()), 6)

    def test_operations_of_its_own_stream_program(self):
        tangent = self.graph.placeholder("tangents_1")
        first = self.relu(self.x, stream=1)
        kept = self.call(RECORD, THEIRS, 1)
        side = self.relu(tangent, stream=1)
        other = self.call(streams.synchronize_stream.default, 1)
        self.place(first, side)
        self.assertEqual(self.left(), [first, kept, side, other])
        self.assertNotIn("partitioner_tag", kept.meta)
        self.assertEqual(other.meta["partitioner_tag"], "must_be_in_backward")
        self.assertEqual(fact_of(tangent), NOTHING)

    def test_ranges_of_each_half(self):
        tangent = self.graph.placeholder("tangents_1")
        forward = self.relu(self.x, stream=1)
        self.call(range_push, NVTX, "a", None)
        backward = self.relu(tangent, stream=1)
        self.call(range_pop, NVTX)
        self.place(forward, backward, last := self.relu(tangent))
        found = [fact_of(node).range for node in (forward, backward, last)]
        self.assertEqual(found, [0, 0, 1])


EVENT = 5


class PartsCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.value(self.graph.placeholder("x"))

    def value(self, node, size=8):
        node.meta["val"] = torch.empty(size, device="meta")
        return node

    def call(self, target, *args, stream=0, promised_to=(), size=8):
        node = self.value(self.graph.call_function(target, args), size)
        place_on(node, stream)
        note_fact(node, after=(), promised_to=tuple(sorted(promised_to)))
        return node

    def made(self, *before, stream=1):
        return self.call(aten.relu.default, self.x, stream=stream, promised_to=before)

    def updated(self, base, end=4, promised_to=()):
        """The base with its first elements updated, on stream 2."""
        part = self.call(aten.relu.default, base, stream=2, size=end)
        args = (base, part, 0, 0, end)
        return self.call(aten.slice_scatter.default, *args, stream=2, promised_to=promised_to)

    def rest(self, base, start=4):
        args = (base, 0, start, 8)
        return self.call(aten.slice.Tensor, *args, stream=2, size=8 - start)

    def operation(self, target, *args, requires=None):
        node = self.graph.call_function(target, args)
        note_fact(node, requires=requires)
        return node

    def record(self):
        target = streams.record_event.default
        return self.operation(target, EVENT, 1, requires=record(EVENT, 0))

    def promise(self, *values):
        return promise_parts(self.graph.output(values))

    def before(self, *nodes):
        return [set(fact_of(node).promised_to or ()) for node in nodes]


class TestPromises(PartsCase):
    def test_streams_that_had_waited(self):
        new = self.updated(self.made(CALLER))
        rest = self.rest(new)
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest, new), [{CALLER, state(1)}] * 2)

    def test_result_with_updated_elements(self):
        new = self.updated(self.made(CALLER))
        some, whole = self.rest(new, 3), new
        self.assertEqual(self.promise(some, whole), [])
        self.assertEqual(self.before(some, whole), [set(), set()])

    def test_elements_of_several_operations(self):
        first = self.made(CALLER, state(3))
        both = self.call(aten.slice_scatter.default, *(first, self.made(CALLER, stream=4), 0, 4, 6))
        rest = self.rest(self.updated(both))
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest), [{CALLER}])

    def test_elements_of_an_input(self):
        rest = self.rest(self.updated(self.x))
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest), [set()])

    def test_values_of_the_backward(self):
        made = self.made(CALLER)
        rest = self.rest(self.updated(made))
        rest.meta["partitioner_tag"] = "is_backward"
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest), [set()])

    def test_record_moves_after_the_update(self):
        made = self.made(record(EVENT, 0))
        self.record()
        self.operation(streams.wait_event.default, EVENT, 0)
        rest = self.rest(self.updated(made))
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest), [{record(EVENT, 0), state(1)}])

    def test_record_can_not_move_past_the_host(self):
        made = self.made(record(EVENT, 0))
        self.record()
        self.operation(streams.synchronize_event.default, 6)
        new = self.updated(made)
        rest = self.rest(new)
        self.assertEqual(self.promise(rest), [(rest, new)])
        self.assertEqual(self.before(rest), [{state(1)}])

    def test_record_after_the_update(self):
        made = self.made(record(EVENT, 0))
        new = self.updated(made)
        self.operation(streams.synchronize_event.default, 6)
        self.record()
        rest = self.rest(new)
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest), [{record(EVENT, 0), state(1)}])

    def test_host_had_waited(self):
        made = self.made(synchronization(0))
        new = self.updated(made)
        rest = self.rest(new)
        self.assertEqual(self.promise(rest), [(rest, new)])

    def test_host_waits_for_the_update_too(self):
        made = self.made(synchronization(0))
        rest = self.rest(self.updated(made, promised_to=[synchronization(0)]))
        self.assertEqual(self.promise(rest), [])

    def test_copy_that_blocks_promises_nothing(self):
        rest = self.rest(self.updated(self.made(blocking_copy(0), CALLER)))
        self.assertEqual(self.promise(rest), [])
        self.assertEqual(self.before(rest), [{CALLER, state(1)}])


class TestWaits(PartsCase):
    def test_host_waits_once_for_each_stream(self):
        self.operation(streams.synchronize_stream.default, 3)
        made = self.made(synchronization(0))
        news = [self.updated(made), self.updated(made, 2)]
        rests = [self.rest(new) for new in news]
        place_on(other := self.updated(made), 3)
        rests.append(self.rest(other))
        other.meta["stack_trace"] = "here"
        last = self.call(aten.relu.default, self.x)
        backward = self.call(aten.relu.default, self.x)
        backward.meta["partitioner_tag"] = "is_backward"
        program = Program(list(self.graph.nodes), FrameFacts())
        awaited = self.promise(*rests)
        self.assertEqual(awaited, list(zip(rests, [*news, other])))
        wait_for_parts(program, awaited)
        self.graph.lint()

        found = [last.next, last.next.next]
        self.assertIs(found[1].next, backward)
        found.sort(key=lambda node: node.args)
        self.assertEqual([node.args for node in found], [(2,), (3,)])
        tokens = [fact_of(node).requires for node in found]
        self.assertEqual(tokens, [synchronization(1), synchronization(2)])
        self.assertEqual([fact_of(node).order for node in found], [1, 2])
        self.assertTrue(all(fact_of(node).is_placed for node in found))
        self.assertEqual(found[1].meta["stack_trace"], "here")
        for rest, new, token in zip(rests, [*news, other], [tokens[0], *tokens]):
            for node in (rest, new):
                self.assertIn(token, fact_of(node).promises)
