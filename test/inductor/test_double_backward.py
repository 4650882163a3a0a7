"""A gradient of a gradient of a compiled function is an error that says what to do, and where."""

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from torch_overlay.testing import simulated_gpu


def plain(x):
    return (x * x).sin()


def saving(x):
    return (x @ x).sin()


class TestDoubleBackward(TestCase):
    def check(self, fn, before=None, **options):
        with simulated_gpu():
            x = torch.randn(4, 4, device="cuda", requires_grad=True)
            compiled = torch.compile(fn)
            if before is not None:
                before(compiled(x).sum())
            line = rf"test_double_backward\.py:{fn.__code__.co_firstlineno + 1}: return "
            with self.assertRaisesRegex(RuntimeError, rf"^torch\.compile computes no .*torch\.func\.grad .*{line}"):
                (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True, **options)
                self.assertIsNone(before, "an earlier backward may write over what is saved")
                (gradient * x).sum().backward()

    def test_second_backward(self):
        self.check(plain)
        self.check(saving, retain_graph=True)

    def test_after_a_backward_that_writes_over_what_is_saved(self):
        """Stock recommends an option after which the second backward fails."""
        self.check(saving, torch.Tensor.backward)
        self.check(saving, torch.Tensor.backward, retain_graph=True)

    def test_no_second_backward_is_no_error(self):
        with simulated_gpu():
            x = torch.randn(4, 4, device="cuda", requires_grad=True)
            compiled = torch.compile(saving)
            torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
            torch._dynamo.reset()
            compiled(x).sum().backward()
            with self.assertRaisesRegex(RuntimeError, "donated_buffer=False"):
                compiled(x).sum().backward(retain_graph=True)

    def test_what_the_error_recommends(self):
        with simulated_gpu():
            x = torch.randn(4, 4, device="cuda", requires_grad=True)
            compiled = torch.compile(lambda x: torch.func.grad(lambda x: plain(x).sum())(x))
            (compiled(x) * x).sum().backward()
            self.assertEqual(x.grad.shape, x.shape)
