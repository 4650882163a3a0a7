"""Defines operators that open, close and mark profiler ranges: NVTX's and those of torch.profiler.record_function.

    range_push(str kind, str message, str? details)     kind: "nvtx" or "record_function"
    range_pop(str kind)
    range_mark(str message)                             an instant of NVTX

They compute nothing, and keep their order with each other and with the launches around them: see Note [Ranges] in
`torch_overlay._inductor.streams.ranges`. Ranges of record_function nest, and belong to the thread.
"""

from __future__ import annotations

import threading
from typing import Any, TYPE_CHECKING

import torch
from torch._library.custom_ops import custom_op
from torch.fx import has_side_effect

from torch_overlay._dynamo.ops import NAMESPACE


if TYPE_CHECKING:
    from collections.abc import Callable

NVTX, RECORD_FUNCTION = "nvtx", "record_function"


class _Open(threading.local):
    def __init__(self) -> None:
        self.ranges: list[torch.profiler.record_function] = []


_open = _Open()


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


def _define(name: str, schema: str, run: Callable[..., None]) -> Any:
    custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema).register_fake(lambda *args: None)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    has_side_effect(overload)
    return overload


range_push = _define("range_push", "(str kind, str message, str? details) -> ()", push_range)
range_pop = _define("range_pop", "(str kind) -> ()", pop_range)
range_mark = _define("range_mark", "(str message) -> ()", _mark)

RANGES = (range_push, range_pop, range_mark)
