"""Names calls of compiled code, launches of graphs, and blocks on side streams in profiles.

Note [Names in profiles]
A launch of a graph is one call of the host for many kernels, so a profile doesn't say what they belong to. Where the
option `nvtx` is True, code that is compiled, and graphs that are made, from then on show what runs:

    backward of compiled frame 0/0                                   a call
      backward of compiled frame 0/0, partition 1                    where there are several
        backward of compiled frame 0/0, partition 1, graph of 40 nodes
        backward of compiled frame 0/0, partition 1, stage 3 of 8, graph of 5 nodes
      side stream 2: model.py:41                                     in code without graphs

Each is a range of NVTX, which Nsight Systems shows, and one of record_function, which torch.profiler shows, also above
the kernels on the device. What opens a range is put around a function when that is made, and into generated code with
side streams when that is generated (the option is in the key of the caches): without the option there is nothing to
skip. Generated code that asks for graphs has no ranges of side streams, since nobody would see them in a launch.

The kernels in a graph are named one by one where the driver allows it: `relaunch.capture.kernel_names`.

A function that raises leaves the ranges open that generated code has opened in it; whoever is around it closes them.
"""

from __future__ import annotations

import threading
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


RUNTIME = "from torch_overlay._inductor import profiler_ranges"


class _OpenProfilerRanges(threading.local):
    def __init__(self) -> None:
        self.ranges: list[torch.profiler.record_function] = []


_open = _OpenProfilerRanges()


def push(name: str) -> None:
    torch.cuda.nvtx.range_push(name)
    opened = torch.profiler.record_function(name)
    opened.__enter__()
    _open.ranges.append(opened)


def pop() -> None:
    _open.ranges.pop().__exit__(None, None, None)
    torch.cuda.nvtx.range_pop()


def within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls this one in a range of that name; this one itself if the name is empty."""
    if not name:
        return function

    def call(*args: Any) -> Any:
        depth = len(_open.ranges)
        push(name)
        try:
            return function(*args)
        finally:
            while len(_open.ranges) > depth:
                pop()

    return call
