# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import capture
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.nodes import KernelNode, PointerSlot, Template
from torch._inductor.cudagraph_relaunch.outputs import (
    Layout,
    OfInput,
    OfStorage,
    Repeated,
    SameInput,
    Storage,
    View,
)
from torch._inductor.cudagraph_relaunch.verify import (
    describe_difference,
    tolerance_of,
    Verified,
    VerifyError,
)
from torch.testing._internal.common_utils import run_tests, TestCase


VECTOR = View((4,), (1,), torch.float32)


def node(index):
    return KernelNode(index, index, f"k{index}", 7, 0, 0, (1, 1, 1), (32, 1, 1), 0, ())


class Relaunch:
    """A relaunch of two inputs, which are regions 0 and 1: `run` makes the outputs."""

    sized = None

    def __init__(self, run, recipes, slots=(), saved=False):
        self.run = run
        storages = (Storage(16, saved, 512 * i) for i in range(2))
        self.layout = Layout((0, 1), tuple(storages), recipes, ())
        nodes = tuple(map(node, range(12)))
        self.template = Template(6, nodes, tuple(slots))
        self.region = {0: 0, 1: 1}
        self.device = SimpleNamespace(
            random_state=torch.get_rng_state, set_random_state=torch.set_rng_state
        )

    def launch(self, inputs, originals=None):
        self.originals = originals
        result = self.run(*inputs)
        inputs.clear()
        return result


def plain(inputs):
    x, y = inputs
    inputs.clear()
    return x + y, x * y


class TestVerify(TestCase):
    def setUp(self):
        super().setUp()
        tensors = mock.Mock(side_effect=lambda value: isinstance(value, torch.Tensor))
        self.enterContext(mock.patch.object(capture, "is_region", tensors))
        self.x, self.y = torch.randn(4), torch.randn(4)

    def launch(self, run, recipes=None, plain=plain, mutated=(), **kwargs):
        made = OfStorage(0, VECTOR), OfStorage(1, VECTOR)
        slots = [PointerSlot(4, 2, 0, 2, 0), PointerSlot(5, 1, 8, 3, 0)]
        kwargs.setdefault("slots", slots)
        recipes = made if recipes is None else recipes
        self.relaunch = Relaunch(run, recipes, **kwargs)
        code = Code("forward of 0/0", 0, mutated_inputs=mutated)
        verified = Verified(self.relaunch, plain, code, torch.clone)
        self.assertIsNone(verified.attempt)  # each launch comes here
        return verified.launch([self.x, self.y], "originals")

    def test_equal(self):
        found = self.launch(lambda x, y: (x + y, x * y))
        self.assertEqual(found, (self.x + self.y, self.x * self.y))
        self.assertEqual(self.relaunch.originals, "originals")

    def test_output_that_differs(self):
        def run(x, y):
            wrong = x * y
            wrong[2] = 5.0
            return x + y, wrong

        with self.assertRaises(VerifyError) as caught:
            self.launch(run)
        first, second = str(caught.exception).splitlines()
        begin = "forward of 0/0: output 1 of the relaunched graph is not that of the"
        self.assertTrue(
            first.startswith(f"{begin} compiled code: 1 of 4 values differ")
        )
        self.assertIn("first at (2,): 5.0 instead of", first)
        where = "  its address: node 5 (k5), parameter 1, offset 8"
        self.assertEqual(second, where)

    def test_many_addresses(self):
        slots = [PointerSlot(i, 0, 0, 2, 0) for i in range(11)]
        slots.append(PointerSlot(0, 1, 0, 3, 0))
        with self.assertRaisesRegex(VerifyError, "and 3 more pointer slots"):
            self.launch(lambda x, y: (x - y, x * y), slots=slots)

    def test_input_that_is_written(self):
        def run_plain(inputs):
            inputs[0].add_(1)
            return ()

        def run(x, y):
            x.add_(self.by)
            return ()

        self.by = 1
        self.launch(run, (), run_plain, mutated=(0,))
        self.by = 2
        with self.assertRaisesRegex(VerifyError, "input 0, which it writes, of the"):
            self.launch(run, (), run_plain, mutated=(0,))

    def test_compiled_code_runs_on_copies(self):
        seen = []

        def run_plain(inputs):
            seen.extend(tensor.data_ptr() for tensor in inputs)
            return plain(inputs)

        self.launch(lambda x, y: (x + y, x * y), plain=run_plain)
        self.assertEqual({*seen} & {self.x.data_ptr(), self.y.data_ptr()}, set())

    def test_random_numbers(self):
        def draw(x, y):
            return torch.rand(4), x * y

        torch.manual_seed(1)
        self.launch(draw, plain=lambda inputs: draw(*inputs))
        after = torch.rand(1)
        torch.manual_seed(1)
        torch.rand(4)
        self.assertEqual(torch.rand(1), after)  # it advanced once

    def test_output_that_nothing_writes(self):
        def run(x, y):
            return x - y, x * y * self.by, x - y

        def run_plain(inputs):
            x, y = inputs
            return x + y, x * y, x + y

        recipes = OfStorage(0, VECTOR), OfStorage(1, VECTOR), Repeated(0)
        slots, self.by = [PointerSlot(5, 1, 0, 3, 0)], 1
        self.launch(run, recipes, run_plain, slots=slots)
        self.by = 2
        with self.assertRaisesRegex(VerifyError, "output 1"):
            self.launch(run, recipes, run_plain, slots=slots)
        slots.append(PointerSlot(4, 1, 0, 2, 0))
        with self.assertRaisesRegex(VerifyError, "output 0"):
            self.launch(run, recipes, run_plain, slots=slots)

    def test_outputs_in_the_slab(self):
        recipes = OfStorage(0, VECTOR), OfStorage(1, VECTOR)

        def run(x, y):
            return x - y, x * y

        second = [PointerSlot(5, 1, 0, 2, 512)]
        self.launch(run, recipes, slots=second, saved=True)
        both = [*second, PointerSlot(4, 1, 0, 2, 8)]
        with self.assertRaisesRegex(VerifyError, "output 0"):
            self.launch(run, recipes, slots=both, saved=True)

    def test_outputs_of_inputs(self):
        recipes = SameInput(0), OfInput(1, VECTOR)
        slots = [PointerSlot(3, 0, 0, 1, 0)]
        with self.assertRaisesRegex(VerifyError, r"output 1(.|\n)*node 3"):
            self.launch(
                lambda x, y: (x, y + 1),
                recipes,
                lambda given: tuple(given),
                slots=slots,
            )


