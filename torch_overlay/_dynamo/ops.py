"""Operators for what only the run can tell: is that work done, how long did it take, what is the handle.

Each returns a 0-dim CPU tensor, and `runtime_scalar` makes a Python number of it: in the graph that is an unbacked
symbol, so the value can be returned, computed with, and passed to operators under fullgraph=True. A branch on it breaks
the graph with PyTorch's usual message about data-dependent control flow.

They read host-visible state, so each is a side effect that passes keep and don't reorder, merge or recompute. Arguments
are indices (objects.py). They look at, and must stay behind, the syncs that precede them in the program:

    query_event(int event)                  Event.query(), as 0 or 1
    query_stream(int stream)                Stream.query(), as 0 or 1
    elapsed_time(int start, int end)        Event.elapsed_time(end), float64
    stream_handle(int stream)               Stream.cuda_stream
    stream_id(int stream)                   Stream.stream_id
    same_stream(int left, int right)        whether two streams are equal, as 0 or 1

The truth values are integers because an unbacked bool brings range assertions into the graph.
"""

from __future__ import annotations

import dataclasses
import operator
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


query_event = _define("query_event", _ONE_INDEX, torch.int64, lambda event: event.query())
query_stream = _define("query_stream", _ONE_INDEX, torch.int64, lambda stream: stream.query())
elapsed_time = _define("elapsed_time", _TWO_INDICES, torch.float64, lambda start, end: start.elapsed_time(end))
stream_handle = _define("stream_handle", _ONE_INDEX, torch.int64, lambda stream: stream.cuda_stream)
stream_id = _define("stream_id", _ONE_INDEX, torch.int64, lambda stream: stream.stream_id)
same_stream = _define("same_stream", _TWO_INDICES, torch.int64, lambda left, right: left == right)

HOST_READS = (query_event, query_stream, elapsed_time, stream_handle, stream_id, same_stream)


def runtime_scalar(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """Calls the operator in the graph; the result is a number or bool that the run provides."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    shape_env = tx.output.shape_env
    if shape_env is not None and not shape_env.allow_scalar_outputs:
        # Decides for fake tensors only. Whether the user's own Tensor.item() breaks the graph is Dynamo's decision.
        shape_env.settings = dataclasses.replace(shape_env.settings, allow_scalar_outputs=True)
    result = wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", op, indices, {}))
    with config.patch(capture_scalar_outputs=True):
        number = result.call_method(tx, "item", [], {})
    if isinstance(number, SymNodeVariable) and isinstance(result, TensorVariable) and number.python_type() is float:
        number._tensor_var = result  # a float leaves the graph as a tensor; here is one already
    return number


def runtime_bool(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """As runtime_scalar, for the operators that return 0 or 1."""
    from torch._dynamo.variables.base import VariableTracker

    number = runtime_scalar(tx, op, *indices)
    return VariableTracker.build(tx, operator.ne).call_function(tx, [number, VariableTracker.build(tx, 0)], {})
