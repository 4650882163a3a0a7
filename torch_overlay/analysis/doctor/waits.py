"""Finds where the host waits for the device: torch warns at each such call, and the stack has the user's line.

Waits are counted from the first compiled code on. Those of the compiler and of a capture, which a step has once, are
left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch import coverage
from torch_overlay._inductor.relaunch.capture.culprit import user_line
from torch_overlay._inductor.user_lines import is_in_torch
from torch_overlay.analysis.race_check.source_lines import _is_compiling


if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

OURS = f"{__name__.partition('.analysis.')[0]}."
CAPTURES = f"{OURS}_inductor.relaunch.capture."
OTHERS = (
    os.sep + "warnings.py",
    os.sep + "contextlib.py",
    os.sep + "threading.py",
    os.path.join("unittest", "mock.py"),
)
TUNES = os.path.join(os.path.dirname(torch.__file__), "_inductor", "runtime", "")  # and launches what it has chosen
TEXT = "called a synchronizing CUDA operation"


@contextlib.contextmanager
def noted() -> Iterator[Counter[str]]:
    """Count the waits inside, by "file:line" of the program. Needs a GPU, which may be initialised inside."""
    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if TEXT in str(message):
            if coverage.live and not _is_compiling() and (line := _line()) is not None:
                found[line] += 1
        else:
            original(message, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{TEXT}")
        original, warnings.showwarning = warnings.showwarning, show
        torch.cuda._lazy_call(lambda: _set_mode(1))
        try:
            yield found
        finally:
            torch.cuda._lazy_call(lambda: _set_mode(before))


def _set_mode(mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at the first call that the mode is a prototype
        torch._C._cuda_set_sync_debug_mode(mode)


def _line() -> str | None:
    """The line of the program that is running, or that the running line of generated code comes from; None for a wait
    of a capture, or of a choice among kernels."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if line := user_line(frame.f_code.co_filename, frame.f_lineno):
            return line
        if is_program(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_globals.get("__name__", "").startswith(CAPTURES) or frame.f_code.co_filename.startswith(TUNES):
            return None
        frame = frame.f_back
    return ""


def is_program(frame: FrameType) -> bool:
    """True for a frame outside of torch and of ours."""
    path = frame.f_code.co_filename
    is_ours = frame.f_globals.get("__name__", "").startswith(OURS)
    return not (is_ours or is_in_torch(path) or path.startswith("<") or path.endswith(OTHERS))
