"""Operators for what only the run can tell: is that work done, how long did it take, what is the handle.

Each returns a 0-dim CPU tensor, and `runtime_scalar` makes a Python number of it: in the graph that is an unbacked
symbol, so the value can be returned, computed with, and passed to operators under fullgraph=True. A branch on it breaks
the graph with PyTorch's usual message about data-dependent control flow.

They read host-visible state, so each is a side effect that passes keep and don't reorder, merge or recompute. Arguments
are indices (objects.py). They look at, and must stay behind, the syncs that precede them in the program:

    query_event(int event) -> bool          Event.query()
    query_stream(int stream) -> bool        Stream.query()
    elapsed_time(int start, int end) -> float64
    stream_handle(int stream) -> int64      Stream.cuda_stream
    stream_id(int stream) -> int64          Stream.stream_id
    same_stream(int left, int right) -> bool
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._library.custom_ops import custom_op
from torch.fx import has_side_effect

from torch_overlay._dynamo import objects


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

NAMESPACE = "streams_overlay"
_ONE_INDEX = "(int index) -> Tensor"
_TWO_INDICES = "(int left, int right) -> Tensor"


def _define(name: str, schema: str, dtype: torch.dtype, read: Callable[..., object]) -> Any:
    def run(*indices: int) -> torch.Tensor:
        return torch.tensor(read(*map(objects.get, indices)), dtype=dtype)

    op = custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(lambda *indices: torch.empty((), dtype=dtype))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    has_side_effect(overload)
    return overload


query_event = _define("query_event", _ONE_INDEX, torch.bool, lambda event: event.query())
query_stream = _define("query_stream", _ONE_INDEX, torch.bool, lambda stream: stream.query())
elapsed_time = _define("elapsed_time", _TWO_INDICES, torch.float64, lambda start, end: start.elapsed_time(end))
stream_handle = _define("stream_handle", _ONE_INDEX, torch.int64, lambda stream: stream.cuda_stream)
stream_id = _define("stream_id", _ONE_INDEX, torch.int64, lambda stream: stream.stream_id)
same_stream = _define("same_stream", _TWO_INDICES, torch.bool, lambda left, right: left == right)

HOST_READS = (query_event, query_stream, elapsed_time, stream_handle, stream_id, same_stream)


def runtime_scalar(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """Calls the operator in the graph; the result is a number or bool that the run provides."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import wrap_fx_proxy

    shape_env = tx.output.shape_env
    if shape_env is not None and not shape_env.allow_scalar_outputs:
        # Decides for fake tensors only. Whether the user's own Tensor.item() breaks the graph is Dynamo's decision.
        shape_env.settings = dataclasses.replace(shape_env.settings, allow_scalar_outputs=True)
    result = wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", op, indices, {}))
    with config.patch(capture_scalar_outputs=True):
        return result.call_method(tx, "item", [], {})
