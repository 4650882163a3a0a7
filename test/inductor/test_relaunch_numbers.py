"""Tests of regions whose numbers are parameters: one graph serves all values, and computes what the code computes."""

import math
import operator
import struct

import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.utils import counters

import form  # noqa: F401
from stand_ins import relaunch_driver
from stand_ins.relaunch_case import region, RelaunchTestCase, run_in_threads
from stand_ins.relaunch_device import Kernel
from torch_overlay import config
from torch_overlay._inductor.relaunch import coverage
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate, pack, RegisterProgram, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped, Traced
from torch_overlay.testing import compile_only, simulated_gpu


REGION = region("x, n", "out = new(4, dtype=torch.float64)", "scale.run(x, out, {0}, stream=0)", "return (out,)")


def scaled(x, out, n):
    out.copy_(x * n)


# A backward that may be cut into stages, each of which gets a number.
STAGED = """
def region(args):
    *saved, n = args
    args.clear()
    made = []
    while saved:
        x = saved.pop()
        out = empty_strided_cuda((512,), (1,), torch.float64)
        scale.run(x, out, n + len(saved), stream=0)
        del x
        made.append(out)
    return (*made, n + 1)
"""


class NumbersTestCase(RelaunchTestCase):
    def scale(self, letter="l", grid="1"):
        return Kernel(self.device, scaled, "x, out, n", "OO" + letter, grid)

    def region(self, expression="n", letter="l", grid="1", **options):
        return self.runner(REGION.format(expression), numbers=[1], scale=self.scale(letter, grid), **options)

    def check(self, fn, values, expected=lambda n: n, captures=1):
        for i, n in enumerate(values):
            x = torch.arange(4, dtype=torch.float64) + i
            (out,) = fn([x, n])
            want = x * expected(n)
            self.assertEqual(struct.pack("<4d", *out), struct.pack("<4d", *want), f"{n!r} at call {i}")
        self.assertEqual(self.counted("captures"), captures)


