"""`_functorch.streams.backward`: streams of a joint graph's backward."""

import operator
import random

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._guards import tracing, TracingContext
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.backward import (
    assign_second_nodes,
    assign_sums,
    engine_streams,
    leave_backward,
    mark_backward,
    order_after_gradients,
    place_computed_early,
    place_parts,
    place_recomputed,
    read_past_updates,
)
from torch_overlay._functorch.streams.epilogue import follow_mutations, note_autograd_nodes, place_first_copies
from torch_overlay._functorch.streams.facts import ExitWait, Fact, fact_of, note_fact
from torch_overlay._functorch.streams.fx import BACKWARD, node_stream, place_on
from torch_overlay._functorch.streams.saved_values import ContextNotes, DUPLICATES
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, state


aten, streams = torch.ops.aten, torch.ops.streams
WAIT = streams.wait_stream.default
EVENT = caller_event(5)


class _Checked(torch.fx.Interpreter):
    """Runs a graph, and compares the layouts of views with those that were noted."""

    def run_node(self, n):
        value = super().run_node(n)
        if n.target in (aten.select.int, aten.slice.Tensor):
            noted = n.meta["val"]
            assert (value.size(), value.stride()) == (noted.size(), noted.stride()), n
        return value


class TestGradientsOfRows(TestCase):
    """Gradients of rows are taken from before the updates of others: Note [Gradients of rows]."""

    def rewritten(self, fn):
        """The joint graph of `fn(x, w)`, of which all gradients are what they were."""
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        gm = aot_export_joint_simple(lambda *args: (fn(*args),), (x, w), trace_joint=True)
        given = [x.detach(), w.detach()], [torch.randn(())]
        expected = gm(*given)
        mark_backward(gm.graph)
        read_past_updates(gm.graph)
        self.assertEqual(_Checked(gm).run(*given), expected, rtol=0, atol=0)
        return [n.target for n in gm.graph.nodes if n.meta.get(BACKWARD)]

    def test_rows_of_new_memory_have_no_chain(self):
        def assign_all(x, w, stop=8):
            out = torch.empty(8, 8, 8) if stop == 8 else (x @ w).expand(8, 8, 8) * 2
            for i in range(stop):
                out[i] = (x @ w).relu() * i
            return (out * out).sum()

        targets = self.rewritten(assign_all)
        self.assertNotIn(aten.select_scatter.default, targets)
        self.assertNotIn(aten.copy.default, targets)
        # The gradient of what the other rows held passes all assignments.
        targets = self.rewritten(lambda x, w: assign_all(x, w, stop=3))
        self.assertEqual(targets.count(aten.select_scatter.default), 3)

    def test_other_copies_read_what_they_read(self):
        x, other = torch.rand(4, 4), torch.empty(4, 4, dtype=torch.int64)
        update, contiguous = (aten.select_scatter.default, 1), torch.contiguous_format
        cases = (
            (other, (aten.copy.default, 0), (aten.select.int, 0, 1), contiguous),  # of another type
            (x, update, (aten.select.int, 0, 1), torch.preserve_format),  # its layout is that of the row
            (x, update, (aten.select_scatter.default, 0, 1), contiguous),  # of a whole
        )
        for held, (change, given), (target, *at), memory_format in cases:
            graph = Graph()
            inputs = [graph.placeholder(name) for name in ("tangents_1", "held", "row")]
            more = (inputs[2], 0, 3) if given else (inputs[0],)
            changed = graph.call_function(change, (inputs[1], *more))
            row = graph.call_function(target, (changed, *(inputs[2:] if target is change else ()), *at))
            clone = graph.call_function(aten.clone.default, (row,), {"memory_format": memory_format})
            graph.output((clone,))
            for node, noted in zip(graph.nodes, (x, held, x[0], held, x, x)):
                node.meta |= {"val": noted, BACKWARD: node.op == "call_function"}
            read_past_updates(graph)
            self.assertIs(clone.args[0], row)
            self.assertIs(row.args[0], changed)

    def test_gradients_are_equal_whatever_is_assigned(self):
        draw = random.Random(3)
        for turn in range(12):
            held, at = turn % 3, []
            for _ in range(draw.randrange(2, 6)):
                start = draw.randrange(8)
                part = slice(start, draw.randrange(start, 9), draw.choice((None, 1, 2, 3)))
                index = draw.choice((draw.randrange(-8, 8), part))
                at.append(index if draw.randrange(3) else (slice(None), index))

            def assign(x, w, held=held, at=tuple(at)):
                out = (x @ w).clone() if held else torch.zeros(8, 8)
                for i, index in enumerate(at, start=1):
                    out[index] = (x @ w).sin()[index] * i
                    out.select(-1, i).copy_(x[i] * w[i])
                return out.sum() if held == 2 else (out * out).sum()

            self.rewritten(assign)


class GraphCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("primals_1")

    def call(self, target, *args, stream=0, tag=None, **meta):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        node.meta |= meta
        if tag is not None:
            node.meta["partitioner_tag"] = tag
        return node

    def relu(self, *args, **kwargs):
        return self.call(aten.relu.default, *(args or (self.x,)), **kwargs)

    def view(self, base, **kwargs):
        return self.call(aten.t.default, base, **kwargs)

    def backward(self, *args, **kwargs):
        return self.relu(*args, tag="is_backward", **kwargs)


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
        view = self.view(made, stream=2, tag="is_backward")
        of_input = self.view(self.x, stream=2, tag="is_backward")
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
        expected = (ExitWait(1, (CALLER,)), ExitWait(3, (CALLER,)), ExitWait(0, (state(1), state(2), state(3))))
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


class TestBackward(GraphCase):
    def marked(self, results=(), desc=()):
        self.graph.output(results).meta["desc"] = desc
        mark_backward(self.graph)
        return [node for node in self.graph.nodes if node.meta.get(BACKWARD)]

    def test_tags(self):
        first = self.relu(self.x, tag="is_forward")
        self.relu(first)
        backward = self.relu(first, tag="is_backward")
        self.assertEqual(self.marked(), [backward])

    def test_nodes_after_the_first_gradient(self):
        """As in the body of a backward that the user wrote."""
        tangent = self.graph.placeholder("tangents_1")
        self.relu(self.x)
        first = self.relu(tangent)
        second = self.relu(self.x)
        third = self.relu(self.x, tag="must_be_in_forward")
        self.assertEqual(self.marked(), [first, second])
        self.assertNotIn(BACKWARD, third.meta)

    def test_mark_of_another_pass(self):
        marked = self.relu(self.x, **{BACKWARD: True})
        after = self.relu(self.x)
        self.assertEqual(self.marked(), [marked, after])

    def test_copy_that_writes_an_input_back(self):
        new = self.relu(self.x)
        self.call(aten.copy_.default, self.x, new, tag="must_be_in_backward")
        view = self.call(aten.t.default, new)
        self.assertEqual(self.marked([view], [PlainAOTOutput(0)]), [])

    def test_views_that_the_forward_returns(self):
        """They may stand after the backward has begun."""
        made = self.relu(self.x)
        gradient = self.relu(made, tag="is_backward")
        inner = self.call(aten.t.default, made, tag="is_backward")
        view = self.call(aten.t.default, inner, tag="is_backward")
        other = self.call(aten.t.default, gradient, tag="is_backward")
        desc = [PlainAOTOutput(0), GradAOTOutput(PlainAOTInput(0))]
        self.assertEqual(self.marked([view, other], desc), [gradient, other])


class TestFirstCopies(GraphCase):
    def setUp(self):
        super().setUp()
        self.copy = self.call(aten.clone.default, self.x)

    def order(self):
        self.graph.output(())
        place_first_copies(self.graph)
        self.graph.lint()
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def test_copy_stands_before_its_first_reader(self):
        wait = self.call(streams.wait_stream.default, 1, 0)
        reader = self.relu(self.copy, stream=1)
        later = self.relu(self.copy, stream=2)
        self.assertEqual(self.order(), [wait, self.copy, reader, later])
        self.assertEqual(node_stream(self.copy), 1)

    def test_views_launch_nothing(self):
        wait = self.call(streams.wait_stream.default, 2, 0)
        view = self.call(aten.t.default, self.copy, stream=1)
        reader = self.relu(view, stream=2)
        later = self.relu(self.copy, stream=3)
        self.assertEqual(self.order(), [wait, self.copy, view, reader, later])
        self.assertEqual(node_stream(self.copy), 2)

    def test_operations_of_the_stream_program_do_not_read(self):
        record = self.call(streams.record_stream.default, self.copy, 1, stream=2)
        self.call(aten.t.default, self.copy, stream=1)
        self.order()
        self.assertEqual(node_stream(self.copy), 0)
        self.assertEqual(self.copy.next, record)

    def test_copies_of_the_user(self):
        self.copy.meta["source_fn_stack"] = [("clone", torch.clone)]
        relu = self.relu(self.x, stream=2)
        of_relu = self.call(aten.clone.default, relu)
        readers = [self.relu(n, stream=1) for n in (self.copy, of_relu)]
        self.assertEqual(self.order(), [self.copy, relu, of_relu, *readers])
        self.assertEqual([node_stream(n) for n in (self.copy, of_relu)], [0, 0])


