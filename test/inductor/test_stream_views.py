"""Views that calls return, of memory that other streams or the caller hold: `view_as_real`, and any view of complex
numbers, which Inductor has no views of its own for.
"""

from typing import Any

import torch
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401
from torch_overlay.analysis import check
from torch_overlay.testing import compile_only, observe, simulated_gpu


OF_INPUTS = {
    "permute": (lambda z: z.permute(0, 2, 1) * 2, (4, 8, 16), torch.complex64),
    "real": (lambda z: z.real * 2, (8, 16), torch.complex64),
    "conj": (lambda z: z.conj() * 2, (8, 16), torch.complex64),
    "slice": (lambda z: z[:, 1:] * 2, (8, 16), torch.complex64),
    "unbind": (lambda z: z.unbind(0)[1] * 2, (8, 16), torch.complex64),
    "view_of_view": (lambda z: torch.view_as_real(z.t()[1:]) * 2, (8, 16), torch.complex64),
    "view_as_complex": (lambda z: torch.view_as_complex(z) * 2, (8, 16, 2), torch.float32),
    "other_type": (lambda z: z.view(torch.int16) * 2, (8, 16), torch.float32),
}
SAVED = {"conj": lambda z: (z * z.conj()).real, "unbind": lambda z: (z.unbind(0)[0] * z.unbind(0)[1].conj()).real}


def forked(side: torch.cuda.Stream, compute: Any, then: Any = lambda value: value) -> Any:
    """A function that computes on a side stream, and goes on with the result on the current stream."""

    def fn(x: torch.Tensor) -> Any:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            made = compute(x)
        current.wait_stream(side)
        return then(made)

    return fn


@instantiate_parametrized_tests
class TestViews(TestCase):
    def check(self, fn: Any, *args: Any, **kwargs: Any) -> None:
        report = check(fn, *args, **kwargs)
        self.assertTrue(report.ok and not report.redundant, str(report))

    @parametrize("kind", list(OF_INPUTS))
    @simulated_gpu()
    def test_view_of_a_misaligned_input_is_read_in_order(self, kind: str) -> None:
        """A copy would be made at the view, which stands before the waits of the view's reader."""
        compute, shape, dtype = OF_INPUTS[kind]
        self.check(forked(torch.cuda.Stream(), compute), torch.ones(shape, device="cuda", dtype=dtype))

    @simulated_gpu()
    def test_view_is_not_of_the_aligned_copy_of_an_earlier_reader(self) -> None:
        side = torch.cuda.Stream()

        def fn(z: torch.Tensor) -> Any:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            early = z.sin()
            with torch.cuda.stream(side):
                made = z.conj() * 2
            late = z.cos()
            current.wait_stream(side)
            return early, made, late

        self.check(fn, torch.ones(8, 16, device="cuda", dtype=torch.complex64))

    @simulated_gpu()
    def test_kernels_that_read_a_view_of_an_input_assume_no_alignment(self) -> None:
        for compute in (lambda z: torch.view_as_real(z) * 2, lambda z: torch.view_as_real(z.unbind(0)[1]) * 2):
            z = torch.ones(8, 16, device="cuda", dtype=torch.complex64)
            (wrapper,) = compile_only(forked(torch.cuda.Stream(), compute), z).wrappers
            self.assertNotIn("assert_alignment(", wrapper.partition("def call(")[2])
            self.assertNotIn("(0,): [['tt.divisibility', 16]]", wrapper)
            self.assertIn("(1,): [['tt.divisibility', 16]]", wrapper)

    @simulated_gpu()
    def test_backward_assumes_no_alignment_of_a_saved_view_of_an_input(self) -> None:
        side = torch.cuda.Stream()

        def fn(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
            return forked(side, lambda v: torch.mv(matrix, v), lambda made: made * 2)(vector)

        matrix, vector = (torch.ones(n, device="cuda", dtype=torch.complex64, requires_grad=True) for n in ((4, 8), 8))
        with observe() as seen:
            made = torch.compile(fn)(matrix, vector)
            torch.autograd.grad(made, (matrix, vector), torch.ones_like(made))
        self.assertIn("permute.default(_conj", seen.wrappers[-1])
        self.assertNotRegex(seen.wrappers[-1], r"assert_alignment\(\w+, 16, 'torch.ops.aten.permute")

    @parametrize("kind", list(SAVED))
    @simulated_gpu()
    def test_saved_view_is_memory_of_the_stream_that_made_what_it_views(self, kind: str) -> None:
        fn = forked(torch.cuda.Stream(), lambda x: torch.complex(x, x + 1), SAVED[kind])
        self.check(fn, torch.ones(8, 16, device="cuda", requires_grad=True), backward=True)
