# Owner(s): ["module: inductor"]

import ctypes
import gc
import tempfile
import threading
import unittest
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import csrc
from torch._inductor.cudagraph_relaunch.address_space import (
    AddressSpace,
    BLOCKS,
    LARGEST,
)
from torch._inductor.cudagraph_relaunch.nodes import Refusal
from torch.testing._internal import cuda_driver_stand_in, cuda_memory_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


MiB = 1 << 20
BLOCK, GAP = 12 * MiB, 64 << 10


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestAddressSpace(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        source = cuda_memory_stand_in.DRIVER
        module, library = cuda_driver_stand_in.build_module(source, folder)
        cls.module, pointer = module.relaunch, ctypes.c_void_p
        cls.driver = cuda_memory_stand_in.Driver(library)
        types = pointer, ctypes.c_ssize_t, ctypes.c_int, pointer
        cls.alloc = staticmethod(ctypes.CFUNCTYPE(*types)(cls.module.alloc_address))
        types = None, pointer, ctypes.c_ssize_t, ctypes.c_int, pointer
        cls.free = staticmethod(ctypes.CFUNCTYPE(*types)(cls.module.free_address))

    def setUp(self):
        super().setUp()
        self.driver.library.memory_reset()

    def tearDown(self):
        self.assertEqual(set(self.module.counts().values()), {0})
        self.assertEqual(self.driver.left(), (0, 0, 0))
        super().tearDown()

    def space(self, **options):
        return AddressSpace(0, module=self.module, **options)

    def drop(self, space, *addresses):
        space.close()
        for address in addresses:
            self.free(address, 0, 0, None)

    def test_allocations(self):
        space = self.space(gap=2)
        with space:
            first = self.alloc(100, 0, None)
            with space:
                second = self.alloc(3 * MiB, 0, None)
            third = space.allocate(100)  # entered once, and so not sealed
        wanted = [(first, 100), (second, 3 * MiB), (third, 100)]
        self.assertEqual((space.allocations(), space.count()), (wanted, 3))
        self.assertEqual(space.allocations(2), wanted[2:])
        self.assertEqual(
            (first - space.low, space.high - third), (2 * GAP, 512 + 2 * GAP)
        )
        self.drop(space, first, second)

    def test_sealed(self):
        space = self.space()
        with space:
            address = self.alloc(100, 0, None)
        self.assertIsNone(space.error())
        with space:
            self.assertIsNone(self.alloc(100, 0, None))
        text = "the range is sealed, for an allocation of 100 bytes"
        self.assertEqual(space.error(), text)
        self.drop(space, address)

    def test_closed(self):
        space = self.space(size=BLOCK)
        with space:
            address = self.alloc(100, 0, None)
            self.assertIsNone(self.alloc(2 * BLOCK, 0, None))

        def known():
            bounds = space.low, space.high
            return bounds, space.allocations(), space.count(), space.error()

        before = known()
        space.close()
        self.drop(space, address)
        self.assertEqual(known(), before)
        for use in (lambda: space.allocate(1), lambda: space.__enter__()):
            with self.assertRaisesRegex(RuntimeError, "this address space is closed"):
                use()

    def test_forgotten_space_frees_its_memory(self):
        space = self.space()
        with space:
            address = self.alloc(100, 0, None)
        del space
        gc.collect()
        self.assertEqual(self.driver.left(), (1, 0, 0))
        self.free(address, 0, 0, None)

    def test_pools(self):
        pools = [mock.Mock(), mock.Mock()]
        allocator = mock.Mock()
        self.enterContext(
            mock.patch.object(torch._C, "_cuda_customAllocator", allocator, create=True)
        )
        made = self.enterContext(
            mock.patch.object(torch.cuda, "MemPool", side_effect=pools)
        )
        space = self.space()
        self.assertEqual([space.pool(), space.pool(no_split=True)], pools)
        functions = self.module.alloc_address, self.module.free_address
        allocator.assert_called_once_with(*functions)
        splits = [call.kwargs["no_split"] for call in made.call_args_list]
        self.assertEqual(splits, [False, True])
        space.close()
        self.assertEqual(space._pools, [])

    def test_spaces_have_no_address_in_common(self):
        spaces, addresses = [self.space() for _ in range(3)], []
        for space in spaces:
            with space:
                addresses.append(self.alloc(100, 0, None))
        spans = sorted((space.low, space.high) for space in spaces)
        self.assertTrue(all(a[1] <= b[0] for a, b in zip(spans, spans[1:])))
        spaces[0].close()
        last = self.space()
        self.assertGreaterEqual(last.low, spans[-1][1])
        for space in (*spaces, last):
            space.close()
        for address in addresses:
            self.free(address, 0, 0, None)

    def test_freed_address_is_not_allocated_again(self):
        space, seen = self.space(), set()
        with space:
            for _ in range(5):
                seen.add(address := self.alloc(100, 0, None))
                self.free(address, 100, 0, None)
        self.assertEqual(len(seen), 5)
        space.close()

    def test_sealing_frees_the_rest(self):
        first = self.space()
        with first:
            address = self.alloc(100, 0, None)
        second = self.space()
        self.assertEqual(second.low, first.low + BLOCK)
        second.close()
        self.drop(first, address)

    def test_blocks_of_many_inputs(self):
        """Each takes the driver time."""
        for inputs, block in (
            (90 * MiB, BLOCK),
            (BLOCKS * 24 * MiB, 24 * MiB),
            (1 << 40, LARGEST),
        ):
            space = self.space(inputs=inputs)
            with space:
                address = self.alloc(100, 0, None)
            other = self.space()
            self.assertEqual(other.low - space.low, block)
            other.close()
            self.drop(space, address)

    def test_many_small_allocations_need_few_calls(self):
        space = self.space()
        with space:
            addresses = [self.alloc(100_000, 0, None) for _ in range(1000)]
        blocks = (space.high - space.low) // BLOCK
        self.assertLessEqual(len(self.driver.calls("map")), blocks + 5)
        self.assertLessEqual(len(self.driver.calls("access")), blocks // 4 + 4)
        self.drop(space, *addresses)
        self.assertEqual(len(self.driver.calls("unmap")), 1)

    def test_threads(self):
        space, other, found = self.space(), self.space(), []

        def run(target):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

        def allocate():
            found.append(self.alloc(100, 0, None))

        def allocate_in_the_other():
            with other:
                run(allocate)  # two spaces are in use, and it can't be either's
                allocate()

        with space:
            run(allocate)
            run(allocate_in_the_other)
        self.assertEqual(space.allocations(), [(found[0], 100)])
        self.assertIsNone(found[1])
        self.assertEqual(other.allocations(), [(found[2], 100)])
        space.close()
        self.drop(other, found[0], found[2])

    def test_module_that_cannot_be_built(self):
        error = csrc.NotBuiltError("no compiler")
        self.enterContext(mock.patch.object(csrc, "extension", side_effect=error))
        with self.assertRaisesRegex(Refusal, "no compiler") as caught:
            AddressSpace(0)
        self.assertEqual(caught.exception.reason, "c-module")


if __name__ == "__main__":
    run_tests()
