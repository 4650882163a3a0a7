# Owner(s): ["module: inductor"]

import dataclasses
import math
import operator
import random
import struct

import torch
from torch._inductor.cudagraph_relaunch.expressions import (
    evaluate,
    inputs_of,
    moved,
    pack,
    Unfit,
)
from torch._inductor.cudagraph_relaunch.nodes import CapturedGraph, KernelNode
from torch._inductor.cudagraph_relaunch.traced import Escaped, LARGEST, Traced
from torch._inductor.cudagraph_relaunch.words import (
    another,
    settled,
    slots_of,
    Use,
    values_of,
)
from torch.testing._internal.common_utils import run_tests, TestCase


EDGES = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, -3.5, 1e300, -1e-300, math.inf)


def draw_number(rng):
    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice(EDGES)
    return rng.choice(FLOATS) if kind == 1 else rng.randrange(-100, 100)


def draw_code(rng, depth=3):
    if not depth or rng.random() < 0.2:
        return rng.choice(("n", "m", repr(draw_number(rng))))
    left, right = draw_code(rng, depth - 1), draw_code(rng, depth - 1)
    return f"({left} {rng.choice(('+', '-', '*', '//', '%', '/'))} {right})"


def run(code, n, m):
    return eval(code, {"inf": math.inf}, {"n": n, "m": m})


def bits(value):
    return struct.pack("<d", value) if type(value) is float else value


def graph_of(*parameters):
    values = tuple((8 * i, value) for i, value in enumerate(parameters))
    node = KernelNode(0, 77, "kernel", 7, 0, 0, (1, 1, 1), (32, 1, 1), 0, values)
    return CapturedGraph((node,), (), (), 1 << 40, 1 << 41)


class TestTraced(TestCase):
    def test_an_expression_has_the_value_of_the_code(self):
        rng, compared, unfit = random.Random(0), 0, 0
        for _ in range(3000):
            code, n, m = draw_code(rng), draw_number(rng), rng.choice(EDGES)
            try:
                made = run(code, Traced.input(0, n), Traced.input(1, m))
            except (Escaped, ArithmeticError):
                continue
            if not isinstance(made, Traced):
                continue
            others = (type(n)(rng.randrange(-9, 9)), rng.choice(EDGES))
            for values in ((n, m), others):
                try:
                    want = run(code, *values)
                except ArithmeticError:
                    with self.assertRaises(Unfit):
                        evaluate(made.expression, values)
                    continue
                try:
                    got = evaluate(made.expression, values)
                except Unfit:
                    unfit += 1
                    continue
                self.assertIs(type(got), type(want), code)
                if not (got != got and want != want):
                    self.assertEqual(bits(got), bits(want), code)
                compared += 1
        self.assertGreater(compared, 1000)
        self.assertLess(unfit, compared)

    def test_plain_values_are_not_to_be_had(self):
        n = Traced.input(3, 5)
        uses = [
            int, float, bool, hash, str, abs, round, len, range, math.sqrt,
            operator.index, "{:d}".format, "abc".__getitem__, torch.empty,
            lambda v: v < 2, lambda v: v == 5, lambda v: v & 1, lambda v: 1 << v,
            lambda v: 2**v, lambda v: v**0.5, lambda v: max(v, 1), lambda v: v + True,
            lambda v: v * torch.ones(2), lambda v: [1] * v, lambda v: v // 0,
        ]  # fmt: skip
        for use in uses:
            with self.assertRaises((Escaped, TypeError)):
                use(n)

    def test_who_escaped(self):
        n, m = Traced.input(3, 5), Traced.input(8, 2)
        with self.assertRaises(Escaped) as caught:
            bool(n * 2 + m)
        self.assertEqual(caught.exception.positions, {3, 8})
        self.assertIn("__bool__", str(caught.exception))

    def test_length(self):
        n = Traced.input(0, 1)
        for _ in range(LARGEST):
            n = n + 1
        with self.assertRaisesRegex(Escaped, "steps"):
            n + 1

    def test_inputs(self):
        made = (Traced.input(3, 5) * 2 + Traced.input(8, 2)).expression
        self.assertEqual(inputs_of([made]), {3, 8})
        self.assertEqual(evaluate(moved(made, {3: 0, 8: 1}), [5, 2]), 12)

    def test_number_that_is_too_large(self):
        n = Traced.input(0, 3)
        with self.assertRaisesRegex(Unfit, "64 bits"):
            evaluate((n * n).expression, [1 << 40])
        self.assertEqual(evaluate((n / 2).expression, [1 << 53]), 2.0**52)
        for made in (n / 2, n * 0.5):
            with self.assertRaisesRegex(Unfit, "53 bits"):
                evaluate(made.expression, [(1 << 53) + 1])

    def test_constants_are_told_apart_by_their_bits(self):
        n = Traced.input(0, 1.0)
        self.assertNotEqual((n * 0.0).expression, (n * -0.0).expression)
        self.assertEqual((n * 0.0).expression, (n * 0.0).expression)

    def test_number_of_another_type(self):
        with self.assertRaisesRegex(Unfit, "bool instead of a int"):
            evaluate(Traced.input(0, 3).expression, [True])


class TestParameters(TestCase):
    def test_bytes(self):
        for letter, value, form in (
            ("i", -5, "<i"),
            ("l", -(2**63), "<q"),
            ("B", 255, "<B"),
            ("f", 0.1, "<f"),
            ("d", 0.1, "<d"),
        ):
            self.assertEqual(pack(letter, value), struct.pack(form, value))
        for letter, value in (("i", 2**31), ("B", -1), ("l", 0.5), ("h", True)):
            with self.assertRaises(Unfit):
                pack(letter, value)

    def capture(self, n, *, of=lambda n: 2 * n + 1, found=None):
        """A graph whose kernel gets an expression of n, and what was noted."""
        made = of(Traced.input(4, n))
        value = made.value if found is None else found
        graph = graph_of(b"\0" * 8, value.to_bytes(8, "little"))
        return graph, slots_of([Use(77, 1, "l", made.expression)], {4: n}, graph)

    def test_slots(self):
        n = 5
        (first, slots), (second, again) = self.capture(n), self.capture(another(n))
        self.assertEqual(slots, again)
        self.assertNotEqual(first, second)
        self.assertEqual(settled(second, first, slots), first)
        (value,) = values_of(slots, {4: 100})
        self.assertEqual(int.from_bytes(value, "little"), 201)

    def test_parameter_that_is_something_else(self):
        with self.assertRaisesRegex(Escaped, "not what was computed"):
            self.capture(5, found=12)

    def test_node_that_is_not_in_the_graph(self):
        graph, _ = self.capture(5)
        node = dataclasses.replace(graph.nodes[0], handle=78)
        graph = dataclasses.replace(graph, nodes=(node,))
        with self.assertRaisesRegex(Escaped, "not in the graph") as caught:
            slots_of([Use(77, 1, "l", ("input", 4, int))], {4: 5}, graph)
        self.assertEqual(caught.exception.positions, {4})

    def test_another_number(self):
        for value in (0, 5, 2**31 - 1, 0.0, 1.5, 1e300, math.inf):
            other = another(value)
            self.assertIs(type(other), type(value))
            self.assertNotEqual(other, value)


if __name__ == "__main__":
    run_tests()
