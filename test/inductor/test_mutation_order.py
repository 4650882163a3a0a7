"""What reads the old value of a buffer comes before the operation that writes over it."""

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from torch_overlay.testing import observe, simulated_gpu
from user_kernels import scaled_into


class TestMutationOrder(TestCase):
    @simulated_gpu()
    def test_a_write_behind_a_kernel_that_is_dropped(self) -> None:
        """The kernel writes what the reader of `x` computed, and the copy overwrites that."""
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor, y: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                b = x.relu_() @ y
                scaled_into(x, y, 2)
                x.copy_(host, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            return b

        with observe() as seen:
            inputs = [torch.randn(32, 32, device="cuda"), torch.randn(32, 32, device="cuda"), torch.randn(32, 32)]
            torch.compile(fn, options={"triton.cudagraphs": True, "reorder_for_peak_memory": False})(*inputs)
        (wrapper,) = seen.wrappers
        call = wrapper[wrapper.index("def call(self, args)") :]
        self.assertLess(call.index("self.partitions[0]("), call.index(".copy_("), wrapper)

    @simulated_gpu()
    def test_a_write_behind_what_reads_a_view_that_a_call_returned_198104(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            y = x.view(torch.int32) * 2
            y.sub_(-4)
            x[:, 2:5] = 2
            return y.view(torch.int64)

        with observe() as seen:
            torch.compile(fn)(torch.ones(8, 8, dtype=torch.int64, device="cuda"))
        (wrapper,) = seen.wrappers
        call = wrapper[wrapper.index("def call(self, args)") :]
        self.assertLess(call.index("_sub_"), call.index("_fill_"), call)
