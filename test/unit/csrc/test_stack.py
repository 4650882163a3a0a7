"""`csrc/stack.c`: addresses that a call leaves on the stack are gone."""

import ctypes
import tempfile
import threading
import unittest

from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
import memory_stand_in


# Addresses that cuMemMap leaves on the stack, by the first one and their distance.
LOW, STEP = 1 << 40, 12 << 20
REMAINS = LOW, LOW + 8 * STEP, STEP


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestClearStack(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        driver = memory_stand_in.DRIVER
        module, library = driver_stand_in.build_module(driver, folder)
        cls.library = memory_stand_in.Driver(library).library
        cls.clear_stack = staticmethod(module.relaunch.clear_stack)

    def leave(self):
        """Have cuMemMap leave an address."""
        self.library.memory_reset()
        self.library.stub_litter()
        arguments = LOW + STEP, STEP, 0, 1000, 0
        self.library.cuMemMap(*[ctypes.c_uint64(number) for number in arguments])

    def test_what_a_call_leaves_is_gone(self):
        self.leave()
        self.assertGreater(self.library.stub_remains(*REMAINS), 1000)
        self.leave()
        self.clear_stack()
        self.assertEqual(self.library.stub_remains(*REMAINS), 0)

    def test_thread_with_a_small_stack(self):
        done = []
        before = threading.stack_size(64 << 10)
        try:
            thread = threading.Thread(target=lambda: done.append(self.clear_stack()))
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        self.assertEqual(done, [None])
