"""Processes of a benchmark, which are asked to prepare side by side, and to measure one at a time.

The words are those of `models.serve`. What a process prints to standard error is kept: it says why a process ended.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, TYPE_CHECKING

import models  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable

LOG = "BENCH_LOG"  # variable of the environment of a process: the file that has its standard error


class Process(models.Process):
    """Runs `script --serve ROW SIDE`, which calls `serve`."""

    def __init__(self, row: str, side: str, environment: dict[str, str], script: str) -> None:
        self.log = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
        self.failed: dict[str, Any] = {}
        super().__init__(row, side, {**environment, LOG: self.log.name}, script)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The answer to a word, or the error of an earlier one: a process that failed does nothing more."""
        found = self.failed or super().answer(timeout)
        if "error" in found and not self.failed:
            if found["error"].startswith("ended"):
                found["error"] = f"the process {found['error']}: {self.log.read().strip()[-300:]}"
            self.failed = found
        return found

    def ask_and_stop(self, word: str, timeout: float) -> dict[str, Any]:
        self.tell(word)
        found = self.answer(timeout)
        self.stop()
        return found


def serve(make: Callable[[], Any]) -> None:
    """Answer words by calls of the methods of what `make` returns. Ends the process."""
    os.dup2(os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND), 2)
    models.serve(make)
