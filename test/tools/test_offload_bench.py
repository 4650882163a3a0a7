"""The benchmark of offload: its table of what there is, and who measures when."""

import argparse
import contextlib
import io
import queue
import tempfile
from typing import Any
from unittest import mock

import offload  # pyrefly: ignore[missing-import]
from torch._inductor.test_case import TestCase

import form  # noqa: F401
from printed import printed


OFF = {"ms": 100.0, "peak GiB": 10.0, "reserved GiB": 11.0, "refused": []}
ON = {"ms": 104.0, "peak GiB": 5.9, "reserved GiB": 6.0, "refused": [], "host GiB": 3.0, "tensors": 7, "again": 1}
ON |= {"hidden": 0.99, "plan": "7 saved tensors"}


def child(side: str, order: int = 0, **found: Any) -> Any:
    made = offload.Child("llama", "default", side, order, io.StringIO("the reason"))
    made.found |= found
    return made


def said(results: list[dict[str, Any]]) -> tuple[bool, str]:
    return printed(offload.table, results, 0.4)[:2]


class TestTable(TestCase):
    def test_row_within_its_limits(self) -> None:
        passed, text = said([offload.merged(child("off", **OFF), child("on", **ON))])
        self.assertTrue(passed)
        self.assertRegex(text, r"llama  default  100.0 +104.0  1.040  10.0 -> 5.9 +11.0 -> 6.0  41.0 %  3.0 +7 \+ 1")

    def test_each_limit(self) -> None:
        for changed in ({"ms": 106.0}, {"peak GiB": 6.1}, {"refused": ["no graph"]}, {"error": "status 1"}):
            passed, _ = said([offload.merged(child("off", **OFF), child("on", **{**ON, **changed}))])
            self.assertFalse(passed, changed)

    def test_row_that_did_not_get_far_shows_what_it_has(self) -> None:
        passed, text = said([offload.merged(child("off", **OFF), child("on"))])
        self.assertFalse(passed)
        self.assertRegex(text, r"llama  default  100.0")
        self.assertIn("not ready in time", text)

    def test_out_of_memory(self) -> None:
        off = {"limit GiB": 8.5, "expected": [3.0, 2.0, 1.0], "under the limit": "OutOfMemoryError"}
        for found, good in (([3.0, 2.0, 1.01], True), ([3.0, 2.0, 1.1], False), ("OutOfMemoryError", False)):
            on = {"limit GiB": 8.5, "under the limit": found}
            row = offload.merged(child("off", **OFF, oom=off), child("on", **ON, oom=on))
            self.assertEqual(said([row])[0], good)
        row = offload.merged(child("off", **OFF, oom={**off, "under the limit": [3.0]}), child("on", **ON, oom=on))
        self.assertFalse(said([row])[0])


class TestTurns(TestCase):
    def test_one_measures_at_a_time_the_first_row_first_and_a_side_that_needs_a_peak_begins_when_it_is_known(
        self,
    ) -> None:
        children = [child("off", 0), child("on", 0), child("off", 1), child("on", 1)]
        begun: list[Any] = []
        events: queue.Queue[Any] = queue.Queue()
        went: list[Any] = []

        def begin(self: Any, options: Any, peak: float | None, events: Any) -> None:
            begun.append((self.order, self.side, peak))
            self.process = mock.Mock(returncode=0)
            events.put((self, {"ready": 0}))

        def go(self: Any) -> None:
            went.append((self.order, self.side, self.ready))
            phase, self.ready = self.ready, None
            events.put((self, {"peak GiB": 10.0 + self.order}))
            events.put((self, {"done": phase}))
            events.put((self, {"ready": 100} if not phase and self.side == "off" else None))

        with mock.patch.multiple(offload.Child, begin=begin, go=go), contextlib.redirect_stdout(io.StringIO()):
            for each in children[::2][::-1]:
                each.begin(None, None, events)
            offload._serve(children, events, argparse.Namespace(limit=20))
        self.assertEqual(begun, [(1, "off", None), (0, "off", None), (1, "on", 11.0), (0, "on", 10.0)])
        # The second row was ready alone; then the first one's turn; what comes last comes last.
        self.assertEqual(went[0], (1, "off", 0))
        self.assertEqual(went[1], (0, "off", 0))
        self.assertEqual([w[2] for w in went], sorted(w[2] for w in went))
        self.assertEqual(len(went), 6)

    def test_time_limit(self) -> None:
        self.assertIsNone(offload._serve([child("off")], queue.Queue(), argparse.Namespace(limit=0.01)))

    def test_error_of_a_process(self) -> None:
        with tempfile.TemporaryFile("w+") as errors:
            errors.write("Traceback: it broke")
            failed = child("off")
            failed.errors, failed.process = errors, mock.Mock(returncode=3)
            self.assertEqual(failed.error(), "status 3: Traceback: it broke")
