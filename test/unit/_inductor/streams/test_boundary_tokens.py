"""`_inductor.streams.reader`: what a region waits for at its entry and exit."""

import gc
import weakref

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.source import CurrentStreamSource, LocalSource
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._inductor import config

import form  # noqa: F401
from stand_ins.schedules import Program, ProgramCase
from torch_overlay import frame_facts
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import ExitWait, ForeignRead, note_fact, ResultMemory
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, record, state, synchronization
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins
from torch_overlay._inductor.streams import graph_facts
from torch_overlay._inductor.streams.reader import BoundaryTokens


aten, streams = torch.ops.aten, torch.ops.streams
PRIVATE, OTHER = 3, 4  # made by the frame; the current stream of the other device
OTHER_DEVICE = 1_000_001  # the number that OTHER has where regions are planned
E5, R5, H0, C0 = caller_event(5), record(5, 0), synchronization(0), blocking_copy(0)


def current(device):
    stream = torch.Stream(stream_id=0, device_index=device, device_type=1)
    return stream, CurrentStreamSource(stream.device)


class SchedulesTestCase(ProgramCase):
    def setUp(self):
        super().setUp()
        self.objects = [current(0)]
        numbering.register_user_object(*self.objects[0])
        for index in (1, 2):
            stream = torch.Stream(stream_id=index, device_index=0, device_type=1)
            self.objects.append(stream)
            numbering.register_user_object(stream, LocalSource(f"s{index}"))
        stream = torch.Stream(stream_id=PRIVATE, device_index=0, device_type=1)
        self.objects.append(stream)
        self.assertEqual(registry.add_owned(stream, torch.Stream, (), {}), PRIVATE)
        self.objects.append(current(1))
        self.assertEqual(registry.add_current(*self.objects[-1]), OTHER)
        self.enterContext(frame_facts.compiling(registry.facts()))

    def scheduled(self, *results, **options):
        self.program.output(*results)
        return self.program.scheduled(**options)


