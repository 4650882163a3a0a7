# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import (
    attention_seeds,
    capture as captures,
    first_runs as module,
)
from torch._inductor.cudagraph_relaunch.allocations import ALLOCATOR, Plan
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.compiled_region import CompiledRegion
from torch._inductor.cudagraph_relaunch.first_runs import FirstRuns
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._python_dispatch import _disable_current_modes


def aligned(skew=0):
    """A vector so many bytes behind a multiple of 64."""
    memory = torch.zeros(256, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + skew
    return memory[start : start + 64].view(torch.float32)


def allocate(size, stride, dtype):
    with _disable_current_modes():  # generated code doesn't ask the dispatcher
        return torch.empty_strided(size, stride, dtype=dtype)


class Generator:
    offset = 100

    def get_offset(self):
        return self.offset


class RegionTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(
            mock.patch.object(
                captures, "is_region", lambda v: isinstance(v, torch.Tensor)
            )
        )
        self.generator = Generator()

    def region(self, text, **code):
        """A region as generated code: `text` makes `result` of x and y."""
        scope = {
            "torch": torch,
            "generator": self.generator,
            ALLOCATOR: allocate,
        }
        lines = ["x, y = args", "args.clear()", *text.split("; "), "return result"]
        exec("def call(args):\n    " + "\n    ".join(lines), scope)
        device = SimpleNamespace(generators=lambda inputs: [self.generator])
        return CompiledRegion(scope["call"], Code("a region", 0, **code), device)


NEW = f"{ALLOCATOR}((16,), (1,), torch.float32)"


class TestFirstRuns(RegionTestCase):
    def observe(self, text, inputs=None, **code):
        region = self.region(text, **code)
        run = FirstRuns(region).observe(inputs or [aligned(), aligned()])
        self.assertEqual(region.outside, {"warm-up": 1})
        return run

    def test_allocations_that_become_outputs(self):
        run = self.observe(f"a = {NEW}; b = {NEW}; c = {NEW}; result = (c, a[2:], x)")
        self.assertEqual(run.plan, Plan(allocations=frozenset([0, 2])))
        self.assertEqual(run.operators, 1)  # a[2:]
        self.assertEqual([v.numel() for v in run.result], [16, 14, 16])

    def test_operators_that_allocate(self):
        run = self.observe("a = torch.neg(x); b = x.add_(1); result = (b, a)")
        self.assertEqual(run.plan.operators, {0})
        self.assertEqual((run.operators, run.seeds), (2, frozenset()))

    def test_operator_that_is_not_torchs(self):
        library = self.enterContext(torch.library._scoped_library("asks", "DEF"))
        library.define("neg(Tensor x) -> Tensor")
        library.impl("neg", torch.neg, "CompositeExplicitAutograd")
        self.assertTrue(self.observe("result = (torch.ops.asks.neg(x),)").plan.opaque)

    def test_random_numbers(self):
        self.assertFalse(self.observe("result = (x,)").plan.random)
        run = self.observe("generator.offset += 4; result = (x,)")
        self.assertEqual((run.plan.random, run.plan.drawn), (True, (4,)))

    def test_inputs_that_are_freed(self):
        for is_backward in (False, True):
            for large, dying in ((64, {0}), (65, frozenset())):
                with mock.patch.object(module, "LARGE", large):
                    held = aligned()
                    text, inputs = "del x; result = (y,)", [torch.zeros(16), held]
                    run = self.observe(text, inputs, is_backward=is_backward)
                self.assertEqual(run.plan.dying, dying)
                self.assertEqual(run.plan.detail, is_backward and bool(dying))
                self.assertEqual(run.frees_inputs, is_backward)

    def test_memory_of_an_input_that_is_used_again(self):
        """The run frees an input, and allocates at its address."""
        x, y = aligned(), aligned()
        address, self.x = x.data_ptr(), x
        made = mock.Mock(side_effect=lambda *args: self.x)
        region = self.region(f"result = ({NEW},)")
        with mock.patch.dict(region.model.__globals__, {ALLOCATOR: made}):
            run = FirstRuns(region).observe([x, y])
        self.assertEqual(run.result[0].data_ptr(), address)
        self.assertEqual(run.plan.allocations, {0})

    def test_seeds(self):
        seed = torch.tensor(7)

        def noting(x):
            attention_seeds._thread.noted.update([seed.data_ptr(), x.data_ptr()])
            return (x,)

        device = SimpleNamespace(generators=lambda inputs: [])
        region = CompiledRegion(
            lambda args: noting(args[1]), Code("a region", 0), device
        )
        run = FirstRuns(region).observe([torch.tensor(7), aligned(), seed])
        self.assertEqual(run.seeds, {2})

    def test_alignment_of_inputs(self):
        for skew in (0, 16, 4):
            run = self.observe("result = (y,)", [aligned(), aligned(skew)])
            self.assertEqual(run.are_aligned, skew != 4)

    def test_further_run(self):
        known = Plan(allocations=frozenset([1]), dying=frozenset([1]), random=True)
        region = self.region("del x; result = (y,)", is_backward=True)
        with mock.patch.object(module, "LARGE", 64):
            run = FirstRuns(region).repeat([torch.zeros(16), aligned()], known)
        expected = Plan(frozenset([1]), detail=True, dying=frozenset([0]))
        self.assertEqual((run.plan, run.frees_inputs), (expected, True))
        self.assertEqual(region.outside, {"warm-up": 1})


class TestRegion(RegionTestCase):
    def test_input_that_is_written(self):
        region = self.region("y.add_(x); result = (y.data_ptr() % 16,)")
        for written, skew in ((aligned(4), 0), (aligned(), 0)):
            region.code = Code("a region", 0, mutated_inputs=(1,))
            self.assertEqual(region.plain([torch.ones(16), written]), (skew,))
            self.assertEqual(written, torch.ones(16))
        self.assertEqual(region.outside, {})

    def test_which_inputs_are_copied(self):
        region = self.region("result = ()", static_inputs=(0,))
        given = [aligned(4), aligned(8), aligned(16), 5]
        inputs = list(given)
        ((k, original, clone),) = region.align(inputs)
        self.assertEqual((k, clone.data_ptr() % 16), (1, 0))
        self.assertIs(original, given[1])
        self.assertIs(inputs[1], clone)
        self.assertEqual([inputs[k] is given[k] for k in (0, 2, 3)], [True] * 3)
        self.assertEqual(region.align([aligned(4), aligned(8)], [0]), [])

    def test_launch(self):
        region = self.region("result = ()", mutated_inputs=(1,))
        given = [aligned(4), aligned(4)]
        inputs, seen = list(given), []
        clones = region.align(inputs)

        def launch(inputs, originals):
            seen.append(originals)
            for tensor in inputs:
                tensor.fill_(3)
            return ("launched",)

        relaunch = SimpleNamespace(launch=launch)
        self.assertEqual(region.launch(relaunch, inputs, given, clones), ("launched",))
        self.assertEqual(given, [torch.zeros(16), torch.full((16,), 3.0)])
        region.launch(relaunch, inputs, [], [])
        self.assertIs(seen[0], given)
        self.assertIsNone(seen[1])


if __name__ == "__main__":
    run_tests()
