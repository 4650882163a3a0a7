# Owner(s): ["module: inductor"]

import unittest

import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program
from torch.utils._triton import has_triton_package


aten = torch.ops.aten

if has_triton_package():
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(x + at, 2 * tl.load(x + at, inside), inside)


@unittest.skipUnless(has_triton_package(), "the kernel is Triton's")
class TestDroppedWrites(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.x, self.y, self.z = (self.program.input(32, 32) for _ in range(3))

    def write(self, value):
        """A kernel of the user's that writes a value."""
        table = triton_kernel_wrap.kernel_side_table
        constants = {"count": 32 * 32, "BLOCK": 32 * 32}
        node = self.program.graph.call_function(
            triton_kernel_wrap.triton_kernel_wrapper_mutation,
            kwargs={
                "kernel_idx": table.add_kernel(double),
                "constant_args_idx": table.add_constant_args(constants),
                "grid": [(1, 1, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": {"x": value},
            },
        )
        node.meta["val"] = None

    def order(self, *results):
        """Overwrite x, and return the operators of the schedule, in order."""
        self.program.call(aten.copy_.default, self.x, self.z)
        self.program.output(*results)
        with self.program.scheduled() as scheduler:
            names = []
            for node in scheduler.nodes:
                (origin,) = node.node.get_origins()
                names.append(getattr(origin.target, "_opname", "kernel"))
            return names

    def product(self, value):
        return self.program.call(aten.mm.default, value, self.y)

    def test_kernel_that_is_dropped(self):
        a = self.program.call(aten.relu.default, self.x)
        b = self.product(a)
        self.write(a)
        order = self.order(b)
        self.assertEqual(sorted(order), ["copy_", "mm", "relu"])
        self.assertLess(order.index("relu"), order.index("copy_"))

    def test_two_kernels_that_are_dropped(self):
        a = self.program.call(aten.relu.default, self.x)
        b = self.product(a)
        self.write(a)
        self.write(a)
        order = self.order(b)
        self.assertEqual(sorted(order), ["copy_", "mm", "relu"])
        self.assertLess(order.index("relu"), order.index("copy_"))

    def test_kernel_that_is_dropped_after_one_that_is_not(self):
        a = self.program.call(aten.relu.default, self.x)
        self.write(a)
        b = self.product(a)
        self.write(a)
        order = self.order(b)
        self.assertEqual(sorted(order), ["copy_", "kernel", "mm", "relu"])
        self.assertLess(order.index("relu"), order.index("copy_"))

    def test_nothing_is_dropped(self):
        a = self.program.call(aten.relu.default, self.x)
        self.write(a)
        self.assertEqual(self.order(self.product(a)), ["relu", "kernel", "copy_", "mm"])


if __name__ == "__main__":
    run_tests()