class TestLaunches(SchedulesTestCase):
    def setUp(self):
        super().setUp()
        self.x = self.program.input(4)

    def launches(self, *results, enclosed=False, **options):
        """What the kernel of each result is after, and what is after it."""
        with self.scheduled(*results, **options) as scheduler:
            self.tokens = BoundaryTokens(scheduler, scheduler.nodes, enclosed)
            order, found = list(self.program.graph.nodes), {}
            for node in scheduler.nodes:
                made = max(fx_origins(node), key=order.index)
                tokens = self.tokens.of_launch(node, node_stream(made))
                found[made] = tuple(map(set, tokens))
                self.tokens.note_origins(node)
            return [found[node] for node in results]

    def test_tokens_of_a_node(self):
        known = {"after": (E5, state(0)), "promised_to": (R5, state(0), state(2))}
        node = self.call(aten.sin.default, self.x, stream=1, **known)
        wanted = {E5, state(0)}, {R5, state(0), state(2)}
        self.assertEqual(self.launches(node), [wanted])

    def test_own_stream_and_streams_that_nobody_sees(self):
        tokens = (state(1), state(2), state(PRIVATE))
        node = self.call(aten.sin.default, self.x, stream=1)
        note_fact(node, after=tokens, promised_to=tokens)
        self.assertEqual(self.launches(node), [({state(2)}, {state(2)})])

    def test_backward_sees_the_streams_of_its_forward(self):
        node = self.call(aten.sin.default, self.x, stream=1, after=(state(PRIVATE),))
        found = self.launches(node, is_backward=True, is_inference=False)
        self.assertEqual(found, [({state(PRIVATE)}, set())])

    def test_current_stream_of_another_device(self):
        node = self.call(aten.sin.default, self.x, stream=1, after=(state(OTHER),))
        self.assertEqual(self.launches(node), [({state(OTHER_DEVICE)}, set())])

    def test_nodes_of_one_kernel(self):
        first = self.call(aten.sin.default, self.x, after=(E5,), promised_to=())
        second = self.call(aten.cos.default, first, after=(state(1),), promised_to=(R5,))
        self.assertEqual(self.launches(second), [({E5, state(1)}, {R5})])

    def test_node_that_made_what_a_kernel_reads(self):
        first = self.call(aten.sum.default, self.x, stream=1, after=(E5,), promised_to=(R5,))
        second = self.call(aten.cos.default, first, stream=2, after=(), promised_to=())
        found = self.launches(first, second)
        self.assertEqual(found, [({E5}, {R5}), (set(), set())])

    def sum_and_its_reader(self, of_input=False, **fact):
        """The kernels of both compute `inner`; the second reads the first's result."""
        made = self.program.input(64, 64)
        made = made if of_input else self.call(aten.mm.default, made, made)
        inner = self.call(aten.relu.default, made, after=(E5,), promised_to=(R5,))
        total = self.call(aten.sum.dim_IntList, inner, [1], True)
        reader = self.call(aten.add.Tensor, inner, total, **fact)
        with config.patch(max_fusion_size=1):
            return self.launches(total, reader)

    def test_node_that_went_into_what_a_kernel_reads(self):
        found = self.sum_and_its_reader(after=(state(1),), promised_to=())
        self.assertEqual(found, [({E5}, {R5}), ({state(1)}, set())])

    def test_node_that_reads_the_callers_memory_again(self):
        found = self.sum_and_its_reader(of_input=True, after=(state(1),), promised_to=())
        self.assertEqual(found, [({E5}, {R5}), ({state(1), E5}, {R5})])

    def test_node_that_is_computed_in_two_kernels(self):
        shared = self.call(aten.neg.default, self.x, after=(E5,), promised_to=())
        results = [
            self.call(aten.cos.default, self.call(aten.slice.Tensor, shared, 0, *ends)) for ends in ((0, 1), (1, 4))
        ]
        for node in results:
            note_fact(node, after=(), promised_to=())
        self.assertEqual(self.launches(*results), [({E5}, set())] * 2)

    def test_view(self):
        view = self.call(aten.slice.Tensor, self.x, 0, 0, 2, after=(E5,), promised_to=(R5,))
        node = self.call(aten.cos.default, view, after=(state(1),), promised_to=())
        self.assertEqual(self.launches(node), [({state(1)}, set())])

    def test_node_that_lost_its_tokens(self):
        first = self.call(aten.sum.default, self.x, stream=1, after=(E5,), promised_to=(R5,))
        other = self.call(aten.mm.default, *[self.program.input(2, 2)] * 2, stream=1)
        third = self.call(aten.mm.default, *[self.program.input(3, 3)] * 2, stream=2)
        found = self.launches(first, other, third)
        self.assertEqual(found, [({E5}, {R5})] * 2 + [(set(), set())])

    def test_reader_that_lost_its_tokens(self):
        """What was said of a node before it is not said of it; nor is it unknown."""
        self.assertEqual(self.sum_and_its_reader()[1], (set(), set()))

    def test_enclosed_regions_fork_and_join(self):
        tokens = {"after": (E5,), "promised_to": (R5, H0, state(2), state(0))}
        side = self.call(aten.sum.default, self.x, stream=1, **tokens)
        other = self.call(aten.cos.default, self.program.input(8), promised_to=(R5,))
        found = self.launches(side, other, enclosed=True)
        self.assertEqual(found, [({state(0)}, {state(0), R5, H0}), (set(), {R5})])
        self.assertEqual(self.tokens.concerned, {0, 1, 2})

    def test_reads_of_other_streams_memory(self):
        one, two = ForeignRead(1, "freed"), ForeignRead(2, "kept", "y")
        inner = self.call(aten.sin.default, self.x, reads=(one,))
        y, z = self.program.input(2, 2), self.program.input(3, 3)
        results = [
            self.call(aten.cos.default, inner, reads=(one, two)),
            self.call(aten.mm.default, y, y, reads=()),
            self.call(aten.mm.default, z, z),
            self.call(aten.clone.default, self.call(aten.slice.Tensor, y, 0, 0, 1)),
        ]
        with self.scheduled(*results) as scheduler:
            tokens = BoundaryTokens(scheduler, scheduler.nodes, False)
            nodes = {n: node for node in scheduler.nodes for n in fx_origins(node)}
            found = [tokens.foreign_reads(nodes[n]) for n in results]
            self.assertEqual(found, [{one, two}, set(), None, None])
            view = nodes[results[-1]]
            view.node.origins.remove(results[-1])
            self.assertEqual(tokens.foreign_reads(view), set())


