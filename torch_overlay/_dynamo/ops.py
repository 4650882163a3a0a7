"""Defines operators for questions that only the run can answer: is work done, how long did it take, which handle.

Each returns a 0-dim CPU tensor. The operators read host-visible state, so each is a side effect that passes keep and
don't reorder, merge or recompute; they must stay after the syncs that precede them in the program. Arguments are
indices of streams and events in the table of the call (objects.py):

    query_event(int event)                  Event.query(), as 0 or 1
    query_stream(int stream)                Stream.query(), as 0 or 1
    elapsed_time(int start, int end)        Event.elapsed_time(end), float64
    stream_handle(int stream)               Stream.cuda_stream
    stream_id(int stream)                   Stream.stream_id
    same_stream(int left, int right)        whether two streams are equal, as 0 or 1
    is_capturing(int left, int right)       whether a CUDA graph is captured from one of two streams, as 0 or 1

The truth values are integers because an unbacked bool brings range assertions into the graph.

Operators that open, close and mark profiler ranges, of NVTX and of torch.profiler.record_function, compute nothing, and
keep their order with each other and with the launches around them (Note [Ranges]). Ranges of record_function nest, and
belong to the thread.

    range_push(str kind, str message, str? details)     kind: "nvtx" or "record_function"
    range_pop(str kind)
    range_mark(str message)                             an instant of NVTX
"""

from __future__ import annotations

import threading
from typing import Any, TYPE_CHECKING

import torch
from torch._library.custom_ops import custom_op
from torch.fx import has_side_effect

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.fx import NAMESPACE


if TYPE_CHECKING:
    from collections.abc import Callable


_ONE_INDEX = "(int index) -> Tensor"
_TWO_INDICES = "(int left, int right) -> Tensor"


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator that no pass removes; return its overload. `fake` is what it returns while it is traced."""
    custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema).register_fake(fake)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    has_side_effect(overload)
    return overload


def _define(name: str, schema: str, dtype: torch.dtype, read: Callable[..., object]) -> Any:
    def run(*indices: int) -> torch.Tensor:
        return torch.tensor(read(*map(objects.get, indices)), dtype=dtype)

    return define(name, schema, run, lambda *indices: torch.empty((), dtype=dtype))


def _is_capturing(*streams: torch.cuda.Stream) -> bool:
    for stream in streams:
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


query_event = _define("query_event", _ONE_INDEX, torch.int64, lambda event: event.query())
query_stream = _define("query_stream", _ONE_INDEX, torch.int64, lambda stream: stream.query())
elapsed_time = _define("elapsed_time", _TWO_INDICES, torch.float64, lambda start, end: start.elapsed_time(end))
stream_handle = _define("stream_handle", _ONE_INDEX, torch.int64, lambda stream: stream.cuda_stream)
stream_id = _define("stream_id", _ONE_INDEX, torch.int64, lambda stream: stream.stream_id)
same_stream = _define("same_stream", _TWO_INDICES, torch.int64, lambda left, right: left == right)
is_capturing = _define("is_capturing", _TWO_INDICES, torch.int64, _is_capturing)


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