class TestDifference(TestCase):
    def test_other_kinds(self):
        x = torch.ones(2, 3)
        for other, text in (
            (x.double(), "dtype torch.float64 instead of torch.float32"),
            (x[0], "shape"),
            (x.t().contiguous().t(), "strides"),
            (x.to("meta"), "device meta instead of cpu"),
            (5, "5 instead of tensor"),
        ):
            self.assertIn(text, describe_difference(x, other))
        self.assertIsNone(describe_difference(None, None))
        self.assertIsNone(describe_difference(float("nan"), float("nan")))
        self.assertIn("True instead of 1", describe_difference(1, True))

    def test_tolerance(self):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            tolerance = tolerance_of(dtype)
            x = torch.full((8,), 100.0, dtype=dtype)
            x[0] = 0.0  # sums cancel: differences are relative to the largest number
            self.assertIsNone(describe_difference(x, x + tolerance / 2))
            self.assertIn("8 of 8", describe_difference(x, x + 250 * tolerance))
        x = torch.arange(4)
        self.assertEqual(tolerance_of(x.dtype), 0.0)
        self.assertIn("4 of 4 values differ", describe_difference(x, x + 1))

    def test_special_values(self):
        x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
        self.assertIsNone(describe_difference(x, x.clone()))
        self.assertIn(
            "2 of 4", describe_difference(x, x * torch.tensor([1, 1, -1, -1]))
        )
        z = torch.tensor([1 + 2j])
        self.assertIsNone(describe_difference(z, z.clone()))
        self.assertIsNotNone(describe_difference(z, z.conj()))
        eight = torch.ones(4).to(torch.float8_e4m3fn)
        self.assertIsNone(describe_difference(eight, eight.clone()))
        self.assertIsNone(describe_difference(torch.ones(0), torch.ones(0)))


if __name__ == "__main__":
    run_tests()
