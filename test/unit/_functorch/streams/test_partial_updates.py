"""`_functorch.streams.placement`: updates of parts of a tensor by several streams."""

import torch
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.placement import promise_parts, wait_for_parts
from torch_overlay._functorch.streams.program import Program
from torch_overlay._functorch.streams.tokens import blocking_copy, CALLER, record, state, synchronization
from torch_overlay.frame_facts import FrameFacts


aten, streams = torch.ops.aten, torch.ops.streams
EVENT = 5


class PartsCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.value(self.graph.placeholder("x"))

    def value(self, node, size=8):
        node.meta["val"] = torch.empty(size, device="meta")
        return node

    def call(self, target, *args, stream=0, before=(), size=8):
        node = self.value(self.graph.call_function(target, args), size)
        place_on(node, stream)
        note_fact(node, after=(), promised_to=tuple(sorted(before)))
        return node

    def made(self, *before, stream=1):
        return self.call(aten.relu.default, self.x, stream=stream, before=before)

    def updated(self, base, end=4, before=()):
        """The base with its first elements updated, on stream 2."""
        part = self.call(aten.relu.default, base, stream=2, size=end)
        args = (base, part, 0, 0, end)
        return self.call(aten.slice_scatter.default, *args, stream=2, before=before)

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
        both = self.call(
            aten.slice_scatter.default,
            *(first, self.made(CALLER, stream=4), 0, 4, 6),
        )
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
        rest = self.rest(self.updated(made, before=[synchronization(0)]))
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