class TestExit(SchedulesTestCase):
    def at_exit(self, *leave, blocking=(), enclosed=False):
        x = self.program.input(4)
        node = self.call(aten.sin.default, x, exit_waits=leave)
        with self.scheduled(node) as scheduler:
            tokens = BoundaryTokens(scheduler, scheduler.nodes, enclosed)
            return tokens.at_exit(blocking)

    def test_what_streams_are_left_after(self):
        leave = (
            ExitWait(1, (state(0), state(PRIVATE))),
            ExitWait(1, (E5,)),
            ExitWait(OTHER, (state(OTHER), state(2))),
            ExitWait(PRIVATE, (state(0),)),
        )
        wanted = {1: {state(0), E5}, OTHER_DEVICE: {state(OTHER_DEVICE), state(2)}}
        self.assertEqual(self.at_exit(*leave), wanted)

    def test_copy_that_is_left_out(self):
        leave = ExitWait(1, (state(0),)), ExitWait(2, (E5,), C0)
        self.assertEqual(self.at_exit(*leave), {1: {state(0)}, 2: {E5}})
        self.program = Program()
        self.assertEqual(self.at_exit(*leave, blocking={C0}), {1: {state(0)}})

    def test_enclosed_region(self):
        self.assertEqual(self.at_exit(ExitWait(1, (state(0),)), enclosed=True), {})


class TestGraphFacts(SchedulesTestCase):
    def test_streams_of_the_frame(self):
        self.assertEqual(graph_facts.private_streams(), {PRIVATE})
        self.assertEqual(graph_facts.stream_devices(), {0: 0, 1: 0, 2: 0, 3: 0, 4: 1})

    def test_stream_that_the_frame_hands_out(self):
        registry.current().locals[PRIVATE] = "made"
        with frame_facts.compiling(registry.facts()):
            self.assertEqual(graph_facts.private_streams(), set())

    def test_exit_of_a_graph_that_computes_nothing(self):
        x = self.program.input(4)
        note_fact(x, exit_waits=(ExitWait(1, (E5,)),))
        with self.scheduled(x):
            self.assertEqual(graph_facts.exit_waits(), (ExitWait(1, (E5,)),))

    def test_graph_without_facts(self):
        with self.scheduled(self.program.input(4)):
            self.assertEqual(graph_facts.exit_waits(), ())
            self.assertEqual(graph_facts.eager_memory_of_results(), {})

    def test_saved_values(self):
        inputs = [self.program.input(4) for _ in range(3)]
        note_fact(inputs[1], memory=2)
        with self.scheduled(*inputs):
            self.assertEqual(graph_facts.saved_on_streams(), {"x1": 2})

    def memory_of_results(self, **options):
        x, host = self.program.input(4), self.program.input(4, device="cpu")
        made = self.call(aten.sum.default, x)
        updated = self.call(aten.copy_.default, x, self.call(aten.sin.default, x))
        download = self.call(aten.sin.default, host)
        unknown = self.call(aten.mm.default, *[self.program.input(2, 2)] * 2)
        results = made, updated, download, unknown, made
        names = [f"output[{i}]" for i in (0, 1, 2, 4)]
        for node in (made, updated, download, unknown):
            note_fact(node, results=[ResultMemory(n, (1, i)) for i, n in enumerate(names)])
        output = self.program.output(*results)
        output.meta["desc"] = [PlainAOTOutput(i) for i in range(len(results))]
        with self.program.scheduled(**options):
            return graph_facts.eager_memory_of_results()

    def test_memory_of_results(self):
        """Of results that are the caller's own memory, or the host's, nothing is said."""
        self.assertEqual(self.memory_of_results(), {"buf0": {0, 1, 3}})

    def test_results_of_a_backward(self):
        found = self.memory_of_results(is_backward=True, is_inference=False)
        self.assertEqual(found, {})

    def test_what_nodes_make_happen(self):
        x = self.program.input(4)
        self.call(streams.record_event.default, 5, 1, requires=R5)
        node = self.call(aten.sin.default, x)
        with self.scheduled(node) as scheduler:
            found = [graph_facts.required(n) for n in scheduler.nodes]
            self.assertEqual(found, [{R5}, set()])


class TestNotes(SchedulesTestCase):
    def test_notes_live_as_long_as_the_schedule(self):
        with self.scheduled(self.call(aten.sin.default, self.program.input(4))) as made:
            notes = ScheduleNotes.of(made)
            notes.awaited_stores = dict.fromkeys(made.nodes, ())
            self.assertIs(ScheduleNotes.of(made), notes)

        class Schedule:
            pass

        other = Schedule()
        self.assertIsNot(ScheduleNotes.of(other), notes)
        ScheduleNotes.of(other).awaited_stores = {other: ()}
        gone = weakref.ref(ScheduleNotes.of(other))
        del other
        gc.collect()
        self.assertIsNone(gone())
