"""`csrc/aliased_memory.c`: two addresses of one block, and errors of each of the driver's calls."""

import ctypes
import tempfile
import unittest

from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
import memory_stand_in


MiB = 1 << 20
BLOCK, GAP = 12 * MiB, 64 << 10
OUT_OF_MEMORY = 2


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestMemory(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        source = memory_stand_in.DRIVER
        module, library = driver_stand_in.build_module(source, folder)
        cls.module, pointer = module.relaunch, ctypes.c_void_p
        cls.driver = memory_stand_in.Driver(library)
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

    def fill(self, *sizes, device=0, bytes=1 << 40, gap=1):
        space = self.module.reserve(device, bytes, gap)
        self.assertIsNone(self.module.use(space))
        addresses = [self.alloc(size, device, None) for size in sizes]
        self.assertEqual(self.module.use(None), space)
        return space, addresses

    def drop(self, space, addresses):
        self.module.release(space)
        for address in addresses:
            self.free(address, 0, 0, None)

    def test_addresses(self):
        for gap in (1, 3):
            space, addresses = self.fill(100, 2 * MiB, 0, gap=gap)
            self.module.seal(space)
            low, high = self.module.bounds(space)
            steps = [b - a - gap * GAP for a, b in zip([low, *addresses], [*addresses, high])]
            self.assertEqual(steps, [0, 512, 2 * MiB, 512])
            wanted = list(zip(addresses, (100, 2 * MiB, 0)))
            self.assertEqual(self.module.allocations(space), wanted)
            self.assertEqual(self.module.allocations(space, 1), wanted[1:])
            self.assertEqual(self.module.count(space), 3)
            self.drop(space, addresses)

    def test_one_block_is_mapped_for_all(self):
        (space, (a,)), (other, (b,)) = self.fill(3 * BLOCK - MiB), self.fill(100)
        self.assertEqual(self.driver.left(), (1, 4, 1))
        self.module.release(space)
        self.assertEqual(self.driver.left(), (1, 1, 1))
        self.module.release(other)
        self.assertEqual(self.driver.left(), (1, 0, 0))
        self.free(a, 0, 0, None)
        self.assertEqual(self.driver.left(), (1, 0, 0))  # torch has a segment there
        self.free(b, 0, 0, None)
        devices = [self.fill(100, device=device) for device in (0, 1)]
        self.assertEqual(self.driver.left(), (2, 2, 2))
        for made in devices:
            self.drop(*made)

    def test_larger_block_if_the_device_has_it(self):
        for failing, size in ((False, 4 * BLOCK), (True, BLOCK)):
            if failing:
                self.driver.fail("cuMemCreate", OUT_OF_MEMORY)
            space = self.module.reserve(0, 1 << 40, 1, 4 * BLOCK)
            self.module.take(space, 100)
            self.assertEqual(int(self.driver.calls("map")[-1][1]), size)
            self.module.release(space)

    def test_nothing_of_a_mapping_stays_on_the_stack(self):
        space, _ = self.fill()
        low, high = self.module.bounds(space)
        self.driver.library.stub_litter()
        self.module.take(space, BLOCK)
        self.assertEqual(self.driver.library.stub_remains(low, high, BLOCK), 0)
        self.module.release(space)

    def test_refusals(self):
        space, (address,) = self.fill(100, bytes=2 * BLOCK)
        self.assertIsNone(self.module.error(space))
        self.module.use(space)
        for device, size, text in (
            (0, 2 * BLOCK, "the range is too small"),
            (1, 5, "another device than the range's"),
        ):
            self.assertIsNone(self.alloc(size, device, None))
            text += f", for an allocation of {size} bytes"
            self.assertEqual(self.module.error(space), text)
        self.module.seal(space)
        with self.assertRaisesRegex(RuntimeError, "sealed, for an allocation of 5"):
            self.module.take(space, 5)
        with self.assertRaisesRegex(RuntimeError, f"range {space} is in use"):
            self.module.release(space)
        self.module.use(None)
        self.assertIsNone(self.alloc(100, 0, None))  # in no range
        self.drop(space, [address])

    def test_reservation_that_fails(self):
        for name in ("cuMemGetAllocationGranularity", "cuMemCreate"):
            self.driver.fail(name, OUT_OF_MEMORY)
            with self.assertRaisesRegex(RuntimeError, rf"{name}: out of memory \(2\)"):
                self.module.reserve(0, 1 << 40)
        self.driver.library.stub_reserve_at_most(BLOCK)
        with self.assertRaisesRegex(RuntimeError, "cuMemAddressReserve: out of memory"):
            self.module.reserve(0, 1 << 40)
        self.driver.library.stub_reserve_at(ctypes.c_uint64(1 << 30))
        with self.assertRaisesRegex(RuntimeError, "which gave addresses below 4 GiB"):
            self.module.reserve(0, 1 << 20)

    def test_reservation_that_is_tried_again(self):
        self.driver.library.stub_refuse_wishes()
        self.driver.library.stub_reserve_at_most((1 << 38) + BLOCK)
        made = self.fill(100, bytes=1 << 30)
        ((_, size),) = self.driver.calls("reserve")
        self.assertEqual((int(size) // BLOCK, int(size) % BLOCK), ((1 << 38) // BLOCK + 1, 0))
        self.drop(*made)

    def test_mapping_that_fails(self):
        for name, skip in (("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0)):
            space, _ = self.fill()
            self.driver.fail(name, OUT_OF_MEMORY, skip)
            with self.assertRaisesRegex(RuntimeError, rf"{name}: out of memory \(2\)"):
                self.module.take(space, 3 * BLOCK - MiB)
            self.assertEqual(self.driver.left()[1], 0)
            address = self.module.take(space, 3 * BLOCK - MiB)
            wanted = [(address, 3 * BLOCK - MiB)]
            self.assertEqual(self.module.allocations(space), wanted)
            self.module.release(space)

    def test_driver_that_unmaps_one_mapping_a_call(self):
        made = self.fill(3 * BLOCK - MiB)
        self.driver.library.stub_unmap_one_by_one()
        self.drop(*made)
        sizes = [int(size) for _, size in self.driver.calls("unmap")]
        self.assertEqual(sizes, 3 * [BLOCK])

    def test_capture_mode_is_as_before(self):
        mode = ctypes.c_int(1)
        exchange = self.driver.library.cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(mode))
        self.drop(*self.fill(100))
        exchange(ctypes.byref(mode))
        self.assertEqual(mode.value, 1)

    def test_arguments_that_make_no_sense(self):
        for call in ["use", "seal", "release", "allocations", "count", "bounds", "error"]:
            with self.assertRaisesRegex(ValueError, "there is no range 12345"):
                getattr(self.module, call)(12345)
        for arguments in ((0, 0), (0, 1 << 30, 0), (0, 1 << 30, 1, -1)):
            with self.assertRaisesRegex(ValueError, "wants bytes > 0 and gap > 0"):
                self.module.reserve(*arguments)