class TestWriteBacks(GraphCase):
    AFTER, BEFORE = (state(2),), (CALLER, caller_event(5))

    def follow(self, value, target=None):
        copy = self.call(aten.copy_.default, target or self.x, value, stream=3)
        note_fact(copy, after=(state(7),), promised_to=(state(8),))
        follow_mutations(self.graph)
        fact = fact_of(copy)
        return node_stream(copy), fact.after, fact.promised_to

    def update(self):
        node = self.relu(self.x, stream=1)
        note_fact(node, after=self.AFTER, promised_to=self.BEFORE, order=4)
        return node

    def test_copy_is_ordered_as_its_value(self):
        self.assertEqual(self.follow(self.update()), (1, self.AFTER, self.BEFORE))

    def test_value_below_aliases_and_selections(self):
        part = self.call(operator.getitem, self.update(), 0, stream=2)
        alias = self.call(aten.alias.default, part)
        self.assertEqual(self.follow(alias), (1, self.AFTER, self.BEFORE))

    def test_value_that_is_an_input(self):
        other = self.graph.placeholder("primals_2")
        self.assertEqual(self.follow(other), (3, (state(7),), (state(8),)))

    def test_copy_into_no_input(self):
        value = self.update()
        self.assertEqual(self.follow(value, self.relu(self.x)), (3, (state(7),), (state(8),)))


class JointCase(TestCase):
    """A joint graph: an input, operations with numbers, and their backward."""

    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.input("primals_1", PlainAOTInput(0))
        self.number = 0

    def input(self, name, desc):
        node = self.graph.placeholder(name)
        node.meta["desc"] = desc
        return node

    def forward(self, *args, stream=0, target=aten.relu.default):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        self.number += 1
        node.meta["seq_nr"] = self.number
        return node

    def view(self, base, stream=0):
        return self.forward(base, stream=stream, target=aten.t.default)

    def tangent(self, index=0):
        desc = TangentAOTInput(PlainAOTOutput(index))
        return self.input(f"tangents_{index + 1}", desc)

    def backward(self, *args, of=None, target=aten.relu.default, is_sum=False):
        """A kernel of the backward of an operation, or of a sum of gradients."""
        node = self.graph.call_function(target, args)
        node.meta["partitioner_tag"] = "is_backward"
        node.meta["is_gradient_acc"] = is_sum
        if of is not None:
            node.meta["seq_nr"] = of.meta["seq_nr"]
        return node

    def finish(self, results, gradients):
        """`gradients` has each with its input."""
        values = [*results, *(value for value, _ in gradients)]
        desc = [PlainAOTOutput(i) for i in range(len(results))]
        desc += [GradAOTOutput(given.meta["desc"]) for _, given in gradients]
        self.graph.output(values).meta["desc"] = desc
        note_autograd_nodes(self.graph, {})

    def streams(self, *leaves):
        found = engine_streams(self.graph, leaves)
        return {node.name: stream for node, stream in found.items()}

    def order(self, *leaves):
        order_after_gradients(self.graph, engine_streams(self.graph, leaves))
        return {node.name: fact_of(node).promised_to for node in self.graph.nodes if fact_of(node).promised_to}


