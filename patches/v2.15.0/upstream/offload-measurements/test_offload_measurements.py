# Owner(s): ["module: aotdispatch"]

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch._functorch._activation_offloading import (
    device_rates,
    kernel_times,
    profile_cache,
)
from torch._functorch._activation_offloading.cost_model import Link
from torch._functorch._activation_offloading.device_rates import (
    measuring,
    Rates,
    rates,
    shortest_us,
)
from torch._functorch._activation_offloading.kernel_times import (
    is_measurable,
    known_us,
    measure,
    name_of,
)
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten


def block(x, w):
    q = (x @ w).view(1, -1, 2, 16).transpose(1, 2)
    heads = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return torch.relu(heads.transpose(1, 2).reshape(x.shape) @ w)


def traced(fn, *args, tracing_mode="fake"):
    graph = make_fx(fn, tracing_mode=tracing_mode)(*args).graph
    return [node for node in graph.nodes if node.op == "call_function"]


class TestCaseOfMeasurements(TestCase):
    def replace(self, owner, **values):
        patch = mock.patch.multiple(owner, **values)
        patch.start()
        self.addCleanup(patch.stop)


class TestClock(TestCaseOfMeasurements):
    def setUp(self):
        super().setUp()
        self.now = 0.0
        case = self

        class Event:
            def __init__(self, enable_timing):
                self.timed = enable_timing

            def record(self):
                self.at = case.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        self.replace(torch.cuda, Event=Event)

    def us(self, *milliseconds):
        left = list(milliseconds)

        def work():
            self.now += left.pop(0)

        found = shortest_us(work)
        return found, len(left)

    def test_shortest_of_three_after_the_first(self):
        self.assertEqual(self.us(0.001, 0.5, 0.25, 0.75, 0.125), (250.0, 1))

    def test_long_work_is_timed_once(self):
        self.assertEqual(self.us(32.0, 32.0, 1.0), (32000.0, 1))

    def test_time_is_never_zero(self):
        self.assertGreater(self.us(0, 0, 0, 0)[0], 0)


class TestRates(TestCaseOfMeasurements):
    def test_rates_are_measured(self):
        """On the host, by a clock on which the n-th work takes n us."""
        copied = []

        def us(work):
            result = work()
            copied.append(result)
            return float(len(copied))

        def on_host(make):
            return lambda *args, device=None, pin_memory=None, **kwargs: make(
                *args, **kwargs
            )

        makers = {n: on_host(getattr(torch, n)) for n in ("empty", "zeros", "randn")}
        self.replace(device_rates, SIZE=64, SIDE=4, shortest_us=us)
        self.replace(device_rates, measuring=lambda index: contextlib.nullcontext())
        profile = SimpleNamespace(get=lambda names, measure: measure(names))
        self.replace(profile_cache, profile=lambda index: profile)
        self.replace(torch, **makers)
        found = rates(0)
        self.assertEqual(found, Rates(Link(64.0, 32.0), 2 * 64 / 3, 32.0, True))
        self.assertEqual([value.numel() for value in copied], [64, 64, 64, 16])

    def test_device_that_does_not_answer(self):
        self.replace(profile_cache, profile=mock.Mock(side_effect=RuntimeError))
        self.replace(
            device_rates,
            bytes_per_us=lambda index: 10.0,
            flops_per_us=lambda index, size: 20.0,
        )
        found = rates(0)
        self.assertEqual(found, Rates(device_rates.LINK, 8.0, 10.0, False))

    def test_other_types_scale_as_the_peaks(self):
        self.replace(device_rates, flops_per_us=lambda index, size: 100.0 / size)
        of_4_bytes = Rates(Link(1.0, 1.0), 1.0, 30.0, True).flops_of(0, 4)
        self.assertEqual(of_4_bytes, 15.0)


class TestMeasuring(TestCaseOfMeasurements):
    def setUp(self):
        super().setUp()
        self.pools, self.capturing = [], False

        @contextlib.contextmanager
        def use(pool):
            self.pools.append(pool)
            yield

        self.replace(
            torch.cuda,
            device=lambda index: contextlib.nullcontext(),
            is_current_stream_capturing=lambda: self.capturing,
            MemPool=lambda: "a pool",
            use_mem_pool=use,
        )
        empty = torch.empty
        self.replace(torch, empty=lambda *args, device=None, **kw: empty(*args, **kw))
        fork = torch.random.fork_rng
        self.replace(torch.random, fork_rng=lambda devices: fork([]))

    def test_tensors_are_real_and_random_numbers_stay(self):
        torch.manual_seed(0)
        expected = torch.rand(4)
        torch.manual_seed(0)
        with FakeTensorMode(), measuring(0):
            made = torch.empty(4)
            self.assertIs(type(made), torch.Tensor)
            made.normal_()
            self.assertFalse(torch.is_grad_enabled())
            self.assertEqual(self.pools, ["a pool"])
        self.assertEqual(torch.rand(4), expected)

    def test_capture(self):
        self.capturing = True
        with self.assertRaisesRegex(RuntimeError, "being captured"), measuring(0):
            self.fail("it was measured")

    def test_device_that_is_not_there(self):
        with FakeTensorMode():
            fake = torch.empty(1)
        self.replace(torch, empty=lambda *args, **kwargs: fake)
        with self.assertRaisesRegex(RuntimeError, "no device"), measuring(0):
            self.fail("it was measured")


