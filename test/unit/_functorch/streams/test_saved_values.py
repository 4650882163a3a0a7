"""`_functorch.streams.saved_values`: whose memory the backward reads, and when it is freed."""

import operator
from types import SimpleNamespace

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.facts import fact_of, note_fact, NOTHING
from torch_overlay._functorch.streams.fx import node_stream, place_on
from torch_overlay._functorch.streams.memory import memory_writer
from torch_overlay._functorch.streams.saved_values import (
    merge_duplicates,
    place_saved,
    read_unordered,
    record_saved_gradients,
    split_duplicates,
)
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, state


aten = torch.ops.aten
RECORD = torch.ops.streams.record_stream.default


class PairCase(TestCase):
    def setUp(self):
        super().setUp()
        self.forward, self.backward = Graph(), Graph()
        self.x = self.forward.placeholder("x")

    def call(self, graph, target, *args, stream=0, before=()):
        node = graph.call_function(target, args)
        place_on(node, stream)
        if before:
            note_fact(node, promised_to=tuple(sorted(before)))
        return node

    def made(self, stream=0, before=(), of=None):
        args = (aten.relu.default, of or self.x)
        return self.call(self.forward, *args, stream=stream, before=before)

    def view(self, base, stream=0):
        return self.call(base.graph, aten.t.default, base, stream=stream)

    def saved(self, node):
        """The backward's input for a node of the forward."""
        value = self.backward.placeholder(node.name)
        place_on(value, 7)
        note_fact(value, memory=7)
        return value

    def reader(self, *values, stream=0):
        return self.call(self.backward, aten.add.Tensor, *values, stream=stream)

    def finish(self, results=(), gradients=()):
        self.forward.output(tuple(results))
        self.backward.output(tuple(gradients))

    def place(self, unread=()):
        self.finish()
        place_saved(self.forward, self.backward, dict(unread))

    def records(self):
        found = self.backward.find_nodes(op="call_function", target=RECORD)
        for node in found:
            self.assertEqual(node.meta["partitioner_tag"], "must_be_in_backward")
        return [node.args for node in found]


class TestSavedValues(PairCase):
    def test_readers_on_streams_that_had_waited(self):
        value = self.saved(self.made(1, before=[CALLER, state(2)]))
        readers = [self.reader(value, stream=stream) for stream in (0, 1, 2, 3)]
        self.place()
        after = [fact_of(reader).after for reader in readers]
        self.assertEqual(after, [None, None, None, (state(1),)])

    def test_readers_through_views(self):
        value = self.saved(self.made(1))
        view = self.view(self.view(value, 1), 1)
        part = self.call(
            self.backward, operator.getitem, self.call(self.backward, aten.split.Tensor, view, 1, stream=1), 0
        )
        readers = [self.reader(name, stream=2) for name in (view, part)]
        other = self.reader(self.reader(value, stream=1), stream=2)
        self.place()
        self.assertEqual([fact_of(reader).after for reader in readers], [(state(1),)] * 2)
        self.assertIsNone(fact_of(other).after)

    def test_memory_of_values(self):
        side, own = self.made(1), self.made()
        view = self.view(side, 2)
        values = [self.saved(node) for node in (side, own, view, self.x)]
        tangent = self.saved(SimpleNamespace(name="tangents_1"))
        self.place()
        facts = [fact_of(value) for value in values]
        self.assertEqual([fact.memory for fact in facts], [1, None, 1, None])
        self.assertEqual([f.is_computed for f in facts], [True, True, True, False])
        self.assertEqual(fact_of(tangent), NOTHING)
        streams = [node_stream(value) for value in (*values, tangent)]
        self.assertEqual(streams, [0] * 5)

    def test_part_of_several_results(self):
        both = self.call(self.forward, aten.topk.default, self.x, 2, stream=1, before=[CALLER])
        part = self.call(self.forward, operator.getitem, both, 0, stream=2)
        value = self.saved(part)
        reader = self.reader(value)
        self.place()
        self.assertEqual(fact_of(value).memory, 1)
        self.assertIsNone(fact_of(reader).after)

    def test_writer_of_memory(self):
        made = self.made()
        view = self.view(self.view(made))
        self.assertIs(memory_writer(view), made)
        self.assertIs(memory_writer(self.view(self.x)), self.x)
        number = self.call(self.forward, operator.getitem, [1], 0)
        self.assertIs(memory_writer(number), number)


class TestInputs(PairCase):
    """Inputs of which eager saves nothing."""

    def setUp(self):
        super().setUp()
        event = caller_event(5)
        self.made(1, before=[state(3), state(4), event])
        self.made(3, before=[state(4), event])
        self.view(self.x, 2)
        self.call(self.forward, RECORD, self.x, 2)

    def test_what_is_ordered_after_the_forwards_readers(self):
        value = self.saved(self.x)
        reader = self.reader(self.view(value))
        self.place({"x": True})
        self.assertEqual(fact_of(reader).promised_to, (state(3), state(4)))
        self.assertEqual(self.records(), [])

    def test_input_that_may_be_freed(self):
        value = self.saved(self.x)
        self.reader(value, stream=2)
        self.reader(value, stream=1)
        self.place({"x": False})
        self.assertEqual(self.records(), [(value, 1), (value, 2)])

    def test_input_that_eager_saves(self):
        value = self.saved(self.x)
        reader = self.reader(value)
        self.place({"another": False})
        self.assertEqual((fact_of(reader).promised_to, self.records()), (None, []))

    def test_input_that_nothing_reads_in_the_forward(self):
        self.forward = Graph()
        self.x = self.forward.placeholder("x")
        reader = self.reader(self.saved(self.x))
        self.place({"x": True})
        self.assertFalse(fact_of(reader).promised_to)


