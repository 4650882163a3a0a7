"""`_functorch.streams.fx`: has a graph streams?"""

import torch
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.fx import has_streams, place_on


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
