"""Streams of compiled code in a capture: each is replaced by one that only captures use."""

from typing import Any

import torch
from torch._dynamo.test_case import TestCase

from torch_overlay._dynamo import objects
from torch_overlay._functorch.offload import runtime
from torch_overlay._functorch.streams.ids import COPY_STREAMS
from torch_overlay._inductor.relaunch.capture.streams import exchanged_streams


def stream(number: int) -> torch.Stream:
    return torch.Stream(stream_id=number, device_index=0, device_type=1)


class TestExchange(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.made: Any = "capture's {}".format

    def test_table_of_objects(self) -> None:
        event, owned = object(), objects.Owned(stream, (32,), {})
        leave = objects.enter(stream(7), stream(7), event, owned, stream(32))
        try:
            with exchanged_streams(self.made):
                found = [objects.get(index) for index in range(5)]
            self.assertEqual([objects.get(0), objects.get(3)], [stream(7), stream(32)])
        finally:
            leave()
        # Index 0 is the caller's stream, whatever that is, and no other index is.
        self.assertEqual(found, ["capture's 0", "capture's 1", event, "capture's 2", "capture's 2"])

    def test_copies_have_streams_besides(self) -> None:
        leave = objects.enter(stream(0), stream(7))
        try:
            with exchanged_streams(self.made):
                copies = [runtime.copy_stream(number) for number in (COPY_STREAMS, COPY_STREAMS)]
                self.assertEqual([objects.get(1), *copies], ["capture's 1", *["capture's 2"] * 2])
        finally:
            leave()

    def test_code_without_streams(self) -> None:
        with exchanged_streams(self.made):
            self.assertIsNone(objects.current())