class TestGradients(PairCase):
    def test_gradient_that_is_a_saved_value(self):
        joined, unjoined = self.made(1, before=[CALLER]), self.made(2)
        values = [self.saved(node) for node in (joined, unjoined)]
        gradients = [self.view(values[0]), *values, self.reader(values[0])]
        self.finish(gradients=gradients)
        place_saved(self.forward, self.backward, {})
        found = record_saved_gradients(self.forward, self.backward)
        self.assertEqual(found, {state(2)})
        self.assertEqual(self.records(), [(value, 0) for value in values])

    def test_gradient_in_the_callers_memory(self):
        values = [self.saved(node) for node in (self.made(), self.x)]
        self.finish(gradients=values)
        place_saved(self.forward, self.backward, {})
        found = record_saved_gradients(self.forward, self.backward)
        self.assertEqual((found, self.records()), (set(), []))


class TestUnorderedReads(PairCase):
    def test_outputs_that_a_side_stream_reads_last(self):
        first, second, third = (self.made() for _ in range(3))
        view = self.view(first)
        self.made(1, of=view)
        self.made(1, before=[CALLER], of=second)
        self.made(of=third)
        self.finish(results=[first, second, third, view, self.x])
        self.assertEqual(read_unordered(self.forward), {first.name, view.name})

    def test_inputs(self):
        self.made(1)
        self.finish(results=[self.x])
        self.assertEqual(read_unordered(self.forward), {"x"})


def key(node):
    return node.meta.get("key")


def program(graph):
    """Each operation with its stream, and the operands with theirs."""
    return sorted(
        (str(node.target), node_stream(node), [(operand.op, node_stream(operand)) for operand in node.all_input_nodes])
        for node in graph.nodes
        if node.op == "call_function"
    )


class TestDuplicates(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target, *args, stream=None, **meta):
        node = self.graph.call_function(target, args)
        node.meta |= {"val": torch.empty(4, device="meta"), **meta}
        if stream is not None:
            node.meta["custom"] = {"stream": stream, "name": node.name}
        return node

    def branches(self, *streams, **meta):
        """On each stream the same two operations, and one of its own."""
        results = []
        for index, stream in enumerate(streams):
            made = self.x
            for target in (aten.relu.default, aten.neg.default):
                made = self.call(target, made, stream=stream, **meta)
            args = (made, index)
            results.append(self.call(aten.add.Tensor, *args, stream=stream, **meta))
        return results

    def merged(self, *results):
        self.graph.output(results)
        before = program(self.graph)
        merged = merge_duplicates(self.graph, lambda graph: fx_graph_cse(graph, extra_node_key=key), key)
        self.assertEqual(program(self.graph), before)
        return merged

    def count(self, graph, target=aten.relu.default):
        return len(graph.find_nodes(op="call_function", target=target))

    def check(self, count, *streams):
        """The number of operations between the pass and the division."""
        merged = self.merged(*self.branches(*streams))
        self.assertEqual(self.count(merged), count)
        self.assertEqual(self.count(merged, aten.neg.default), count)
        split_duplicates(merged, of_backward=False)
        merged.lint()
        self.assertEqual(program(merged), program(self.graph))
        for node in merged.nodes:
            name = node.meta.get("custom", {}).get("name", node.name)
            self.assertIn(name, [node.name for node in self.graph.nodes])

    def test_branches_are_merged_and_divided(self):
        self.check(1, 1, 2)
        self.setUp()
        self.check(1, 1, None, 2)
        self.setUp()
        self.check(1, None, 1)

    def test_operations_of_one_stream_stay_merged(self):
        results = self.branches(1, 1)
        merged = self.merged(*results)
        split_duplicates(merged, of_backward=False)
        self.assertEqual(self.count(merged), 1)
        self.assertTrue(all("stream_duplicates" not in n.meta for n in merged.nodes))

    def test_operations_with_other_keys(self):
        merged = self.merged(*self.branches(1), *self.branches(2, key="other"))
        self.assertEqual(self.count(merged), 2)
        split_duplicates(merged, of_backward=False)
        self.assertEqual(program(merged), program(self.graph))

    def test_operation_whose_readers_are_all_elsewhere(self):
        """Nothing of it is left on its own stream."""
        first, second = (self.call(aten.relu.default, self.x, stream=s) for s in (1, 2))
        ends = [self.call(aten.add.Tensor, n, 1, stream=2) for n in (first, second)]
        ends.append(self.call(aten.add.Tensor, second, 2, stream=2))
        merged = self.merged(*ends)
        split_duplicates(merged, of_backward=False)
        (left,) = merged.find_nodes(op="call_function", target=aten.relu.default)
        self.assertEqual(node_stream(left), 2)

    def test_reader_on_a_third_stream(self):
        pair = [self.call(aten.relu.default, self.x, stream=s) for s in (1, 2)]
        ends = [self.call(aten.add.Tensor, node, i, stream=s) for i, (node, s) in enumerate(zip(pair, (1, 3)))]
        merged = self.merged(*ends)
        split_duplicates(merged, of_backward=False)
        (left,) = merged.find_nodes(op="call_function", target=aten.relu.default)
        self.assertEqual(node_stream(left), 1)

    def test_each_half_has_its_own(self):
        """A value that the forward saves, or the backward computes again, is one value."""
        for in_backward in (False, True):
            tag = {"partitioner_tag": "is_backward"} if in_backward else {}
            for of_backward in (False, True):
                self.setUp()
                merged = self.merged(*self.branches(1, 2, **tag))
                split_duplicates(merged, of_backward)
                count = 2 if in_backward == of_backward else 1
                self.assertEqual(self.count(merged), count)
