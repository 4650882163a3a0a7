"""`_functorch.streams.fx`: has a graph streams, and which values are names of one memory?"""

import operator

import torch
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.fx import (
    has_streams,
    names_of,
    place_on,
    readers_of,
    storage_node,
    users_of_memory,
    view_chain,
)


class TestHasStreams(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.kernel = self.graph.call_function(torch.ops.aten.relu.default, (self.x,))

    def test_work_on_a_side_stream(self):
        self.assertFalse(has_streams(self.graph.nodes))
        place_on(self.kernel, 1)
        for sign in (lambda node: False, None):
            self.assertTrue(has_streams(self.graph.nodes, sign))

    def test_operations_alone_are_a_sign_unless_only_work_counts(self):
        self.graph.call_function(torch.ops.streams.record_event.default, (1, 0))
        self.assertTrue(has_streams(self.graph.nodes))
        self.assertFalse(has_streams(self.graph.nodes, None))

    def test_sign_of_the_callers_choice(self):
        self.assertTrue(has_streams(self.graph.nodes, lambda node: node is self.x))


class TestNamesOfMemory(TestCase):
    """A part that is selected from the outputs of a view names the memory, as the view does."""

    def setUp(self):
        super().setUp()
        aten, self.graph = torch.ops.aten, Graph()
        call = self.graph.call_function
        self.x = self.graph.placeholder("x")
        self.made = call(aten.topk.default, (self.x, 2))
        self.value = call(operator.getitem, (self.made, 0))
        self.parts = call(aten.split.Tensor, (self.value, 1))
        self.part = call(operator.getitem, (self.parts, 0))
        self.turned = call(aten.t.default, (self.part,))
        self.reader = call(aten.mm.default, (self.x, self.turned))
        self.record = call(torch.ops.streams.record_stream.default, (self.turned, 1))
        self.graph.output((self.part,))

    def test_down_to_what_allocates(self):
        names = [self.turned, self.part, self.parts, self.value]
        self.assertEqual([*view_chain(self.turned)], names)
        self.assertEqual([storage_node(name) for name in names], [self.value] * 4)
        self.assertEqual([*view_chain(self.x)], [self.x])

    def test_up_to_what_reads(self):
        names = [self.value, self.parts, self.part, self.turned]
        self.assertEqual(names_of(self.value), names)
        self.assertEqual(users_of_memory(self.value), [*names[1:], self.reader, self.record])
        self.assertEqual(readers_of(self.value), [self.reader])
        self.assertEqual(names_of(self.made), [self.made])
        self.assertEqual(readers_of(self.x), [self.made, self.reader])
