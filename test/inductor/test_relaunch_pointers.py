"""Addresses of tensors, by their fields and by torch's functions."""

import sys
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from stand_ins import relaunch_driver
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.launch.executable import call_maker
from torch_overlay._inductor.relaunch.proof.nodes import Template


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
    def setUp(self):
        super().setUp()
        self.native = relaunch_driver.module()

    def test_fields_lie_where_they_are_looked_for(self):
        self.assertTrue(executable.teach(self.native))

    def test_any_tensor(self):
        given = tensors()
        expected = tuple(t.data_ptr() for t in given)
        self.assertEqual(self.native.addresses(given), expected)

    def test_memory_that_is_shared_until_it_is_written(self):
        base = torch.randn(4)
        shared, clone = base.data_ptr(), torch._lazy_clone(base)
        view = clone[1:]
        (own, base_at, after) = self.native.addresses([clone, base, view])
        self.assertEqual((base_at, after), (shared, own + 4))
        self.assertNotEqual(own, shared)
        self.assertFalse(torch._C._is_cow_tensor(clone) or torch._C._is_cow_tensor(base))
        self.assertEqual(clone, base)

    def test_other_tensors_are_not_asked(self):
        asked = []

        class Asked(torch.Tensor):
            def data_ptr(self):
                asked.append(self)
                return super().data_ptr()

        plain = torch.randn(4).as_subclass(Asked)
        self.native.addresses([plain])
        self.assertEqual(len(asked), 0)
        clone = torch._lazy_clone(plain)
        self.native.addresses([clone, clone])
        self.assertEqual((type(clone), len(asked)), (Asked, 1))
        self.native.addresses([torch.empty(0).as_subclass(Asked)])
        self.assertEqual(len(asked), 2)

    def test_aligned(self):
        base = torch.empty(64, dtype=torch.uint8)
        first = -base.data_ptr() % 16
        given = [base[first + k :] for k in (0, 8, 4)] + [torch.ones(2).as_subclass(Tagged)]
        cases = [((0, 1), (15, 7), True), ((0, 1), (15, 15), False), ((2,), (3,), True), ((2, 0), (7, 0), False)]
        cases += [((), (), True), ((3, 0), (3, 15), True)]
        aligned = self.native_aligned()
        for positions, masks, expected in cases:
            self.assertIs(aligned(given, tuple(zip(positions, masks))), expected)

    def test_aligned_with_positions_that_are_not_there(self):
        aligned = self.native_aligned()
        for position in (1, -1):
            with self.assertRaisesRegex(ValueError, f"input has a number that isn't there: {position}"):
                aligned([torch.ones(2)], ((position, 15),))
        with self.assertRaisesRegex(TypeError, "a list of tensors, and a tuple of"):
            aligned([torch.ones(2)], 0)
        with self.assertRaisesRegex(TypeError, "input 0 must have 2 numbers"):
            aligned([torch.ones(2)], ((0,),))
        with self.assertRaises(AttributeError):
            aligned([5], ((0, 15),))

    def native_aligned(self):
        """By a call that is never made."""
        return relaunch_driver.call_of(call_maker(self.native, 0, Template(0, (), ()))).aligned

    def test_what_is_exchanged_under_the_same_object_is_seen(self):
        addresses = self.native.addresses
        p, other = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(4))
        base = torch.randn(8)
        seen = [addresses([p])]
        p.data = base
        self.assertEqual(addresses([p]), (base.data_ptr(),))
        p.data = base[3:]
        self.assertEqual(addresses([p]), (base.data_ptr() + 12,))
        torch.utils.swap_tensors(p, other)
        self.assertEqual(addresses([p, other])[1], base.data_ptr() + 12)
        seen.append(addresses([p]))
        p.untyped_storage().resize_(1 << 20)
        seen.append(addresses([p]))
        self.assertEqual(len(set(seen)), 3)
        self.assertEqual(seen[-1], (p.data_ptr(),))

    def test_other_layout_of_fields_is_noticed(self):
        wrong = [t.data_ptr() + 8 for t in executable.probes()]
        native = mock.Mock(addresses=lambda found: tuple(wrong[: len(found)]))
        self.assertFalse(executable.teach(native))
        self.assertEqual(native.learn.call_args.args, (torch.Tensor, None, 0))

    def test_without_knowledge_each_tensor_is_asked(self):
        given = tensors()
        self.addCleanup(lambda: self.assertTrue(executable.teach(self.native)))
        self.native.learn(torch.Tensor, None, 0)
        with mock.patch.object(Tagged, "data_ptr", lambda tensor: 7, create=True):
            expected = tuple(7 if type(t) is Tagged else t.data_ptr() for t in given)
            self.assertEqual(self.native.addresses(given), expected)

    def test_errors(self):
        for wrong in (3, None, "text"):
            with self.assertRaises(AttributeError):
                self.native.addresses([wrong])
        with self.assertRaises(TypeError):
            self.native.addresses(3)
        with self.assertRaises(TypeError):
            self.native.learn(torch.Tensor, 3, 4)

    def test_no_reference_is_lost_or_gained(self):
        given = tensors()
        before = [sys.getrefcount(t) for t in given]
        for _ in range(100):
            self.native.addresses(given)
        self.assertEqual([sys.getrefcount(t) for t in given], before)
