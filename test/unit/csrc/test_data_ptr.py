"""`csrc/data_ptr.c`: addresses of tensors, also of subclasses."""

import sys
import tempfile
import unittest
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
from torch_overlay._inductor.relaunch.launch import data_ptrs


class Tagged(torch.Tensor):
    pass


class Asked(torch.Tensor):
    """Notes that its address is asked for."""

    count = 0

    def data_ptr(self):
        Asked.count += 1
        return super().data_ptr()


def tensors():
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
        torch.ones(2).expand(3, 2),
    ]


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestAddresses(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.module = driver_stand_in.build_module("", folder)[0].relaunch

    def setUp(self):
        super().setUp()
        self.assertTrue(data_ptrs.teach(self.module))
        Asked.count = 0

    def check(self, given):
        wanted = tuple(tensor.data_ptr() for tensor in given)
        self.assertEqual(self.module.addresses(given), wanted)

    def test_any_tensor(self):
        self.check(tensors())

    def test_fields_are_read(self):
        plain = torch.randn(3, 4).as_subclass(Asked)
        self.module.addresses([plain, plain[1:], plain.t()])
        self.assertEqual(Asked.count, 0)

    def test_tensors_that_are_asked(self):
        copied = torch._lazy_clone(torch.randn(4).as_subclass(Asked))
        for tensor in (torch.empty(0).as_subclass(Asked), copied):
            before = Asked.count
            self.module.addresses([tensor])
            self.assertEqual((type(tensor), Asked.count), (Asked, before + 1))

    def test_without_knowledge_each_tensor_is_asked(self):
        self.module.learn(torch.Tensor, None, 0)
        self.check(tensors())
        self.module.addresses([torch.randn(4).as_subclass(Asked)])
        self.assertEqual(Asked.count, 1)

    def test_other_layout_of_fields_is_noticed(self):
        wrong = [tensor.data_ptr() + 8 for tensor in data_ptrs.probes()]
        module = mock.Mock(addresses=lambda found: tuple(wrong[: len(found)]))
        self.assertFalse(data_ptrs.teach(module))
        self.assertEqual(module.learn.call_args.args, (torch.Tensor, None, 0))

    def test_memory_that_is_shared_until_it_is_written(self):
        base = torch.randn(4)
        shared, clone = base.data_ptr(), torch._lazy_clone(base)
        own, at = self.module.addresses([clone, base])
        self.assertEqual((at, self.module.addresses([clone[1:]])), (shared, (own + 4,)))
        self.assertNotEqual(own, shared)
        self.assertFalse(torch._C._is_cow_tensor(clone))
        self.assertEqual(clone, base)

    def test_what_is_exchanged_under_the_same_object_is_seen(self):
        p, other = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))
        base = torch.randn(8)
        seen = [*self.module.addresses([p])]
        p.data = base[3:]
        self.assertEqual(self.module.addresses([p]), (base.data_ptr() + 12,))
        torch.utils.swap_tensors(p, other)
        self.check([p, other])
        seen += self.module.addresses([p])
        p.untyped_storage().resize_(1 << 20)
        self.check([p])
        seen += self.module.addresses([p])
        self.assertEqual(len(set(seen)), 3)

    def test_errors(self):
        for wrong in (3, None, "text"):
            with self.assertRaises(AttributeError):
                self.module.addresses([wrong])
        with self.assertRaises(TypeError):
            self.module.addresses(3)
        with self.assertRaisesRegex(TypeError, "takes a tensor of the type"):
            self.module.learn(torch.Tensor, 3, 4)

    def test_no_reference_is_lost_or_gained(self):
        given = tensors()
        before = [sys.getrefcount(tensor) for tensor in given]
        for _ in range(100):
            self.module.addresses(given)
        self.assertEqual([sys.getrefcount(tensor) for tensor in given], before)


class TestPython(TestCase):
    def test_same(self):
        a, b = torch.randn(3), torch.randn(3)
        wanted = [1, 2, b.data_ptr()]
        self.assertTrue(data_ptrs.same([a, 5, b], wanted, (2,)))
        self.assertFalse(data_ptrs.same([a, 5, b], wanted, (0, 2)))

    def test_addresses(self):
        b = torch.randn(3)
        self.assertEqual(data_ptrs.addresses((None, b), (1, 1)), 2 * (b.data_ptr(),))

    def test_aligned(self):
        base = torch.empty(64, dtype=torch.uint8)
        first = -base.data_ptr() % 16
        given = [base[first + k :] for k in (0, 8, 4)]
        for positions, masks, expected in (
            ((0, 1), (15, 7), True),
            ((0, 1), (15, 15), False),
            ((2,), (3,), True),
            ((2, 0), (7, 0), False),
            ((), (), True),
        ):
            self.assertIs(data_ptrs.aligned(given, positions, masks), expected)