class TestNumbers(NumbersTestCase):
    def test_one_graph_computes_what_the_code_does(self):
        """Of values that no parameter of the graph can hold, the code itself is called."""
        floats = (0.5, 2.0, 0.0, -0.0, math.inf, 1e-310, 0.1, -3.5)
        for expression, letter, values, without_graph in (
            ("n", "l", range(10), 0),
            ("2 * n - (n + 7) // 3 + n % 5 - (-n)", "l", range(-9, 9), 0),
            ("n", "d", floats, 0),  # with their bits
            ("n / 4 + 0.5", "d", range(6), 0),
            ("n / 4", "d", (1, 2, 2**53, 2**53 + 1, 2**60 + 1, 3), 2),  # two are no float
            ("n * n % 7", "l", (2, 3, 2**40, 4), 1),  # one is too large
            ("n", "l", (2, 3, True, 4), 1),  # one is of another type
        ):
            with self.subTest(expression, values=values):
                counters.clear()
                fn = self.region(expression, letter)
                self.check(fn, values, eval(f"lambda n: {expression}"))
                self.assertEqual(fn.outside, {"warm-up": 1, **({"number": without_graph} if without_graph else {})})

    def test_verified(self):
        self.check(self.region("n + 1", verify=True), range(5), lambda n: n + 1)

    def test_region_without_a_key_is_launched_at_once(self):
        fn = self.region()
        self.check(fn, range(3))
        self.assertIsNotNone(fn.states.try_launch)

    def test_nan(self):
        fn = self.region(letter="d")
        self.check(fn, (1.0, 2.0))
        (out,) = fn([torch.ones(4, dtype=torch.float64), math.nan])
        self.assertTrue(out.isnan().all())

    def test_division_by_zero_is_the_codes_own(self):
        fn = self.region("12 // n")
        self.check(fn, (2, 3, 4), lambda n: 12 // n)
        with self.assertRaises(ZeroDivisionError):
            fn([torch.ones(4, dtype=torch.float64), 0])
        self.check(fn, (5,), lambda n: 12 // n)

    def test_output_that_is_a_number(self):
        source = region(
            "x, n",
            "out = new(4, dtype=torch.float64)",
            "scale.run(x, out, n, stream=0)",
            "return (out, 2 * n + 1, n, 5)",
        )
        fn = self.runner(source, numbers=[1], scale=self.scale())
        for n in range(5):
            x = torch.ones(4, dtype=torch.float64)
            out, *numbers = fn([x, n])
            self.assertEqual((out, numbers), (x * n, [2 * n + 1, n, 5]))
            self.assertTrue(all(type(v) is int for v in numbers))
        self.assertEqual(self.counted("captures"), 1)

    def test_output_that_a_launch_can_not_compute(self):
        """It is found before the launch, which may write to inputs."""
        source = region("x, n", "x.add_(1)", "return (n * n, 12 // n)")
        fn = self.runner(source, numbers=[1], mutated=[0])
        x = torch.zeros(4)
        for i, n in enumerate((2, 3, 1 << 40, True, -5), start=1):
            self.assertEqual(fn([x, n]), (n * n, 12 // n))
            self.assertEqual(x, torch.full((4,), float(i)))
        with self.assertRaises(ZeroDivisionError):
            fn([x, 0])
        self.assertEqual((self.counted("captures"), fn.outside), (1, {"warm-up": 1, "number": 3}))

    def test_two_numbers(self):
        source = region(
            "n, x, m",
            "a = new(4, dtype=torch.float64)",
            "scale.run(x, a, n * m, stream=0)",
            "b = new(4, dtype=torch.float64)",
            "scale.run(a, b, n - m, stream=0)",
            "c = new(4, dtype=torch.float64)",
            "scale.run(b, c, 3, stream=0)",
            "return (c,)",
        )
        fn = self.runner(source, numbers=[0, -1], scale=self.scale())
        for n, m in ((1, 2), (3, 1), (3, 5), (0, 0), (-4, 2)):
            x = torch.arange(4, dtype=torch.float64)
            self.assertEqual(fn([n, x, m])[0], x * (n * m) * (n - m) * 3)
        self.assertEqual(self.counted("captures"), 1)

    def test_only_nodes_whose_number_changed_are_set(self):
        fn = self.region()
        x = torch.arange(4, dtype=torch.float64)
        kept = [fn([x, n]) for n in (1, 2, 2, 2, 3)]
        self.assertEqual([k[0] for k in kept], [x * n for n in (1, 2, 2, 2, 3)])

    def test_backward_in_stages(self):
        self.cut_into_stages()
        fn = self.runner(STAGED, numbers=[-1], scale=self.scale(), is_backward=True)
        for n in range(1, 6):
            *made, number = fn([*[torch.full((512,), float(k)) for k in range(6)], n])
            self.assertEqual([float(out[-1]) for out in made], [float(k * (n + k)) for k in reversed(range(6))])
            self.assertEqual(number, n + 1)
        self.assertEqual(self.counted("captures"), 1)
        self.assertGreater(len(self.device.arrangements[-1].stages), 1)

    def test_number_that_only_a_later_stage_can_not_take(self):
        """It is found before the first stage, while there are inputs to run as compiled with."""
        self.cut_into_stages()
        source = STAGED.replace("n + len(saved)", "n ** (6 - len(saved)) % 7").replace("(*made, n + 1)", "tuple(made)")
        fn = self.runner(source, numbers=[-1], scale=self.scale(), is_backward=True)
        for n in (2, 3, 1 << 12, 4):
            made = fn([*[torch.full((512,), float(k), dtype=torch.float64) for k in range(6)], n])
            self.assertEqual([int(out[-1]) for out in made], [(5 - i) * (n ** (i + 1) % 7) for i in range(6)])
        self.assertGreater(len(self.device.arrangements[-1].stages), 1)
        self.assertEqual(fn.outside, {"warm-up": 1, "number": 1})

    def test_after_an_error_of_the_driver_a_node_with_numbers_alone_is_set_again(self):
        source = REGION.replace("    return", "    note.run({0}, stream=0)\n    return").format("n")
        noted = []
        note = Kernel(self.device, noted.append, "n", "l")
        fn = self.runner(source, numbers=[1], scale=self.scale(), note=note)
        x = torch.arange(4, dtype=torch.float64)
        for n in (1, 2):
            fn([x, n])
        relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1)
        with self.assertRaisesRegex(RuntimeError, "cuGraphExecKernelNodeSetParams"):
            fn([x, 3])
        self.assertEqual((fn([x, 3])[0], noted[-1]), (x * 3, 3))


class TestNumbersInTheKey(NumbersTestCase):
    """What is more than a parameter that can be patched is in the key, as any number was."""

    def in_key(self, fn, values, expected=lambda n: n):
        captures = len(set(values))
        self.check(fn, [n for n in values for _ in range(3)], expected, captures)
        self.assertEqual(list(fn.keys.kept), [1])
        return fn.keys.kept[1]

    def source(self, body):
        return region("x, n", "out = new(4, dtype=torch.float64)", body, "return (out,)")

    def run_in_key(self, body, expected, **namespace):
        return self.in_key(self.runner(self.source(body), numbers=[1], **namespace), (1, 2, 3), expected)

    def test_what_code_does_with_a_number(self):
        scaled_by = "scale.run(x, out, {}, stream=0)".format
        for body, expected, why in (
            ("torch.mul(x, n, out=out)", lambda n: n, "TypeError"),
            (scaled_by("5 if n > 2 else n"), lambda n: 5 if n > 2 else n, "__gt__"),
            ("out.copy_(x * 2 if n else x)", lambda n: 2, "__bool__"),
            ("out.copy_(x * (7, 1, 2, 3)[n])", lambda n: n, "__index__"),
            ("for _ in range(70): n = n + 1\n    " + scaled_by("n"), lambda n: n + 70, "steps"),
            (scaled_by("n % 2**64"), lambda n: n, "has more than 64 bits"),
            (scaled_by("n + 2**63 - 2**63"), lambda n: n, "has more than 64 bits"),
            (scaled_by("n // -2**64 + n + 1"), lambda n: n, "has more than 64 bits"),
        ):
            with self.subTest(body):
                counters.clear()
                self.assertIn(why, self.run_in_key(body, expected, scale=self.scale()))

    def test_coverage_has_the_reason_where_no_number_comes_again(self):
        fn = self.runner(self.source("torch.mul(x, n, out=out)"), numbers=[1])
        for n in range(2, 20):
            fn([torch.ones(4, dtype=torch.float64), n])
        (why,) = (each for each in coverage._without_graph(fn, 1) if each.code == "warm-up")
        self.assertIn("; the number at input 1 is no parameter: TypeError", why.message)

    def test_grid(self):
        self.assertIn("grid", self.in_key(self.region(grid="n"), (1, 2)))

    def test_kernel_whose_launch_is_not_known(self):
        class Half(Kernel):
            def launch(self, *args):
                self.arg_tys = "OOl"
                super().launch(*args)
                self.arg_tys = "OOe"

        class Twice(Kernel):
            def launch(self, *args):
                super().launch(*args)
                super().launch(*args)

        kinds = Half, Twice, Kernel, Kernel
        half, twice, other, several = (kind(self.device, scaled, "x, out, n", "OOl") for kind in kinds)
        other.launchers[0]._is_static = False
        several.launchers.append(None)
        for kernel, why in (
            (half, "do not convert"),
            (twice, "not launched once, by torch's static launcher"),
            (other, "not launched once, by torch's static launcher"),
            (several, "not launched once, by torch's static launcher"),
        ):
            counters.clear()
            found = self.run_in_key("scale.run(x, out, n, stream=0)", lambda n: n, scale=kernel)
            self.assertIn(why, found)

    def test_parameter_that_is_not_what_was_computed(self):
        class Odd(Kernel):
            def run(self, x, out, n, *, stream):
                super().run(x, out, 2 * n, stream=stream)

        kernel = Odd(self.device, scaled, "x, out, n", "OOl")
        why = self.run_in_key("scale.run(x, out, n, stream=0)", lambda n: 2 * n, scale=kernel)
        self.assertIn("not what was computed", why)

    def test_one_of_two(self):
        source = region(
            "x, n, m",
            "out = new(4, dtype=torch.float64)",
            "scale.run(x, out, n if m else 2 * n, stream=0)",
            "return (out,)",
        )
        fn = self.runner(source, numbers=[1, 2], scale=self.scale())
        x = torch.arange(4, dtype=torch.float64)
        for n, m in ((1, 1), (2, 1), (3, 1), (4, 0), (5, 0), (6, 0), (7, 1), (8, 0)):
            self.assertEqual(fn([x, n, m])[0], x * (n if m else 2 * n))
        self.assertEqual((list(fn.keys.kept), self.counted("captures")), ([2], 2))

    def test_other_threads_kernels_are_not_noted(self):
        def aside(x, n):
            if self.device.thread.__dict__.get("recording") is not None:
                run_in_threads(lambda: kernel_of().run(x, torch.zeros(4, dtype=torch.float64), 3, stream=0))

        fn = self.runner(
            self.source("aside(x, n)\n    scale.run(x, out, n, stream=0)"), numbers=[1], scale=self.scale(), aside=aside
        )
        kernel_of = lambda: fn.region.model.__globals__["scale"]  # noqa: E731
        self.check(fn, range(4))

    def test_kernels_are_back_after_a_capture(self):
        kernel = self.scale()
        fn = self.runner(REGION.format("n"), numbers=[1], scale=kernel)
        self.check(fn, range(3))
        self.assertIs(fn.region.model.__globals__["scale"], kernel)


INTEGERS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


def expressions(numbers):
    leaves = st.sampled_from(["n", "m"]) | numbers.map(repr)
    return st.recursive(
        leaves,
        lambda parts: st.tuples(parts, st.sampled_from([*INTEGERS, "/"]), parts).map("({0[0]} {0[1]} {0[2]})".format),
        max_leaves=8,
    )


EDGES = [0, 1, -1, 7, 2**31 - 1, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63)]
INTEGER = st.sampled_from(EDGES) | st.integers(-100, 100)
FLOAT = st.sampled_from([0.0, -0.0, 0.5, 1e300, -1e-300, math.inf]) | st.floats(allow_nan=False)


class TestExpressions(RelaunchTestCase):
    @settings(max_examples=80, deadline=None)
    @given(text=expressions(INTEGER | FLOAT), n=INTEGER | FLOAT, m=INTEGER, others=st.tuples(INTEGER, INTEGER))
    def test_an_expression_is_worth_what_the_code_computes(self, text, n, m, others):
        traced = {"n": Traced.input(0, n), "m": Traced.input(1, m)}
        try:
            made = eval(text, {"inf": math.inf}, traced)
        except (NumberEscaped, ZeroDivisionError, OverflowError):
            return
        if not isinstance(made, Traced):
            return
        for values in ((n, m), (type(n)(others[0]), others[1])):
            try:
                want = eval(text, {"inf": math.inf}, dict(zip("nm", values)))
            except (ZeroDivisionError, OverflowError):
                with self.assertRaises(Unfit):
                    evaluate(made.expression, values)
                continue
            try:
                got = evaluate(made.expression, values)
            except Unfit:
                continue
            self.assertEqual(type(got), type(want))
            self.assertEqual(
                struct.pack("<d", got) if type(got) is float else got,
                struct.pack("<d", want) if type(want) is float else want,
            )

    def test_constants_of_equal_value_are_told_apart(self):
        n = Traced.input(0, 1.0)
        program = RegisterProgram.of([(n * 0.0).expression, (n * -0.0).expression, (n + 0).expression])
        self.assertEqual(list(map(repr, program.constants)), ["0.0", "-0.0", "0"])

    def test_nothing_uses_a_traced_number_unnoticed(self):
        n = Traced.input(3, 5)
        uses = [int, float, bool, hash, str, range, abs, round, len, bytes, math.sqrt, torch.empty]
        uses += [list("abcdef").__getitem__, "{:d}".format]
        texts = (
            "v < 2; v == 2; 1 << v; 2**v; v & 1; v in (1, 2); v + 'a'; v * torch.ones(2); max(v, 1); v + True; v**0.5"
        )
        texts += "; [1] * v; divmod(v, 2); v // 0"
        for use in (*uses, *(eval(f"lambda v: {text}") for text in texts.split("; "))):
            with self.assertRaises((NumberEscaped, TypeError)):
                use(n)

    def test_parameters_are_what_launchers_make(self):
        cases = [("i", -5, "<i"), ("l", -(2**63), "<q"), ("B", 255, "<B"), ("f", 0.1, "<f"), ("d", 0.1, "<d")]
        for letter, value, kind in cases:
            self.assertEqual(pack(letter, value), struct.pack(kind, value))
        self.assertEqual(pack("f", 1e300), struct.pack("<f", math.inf))
        for letter, value in (("i", 2**31), ("B", -1), ("l", 0.5), ("h", True)):
            with self.assertRaises(Unfit):
                pack(letter, value)


class TestCompiledCode(RelaunchTestCase):
    """Which numbers of a compiled function no shape depends on."""

    def codes(self, fn, *numbers, size=6, **options):
        with simulated_gpu():
            x = torch.randn(size, 4, device="cuda")
            with config.patch(cudagraphs="relaunch"):
                made = compile_only(fn, x, *numbers, mode="reduce-overhead", dynamic=True, **options)
        return [graph["relaunch"] for graph in made.cudagraphs]

    def test_numbers_that_no_shape_depends_on(self):
        for hazard, fn, numbers, free in (
            ("kernels compute with it", lambda x, n: x * n + 1, (7,), {-1}),
            ("it is a size, too", lambda x, n: x.new_ones(n, 4) * n, (7,), set()),
            ("size of an input", lambda x: x * x.shape[0], (), set()),
        ):
            with self.subTest(hazard):
                (code,) = self.codes(fn, *numbers)
                self.assertEqual(code.numbers, free)

    def test_number_that_is_an_offset(self):
        (code,) = self.codes(lambda x, n: x.index_add(0, x.new_ones(1).long() * n, x[n : n + 1]), 2)
        self.assertEqual(len(code.numbers), 1)

    def test_without_partitions_positions_are_those_of_the_graph(self):
        with torch._inductor.config.patch(graph_partition=False):
            (code,) = self.codes(lambda x, n: x * n, 7)
        self.assertEqual(len(code.numbers), 1)
        self.assertGreaterEqual(min(code.numbers), 0)

    def test_number_from_the_device(self):
        def fn(x):
            n = x.sum().item()
            return x.cos() + n, n

        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            *_, code = self.codes(fn)
        self.assertLessEqual(len(code.numbers), 1)
