"""Addresses of tensors, by the exchange table and by torch's functions."""

from __future__ import annotations

import sys

import torch
from torch._dynamo.test_case import run_tests, TestCase

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._inductor.cudagraphs import pointers


class Tagged(torch.Tensor):
    pass


def tensors() -> list[torch.Tensor]:
    base = torch.randn(8, 16)
    return [
        base,
        base[2:, 1:],
        base.t(),
        torch.nn.Parameter(torch.randn(4)),
        torch.randn(3, requires_grad=True).exp(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.empty(0),
        torch.tensor(1.0),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.zeros(4, dtype=torch.bool),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(5).as_subclass(Tagged),
        torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8),
        torch.ones(2).expand(3, 2),
    ]


class TestPointers(TestCase):
    def both(self):
        native = pointers._native()
        self.assertIsNotNone(native, "the C module was not built")
        return (native, pointers.PythonPointers)

    def test_any_tensor(self):
        given = tensors()
        expected = tuple(t.data_ptr() for t in given)
        for module in self.both():
            self.assertEqual(module.addresses(given, range(len(given))), expected)
            self.assertTrue(module.same(given, list(expected), range(len(given))))
            for i in range(len(given)):
                self.assertEqual(module.addresses(given, (i,)), expected[i : i + 1])
                other = [e + 8 * (k == i) for k, e in enumerate(expected)]
                self.assertFalse(module.same(given, other, range(len(given))), i)
                self.assertTrue(module.same(given, other, [k for k in range(len(given)) if k != i]))

    def test_indices_choose(self):
        a, b = torch.randn(3), torch.randn(3)
        for module in self.both():
            self.assertTrue(module.same([a, 5, b], [1, 2, b.data_ptr()], (2,)))
            self.assertTrue(module.same([a, b], [1, 2], ()))
            self.assertEqual(module.addresses((None, b), (1, 1)), (b.data_ptr(), b.data_ptr()))

    def test_storage_that_is_exchanged_is_seen(self):
        p = torch.nn.Parameter(torch.randn(4))
        for module in self.both():
            before = [p.data_ptr()]
            self.assertTrue(module.same([p], before, (0,)))
            p.data = torch.randn(4)
            self.assertFalse(module.same([p], before, (0,)))

    def test_errors(self):
        native, _ = self.both()
        for call in (
            lambda: native.same([torch.ones(1)], [1], (1,)),
            lambda: native.same([torch.ones(1)], [], (0,)),
            lambda: native.addresses([], (0,)),
        ):
            with self.assertRaisesRegex(IndexError, "is outside of a sequence of"):
                call()
        with self.assertRaises(AttributeError):
            native.addresses([3], (0,))
        with self.assertRaises(TypeError):
            native.same([torch.ones(1)], ["no number"], (0,))
        with self.assertRaises(TypeError):
            native.same([torch.ones(1)], [1])

    def test_no_reference_is_lost_or_gained(self):
        native, _ = self.both()
        given, numbers = tensors(), [t.data_ptr() for t in tensors()]
        indices = tuple(range(len(given)))
        before = [sys.getrefcount(t) for t in given]
        for _ in range(100):
            native.addresses(given, indices)
            native.same(given, numbers, indices)
        self.assertEqual([sys.getrefcount(t) for t in given], before)

    def test_python_takes_its_place(self):
        with config.patch(native_relaunch=False):
            self.assertIs(pointers.implementation(), pointers.PythonPointers)


if __name__ == "__main__":
    run_tests()
