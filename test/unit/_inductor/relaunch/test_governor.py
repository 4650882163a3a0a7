"""When a further size is captured: `relaunch.governor`. Times are drawn, and nothing is run."""

import random
import unittest

import hypothesis
import hypothesis.strategies as st

import form  # noqa: F401
from torch_overlay._inductor.relaunch.governor import CALLS, Governor, SHARE


def never() -> int:
    raise AssertionError("launches are counted only where it matters")


class TestGovernor(unittest.TestCase):
    def test_size_that_has_not_come_often_waits(self) -> None:
        governor = Governor()
        governor.note_capture(0.1)
        governor.note_call(0.2 / SHARE * 1.01)
        self.assertFalse(governor.affords_capture(0.09, never))
        self.assertTrue(governor.affords_capture(0.1, lambda: 0))

    def test_first_capture_is_taken_to_last_as_long_as_many_calls(self) -> None:
        governor = Governor()
        governor.note_call(0.25)
        self.assertFalse(governor.affords_capture(CALLS * 0.25 - 0.01, never))
        self.assertFalse(governor.affords_capture(CALLS * 0.25, lambda: 0), "it is not affordable")
        for _ in range(int(CALLS / SHARE)):
            governor.note_call(0.25)
        self.assertTrue(governor.affords_capture(CALLS * 0.25, lambda: 0))

    def test_captures_are_paid_by_calls_without_a_graph(self) -> None:
        governor = Governor()
        governor.note_capture(0.2)
        governor.note_call(0.4 / SHARE * 0.99)
        self.assertFalse(governor.affords_capture(1e9, lambda: 0))
        governor.note_call(0.4 / SHARE * 0.02)
        self.assertTrue(governor.affords_capture(1e9, lambda: 0))

    def test_captures_are_paid_by_what_launches_save(self) -> None:
        governor = Governor()
        governor.note_capture(0.2)
        for seconds in (0.02, 0.01, 0.03):  # the shortest
            governor.note_call(seconds)
        self.assertEqual(governor.saved(10), 0.0, "no launch was seen")
        for seconds in (0.009, 0.002):
            governor.note_first_launch(seconds)
        self.assertAlmostEqual(governor.saved(10), 0.08)
        self.assertFalse(governor.affords_capture(1e9, lambda: 48))
        self.assertTrue(governor.affords_capture(1e9, lambda: 51))

    def test_nothing_is_saved_where_launches_take_longer_or_no_call_was_seen(self) -> None:
        governor = Governor()
        governor.note_first_launch(0.02)
        self.assertEqual(governor.saved(1000), 0.0)
        governor.note_call(0.01)
        self.assertEqual(governor.saved(1000), 0.0)

    @hypothesis.given(
        st.integers(1, 400), st.integers(0, 1 << 30), st.floats(1e-4, 0.1), st.floats(0, 1.5), st.floats(1e-3, 1.0)
    )
    def test_no_sequence_of_sizes_is_slower_by_more_than_the_share_and_a_capture(
        self, sizes: int, seed: int, call: float, launch: float, capture: float
    ) -> None:
        """`launch` is a share of a call. Some sizes come more often than others."""
        governor, draw, launches, took = Governor(), random.Random(seed), 0, 0.0
        waited: dict[int, float] = {}
        has_graph: set[int] = set()
        for number in range(1, 1001):
            size = min(draw.randrange(sizes), draw.randrange(sizes))
            if size in has_graph:
                launches, took = launches + 1, took + launch * call
            elif size in waited and governor.affords_capture(waited[size], lambda so_far=launches: so_far):
                has_graph.add(size)
                governor.note_capture(capture)
                governor.note_first_launch(launch * call)
                launches, took = launches + 1, took + capture + launch * call
            else:
                governor.note_call(call)
                waited[size] = waited.get(size, 0.0) + call
                took += call
            slower = max(launch - 1, 0.0) * call * launches  # by launches themselves
            # The first capture's time isn't known before.
            self.assertLessEqual(took, number * call * (1 + SHARE) + capture + slower + 1e-9)
