"""Tests of graphs for any size: after two sizes, a region of Triton kernels alone is never captured again."""

import contextlib
import gc
import itertools
import logging
import threading
import weakref
from unittest import mock

import torch
from hypothesis import given, settings, strategies as st

import form  # noqa: F401
from stand_ins import relaunch_device, relaunch_driver
from stand_ins.relaunch_case import host, region, RelaunchTestCase
from stand_ins.relaunch_device import SizedKernel, tensor_at
from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate, Result, Unfit
from torch_overlay._inductor.relaunch.numbers.launches import Shapes
from torch_overlay._inductor.relaunch.numbers.traced import decide, deciding, NumberEscaped, Traced


BLOCK = 4
DOUBLE = torch.float64


def flat(address, count):
    return tensor_at(address, (count,), (1,), DOUBLE)


def scale(grid, x, out, k, n):
    """out[i] = k * x[i] for i < n, as far as the grid reaches."""
    n = min(n, BLOCK * grid[0])
    if n > 0:
        flat(out, n).copy_(flat(x, n) * k)


def add(grid, x, y, out, n):
    n = min(n, BLOCK * grid[0])
    flat(out, n).copy_(flat(x, n) + flat(y, n))


def transpose(grid, x, out, rows, cols):
    """A grid of blocks of columns and of rows."""
    m, n = min(cols, BLOCK * grid[0]), min(rows, BLOCK * grid[1])
    tensor_at(out, (m, n), (rows, 1), DOUBLE).copy_(tensor_at(x, (n, m), (cols, 1), DOUBLE).t())


CEIL = "-(({}) // -4)"

# sin's place is taken by products: what is checked is where kernels read and write, and how much.
REGION = region(
    "x, n, m",
    "assert_size_stride(x, (n, m), (m, 1))",
    "buf0 = empty_strided_cuda((n, m), (m, 1), torch.float64)",
    "xnumel = n * m",
    "scale.run(x, buf0, 2, xnumel, stream=0)",
    "buf1 = empty_strided_cuda((1 + 2 * n, m), (m, 1), torch.float64)",
    "buf2 = reinterpret_tensor(buf1, (n, m), (m, 1), 0)",
    "scale.run(buf0, buf2, 3, xnumel, stream=0)",
    "buf3 = reinterpret_tensor(buf1, (n, m), (m, 1), m * n)",
    "add.run(x, buf0, buf3, xnumel, stream=0)",
    "del x",
    "buf4 = reinterpret_tensor(buf1, (1, m), (m, 1), 2 * m * n)",
    "scale.run(buf0, buf4, 5, m, stream=0)",
    "del buf2, buf3, buf4",
    "buf5 = empty_strided_cuda((m, n), (n, 1), torch.float64)",
    "transpose.run(buf0, buf5, n, m, stream=0)",
    "del buf0",
    "buf6 = empty_strided_cuda((m, n), (n, 1), torch.float64)",
    "scale.run(buf5, buf6, 7, xnumel, stream=0)",
    "return (buf6, buf1, reinterpret_tensor(buf1, (n + 1, m), (m, 1), n * m), n + m, buf6, None, n)",
)


def expected(x, n, m):
    a = 2 * x
    whole = torch.cat([3 * a, x + a, 5 * a[:1]])
    c = 7 * a.t().contiguous()
    return c, whole, whole[n:], n + m, c, None, n


class AnySizeTestCase(RelaunchTestCase):
    def kernels(self):
        one, two = f"{CEIL.format('n')}, 1, 1", f"{CEIL.format('cols')}, {CEIL.format('rows')}, 1"
        return {
            "scale": SizedKernel(self.device, scale, "x, out, k, n", "OOll", one),
            "add": SizedKernel(self.device, add, "x, y, out, n", "OOOl", one),
            "transpose": SizedKernel(self.device, transpose, "x, out, rows, cols", "OOll", two),
            "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,
            "assert_size_stride": torch._C._dynamo.guards.assert_size_stride,
        }

    def region(self, source=REGION, **options):
        return self.runner(source, **self.kernels(), **options)

    def call(self, run, n, m, want=expected):
        x = torch.randn(n, m, dtype=DOUBLE)
        got = run([x, n, m])
        for k, (have, wanted) in enumerate(zip(got, want(x, n, m), strict=True)):
            self.assertEqual(have, wanted, f"output {k} for {n} x {m}")
            if isinstance(wanted, torch.Tensor) and n > 1 and m > 1:
                self.assertEqual((have.stride(), have.dtype), (wanted.stride(), wanted.dtype))
        return got

    def captures(self):
        return len(self.device.random)


