# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
from torch._functorch._activation_offloading.cost_model import Link
from torch._functorch._activation_offloading.device_rates import Rates
from torch._functorch._activation_offloading.kernel_times import name_of
from torch._functorch._activation_offloading.reader import (
    estimated_us,
    is_dense,
    is_library_call,
    is_pointwise,
    is_static,
    nbytes,
    Reader,
    tensor_of,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten
CPU = torch.device("cpu")
RATES = Rates(Link(1.0, 1.0), 1e3, 1e3, True)  # 1 kB in a us, 1000 operations


class ReaderCase(TestCase):
    def setUp(self):
        super().setUp()
        patch = mock.patch.object(Rates, "flops_of", lambda *args: RATES.flops)
        patch.start()
        self.addCleanup(patch.stop)

    def trace(self, fn, *args, tracing_mode="fake"):
        self.graph = make_fx(fn, tracing_mode=tracing_mode)(*args).graph
        return {node.name: node for node in self.graph.nodes}

    def steps(self, fn, *args, kept=(), times=None, **kwargs):
        """What each step makes, in bytes, and reads."""
        nodes = self.trace(fn, *args, **kwargs)
        kept = {nodes[name] for name in kept}
        steps = Reader(self.graph, kept, RATES, CPU, times).steps
        self.us = {step.name: step.us for step in steps}
        found = {}
        for step in steps:
            self.assertLessEqual(step.makes.keys(), {step.name})
            found[step.name] = (step.makes.get(step.name), set(step.reads))
        return found


X, W = torch.empty(32, 16), torch.empty(16, 16)


class TestSteps(ReaderCase):
    def test_pointwise_operations_are_fused(self):
        found = self.steps(
            lambda x, w: torch.relu(torch.mm(x, w)) * 2, X, W, kept=["mul"]
        )
        self.assertEqual(
            found,
            {"mm": (2048, {"x_1", "w_1"}), "mul": (2048, {"mm"})},
        )

    def test_library_kernels_read_memory(self):
        found = self.steps(lambda x, w: torch.mm(torch.relu(x), w), X, W)
        self.assertEqual(
            found, {"relu": (2048, {"x_1"}), "mm": (2048, {"relu", "w_1"})}
        )

    def test_library_kernels_read_memory_through_views(self):
        found = self.steps(lambda x, w: torch.mm(torch.relu(x).t(), w), W, W)
        self.assertEqual(found.keys(), {"relu", "mm"})
        self.assertEqual(found["mm"][1], {"relu", "w_1"})

    def test_kept_value_is_in_memory(self):
        found = self.steps(lambda x: torch.sin(torch.relu(x)), X, kept=["relu", "sin"])
        self.assertEqual(found, {"relu": (2048, {"x_1"}), "sin": (2048, {"relu"})})

    def test_views_are_what_they_view(self):
        found = self.steps(lambda x: torch.sum(x.t()[1:], 0), X)
        self.assertEqual(found, {"sum_1": (128, {"x_1"})})

    def test_conversions_are_fused(self):
        found = self.steps(lambda x: x.to(torch.float64).sum(), X.to(torch.bfloat16))
        self.assertEqual(found, {"sum_1": (8, {"x_1"})})

    def test_values_made_from_nothing_are_fused(self):
        found = self.steps(lambda x: (x + torch.zeros(32, 16)).sum(), X)
        self.assertEqual(found, {"sum_1": (4, {"x_1"})})

    def test_value_that_reads_many_others_is_in_memory(self):
        def program(count, readers):
            def fn(*args):
                value = sum(args[1:], args[0])
                return [torch.sum(value, dim) for dim in range(readers)]

            found = self.steps(fn, *(torch.empty(4, 4) for _ in range(count)))
            return len(found) - readers

        self.assertEqual([program(n, 1) for n in (8, 9)], [0, 1])
        self.assertEqual([program(n, 2) for n in (4, 5)], [0, 1])

    def test_other_devices_take_no_memory_of_this_one(self):
        self.trace(lambda x: torch.sum(x), X)
        (step,) = Reader(self.graph, set(), RATES, torch.device("cuda:0")).steps
        self.assertEqual(step.makes, {})


class TestTimes(ReaderCase):
    def test_measured_time(self):
        nodes = self.trace(lambda x, w: torch.mm(x, w), X, W)
        times = {name_of(nodes["mm"]): 1234.0}
        self.steps(lambda x, w: torch.mm(x, w), X, W, times=times)
        self.assertEqual(self.us, {"mm": 1234.0})

    def test_memory_traffic(self):
        nodes = self.trace(lambda x: x + x.t().t(), X)
        self.assertEqual(estimated_us(nodes["add"], RATES, 0), 4.096)

    def test_arithmetic(self):
        self.steps(lambda x, w: torch.mm(x, w), X, W)
        self.assertEqual(self.us["mm"], 2 * 32 * 16 * 16 / 1e3)

    def test_longer_of_the_two(self):
        self.steps(lambda x, w: torch.mm(x, w), X[:, :1], W[:1])
        moved = (32 + 16 + 32 * 16) * 4
        self.assertEqual(self.us["mm"], moved / 1e3)

    def test_selection_takes_none(self):
        nodes = self.trace(lambda x: x.max(0)[1], X)
        self.assertEqual(estimated_us(nodes["getitem"], RATES, 0), 0.0)

    def test_symbolic_sizes_count_by_their_hints(self):
        def program(x, w):
            return torch.mm(x, w)

        mode = {"tracing_mode": "symbolic"}
        found = self.steps(program, X, W, **mode)
        self.assertEqual(found["mm"][0], 2048)
        self.assertEqual(self.us["mm"], 2 * 32 * 16 * 16 / 1e3)
        value = next(n.meta["val"] for n in self.graph.nodes if n.name == "mm")
        self.assertFalse(is_static(value))
        self.assertEqual(nbytes(value), 2048)
        env = value.fake_mode.shape_env
        count = len(env.guards)
        self.assertEqual(nbytes(value), 2048)
        self.assertEqual(len(env.guards), count)


class TestValues(ReaderCase):
    def test_dense(self):
        x = torch.empty(4, 6)
        for value, expected in (
            (x, True),
            (x.t(), True),
            (x[1:], False),
            (x[:, ::2], False),
            (x.expand(2, 4, 6), False),
            (torch.empty(0), False),
            (torch.empty(()), True),
        ):
            self.assertEqual(is_dense(value), expected)

    def test_nodes_without_a_tensor(self):
        nodes = self.trace(lambda x: x.max(0)[1], X)
        self.assertIsNone(tensor_of(nodes["max_1"]))
        self.assertIsNone(tensor_of(3))
        self.assertEqual(tensor_of(nodes["x_1"]).shape, X.shape)

    def test_kinds(self):
        nodes = self.trace(lambda x, w: torch.mm(torch.relu(x), w).max(0)[1], X, W)
        found = {n: (is_pointwise(nodes[n]), is_library_call(nodes[n])) for n in nodes}
        self.assertEqual(found["relu"], (True, False))
        self.assertEqual(found["mm"], (False, True))
        self.assertEqual(found["getitem"], (False, False))
        self.assertEqual(found["x_1"], (False, False))


if __name__ == "__main__":
    run_tests()
