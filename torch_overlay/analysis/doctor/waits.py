"""Finds where the host waits for the device: torch warns at each such call, and the stack has the user's line."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.culprit import user_line
from torch_overlay._inductor.user_lines import is_in_torch


if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = f"{__name__.partition('.analysis.')[0]}."
TEXT = "called a synchronizing CUDA operation"


@contextlib.contextmanager
def noted() -> Iterator[Counter[str]]:
    """Count the waits inside, by "file:line" of the program. Needs a GPU."""
    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if TEXT in str(message):
            found[_line()] += 1
        else:
            original(message, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{TEXT}")
        original, warnings.showwarning = warnings.showwarning, show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _line() -> str:
    """The line of the program that is running: the innermost one outside of torch and of ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if line := user_line(path, frame.f_lineno):
            return line
        is_ours = frame.f_globals.get("__name__", "").startswith(OURS)
        if not is_ours and not is_in_torch(path) and not path.endswith(("warnings.py", "contextlib.py")):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
