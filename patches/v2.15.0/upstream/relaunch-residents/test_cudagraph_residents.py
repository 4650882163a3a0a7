# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import residents as module
from torch._inductor.cudagraph_relaunch.residents import (
    MOST_CHANGES,
    PAUSE,
    Residents,
    STREAMS,
)
from torch._inductor.cudagraph_relaunch.rewrites import Resident
from torch._subclasses import FakeTensorMode
from torch.testing._internal.common_utils import run_tests, TestCase


class TestResidents(TestCase):
    """The host stands for the device. Of three inputs, the last two are kept; the last
    one is also the second result."""

    def setUp(self):
        super().setUp()
        self.stream, self.plain = 0, []
        for name, value in (
            ("_stream", lambda device: self.stream),
            ("_is_capturing", lambda: False),
            ("_pinned", torch.clone),
            ("_copied", lambda pinned, device: pinned.clone()),
            ("_plain_copy", self.plain_copy),
            ("index_now", lambda device: device),
        ):
            self.replace(name, value)
        self.kept = Residents([Resident(1, 0, ()), Resident(2, 0, (1,))])
        self.run_ = self.kept.around(self.compiled)
        self.table, self.scale = torch.arange(4.0), torch.tensor(2.0)

    def replace(self, name, value):
        self.enterContext(mock.patch.object(module, name, value))

    def plain_copy(self, tensor, device):
        self.plain.append(tensor)
        return tensor.clone()

    def compiled(self, inputs):
        self.given = list(inputs)
        inputs.clear()
        return ["result", None]

    def call(self, table=None, scale=None):
        """What the compiled code gets."""
        table = self.table if table is None else table
        scale = self.scale if scale is None else scale
        self.results = self.run_(["x", table, scale])
        return self.given[1:]

    def test_same_bytes(self):
        first = self.call()
        self.assertEqual(first, [self.table, self.scale])
        self.assertIsNot(first[0], self.table)
        for again in (self.call(), self.call(self.table.clone(), self.scale.clone())):
            self.assertIs(again[0], first[0])
            self.assertIs(again[1], first[1])
        self.assertEqual(self.kept.copies, 2)

    def test_other_bytes_at_the_same_address(self):
        first = self.call()
        self.table.numpy()[2] = 7
        changed = self.call()
        self.assertEqual(changed[0], self.table)
        self.assertIsNot(changed[0], first[0])
        self.assertEqual(first[0], torch.arange(4.0))  # which may still be read
        self.assertIs(changed[1], first[1])

    def test_what_is_compared(self):
        for n, table in enumerate(
            (
                torch.zeros(4),
                -torch.zeros(4),
                torch.zeros(2, 2),
                torch.zeros(4, dtype=torch.int32),
                torch.zeros(2, 3),
                torch.zeros(3, 2).t(),
            ),
            start=2,
        ):
            found = self.call(table)[0]
            self.assertEqual(self.kept.copies, n)
            self.assertEqual(
                (found.dtype, found.stride()), (table.dtype, table.stride())
            )

    def test_result_that_is_an_input(self):
        self.call()
        self.assertEqual(self.results[0], "result")
        self.assertIs(self.results[1], self.scale)
        self.assertIs(type(self.results), tuple)
        run = Residents([Resident(1, 0, ())]).around(self.compiled)
        self.assertEqual(run(["x", self.table]), ["result", None])

    def test_streams(self):
        first = self.call()[0]
        self.stream = 1
        self.assertIsNot(self.call()[0], first)
        self.stream = 0
        self.assertIs(self.call()[0], first)
        for self.stream in range(20):
            self.call()
        self.assertLessEqual(len(self.kept.kept), STREAMS * 2)

    def test_what_always_changes(self):
        same = self.enterContext(mock.patch.object(module, "_same", return_value=False))
        for n in range(3 * MOST_CHANGES):
            table = torch.full((4,), float(n))
            self.assertEqual(self.kept.on_device(1, 0, table), table)
        self.assertEqual(same.call_count, MOST_CHANGES)

    def test_what_always_changed_and_stays_now(self):
        for n in range(2 * MOST_CHANGES):
            self.kept.on_device(1, 0, torch.full((4,), float(n)))
        for _ in range(PAUSE + 1):
            self.kept.on_device(1, 0, self.table)
        before = self.kept.copies
        for _ in range(5):
            self.kept.on_device(1, 0, self.table)
        self.assertEqual(self.kept.copies, before)

    def test_pinned_memory(self):
        with mock.patch.object(torch.Tensor, "is_pinned", return_value=True):
            self.call()
            self.call()
        self.assertEqual((len(self.plain), self.kept.kept), (4, {}))

    def test_capture_of_the_callers(self):
        self.replace("_is_capturing", lambda: True)
        self.assertEqual(self.call(), [self.table, self.scale])
        self.assertEqual((self.kept.kept, self.plain), ({}, [self.table]))
        # The caller's graph reads the pinned scalar each time.
        self.assertEqual(self.kept.captured, [self.scale])

    def test_fake_tensors(self):
        with FakeTensorMode():
            table = torch.zeros(4)
        self.kept.on_device(1, 0, table)
        self.assertEqual((len(self.plain), self.kept.kept), (1, {}))

    def test_what_is_not_kept(self):
        for table in (
            torch.zeros(8)[::2],
            torch._neg_view(torch.ones(4)),
            torch.zeros(module.LARGEST // 4 + 1),
        ):
            self.assertEqual(self.kept.on_device(1, 0, table), table)
        self.assertEqual((len(self.plain), self.kept.kept), (3, {}))


if __name__ == "__main__":
    run_tests()