class TestKernelTimes(TestCaseOfMeasurements):
    def setUp(self):
        super().setUp()
        self.nodes = traced(block, torch.randn(64, 32), torch.randn(32, 32))
        self.known = {}
        profile = SimpleNamespace(known=self.known, get=self.get)
        self.replace(profile_cache, profile=lambda index: profile)
        self.replace(kernel_times, measuring=lambda index: contextlib.nullcontext())
        self.free = 1 << 30
        self.replace(
            torch.cuda,
            mem_get_info=lambda: (self.free, 1 << 40),
            memory_reserved=lambda: 0,
            memory_allocated=lambda: 0,
        )

    def get(self, names, measure):
        self.known |= measure([n for n in names if n not in self.known])
        return {n: self.known[n] for n in names if n in self.known}

    def time(self, us):
        self.replace(kernel_times, shortest_us=us)

    def test_library_kernels_alone_are_measured(self):
        names = {str(n.target): name_of(n) for n in self.nodes}
        found = {target for target, name in names.items() if name is not None}
        self.assertIn("aten.mm.default", found)
        self.assertTrue(any("attention" in target for target in found))
        self.assertTrue(all("mm" in t or "attention" in t for t in found))

    def test_names(self):
        x, y = torch.empty(3, 4), torch.empty(5, 4)
        (mm,) = traced(lambda x, y: torch.mm(x, y), x, y.t())
        types = "float32[3, 4][4, 1] on cpu, float32[4, 5][1, 4] on cpu"
        self.assertEqual(name_of(mm), f"aten.mm.default({types})")
        mm.kwargs = {"out_dtype": torch.float32}
        self.assertEqual(
            name_of(mm), f"aten.mm.default({types}, out_dtype=torch.float32)"
        )

    def test_what_can_not_be_measured(self):
        x = torch.randn(4, 4)
        (symbolic,) = (
            n
            for n in traced(lambda x: x @ x, x, tracing_mode="symbolic")
            if n.target is aten.mm.default
        )
        (relu,) = traced(torch.relu, x)
        written = traced(lambda x, y: torch.mm(x, x, out=y), x, x.clone())
        self.assertIn(aten.mm.out, [node.target for node in written])
        for node in (symbolic, relu, *written):
            self.assertIsNone(name_of(node))

    def test_kernels_run_on_tensors_like_those_of_the_graph(self):
        ran = []

        def us(work):
            ran.append(work())
            return 7.0

        self.time(us)
        found = measure(self.nodes, 0)
        nodes = {name_of(n): n for n in self.nodes if is_measurable(n)}
        self.assertEqual(found, dict.fromkeys(nodes, 7.0))
        for value, node in zip(ran, nodes.values()):
            made, expected = (
                torch.utils._pytree.tree_leaves(v)[0] for v in (value, node.meta["val"])
            )
            self.assertEqual((made.shape, made.dtype), (expected.shape, expected.dtype))
            self.assertTrue(made.abs().sum() > 0 and made.isfinite().all())

    def test_time_is_known_afterwards(self):
        self.time(lambda work: 7.0)
        mm = next(n for n in self.nodes if n.target is aten.mm.default)
        relu = next(n for n in self.nodes if n.target is aten.relu.default)
        self.assertIsNone(known_us(mm, 0))
        measure(self.nodes, 0)
        self.assertEqual((known_us(mm, 0), known_us(relu, 0)), (7.0, None))

    def test_too_little_memory(self):
        self.time(lambda work: 7.0)
        mm = [n for n in self.nodes if n.target is aten.mm.default][:1]
        needed = (64 * 32 + 32 * 32 + 64 * 32) * 4
        self.free = 4 * needed - 1
        self.assertEqual(measure(mm, 0), {})
        self.free = 4 * needed
        self.assertEqual(list(measure(mm, 0).values()), [7.0])

    def test_kernel_that_raises_is_left_out(self):
        times = iter([RuntimeError("no"), *range(1, 9)])

        def us(work):
            if isinstance(found := next(times), Exception):
                raise found
            return float(found)

        self.time(us)
        count = len({name_of(n) for n in self.nodes if is_measurable(n)})
        self.assertEqual(len(measure(self.nodes, 0)), count - 1)

    def test_device_that_does_not_answer(self):
        self.replace(profile_cache, profile=mock.Mock(side_effect=RuntimeError))
        self.assertEqual(measure(self.nodes, 0), {})
        mm = next(n for n in self.nodes if n.target is aten.mm.default)
        self.assertIsNone(known_us(mm, 0))

    def test_elements_that_share_memory(self):
        made = kernel_times._made(torch.empty(1, 8).expand(4, 8))
        self.assertEqual((made.shape, made.stride()), ((4, 8), (0, 1)))
        self.assertEqual(made.untyped_storage().nbytes(), 32)
        self.assertEqual(kernel_times._made(torch.empty(0, 8)).numel(), 0)

    def test_values_of_other_types(self):
        for dtype in (torch.int64, torch.float8_e5m2):
            made = kernel_times._made(torch.empty(3, dtype=dtype))
            self.assertEqual(made.dtype, dtype)
            self.assertEqual(made.to(torch.int64), torch.zeros(3, dtype=torch.int64))
        self.assertEqual(kernel_times._made(True), True)


if __name__ == "__main__":
    run_tests()
