"""`_functorch.streams.duplicates`: equal operations on two streams are two operations."""

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.duplicates import merge_duplicates, split_duplicates
from torch_overlay._functorch.streams.fx import node_stream


aten = torch.ops.aten


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
        """What the forward saves, or the backward computes again, is one value."""
        for in_backward in (False, True):
            tag = {"partitioner_tag": "is_backward"} if in_backward else {}
            for of_backward in (False, True):
                self.setUp()
                merged = self.merged(*self.branches(1, 2, **tag))
                split_duplicates(merged, of_backward)
                count = 2 if in_backward == of_backward else 1
                self.assertEqual(self.count(merged), count)
