"""The benchmark of offload: its table of what there is, and who measures when."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import offload  # pyrefly: ignore[missing-import]
import processes  # pyrefly: ignore[missing-import]
from torch._inductor.test_case import TestCase

import form
from printed import printed


OFF = {"ms": 100.0, "peak GiB": 10.0, "reserved GiB": 11.0, "refused": []}
ON = {"ms": 104.0, "peak GiB": 5.9, "reserved GiB": 6.0, "refused": [], "host GiB": 3.0, "tensors": 7, "again": 1}
ON |= {"hidden": 0.99, "plan": "7 saved tensors"}


def child(side: str, **found: Any) -> Any:
    return offload.Child("llama", "default", side, found=found)


def said(results: list[dict[str, Any]]) -> tuple[bool, str]:
    return printed(offload.table, results)[:2]


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
        passed, text = said([offload.merged(child("off", **OFF), child("on", error="no answer in time"))])
        self.assertFalse(passed)
        self.assertRegex(text, r"llama  default  100.0")
        self.assertIn("on: no answer in time", text)

    def test_out_of_memory(self) -> None:
        off = {"limit GiB": 8.5, "expected": [3.0, 2.0, 1.0], "under the limit": "OutOfMemoryError"}
        for found, good in (([3.0, 2.0, 1.01], True), ([3.0, 2.0, 1.1], False), ("OutOfMemoryError", False)):
            on = {"limit GiB": 8.5, "under the limit": found}
            row = offload.merged(child("off", **OFF, oom=off), child("on", **ON, oom=on))
            self.assertEqual(said([row])[0], good)
        row = offload.merged(child("off", **OFF, oom={**off, "under the limit": [3.0]}), child("on", **ON, oom=on))
        self.assertFalse(said([row])[0])


OOM = {"limit GiB": 8.5, "expected": [1.0], "under the limit": [1.0]}


class FakeProcess:
    """Answers as a process of the row and side would: the second row's side without offload fails."""

    log: list[tuple[Any, ...]] = []

    def __init__(self, row: str, side: str, environment: dict[str, str], script: str) -> None:
        self.name = row.partition("/")[0], side
        self.asked: list[str] = []
        self.log.append((*self.name, "begin", json.loads(environment[offload.OPTIONS])["peak"]))

    def tell(self, word: str) -> None:
        self.asked.append(word)

    def answer(self, timeout: float) -> dict[str, Any]:
        self.log.append((*self.name, word := self.asked.pop(0)))
        if word == "measure" and self.name == ("gpt2", "off"):
            return {"error": "OutOfMemoryError: no memory"}
        return {"measure": OFF if self.name[1] == "off" else ON, "oom": {"oom": OOM}}.get(word, {})

    def stop(self) -> None:
        self.log.append((*self.name, "stop"))


class TestTurns(TestCase):
    def run_all(self, *arguments: str) -> tuple[list[tuple[Any, ...]], int, str]:
        log: list[tuple[Any, ...]] = []
        with (
            mock.patch.object(offload.processes, "Process", FakeProcess),
            mock.patch.object(FakeProcess, "log", log),
            mock.patch.object(offload.streams, "describe", dict),
            mock.patch.object(sys, "argv", ["offload.py", "--modes", "default", *arguments]),
        ):
            status, out, _ = printed(offload.main)
        return log, status, out

    def test_one_measures_at_a_time_and_a_side_that_needs_a_peak_begins_when_it_is_known(self) -> None:
        log, status, out = self.run_all()
        of_llama = [("llama", side, word) for side in ("off", "on") for word in ("compile", "measure")]
        expected = [("llama", "off", "begin", None), ("gpt2", "off", "begin", None)]
        expected += [*of_llama[:2], ("llama", "on", "begin", 10.0), ("gpt2", "off", "compile")]
        expected += [("gpt2", "off", "measure"), *of_llama[2:]]
        expected += [("llama", side, word) for word in ("measure", "oom") for side in ("off", "on")]
        self.assertEqual(log[: len(expected)], expected)
        self.assertEqual(
            log[len(expected) :], [(*name, "stop") for name in [("llama", "off"), ("llama", "on"), ("gpt2", "off")]]
        )
        self.assertEqual(status, 1)
        self.assertIn("gpt2 default: off: OutOfMemoryError: no memory", out)

    def test_sides_whose_peak_is_known_begin_together_and_alternate(self) -> None:
        log, status, _ = self.run_all("--rows", "llama", "--peaks", "llama=12.5", "--oom", "")
        begun = [("llama", "off", "begin", 12.5), ("llama", "on", "begin", 12.5)]
        first = [("llama", side, word) for side in ("off", "on") for word in ("compile", "measure")]
        rest = [("llama", side, word) for word in ("measure", "stop") for side in ("off", "on")]
        self.assertEqual((status, log), (0, begun + first + rest))


class TestProcess(TestCase):
    def test_error_of_a_process(self) -> None:
        """An exception is its answer; of one that ends without an answer, the error says what it printed."""
        script = "import sys; sys.path.insert(0, {!r}); import processes; processes.serve(lambda: {})"
        with tempfile.TemporaryDirectory() as folder:
            for make, expected in (
                ("1 / 0", "ZeroDivisionError: division by zero"),
                ("sys.exit(sys.stderr.write('it broke'))", "the process ended with status 8: it broke"),
            ):
                path = Path(folder, "script.py")
                path.write_text(script.format(str(form.ROOT / "tools" / "bench"), make))
                process = processes.Process("row", "side", dict(os.environ), str(path))
                self.addCleanup(process.stop)
                self.assertEqual(process.answer(60.0), {"error": expected})
