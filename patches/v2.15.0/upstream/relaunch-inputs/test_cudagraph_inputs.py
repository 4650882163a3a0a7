# Owner(s): ["module: inductor"]

import itertools
import math
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import capture, host_memory
from torch._inductor.cudagraph_relaunch.alignment import (
    address_of,
    alignment_of,
    clone_flat,
    copy_back,
    FULL,
)
from torch._inductor.cudagraph_relaunch.host_memory import Keeper
from torch._inductor.cudagraph_relaunch.keys import (
    host_value,
    key_of,
    LARGE,
    LARGEST_HOST_TENSOR,
)
from torch.testing._internal.common_utils import run_tests, TestCase


class Number(int):
    pass


class TestKeys(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(host_memory, "keepers", []))

    def test_numbers(self):
        values = (1, True, 1.0, 0.0, -0.0, 0, False, 1j, Number(1), None, "1", (1, 1.0))
        for key in (key_of([1], []), key_of([1], [0])):
            keys = [key([torch.tensor(5), value]) for value in values]
            for (a, x), (b, y) in itertools.combinations(zip(values, keys), 2):
                self.assertFalse(x == y, f"{a!r} and {b!r}")
            again = [key([torch.tensor(5), value]) for value in values]
            self.assertEqual(hash(tuple(again)), hash(tuple(keys)))
            self.assertTrue(again == keys)
        self.assertTrue(key_of([0], [])([math.nan]) == key_of([0], [])([float("nan")]))

    def test_other_inputs_are_in_no_key(self):
        key = key_of([2], [])
        self.assertEqual(key([torch.randn(3), 7, 5]), key(["other", 8, 5]))
        self.assertEqual(key_of([], [])([1, 2]), ())

    def test_tensors_in_host_memory(self):
        made = (
            torch.tensor(1),
            torch.tensor([1, 2]),
            torch.tensor([2, 1]),
            torch.tensor([1.0]),
            torch.tensor(-0.0),
            torch.tensor(0.0),
            torch.tensor([True]),
        )
        keys = [host_value(tensor) for tensor in made]
        for (a, x), (b, y) in itertools.combinations(zip(made, keys), 2):
            self.assertFalse(x == y, f"{a} and {b}")
        self.assertTrue([host_value(tensor.clone()) for tensor in made] == keys)

    def test_large_tensors_in_host_memory(self):
        most = torch.arange(LARGEST_HOST_TENSOR)
        self.assertEqual(len(host_value(most)), 1 + LARGEST_HOST_TENSOR)
        larger = torch.arange(LARGEST_HOST_TENSOR + 1)
        self.assertIs(host_value(larger), LARGE)
        identity = {larger.data_ptr(): ("slab", 3)}
        for found in ({}, identity):
            keeper = Keeper(
                lambda address: False, lambda t, f=found: f.get(t.data_ptr())
            )
            host_memory.keepers.append(keeper)
        self.assertEqual(host_value(larger), ("slab", 3))
        self.assertIs(host_value(larger.clone()), LARGE)

    def test_memory_that_lives_as_long_as_graphs(self):
        self.assertFalse(host_memory.holds(0x10))
        for address in (0x10, 0x20):
            keeper = Keeper(
                lambda given, mine=address: given == mine, lambda tensor: None
            )
            host_memory.keepers.append(keeper)
        holds = [host_memory.holds(address) for address in (0x10, 0x20, 0x30)]
        self.assertEqual(holds, [True, True, False])
        self.assertIsNone(host_memory.identity(torch.ones(3)))


class TestAlignment(TestCase):
    def setUp(self):
        super().setUp()
        tensors = mock.Mock(side_effect=lambda value: isinstance(value, torch.Tensor))
        self.enterContext(mock.patch.object(capture, "is_region", tensors))

    def test_addresses(self):
        x = torch.randn(8)
        self.assertEqual(address_of(x[2:]), x.data_ptr() + 8)
        for value in (5, None, x.to_sparse()):
            self.assertEqual(address_of(value), 0)
        capture.is_region.side_effect = lambda value: False  # it is on the host
        self.assertEqual(address_of(x), 0)

    def test_alignment(self):
        for address in (1, 2, 12, 16, 48, 0x7F0000000100, 0x7F0000000080):
            aligned = alignment_of(address)
            self.assertEqual(address % aligned, 0)
            self.assertTrue(aligned == FULL or address % (2 * aligned))
        self.assertEqual((alignment_of(0), alignment_of(1 << 40)), (FULL, FULL))

    def test_copies(self):
        base = torch.arange(24.0)
        for tensor in (
            base[1:7],
            base.reshape(4, 6).t(),
            base.reshape(4, 6)[1:, ::2],
            base[3].expand(2, 3),
            base[:0],
            base[5],
            torch.nn.Parameter(base[1:5].clone()),
        ):
            clone = clone_flat(tensor)
            self.assertEqual(
                (clone, clone.stride()), (tensor.detach(), tensor.stride())
            )
            self.assertFalse(clone.requires_grad)
            if tensor.numel():
                storages = [t.untyped_storage().data_ptr() for t in (clone, tensor)]
                self.assertNotEqual(*storages)
            clone.fill_(7.0)
            copy_back(tensor, clone)
            self.assertTrue(bool((tensor == 7).all()))

    def test_elements_of_others_are_not_copied_back(self):
        base = torch.zeros(4, 4)
        left, right = base[:, :2], base[:, 2:]
        clone = clone_flat(left).fill_(1.0)
        right.fill_(2.0)
        copy_back(left, clone)
        self.assertEqual((left, right), (torch.ones(4, 2), torch.full((4, 2), 2.0)))

    def test_elements_between_those_of_a_tensor(self):
        base = torch.arange(12.0)
        rows = base.reshape(3, 4)[:, :2]
        clone = clone_flat(rows)
        between = torch.as_strided(clone, (10,), (1,), 0)
        self.assertEqual(between, base[:10])


if __name__ == "__main__":
    run_tests()