class TestEngineStreams(JointCase):
    def test_operations_between_inputs_and_outputs(self):
        first = self.forward(self.x, stream=1)
        second = self.forward(first, stream=2)
        unused = self.forward(first, stream=3)
        other = self.forward(self.input("primals_2", PlainAOTInput(1)), stream=4)
        end = self.forward(second, other)
        gradient = self.backward(self.tangent(), of=first)
        self.finish([end, unused], [(gradient, self.x)])
        self.assertEqual(self.streams(), {first.name: 1, second.name: 2, end.name: 0, gradient.name: 0})

    def test_results_without_a_gradient(self):
        first = self.forward(self.x, stream=1)
        self.finish([first], [(self.x, self.x)])
        self.assertEqual(self.streams(), {})

    def test_inputs_without_a_gradient(self):
        first = self.forward(self.x, stream=1)
        self.tangent()
        self.finish([first], [(None, self.x)])
        self.assertEqual(self.streams(self.x), {})

    def test_leaves(self):
        y = self.input("primals_2", PlainAOTInput(1))
        first = self.forward(self.x, y, stream=1)
        gradient = self.backward(self.tangent(), of=first)
        self.finish([first], [(gradient, self.x)])
        found = {first.name: 1, self.x.name: 1, gradient.name: 0}
        self.assertEqual(self.streams(self.x, y), found)

    def test_operations_of_the_backward(self):
        first = self.forward(self.x, stream=1)
        gradient = self.backward(self.tangent(), of=first)
        place_on(gradient, 2)
        self.finish([first], [(gradient, self.x)])
        self.assertEqual(self.streams(), {first.name: 1, gradient.name: 2})


class TestOrder(JointCase):
    def test_operation_that_launches_nothing(self):
        """A view on a side stream, between operations on the caller's."""
        first = self.forward(self.x)
        view = self.view(first, stream=1)
        last = self.forward(view)
        gradient = self.backward(self.tangent(), of=last)
        end = self.backward(self.backward(gradient, target=aten.t.default), of=first)
        self.finish([last], [(end, self.x)])
        self.assertEqual(self.order(), {gradient.name: (state(1),)})

    def test_operation_that_launches(self):
        first = self.forward(self.x)
        side = self.forward(first, stream=1)
        last = self.forward(side)
        gradient = self.backward(self.tangent(), of=last)
        own = self.backward(gradient, of=side)
        self.finish([last], [(self.backward(own, of=first), self.x)])
        self.assertEqual(self.order(), {})

    def test_operations_on_the_callers_stream(self):
        view = self.view(self.forward(self.x))
        last = self.forward(view)
        gradient = self.backward(self.tangent(), of=last)
        self.finish([last], [(gradient, self.x)])
        self.assertEqual(self.order(), {})

    def test_views_one_after_the_other(self):
        views = [self.view(self.forward(self.x), stream=1)]
        views.append(self.view(views[0], stream=2))
        last = self.forward(views[1])
        gradient = self.backward(self.tangent(), of=last)
        self.finish([last], [(gradient, self.x)])
        self.assertEqual(self.order(), {gradient.name: (state(1), state(2))})

    def test_gradients_that_are_added(self):
        view = self.view(self.forward(self.x), stream=1)
        ends = [self.forward(view), self.forward(view)]
        parts = [self.backward(self.tangent(i), of=end) for i, end in enumerate(ends)]
        total = self.backward(*parts, target=aten.add.Tensor, is_sum=True)
        again = self.backward(total, total, target=aten.add.Tensor, is_sum=True)
        self.finish(ends, [(again, self.x)])
        found = self.order()
        names = {node.name for node in (*parts, total, again)}
        self.assertEqual(found, dict.fromkeys(names, (state(1),)))

    def test_leaf_that_is_read_first_on_a_side_stream(self):
        self.view(self.x, stream=1)
        first = self.forward(self.x)
        gradient = self.backward(self.tangent(), of=first)
        self.finish([first], [(gradient, self.x)])
        self.assertEqual(self.order(self.x), {gradient.name: (state(1),)})

    def test_kernels_of_later_nodes_of_an_operation(self):
        """An operation may make several nodes; their numbers follow its own."""
        view = self.view(self.forward(self.x), stream=1)
        last = self.forward(view)
        gradient = self.backward(self.tangent(), of=last)
        second = self.backward(gradient)
        second.meta["seq_nr"] = last.meta["seq_nr"] + 1
        self.finish([last], [(second, self.x)])
        names = {gradient.name, second.name}
        self.assertEqual(self.order(), dict.fromkeys(names, (state(1),)))

    def test_selections_and_views_launch_nothing(self):
        first = self.forward(self.x)
        side = self.view(first, stream=1)
        last = self.forward(side)
        gradient = self.backward(self.tangent(), of=last)
        part = self.backward(gradient, 0, of=side, target=operator.getitem)
        view = self.backward(part, of=side, target=aten.t.default)
        self.finish([last], [(view, self.x)])
        self.assertEqual(self.order(), {gradient.name: (state(1),)})
