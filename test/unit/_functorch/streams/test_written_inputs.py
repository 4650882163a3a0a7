"""Gradients of programs that write to an input."""

from types import SimpleNamespace

import torch
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase
from torch.utils.checkpoint import CheckpointPolicy

import form  # noqa: F401


aten = torch.ops.aten


class TestGradients(TestCase):
    """Of programs that write to an input, compared with eager."""

    def check(self, f):
        found = []
        for run in (f, torch.compile(f, backend="aot_eager_decomp_partition")):
            weight = torch.ones(4, 4, requires_grad=True)
            cache = torch.ones(4, 4)
            run(cache, weight).backward()
            found.append((weight.grad, cache))
        self.assertEqual(*found)

    def test_input_without_a_gradient(self):
        def f(cache, weight):
            a = (cache * 2) * weight
            cache.mul_(3)
            return a.sum()

        self.check(f)

    def test_view_of_an_input(self):
        def f(cache, weight):
            a = (cache.t()[:2] * 2) * weight[:2]
            cache.mul_(3)
            return a.sum()

        self.check(f)


class TestMarks(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x, self.y = self.graph.placeholder("x"), self.graph.placeholder("y")

    def call(self, target, *args):
        return self.graph.call_function(target, args)

    def view(self, base):
        return self.call(aten.t.default, base)

    def mark(self, inputs):
        from torch_overlay._functorch.streams.backward import keep_unsaved

        keep_unsaved(inputs)

    def is_kept(self, node):
        return not node.meta.get("aot_runtime_epilogue_input_mutation")

    def test_inputs_that_are_written(self):
        views = [self.view(self.view(node)) for node in (self.x, self.y)]
        scatter = self.call(aten.add.Tensor, self.y, self.view(self.x))
        inputs = {self.x: SimpleNamespace(mutates_data=True), self.y: SimpleNamespace(mutates_data=False)}
        self.mark(inputs)
        written = (self.x, views[0], views[0].args[0])
        self.assertFalse(any(self.is_kept(node) for node in written))
        for node in (self.y, views[1], scatter):
            self.assertTrue(self.is_kept(node))

    def test_what_is_computed_from_a_written_input(self):
        asked = self.call(aten.relu.default, self.view(self.x))
        other = self.call(aten.relu.default, self.x)
        asked.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        self.mark({self.x: SimpleNamespace(mutates_data=True)})
        self.assertEqual(asked.meta["recompute"], CheckpointPolicy.MUST_SAVE)
        self.assertNotIn("recompute", other.meta)
