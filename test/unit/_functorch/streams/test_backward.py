"""`_functorch.streams.backward`: streams of a joint graph's backward."""

import operator

import torch
from torch._guards import tracing, TracingContext
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.backward import (
    assign_second_nodes,
    assign_sums,
    leave_backward,
    place_computed_early,
    place_parts,
    place_recomputed,
)
from torch_overlay._functorch.streams.duplicates import DUPLICATES
from torch_overlay._functorch.streams.facts import ExitWait, Fact, fact_of, note_fact
from torch_overlay._functorch.streams.fx import node_stream, place_on
from torch_overlay._functorch.streams.saved_values import ContextNotes
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, state


aten = torch.ops.aten
WAIT = torch.ops.streams.wait_stream.default
EVENT = caller_event(5)


class GraphCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target, *args, stream=0, is_backward=False, **meta):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        node.meta |= meta
        if is_backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    def relu(self, *args, **kwargs):
        return self.call(aten.relu.default, *(args or (self.x,)), **kwargs)

    def view(self, base, **kwargs):
        return self.call(aten.t.default, base, **kwargs)

    def backward(self, *args, **kwargs):
        return self.relu(*args, is_backward=True, **kwargs)


class TestStreams(GraphCase):
    """Of the backward, in a joint graph."""

    def test_second_node_of_an_operation(self):
        self.relu(stream=1, seq_nr=3)
        self.relu(stream=2, seq_nr=5)
        numbers = (3, 4, 5, 6, 2)
        nodes = [self.backward(seq_nr=number, stream=9) for number in numbers]
        assign_second_nodes(self.graph)
        # 3 and 5 have what upstream gave them, if it found their forward
        self.assertEqual([node_stream(n) for n in nodes], [9, 1, 1, 2, 9])

    def test_last_operation_of_a_number_counts(self):
        self.relu(stream=1, seq_nr=3)
        self.relu(stream=2, seq_nr=3)
        self.call(torch.ops.streams.record_event.default, 5, 3, seq_nr=3)
        node = self.backward(seq_nr=4)
        assign_second_nodes(self.graph)
        self.assertEqual(node_stream(node), 2)

    def test_nodes_that_are_placed_otherwise(self):
        self.relu(stream=1, seq_nr=3)
        found = self.backward(seq_nr=4, fwd_source_fn_stack=[])
        total = self.backward(seq_nr=4, is_gradient_acc=True)
        without = self.backward()
        forward = self.relu(seq_nr=4)
        assign_second_nodes(self.graph)
        for node in (found, total, without, forward):
            self.assertEqual(node_stream(node), 0)

    def test_forward_without_streams(self):
        self.relu(seq_nr=3)
        node = self.backward(seq_nr=4, stream=9)
        assign_second_nodes(self.graph)
        self.assertEqual(node_stream(node), 9)

    def test_sums_run_where_their_consumer_runs(self):
        first = self.backward(stream=1, is_gradient_acc=True)
        second = self.backward(first, stream=1, is_gradient_acc=True)
        self.relu(second, stream=2)
        self.relu(second, stream=3)
        to_caller = self.backward(stream=1, is_gradient_acc=True)
        self.relu(to_caller)
        result = self.backward(stream=1, is_gradient_acc=True)
        other = self.backward(stream=1)
        self.graph.output(result)
        assign_sums(self.graph)
        nodes = (first, second, to_caller, result, other)
        self.assertEqual([node_stream(n) for n in nodes], [2, 2, 0, 0, 1])


class TestRecomputed(GraphCase):
    def setUp(self):
        super().setUp()
        self.forward = {"after": (EVENT,), "promised_to": (EVENT,)}

    def recomputed(self, *args, **kwargs):
        node = self.relu(*args, **kwargs)
        note_fact(node, **self.forward)
        return node

    def test_operations_run_with_their_consumers(self):
        first = self.recomputed(stream=1)
        second = self.recomputed(first, stream=1)
        reader = self.backward(second, stream=2)
        note_fact(reader, **self.forward)
        place_recomputed(self.graph)
        self.assertEqual([node_stream(n) for n in (first, second, reader)], [2] * 3)
        inside = Fact((CALLER,), (CALLER,))
        self.assertEqual([fact_of(n) for n in (first, second)], [inside] * 2)
        self.assertEqual(fact_of(reader), Fact((EVENT,), (EVENT,)))

    def test_stream_stays_if_a_consumer_is_there(self):
        node = self.recomputed(stream=1)
        self.backward(node, stream=2)
        self.backward(node, stream=1)
        alone = self.recomputed(stream=3)
        self.graph.output(alone)
        place_recomputed(self.graph)
        self.assertEqual([node_stream(n) for n in (node, alone)], [1, 3])

    def test_operations_on_the_callers_stream(self):
        node = self.recomputed(stream=1)
        self.backward(node)
        place_recomputed(self.graph)
        self.assertEqual((node_stream(node), fact_of(node)), (0, Fact((), ())))

    def test_selections_are_where_their_operation_is(self):
        both = self.recomputed(stream=1)
        parts = [self.call(operator.getitem, both, i, stream=1) for i in range(2)]
        for part, stream in zip(parts, (2, 3)):
            self.backward(part, stream=stream)
        place_recomputed(self.graph)
        self.assertEqual([node_stream(n) for n in (both, *parts)], [2, 2, 2])


