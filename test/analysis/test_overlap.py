"""Overlap of work on several streams, from intervals."""

import unittest

import form  # noqa: F401
from torch_overlay.analysis.timelines.model import DeviceWork, Overlap, overlap


class TestOverlap(unittest.TestCase):
    def test_work_on_one_stream_never_overlaps(self) -> None:
        self.assertEqual(overlap([DeviceWork(7, 0, 10), DeviceWork(7, 5, 20)]), Overlap(20, 0, 1))

    def test_two_streams_share_the_intersection(self) -> None:
        self.assertEqual(overlap([DeviceWork(7, 0, 10), DeviceWork(9, 4, 20)]), Overlap(20, 6, 2))

    def test_work_that_only_touches_does_not_overlap(self) -> None:
        self.assertEqual(overlap([DeviceWork(7, 0, 10), DeviceWork(9, 10, 20)]), Overlap(20, 0, 2))

    def test_idle_time_is_not_busy(self) -> None:
        self.assertEqual(overlap([DeviceWork(7, 0, 10), DeviceWork(9, 30, 40)]), Overlap(20, 0, 2))

    def test_three_streams_count_once(self) -> None:
        self.assertEqual(
            overlap([DeviceWork(1, 0, 10), DeviceWork(2, 0, 10), DeviceWork(3, 5, 10)]), Overlap(10, 10, 3)
        )

    def test_no_work(self) -> None:
        self.assertEqual(overlap([]), Overlap(0, 0, 0))
        self.assertEqual(overlap([]).fraction, 0.0)

    def test_text(self) -> None:
        self.assertEqual(str(Overlap(20, 6, 2)), "30% of 20 µs, 2 streams")
        self.assertEqual(str(Overlap(20, 0, 1)), "0% of 20 µs, 1 stream")
