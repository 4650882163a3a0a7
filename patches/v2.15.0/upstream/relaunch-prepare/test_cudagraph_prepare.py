# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import (
    fill_copy_kernels,
    native,
    native_read,
    prepare as preparing,
)
from torch._inductor.cudagraph_relaunch.prepare import prepare, prepare_early
from torch.testing._internal.common_utils import run_tests, TestCase


class TestPrepare(TestCase):
    """Nothing is loaded; each part notes that it would be."""

    def setUp(self):
        super().setUp()
        self.done = []
        for cached in (preparing.prepare, preparing._try):
            cached.cache_clear()
            self.addCleanup(cached.cache_clear)
        for owner, name in (
            (native, "implementation"),
            (native_read, "NativeDriver"),
            (fill_copy_kernels, "prepare"),
        ):
            noting = mock.Mock(side_effect=self.noting(name))
            self.enterContext(mock.patch.object(owner, name, noting))

    def noting(self, name):
        return lambda *args: self.done.append((name, *args))

    def early(self, initialized=True, used=(3,), capturing=False):
        """In a process whose current device is 3."""
        has_context = used.__contains__
        with (
            mock.patch.object(torch.cuda, "is_initialized", lambda: initialized),
            mock.patch.object(
                torch._C, "_cuda_hasPrimaryContext", has_context, create=True
            ),
            mock.patch.object(
                torch.cuda, "is_current_stream_capturing", lambda: capturing
            ),
            mock.patch.object(torch.cuda, "current_device", lambda: 3),
        ):
            prepare_early()

    ALL = [("implementation",), ("NativeDriver",), ("prepare", 3)]

    def test_once_a_device(self):
        for _ in range(2):
            prepare(3)
        self.assertEqual(self.done, self.ALL)
        prepare(4)
        self.assertEqual(self.done[3:], [*self.ALL[:2], ("prepare", 4)])

    def test_early(self):
        for _ in range(2):
            self.early()
        prepare(3)
        self.assertEqual(self.done, self.ALL)

    def test_device_without_a_context(self):
        self.early(initialized=False)
        self.early(used=(0, 1, 2))
        self.assertEqual(self.done, [])

    def test_not_while_a_stream_is_captured(self):
        self.early(capturing=True)
        self.assertEqual(self.done, [])
        self.early()
        self.assertEqual(self.done, self.ALL)

    def test_error_is_left_to_the_capture(self):
        native.implementation.side_effect = ImportError("no driver")
        with self.assertLogs(preparing.log, "INFO") as logs:
            for _ in range(2):
                self.early()
        self.assertEqual(len(logs.output), 1)
        self.assertIn("no driver", logs.output[0])
        with self.assertRaisesRegex(ImportError, "no driver"):
            prepare(3)
        native.implementation.side_effect = self.noting("implementation")
        prepare(3)
        self.assertEqual(self.done, self.ALL)

    def test_capture_works_without_the_kernels(self):
        fill_copy_kernels.prepare.side_effect = RuntimeError("no assembler")
        with self.assertLogs(preparing.log, "INFO") as logs:
            prepare(3)
        self.assertIn("no assembler", logs.output[0])
        self.assertEqual(self.done, self.ALL[:2])


if __name__ == "__main__":
    run_tests()
