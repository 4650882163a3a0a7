# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
from torch._functorch._streams.ids import (
    callers_device,
    CALLERS_STREAM,
    callers_stream_index,
    copy_device,
    copy_in_stream,
    copy_out_stream,
    CURRENT_DEVICE,
    index_now,
    is_copy_stream,
    written_index,
)
from torch.compiler import config
from torch.testing._internal.common_utils import run_tests, TestCase


def on_device(index):
    """No device is needed: who asks for the current one gets this."""
    return mock.patch.object(torch.accelerator, "current_device_index", lambda: index)


class TestNumbers(TestCase):
    def test_of_copies(self):
        for device in (CURRENT_DEVICE, 0, 1, 63):
            out, back = copy_out_stream(device), copy_in_stream(device)
            self.assertEqual(copy_device(out), (device, False))
            self.assertEqual(copy_device(back), (device, True))
            self.assertTrue(is_copy_stream(out) and is_copy_stream(back))

    def test_of_current_streams(self):
        with on_device(1):
            self.assertEqual(callers_stream_index(1), CALLERS_STREAM)
            self.assertEqual(callers_device(CALLERS_STREAM), 1)
            other = callers_stream_index(0)
            self.assertNotEqual(other, CALLERS_STREAM)
            self.assertEqual(callers_device(other), 0)

    def test_no_two_are_equal(self):
        devices = range(64)
        with on_device(0):
            numbers = [
                *range(1000),  # the user's, and the caller's
                *map(callers_stream_index, devices[1:]),
                *map(copy_out_stream, (CURRENT_DEVICE, *devices)),
                *map(copy_in_stream, (CURRENT_DEVICE, *devices)),
            ]
            self.assertEqual(len(set(numbers)), len(numbers))
            known = [n for n in numbers if callers_device(n) is not None]
            self.assertEqual(known, [0, *map(callers_stream_index, devices[1:])])
            copies = [n for n in numbers if is_copy_stream(n)]
            self.assertEqual(len(copies), 2 * (1 + len(devices)))


class TestOneRank(TestCase):
    def test_code_names_its_device(self):
        with on_device(3):
            self.assertEqual([index_now(written_index(d)) for d in (0, 3)], [0, 3])

    def test_code_of_one_rank_names_none(self):
        with config.patch(compile_on_one_rank=True):
            self.assertEqual(written_index(0), CURRENT_DEVICE)
        for device in (0, 3):
            with on_device(device):
                self.assertEqual(index_now(CURRENT_DEVICE), device)


if __name__ == "__main__":
    run_tests()
