"""PyTorch's own operators in the middle of a side stream (`operator_programs`), compiled for a simulated GPU.

`tools/operators.py --device simulated` checks all cases, and without the option it runs them on a GPU. Here are those
whose kind was wrong once, and with `--slow` a fixed part of the others.
"""

import random
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from operator_programs import Case, cases, checked, DEFAULT, FOLDED, gpu, GRAPHS


ONCE_WRONG = [
    Case("view_as_complex", "forward", "float32", DEFAULT),  # a view of an input that is misaligned
    Case("real", "misaligned", "complex64", FOLDED),
    Case("mul", "saved", "complex64", DEFAULT),  # a conjugate is saved
    Case("_foreach_sub", "update", "float32", DEFAULT),  # a list of the side stream's, updated and returned
    Case("fft.ihfft", "backward", "float32", GRAPHS),
]
CHUNKS = 40  # tests
PART = 6  # of the cases, which are in random order


@instantiate_parametrized_tests
class TestOperators(TestCase):
    @parametrize("case", ONCE_WRONG, name_fn=lambda case: case.operator.replace(".", "_"))
    def test_once_wrong(self, case: Case) -> None:
        self.assertEqual(checked.faults(case), [])

    @form.slow
    @parametrize("chunk", range(CHUNKS))
    def test_ordered_as_eager_is(self, chunk: int) -> None:
        chosen = list(cases())
        random.Random(0).shuffle(chosen)
        wrong = []
        for case in chosen[:: PART * (4 if form.PATCHED else 1)][chunk::CHUNKS]:
            try:
                wrong += [(case, text) for text in checked.faults(case)[:1]]
            except checked.Unfit:
                continue
        self.assertEqual(wrong, [])


class TestComparison(TestCase):
    """What a run on a GPU compares, on a CPU and without a compiler."""

    CASE = Case("add", "out", "float32", DEFAULT)

    def test_eager_equals_itself(self) -> None:
        gpu.check(self.CASE, "cpu", compiled=False)

    def test_a_result_that_is_another_is_found(self) -> None:
        built = []

        def another(case: Case, side: object) -> Callable[..., Any]:
            program = build(case, None)
            built.append(program)
            shift = len(built) - 1  # the first is eager's

            def shifted(args: Any, kwargs: Any) -> Any:
                on_side, on_current = program(args, kwargs)
                return [t + shift for t in on_side], on_current

            return shifted

        build, case = gpu.build, Case("add", "forward", "float32", DEFAULT)
        with unittest.mock.patch.object(gpu, "build", another), pytest.raises(gpu.Mismatch, match=r"^call 0, result"):
            gpu.check(case, "cpu", compiled=False)

    def test_what_nobody_defines_is_not_compared(self) -> None:
        a, b = torch.tensor([1.0]), torch.tensor([2.0])
        self.assertEqual(gpu.difference(a, b, undefined=True), "")
        self.assertIn("1 of 1 elements differ", gpu.difference(a, b, undefined=False))
        self.assertIn("float32[1]", gpu.difference(a, b.double(), undefined=True))

    def test_nan_is_not_equal_to_a_number(self) -> None:
        nan = torch.tensor([float("nan"), 1.0])
        self.assertEqual(gpu.difference(nan, nan.clone(), False), "")
        self.assertIn("nan", gpu.difference(nan, torch.ones(2), False))

    def test_the_last_call_is_misaligned(self) -> None:
        expected = gpu.Expected(self.CASE, gpu.Device("cpu"))
        offsets = [expected.twins(number)[0][0].storage_offset() for number in range(gpu.CALLS)]
        self.assertEqual(offsets, [0] * (gpu.CALLS - 1) + [1])


if __name__ == "__main__":
    unittest.main()