class TestAnySize(AnySizeTestCase, RelaunchTestCase):
    SIZES = [(3, 5), (7, 2), (1, 1), (2, 9), (16, 16), (1, 30), (30, 1), (3, 5), (5, 5), (64, 3)]

    def test_no_capture_after_the_second_size(self):
        run = self.region()
        for n, m in self.SIZES:
            self.call(run, n, m)
        self.assertEqual((self.captures(), self.counted("captures")), (2, 1))
        self.assertEqual(run.outside, {"warm-up": 1})
        self.assertEqual(len(self.device.launchers), 1)
        self.assertEqual(run.launched(), len(self.SIZES) - 1)
        self.assertEqual([graph.nodes for graph in run.graphs()], [6])
        self.assertEqual(run.any_size.describe(run), "one graph serves any size")

    def test_each_launch_is_named_in_profiles(self):
        with config.patch(nvtx=True):
            run = self.region()
        with mock.patch.object(profiler_ranges, "push") as push:
            for n, m in self.SIZES:
                self.call(run, n, m)
        self.assertEqual(push.mock_calls, [mock.call("a region, graph of 6 nodes")] * (len(self.SIZES) - 1))

    def test_a_size_that_has_a_graph_keeps_it(self):
        run = self.region()
        for n, m in ((3, 5), (3, 5), (7, 2), (3, 5), (8, 8), (3, 5)):
            self.call(run, n, m)
        self.assertEqual(self.counted("captures"), 2)
        self.assertEqual(run.states[3, 5].relaunch.totals[0], 3)

    def test_repeated_outputs_are_one_object(self):
        run = self.region()
        for n, m in ((3, 5), (7, 2), (4, 4)):
            got = self.call(run, n, m)
            self.assertIs(got[0], got[4])

    def test_only_one_size_varies_at_first(self):
        """Then the other one, too: what stayed the same is in the key until a call shows another."""
        run = self.region()
        for n, m in ((3, 5), (4, 5), (9, 5), (3, 8), (4, 8), (2, 3)):
            self.call(run, n, m)
        self.assertEqual(self.captures(), 4)
        self.assertEqual(run.any_size.varied, {1, 2})
        self.assertEqual(run.outside, {"warm-up": 1})

    def test_graph_stays_when_another_number_can_not_vary(self):
        run = self.region(REGION.replace("    del x\n", "    for _ in range(m): pass\n    del x\n"))
        for n, m in ((3, 5), (4, 5), (9, 7), (6, 5), (9, 8), (2, 9), (1, 6), (11, 5), (9, 7)):
            self.call(run, n, m)
        self.assertEqual(run.any_size.varied, {1})
        self.assertEqual(run.outside, {"warm-up": 1 + 4})
        self.assertEqual(run.any_size.describe(run), "one graph serves any size")

    def test_graph_that_is_dropped_is_made_again(self):
        run = self.region()
        for n, m in ((3, 5), (4, 7)):
            self.call(run, n, m)
        run.states.clear()  # as for the sake of more recent ones
        for n, m in ((9, 2), (4, 7), (3, 5)):
            self.call(run, n, m)
        self.assertEqual((self.captures(), run.outside), (4, {"warm-up": 1}))

    def test_value_of_a_number_that_stays_the_same_gets_no_graph_of_its_own_each_time(self):
        run = self.region()
        for n, m in ((3, 5), (4, 7), (3, 7), (4, 5), (9, 9)):
            self.call(run, n, m)
        self.assertEqual(self.captures(), 2)

    def test_numbers_that_are_no_sizes_are_parameters_as_well(self):
        source = REGION.replace("x, n, m = args", "x, n, m, k = args").replace("buf0, 2,", "buf0, k,")
        run = self.region(source, numbers=[3])
        for n, m, k in ((3, 5, 2), (4, 6, 7), (5, 2, 2), (5, 2, -3)):
            x = torch.ones(n, m, dtype=DOUBLE)
            self.assertEqual(run([x, n, m, k])[0], torch.full((m, n), 7.0 * k, dtype=DOUBLE))
        self.assertEqual((self.captures(), run.outside), (2, {"warm-up": 1}))

    def test_verified(self):
        run = self.region(verify=True)
        for n, m in self.SIZES:
            self.call(run, n, m)
        self.assertEqual(self.captures(), 2)

    def test_misaligned_inputs(self):
        run = self.region()
        for n, m in ((3, 5), (7, 2), (4, 4)):
            self.call(run, n, m)
        x = torch.randn(1 + 15, dtype=DOUBLE)[1:].view(5, 3)
        self.assertEqual(run([x, 5, 3])[1], expected(x, 5, 3)[1])
        self.assertEqual(self.captures(), 2)

    def test_mutated_input(self):
        source = region(
            "x, n, m",
            "scale.run(x, x, 2, n * m, stream=0)",
            "buf0 = empty_strided_cuda((n, m), (m, 1), torch.float64)",
            "scale.run(x, buf0, 3, n * m, stream=0)",
            "return (x, buf0)",
        )
        run = self.region(source, mutated=[0])
        for n, m in self.SIZES:
            for skew in (0, 1):
                x = torch.ones(n * m + skew, dtype=DOUBLE)[skew:].view(n, m)
                got = run([x, n, m])
                self.assertEqual(x, torch.full((n, m), 2.0, dtype=DOUBLE))
                self.assertEqual(got[1], 3 * x)
                self.assertIs(got[0], x)
        self.assertEqual(
            self.counted("captures"), 2, "that of the first size, which came twice, and one for all others"
        )

    def test_saved_outputs_of_a_forward_have_memory_of_their_own(self):
        run = self.region(saved=[1, 2])
        for n, m in self.SIZES:
            got = self.call(run, n, m)
            self.assertEqual(got[1].untyped_storage().nbytes(), (1 + 2 * n) * m * 8)

    def test_scratch_is_shared_by_what_is_not_used_at_once(self):
        source = """
def region(args):
    x, n, m = args
    args.clear()
    for i in range(6):
        buf = empty_strided_cuda((n + i, m), (m, 1), torch.float64)
        scale.run(x, buf, 2, n * m, stream=0)
        x = buf
        del buf
    out = empty_strided_cuda((n, m), (m, 1), torch.float64)
    scale.run(x, out, 2, n * m, stream=0)
    return (out,)
"""
        taken = []
        run = self.region(source)
        self.device.raw_alloc = lambda size, stream: taken.append(size) or self.keep(size)
        self.device.raw_delete = lambda address: None
        self.device.stream_of = lambda device: 0
        self.device.functions = (0, 0, 0)
        for n, m in ((32, 16), (64, 16), (128, 32)):
            self.call(run, n, m, lambda x, n, m: (128 * x,))
        need = [(n + 5) * m * 8 + (n + 4) * m * 8 for n, m in ((64, 16), (128, 32))]
        for size, least in zip(taken, need, strict=True):
            self.assertLessEqual(least, size)
            self.assertLess(size, least + 2048)

    def test_memory_lives_as_long_as_in_the_capture_that_frees_it_later(self):
        source = region(
            "x, n, m",
            "a = empty_strided_cuda((n, m), (m, 1), torch.float64)",
            "scale.run(x, a, 2, n * m, stream=0)",
            "hold(a)",
            "del a",
            "b = empty_strided_cuda((n, m), (m, 1), torch.float64)",
            "scale.run(x, b, 3, n * m, stream=0)",
            "hold(None)",
            "out = empty_strided_cuda((n, m), (m, 1), torch.float64)",
            "scale.run(b, out, 5, n * m, stream=0)",
            "return (out,)",
        )
        for captures, bins in ((), 1), ((2,), 2), ((4,), 2):  # of the calls of `hold`; two are a run
            held, calls = [None], itertools.count()

            def hold(tensor, held=held, calls=calls, captures=captures):
                held[0] = tensor if next(calls) in captures else None

            run = self.runner(source, **self.kernels(), hold=hold)
            for n, m in ((3, 5), (7, 2)):
                self.call(run, n, m, lambda x, n, m: (15 * x,))
            self.assertEqual(run.any_size.describe(run), "one graph serves any size")
            self.assertEqual(self.device.arrangements[-1].layout.scratch_size, 512 * bins)

    def keep(self, size):
        self.kept = torch.full((size + 64,), 0x5A, dtype=torch.uint8)
        return -(-self.kept.data_ptr() // 64) * 64

    def test_threads(self):
        run = self.region()
        for n, m in ((3, 5), (7, 2)):
            self.call(run, n, m)
        errors = []

        def work(n):
            try:
                for m in range(1, 20):
                    self.call(run, n, m)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3, 5, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((errors, self.captures()), ([], 2))

    def test_forgotten(self):
        run = self.region()
        for n, m in ((3, 5), (7, 2)):
            self.call(run, n, m)
        run.forget()
        gc.collect()
        for n, m in ((3, 5), (7, 2), (4, 4)):
            self.call(run, n, m)
        self.assertEqual(self.captures(), 4)

    def test_globals_are_back_after_a_capture(self):
        run = self.region()
        before = dict(run.region.model.__globals__)
        for n, m in ((3, 5), (7, 2)):
            self.call(run, n, m)
        self.assertEqual({k: v for k, v in run.region.model.__globals__.items() if before.get(k) is not v}, {})

    def test_without_shared_executables_each_size_has_its_own(self):
        with config.patch(cudagraph_executables=0):
            run = self.region()
        for n, m in ((3, 5), (7, 2), (3, 5), (7, 2)):
            self.call(run, n, m)
        self.assertEqual((self.counted("captures"), run.outside["warm-up"]), (2, 2))
        self.assertIn("cudagraph_executables is 0", run.any_size.describe(run))


DECIDING = region(
    "x, n, m",
    "buf0 = empty_strided_cuda((n, m), (m, 1), torch.float64)",
    "k = {}",
    "scale.run(x, buf0, k, n * m, stream=0)",
    "return (buf0,)",
)


class TestDecisions(AnySizeTestCase, RelaunchTestCase):
    """Code may compare sizes: the graph is for those with the same outcomes."""

    def check(self, text, sizes, captures):
        run = self.region(DECIDING.format(text))
        for n in sizes:
            self.call(run, n, 3 + n, lambda x, n, m: (x * eval(text, {}, {"n": n, "m": m}),))
        self.assertEqual(self.counted("captures"), captures, run.any_size.why_not)
        return run

    def test_largest_and_smallest_decide_nothing(self):
        for text in ("max(n, 4)", "min(n, 4)", "max(5, min(n, m, 9) - 1)", "min(max(n, 3), 5, max(m - n, 2))"):
            with self.subTest(text):
                torch._dynamo.utils.counters.clear()
                self.check(text, (5, 6, 9, 3, 7, 2, 4, 30), 1)

    def test_other_outcome_runs_as_compiled_and_gets_its_own(self):
        run = self.check("n if n > 4 else 4", (5, 6, 9, 3, 7, 3, 3, 2, 8), 2)
        self.assertEqual(run.outside["warm-up"], 3)

    def test_two_outcomes_in_the_two_captures(self):
        run = self.check("5 if n > 6 else 6", (5, 8, 5, 8), 2)
        self.assertIn("differ in decisions", run.any_size.why_not)

    def test_every_comparison(self):
        for text, sizes in (
            ("7 if n == 5 else n", (3, 4, 9)), ("7 if n != 5 else n", (3, 4, 9)), ("n if n < 20 else 1", (3, 4, 19)),
            ("n if n <= 9 else 1", (3, 9, 5)), ("1 if n > 9 else n", (3, 9, 5)), ("1 if n >= 9 else n", (3, 8, 5)),
            ("n if n else 3", (3, 4, 1)), ("n if m == n + 3 else 1", (3, 4, 1)), ("1 if 20 < n else n", (3, 20, 5)),
        ):  # fmt: skip
            with self.subTest(text):
                torch._dynamo.utils.counters.clear()
                self.check(text, sizes, 1)

    @settings(max_examples=100, deadline=None)
    @given(
        name=st.sampled_from(["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]),
        first=st.integers(-3, 3),
        bound=st.integers(-3, 3),
        other=st.integers(-3, 3),
    )
    def test_a_decision_holds_for_the_numbers_with_the_same_outcome(self, name, first, bound, other):
        decisions = {}
        with deciding(decisions):
            outcome = getattr(Traced.input(0, first), name)(bound)
        self.assertIs(outcome, getattr(first, name)(bound))
        ((check,),) = [list(decisions)]
        if getattr(other, name)(bound) is outcome:
            evaluate(check, [other])
        else:
            with self.assertRaises(Unfit):
                evaluate(check, [other])

    def test_size_of_nothing_is_unfit(self):
        with deciding(decisions := {}):
            Shapes().allocated(torch.empty(3), (Traced.input(0, 3),), (1,))
        (check,) = decisions
        evaluate(check, [1])
        with self.assertRaises(Unfit):
            evaluate(check, [0])

    def test_only_where_decisions_are_noted(self):
        with self.assertRaises(NumberEscaped):
            bool(Traced.input(0, 3))
        with deciding({}), self.assertRaises(NumberEscaped):
            bool(Traced.input(0, 0.5))
        decide("positive", 3)  # plain numbers need no check


class TestWhatASizeShows(AnySizeTestCase, RelaunchTestCase):
    """Calls that show too little, or something else than later ones."""

    def test_tensors_on_the_host_are_neither_compared_nor_kept(self):
        source = REGION.replace("x, n, m = args", "x, n, m, where = args")
        run = self.region(source)
        kept = []
        for i, (n, m) in enumerate(((3, 5), (4, 6), (4, 6), (5, 5), (5, 5))):
            where = host([i, i + 1])
            kept.append(weakref.ref(where))
            x = torch.randn(n, m, dtype=DOUBLE)
            self.assertEqual(run([x, n, m, where])[0], expected(x, n, m)[0])
            del where
        self.assertEqual([ref() for ref in kept], [None] * 5)
        self.assertIn("host memory", run.any_size.describe(run))

    def test_flag_in_the_key(self):
        source = REGION.replace("x, n, m = args", "x, n, m, flag = args").replace("buf0, 2,", "buf0, 2 if flag else 3,")
        run = self.region(source)
        for n, m in ((3, 5), (4, 6), (5, 5)):
            for flag in (True, False):
                x = torch.ones(n, m, dtype=DOUBLE)
                self.assertEqual(run([x, n, m, flag])[0], torch.full((m, n), 14.0 if flag else 21.0, dtype=DOUBLE))
        self.assertIn("no integer", run.any_size.describe(run))

    def test_it_is_made_on_its_device(self):
        run, device, made = self.region(), self.device, []
        device.selected = 7

        @contextlib.contextmanager
        def guard():
            before, device.selected = device.selected, 0
            try:
                yield
            finally:
                device.selected = before

        instantiate, new_recording = device.instantiate, device.new_recording
        device.guard = guard
        device.instantiate = lambda *args, **kwargs: made.append(device.selected) or instantiate(*args, **kwargs)
        device.new_recording = lambda *args: made.append(device.selected) or new_recording(*args)
        for n, m in ((3, 5), (4, 6), (5, 5)):
            self.call(run, n, m)
        self.assertEqual((made, self.captures()), ([0, 0, 0], 2))

    def test_empty_batch_among_the_first(self):
        run = self.region(DECIDING.format(2))
        for n, m in ((3, 5), (0, 5), (0, 5), (4, 6), (5, 7), (0, 5)):
            self.call(run, n, m, lambda x, n, m: (2 * x,))
        self.assertEqual(run.any_size.describe(run), "one graph serves any size")

    def test_memory_that_is_empty_at_small_sizes(self):
        source = region(
            "x, n, m",
            "part = empty_strided_cuda((n // 8, m), (m, 1), torch.float64)",
            "scale.run(x, part, 2, n // 8 * m, stream=0)",
            "out = empty_strided_cuda((n, m), (m, 1), torch.float64)",
            "scale.run(x, out, 3, n * m, stream=0)",
            "scale.run(part, out, 5, n // 8 * m, stream=0)",
            "return (out,)",
        )

        def want(x, n, m):
            out = 3 * x
            out[: n // 8] = 10 * x[: n // 8]
            return (out,)

        run = self.region(source)
        for n, m in ((3, 5), (4, 6), (16, 5), (17, 3), (40, 2), (3, 5)):
            self.call(run, n, m, want)

    def test_input_that_is_empty_at_small_sizes(self):
        source = region(
            "x, y, n, m", "out = new(m, dtype=torch.float64)", "sums.run(y, out, n // 8, m, stream=0)", "return (out,)"
        )

        def sums(grid, y, out, rows, cols):
            y = tensor_at(y, (rows, cols), (cols, 1), DOUBLE) if rows else torch.zeros(1, cols, dtype=DOUBLE)
            flat(out, cols).copy_(y.sum(0))

        kernel = SizedKernel(self.device, sums, "y, out, rows, cols", "OOll", f"{CEIL.format('cols')}, 1, 1")
        run = self.runner(source, sums=kernel)
        for n, m in ((3, 5), (4, 6), (16, 5), (17, 3), (40, 2), (3, 5)):
            x, y = torch.randn(n, m, dtype=DOUBLE), torch.randn(n // 8, m, dtype=DOUBLE)
            self.assertEqual(run([x, y, n, m])[0], y.sum(0))

    def test_backward_that_frees_inputs(self):
        source = region(
            "x, n, m",
            "out = empty_strided_cuda((n, m), (m, 1), torch.float64)",
            "scale.run(x, out, 3, n * m, stream=0)",
            "del x",
            "return (out,)",
        )
        run = self.region(source, is_backward=True)
        for n, m in ((3, 5), (4, 6), (40, 20), (40, 20)):
            self.assertEqual(run([torch.ones(n, m, dtype=DOUBLE), n, m])[0], torch.full((n, m), 3.0, dtype=DOUBLE))
        self.assertIn("frees inputs", run.any_size.describe(run))
        self.assertEqual(self.counted("captures"), 1)

    def test_first_call_with_a_misaligned_input(self):
        source = REGION.replace("    assert_size_stride", "    x = copy_if_misaligned(x)\n    assert_size_stride")
        run = self.region(source, copy_if_misaligned=lambda x: x.clone() if x.data_ptr() % 16 else x)
        x = torch.randn(16, dtype=DOUBLE)[1:].view(3, 5)
        self.assertEqual(run([x, 3, 5])[1], expected(x, 3, 5)[1])
        for n, m in ((4, 6), (5, 5)):
            self.call(run, n, m)
        self.assertEqual(run.any_size.describe(run), "one graph serves any size")

    def test_no_more_than_the_bound_are_captured(self):
        run = self.region()
        run.states.captures = run.states.most_captures
        for n, m in ((3, 5), (4, 6), (5, 5)):
            self.call(run, n, m)
        self.assertEqual(self.captures(), 0)


def drawn(draw):
    """A region that allocates, fills, adds, updates in place, frees, and returns some of it, with sizes of `n` and `m`.
    Every byte that it reads is written before."""
    lines, alive, outputs = [], {"x": "n * m", "y": "(n + m)"}, []
    wide = {"x", "y"}  # those with at least n values

    def made(size):
        name = f"buf{sum(' = empty' in line for line in lines)}"
        lines.append(f"{name} = empty_strided_cuda(({size},), (1,), torch.float64)")
        alive[name] = size
        return name

    for _ in range(draw.randint(3, 12)):
        source, size = (
            draw.choice(list(alive)),
            draw.choice(("n * m", "n", "(2 * n + 1)", "(n + m)", "7", "(n % 5 + 1)")),
        )
        had = alive[source]
        name = made(f"({size} + {had})")  # a copy of the source, and what follows it
        wide |= {name} if source in wide else set()
        lines.append(f"scale.run({source}, {name}, {draw.randint(1, 4)}, {had}, stream=0)")
        rest = f"reinterpret_tensor({name}, ({size},), (1,), {had})"
        lines.append(f"fill.run({rest}, {size}, stream=0)")
        if draw.random() < 0.5:
            a, b = draw.sample(sorted(alive), 2)
            least = "n" if wide.issuperset((a, b)) else "1"
            lines.append(f"add.run({a}, {b}, {made(least)}, {least}, stream=0)")
        if draw.random() < 0.3:
            lines.append(f"scale.run({name}, {name}, 2, {alive[name]}, stream=0)")
        if draw.random() < 0.6 and (dead := [k for k in alive if k not in outputs and k != name]):
            del alive[gone := draw.choice(dead)]
            lines.append(f"del {gone}")
        outputs += [name] * (draw.random() < 0.3)
    outputs = outputs or [name]
    views = [f"reinterpret_tensor({k}, (1,), (1,), {alive[k]} - 1)" for k in outputs if draw.random() < 0.4]
    body = "".join(f"    {line}\n" for line in lines)
    head = "def region(args):\n    x, y, n, m = args\n    args.clear()\n"
    return f"{head}{body}    return ({', '.join([*outputs, *views, 'n * 2 + m'])},)\n"


class TestDrawnRegions(AnySizeTestCase, RelaunchTestCase):
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(draw=st.randoms(use_true_random=True))
    def test_any_size_computes_what_the_code_computes(self, draw):
        def fill(grid, out, n):
            flat(out, min(n, BLOCK * grid[0])).fill_(1.5)

        source = drawn(draw)
        kernels = {"fill": SizedKernel(self.device, fill, "out, n", "Ol", f"{CEIL.format('n')}, 1, 1")}
        run = self.runner(source, **self.kernels(), **kernels)
        for n, m in [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(6)]:
            skew = draw.choice((0, 0, 1, 2))
            x, y = (torch.randn(size + skew, dtype=DOUBLE)[skew:] for size in (n * m, n + m))
            want = run.region.model([x.clone(), y.clone(), n, m])
            self.assertEqual(list(run([x, y, n, m])), list(want), f"{n} x {m} of\n{source}")
        self.assertEqual(run.any_size.why_not, "", source)
        run.forget()


class TestAnySizeByNode(AnySizeTestCase):
    def test_a_further_size_sets_no_node(self):
        run = self.region()
        self.call(run, 3, 5)
        for n in range(2, 12):
            self.call(run, n, n + 4)
        (call,) = (state.relaunch.call for state in run.states.values() if state.relaunch is not None)
        self.assertEqual((call.by_node, call.patched), (10, 0))


class TestNoGraphForAnySize(AnySizeTestCase, RelaunchTestCase):
    """Regions whose sizes get graphs one by one, and the reasons."""

    SIZES = ((3, 5), (7, 2), (3, 5), (7, 2), (4, 4))

    def check(self, source, why, want=expected, captures=2, **options):
        run = self.region(source, **options)
        for n, m in self.SIZES:
            self.call(run, n, m, want)
        self.assertIn(why, run.any_size.why_not)
        self.assertIn("each size has a graph of its own: ", run.any_size.describe(run))
        self.assertEqual(self.counted("captures"), captures)
        return run

    def test_operator(self):
        run = self.check(REGION.replace("del x\n", "x.add_(0)\n    del x\n"), "")
        self.assertIn("it calls operators", run.any_size.describe(run))
        self.assertEqual(self.captures(), 2 + 2, "there is no try: the first call has shown the operator")

    def test_operator_that_the_first_size_did_not_show(self):
        source = REGION.replace("    del x\n", "    if n != 3: x.add_(0)\n    del x\n")
        self.check(source, "aten.add_.Tensor is called")

    def test_size_that_a_loop_runs_over(self):
        self.check(REGION.replace("    del x\n", "    for _ in range(n): pass\n    del x\n"), "__index__")

    def test_output_that_is_a_view_of_an_input(self):
        source = REGION.replace("    del x\n", "    keep = reinterpret_tensor(x, (1, m), (m, 1), 0)\n    del x\n")
        source = source.replace("None, n)", "keep, n)")
        self.check(source, "view of an input", lambda x, n, m: (*expected(x, n, m)[:5], x[:1], n))

    def test_output_that_is_a_float(self):
        source = REGION.replace("None, n)", "n / m, n)")
        self.check(source, "a float is computed", lambda x, n, m: (*expected(x, n, m)[:5], n / m, n))

    def test_kernel_that_is_no_kernel_of_generated_code(self):
        def others():
            if (recording := getattr(self.device.thread, "recording", None)) is not None:
                function = recording.operations[-1]
                recording.operations.append(function)

        with mock.patch.object(self, "kernels", lambda kernels=self.kernels: {**kernels(), "others": others}):
            self.check(
                REGION.replace("    del x\n", "    others()\n    del x\n"), "no Triton kernel that generated code"
            )

    def test_grid_that_is_not_what_the_launcher_computes(self):
        class Odd(SizedKernel):
            def launch(self, x, *rest):
                super().launch(x + 1, *rest)

        kernels = self.kernels()
        kernels["add"] = Odd(self.device, add, "x, y, out, n", "OOOl", f"{CEIL.format('n')}, 1, 1")
        with mock.patch.object(self, "kernels", lambda: kernels):
            self.check(REGION, "is not what was computed")

    def test_too_many_numbers_to_compute(self):
        self.check(
            REGION.replace("xnumel = n * m", "xnumel = n * m\n    for _ in range(40): xnumel = xnumel + 1 - 1"), "steps"
        )

    def test_it_is_logged(self):
        with self.assertLogs("torch_overlay", logging.INFO) as logs:
            self.test_size_that_a_loop_runs_over()
        self.assertTrue(any("no graph for any size" in line for line in logs.output))

    def test_node_that_the_driver_refuses(self):
        run = self.region()
        self.call(run, 3, 5)
        relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1, 1)
        with mock.patch.object(relaunch_device, "only_order", return_value=None):
            for n, m in self.SIZES[1:]:
                self.call(run, n, m)
        self.assertIn("NodeSetParams", run.any_size.why_not)

    def test_captures_that_fail(self):
        run = self.region()
        self.call(run, 3, 5)
        self.device.fail_captures = 3
        for n, m in ((7, 2), (8, 2), (9, 2), (10, 2)):
            self.call(run, n, m)
        self.assertIn("flu", run.any_size.describe(run))
        self.assertEqual(run.outside["warm-up"], 5)

    def test_capture_that_fails_once(self):
        run = self.region()
        self.call(run, 3, 5)
        self.device.fail_captures = 1
        for n, m in ((7, 2), (8, 3), (9, 2), (10, 2)):
            self.call(run, n, m)
        self.assertEqual(run.any_size.describe(run), "one graph serves any size")
        self.assertEqual(run.outside["warm-up"], 2)

    def test_no_memory_at_a_launch(self):
        run = self.region()
        for n, m in ((3, 5), (7, 2), (4, 4)):
            self.call(run, n, m)
        self.device.full = True
        given = [torch.randn(5, 6, dtype=DOUBLE), 5, 6]
        with self.assertRaises(torch.OutOfMemoryError):
            run(given)
        self.assertEqual(len(given), 3)
        self.device.full = False
        self.call(run, 5, 6)
        self.assertEqual(self.captures(), 2)


class TestResults(RelaunchTestCase):
    def test_a_result_is_no_number(self):
        self.assertNotEqual(Result(3), 3)
        self.assertNotEqual((Result(3),), (3,))
        self.assertEqual(Result(3), Result(3))
        self.assertEqual(len({Result(3), 3, Result(3)}), 2)
