# Owner(s): ["module: fx"]

import operator

import torch
import torch._dynamo.variables.streams  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.canonicalize import (
    _canonical_node_key,
    _is_safe_to_reorder,
    canonicalize_graph,
)
from torch.testing._internal.common_utils import run_tests, TestCase


class TestStreamCanonicalOrder(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        with FakeTensorMode():
            self.on_host, self.on_device = (
                torch.empty(4, device=device) for device in ("cpu", "cuda")
            )

    def placeholder(self, name, value):
        node = self.graph.placeholder(name)
        node.meta["example_value"] = value
        return node

    def call(self, target, *args, value=None, stream=None, **kwargs):
        call = self.graph.call_method if isinstance(target, str) else None
        node = (call or self.graph.call_function)(target, args, kwargs)
        if value is not None:
            node.meta["example_value"] = value
        if stream is not None:
            node.meta["custom"] = {"stream": stream}
        return node

    def order(self):
        """Return the targets of the canonical order."""
        self.graph.output(())

        def key(node, index):
            if node.op == "placeholder":
                return (0, node.name)
            return _canonical_node_key(node, index)

        canonicalize_graph(self.graph, key, _is_safe_to_reorder)
        return [
            self.graph._target_to_str(node.target)
            for node in self.graph.nodes
            if node.op in ("call_function", "call_method")
        ]

    def program(self, copy, *, stream=None, result=None, **kwargs):
        """What is launched on a side stream, a copy of it, and a kernel that comes after
        the copy: the names of the three, in the canonical order."""
        x = self.placeholder("x", self.on_device)
        y = self.call(torch.neg, x, value=self.on_device, stream=stream)
        result = self.on_host if result is None else result
        self.call(copy, y, value=result, stream=stream, **kwargs)
        self.call(operator.add, x, 1, value=self.on_device)
        return self.order()

    def test_kernel_stays_behind_a_copy_to_the_host(self):
        found = self.program("cpu", stream=1)
        self.assertEqual(found, ["neg", "cpu", "add"])

    def test_kernel_stays_behind_a_number_that_the_host_reads(self):
        number = ShapeEnv().create_unbacked_symint()
        found = self.program("item", stream=1, result=number)
        self.assertEqual(found, ["neg", "item", "add"])

    def test_copy_that_does_not_block(self):
        found = self.program("to", stream=1, non_blocking=True)
        self.assertEqual(found, ["add", "neg", "to"])

    def test_copy_on_the_device(self):
        found = self.program("to", stream=1, result=self.on_device)
        self.assertEqual(found, ["add", "neg", "to"])

    def test_program_without_streams(self):
        self.assertEqual(self.program("cpu"), ["add", "neg", "cpu"])

    def test_copy_to_the_device(self):
        x = self.placeholder("x", self.on_host)
        self.call("cuda", x, value=self.on_device, stream=1)
        self.call(operator.add, x, 1, value=self.on_host)
        self.assertEqual(self.order(), ["cuda", "add"])

    def test_current_stream_that_an_event_is_recorded_on(self):
        self.call(torch.ops.streams.record_event, 1, 0)
        self.assertEqual(self.program("cpu")[1:], ["neg", "cpu", "add"])


if __name__ == "__main__":
    run_tests()
