"""Find races of eager code while it runs on a GPU (`check_eager`), with PyTorch's own `torch.cuda._sanitizer`.

    with check_eager() as report:
        step()
    print(report)

The sanitizer observes every kernel that the dispatcher launches, every event, stream and synchronisation, and tracks
the order of streams. By itself it stops a program at its first race; here the report collects the races, and the
program goes on. The sanitizer treats a tensor as one unit of memory, and knows neither compiled kernels nor the
allocator's reuse of freed memory.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch

from torch_overlay.analysis.race_check.happens_before import Done, missing_edge, Race
from torch_overlay.analysis.race_check.race_report import Report
from torch_overlay.analysis.race_check.trace import Launch, Memory, View
from torch_overlay.testing._text import as_line, OURS, TORCH


if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def check_eager() -> Iterator[Report]:
    """Yield a report that collects the races of the eager code inside the context; at the end the device is idle."""
    if not torch.cuda.is_available():
        raise RuntimeError("check_eager: no GPU. Without one, check(fn, *args) runs eager code on a simulated device")
    from torch.cuda import _sanitizer

    report = Report()
    seen: set[tuple[object, ...]] = set()
    launched = _sanitizer.EventHandler._handle_kernel_launch

    def collect(handler: Any, *args: Any, **kwargs: Any) -> list[Any]:
        for error in launched(handler, *args, **kwargs):
            race = _race(error)
            if race.key not in seen:
                seen.add(race.key)
                report.races.append(race)
        return []

    sanitizer = _sanitizer.CUDASanitizer()
    torch.cuda.synchronize()  # earlier work is over, so it can't race
    with mock.patch.object(_sanitizer.EventHandler, "_handle_kernel_launch", collect):
        sanitizer.enable()
        try:
            yield report
        finally:
            sanitizer.disable()
            torch.cuda.synchronize()


def _race(error: Any) -> Race:
    """Convert an UnsynchronizedAccessError of the sanitizer to a `Race`."""
    names = error.previous_access.aliases or error.current_access.aliases
    memory = Memory(f"tensor at {error.data_ptr:#x}" + (f" ({', '.join(names)})" if names else ""), 0, "")
    first, second = _done(error.previous_access, memory), _done(error.current_access, memory)
    kind = "RAW" if first.writes and not second.writes else "WAW" if first.writes else "WAR"
    return Race(kind, first, second, missing_edge(kind, first, second))


def _done(access: Any, memory: Memory) -> Done:
    writes = access.type.name == "WRITE"
    stream = f"stream {access.stream:#x}" if access.stream else "default stream"
    launch = Launch(str(access.operator).partition("(")[0], stream, (), _line(access.stack_trace))
    return Done(launch, View(memory), not writes, writes, access.seq_num, access.seq_num)


def _line(stack: Any) -> str:
    """Format the innermost frame of the user's code."""
    users = [frame for frame in stack if not frame.filename.startswith((TORCH, OURS))]
    return as_line(users[-1].filename, users[-1].lineno, users[-1].line) if users else ""


__all__ = ["check_eager"]