class TestComputedEarly(GraphCase):
    def forward(self, stream=0, after=(), promised_to=()):
        node = self.relu(stream=stream)
        note_fact(node, after=tuple(sorted(after)), promised_to=tuple(sorted(promised_to)))
        return node

    def order(self, *nodes):
        place_computed_early(self.graph)
        facts = map(fact_of, nodes)
        return [(set(fact.after), set(fact.promised_to)) for fact in facts]

    def test_operation_on_a_stream_that_is_joined(self):
        self.forward(1, [CALLER], [EVENT])
        self.forward(1, [EVENT], [CALLER])
        moved = self.backward(stream=1, is_placed=True)
        note_fact(moved, range=3)
        self.assertEqual(self.order(moved), [({CALLER, EVENT}, {CALLER})])
        self.assertIsNone(fact_of(moved).range)

    def test_operation_on_a_stream_that_is_not_joined(self):
        self.forward(1, [CALLER], [CALLER, state(2)])
        self.forward(1, [CALLER], [state(3)])
        moved = self.backward(stream=1)
        before = {CALLER, state(2), state(3)}
        self.assertEqual(self.order(moved), [({CALLER}, before)])

    def test_stream_that_the_forward_does_not_use(self):
        side, own = self.backward(stream=1), self.backward()
        self.assertEqual(self.order(side, own), [({CALLER}, set()), (set(), set())])

    def test_views_have_the_promises_of_their_memory(self):
        made = self.forward(1, [CALLER], [EVENT])
        self.forward(2, [CALLER], [CALLER])
        view = self.view(made, stream=2, is_backward=True)
        of_input = self.view(self.x, stream=2, is_backward=True)
        found = self.order(view, of_input)
        self.assertEqual([before for _, before in found], [{EVENT}, {CALLER}])

    def test_views_of_the_forward_order_nothing(self):
        self.forward(1, [CALLER], [CALLER])
        view = self.view(self.x, stream=1)
        note_fact(view, after=(EVENT,), promised_to=(EVENT,))
        moved = self.backward(stream=1)
        self.assertEqual(self.order(moved), [({CALLER}, {CALLER})])
        self.assertEqual(fact_of(view).after, (EVENT,))


class TestLeave(GraphCase):
    def leave(self, engine, unordered=()):
        self.graph.output(self.results)
        module = GraphModule({}, self.graph)
        leave_backward(module, engine, unordered)
        waits = module.graph.find_nodes(op="call_function", target=WAIT)
        for wait in waits:
            self.assertEqual(wait.meta["partitioner_tag"], "must_be_in_backward")
        (x,) = module.graph.find_nodes(op="placeholder")
        return [wait.args for wait in waits], fact_of(x).exit_waits

    def test_graph_that_launches(self):
        self.results = self.backward()
        expected = (
            ExitWait(1, (CALLER,)),
            ExitWait(3, (CALLER,)),
            ExitWait(0, (state(1), state(2), state(3))),
        )
        self.assertEqual(self.leave({3, 1}, {state(2)}), ([], expected))

    def test_graph_that_launches_nothing(self):
        self.results = self.view(self.x)
        waits, leave = self.leave({3, 1}, {state(1), state(2)})
        self.assertEqual(waits, [(1, 0), (3, 0), (0, 3)])
        self.assertEqual(leave, (ExitWait(0, (state(1), state(2))),))

    def test_no_streams(self):
        self.results = self.backward()
        self.assertEqual(self.leave(set()), ([], None))


class TestParts(GraphCase):
    def parts(self, stream):
        """A saved value of a stream, and a duplicate that is divided."""
        made = self.relu(stream=stream)
        note_fact(made, after=(), promised_to=(CALLER,))
        made.meta[DUPLICATES] = {2: {"stream": 2}}
        reader = self.relu(made, stream=2)
        moved = self.backward(made, stream=stream)
        self.graph.output((reader, made, moved, None))
        forward = GraphModule({}, self.graph)

        self.graph = Graph()
        saved = self.graph.placeholder(made.name)
        again = self.relu(saved, stream=stream)
        gradient = self.backward(again, stream=3)
        self.graph.output((gradient,))
        return forward, GraphModule({}, self.graph)

    def test_both_graphs(self):
        forward, backward = self.parts(1)
        context = TracingContext(None)
        with tracing(context):
            place_parts(forward, backward, {1}, {})
        x, made, other, reader, moved, _ = forward.graph.nodes
        self.assertEqual([node_stream(n) for n in (made, other)], [1, 2])
        self.assertIs(reader.args[0], other)
        self.assertTrue(fact_of(moved).is_placed)
        saved, again, gradient, _ = backward.graph.nodes
        self.assertEqual(fact_of(saved).memory, 1)
        leave = (ExitWait(1, (CALLER,)), ExitWait(0, (state(1),)))
        self.assertEqual(fact_of(saved).exit_waits, leave)
        self.assertEqual([node_stream(n) for n in (again, gradient)], [3, 3])
        self.assertIn(state(1), fact_of(again).after)
        names = [reader.name, made.name, moved.name, ""]
        self.assertEqual(ContextNotes.find(context), ContextNotes(names, backward.graph))

    def test_graphs_without_streams(self):
        forward, backward = self.parts(0)
        for module in (forward, backward):
            for node in module.graph.nodes:
                node.meta.pop("custom", None)
        before = [str(gm.graph) for gm in (forward, backward)]
        context = TracingContext(None)
        with tracing(context):
            place_parts(forward, backward, set(), {})
        self.assertEqual([str(gm.graph) for gm in (forward, backward)], before)
        self.assertIsNone(ContextNotes.find(context))
