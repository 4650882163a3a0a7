"""Defines operators that open, close and mark profiler ranges: NVTX's and those of torch.profiler.record_function.

    range_push(str kind, str message, str? details)     kind: "nvtx" or "record_function"
    range_pop(str kind)
    range_mark(str message)                             an instant of NVTX

They compute nothing, and keep their order with each other and with the launches around them (Note [Ranges]). Ranges of
record_function nest, and belong to the thread.
"""

from __future__ import annotations

import threading

import torch

from torch_overlay._dynamo.ops import define


NVTX, RECORD_FUNCTION = "nvtx", "record_function"


class _OpenRanges(threading.local):
    def __init__(self) -> None:
        self.ranges: list[torch.profiler.record_function] = []


_open = _OpenRanges()


def push_range(kind: str, message: str, details: str | None) -> None:
    if kind == NVTX:
        torch.cuda.nvtx.range_push(message)
    else:
        opened = torch.profiler.record_function(message, details)
        opened.__enter__()
        _open.ranges.append(opened)


def pop_range(kind: str) -> None:
    if kind == NVTX:
        torch.cuda.nvtx.range_pop()
    elif _open.ranges:
        _open.ranges.pop().__exit__(None, None, None)


def _mark(message: str) -> None:
    torch.cuda.nvtx.mark(message)


def _nothing(*args: object) -> None:
    """Trace an operator that computes nothing."""


range_push = define("range_push", "(str kind, str message, str? details) -> ()", push_range, _nothing)
range_pop = define("range_pop", "(str kind) -> ()", pop_range, _nothing)
range_mark = define("range_mark", "(str message) -> ()", _mark, _nothing)

RANGES = (range_push, range_pop, range_mark)
