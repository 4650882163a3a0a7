"""Defines operators for questions that only the run can answer: is work done, how long did it take, which handle.

Each returns a 0-dim CPU tensor, and `runtime_scalar` makes a Python number of it: in the graph that is an unbacked
symbol, so the value can be returned, computed with, and passed to operators under fullgraph=True. A branch on it breaks
the graph with PyTorch's usual message about data-dependent control flow.

The operators read host-visible state, so each is a side effect that passes keep and don't reorder, merge or recompute;
they must stay after the syncs that precede them in the program. Arguments are indices (objects.py):

    query_event(int event)                  Event.query(), as 0 or 1
    query_stream(int stream)                Stream.query(), as 0 or 1
    elapsed_time(int start, int end)        Event.elapsed_time(end), float64
    stream_handle(int stream)               Stream.cuda_stream
    stream_id(int stream)                   Stream.stream_id
    same_stream(int left, int right)        whether two streams are equal, as 0 or 1
    is_capturing(int left, int right)       whether a CUDA graph is captured from one of two streams, as 0 or 1

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
from torch_overlay._functorch.streams.fx import NAMESPACES


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

NAMESPACE = "streams_overlay"
NAMESPACES.add(NAMESPACE)
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

HOST_READS = (query_event, query_stream, elapsed_time, stream_handle, stream_id, same_stream, is_capturing)

# For the operators on which programs branch: the text of the error.
_QUESTIONS = {
    query_event: "whether an event has happened (`query`)",
    query_stream: "whether a stream is done (`query`)",
    same_stream: "whether a stream that the function makes is another one",
    is_capturing: "whether a CUDA graph is being captured (`is_current_stream_capturing`)",
}


def runtime_scalar(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """Call the operator in the graph; return a number or bool that the run provides."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    shape_env = tx.output.shape_env
    if shape_env is not None and not shape_env.allow_scalar_outputs:
        # For fake tensors only. Whether the user's own Tensor.item() breaks the graph is Dynamo's decision.
        shape_env.settings = dataclasses.replace(shape_env.settings, allow_scalar_outputs=True)
    result = wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", op, indices, {}))
    with config.patch(capture_scalar_outputs=True):
        number = result.call_method(tx, "item", [], {})
    if isinstance(number, SymNodeVariable):
        symbols = dict.fromkeys(number.sym_num.node.expr.free_symbols, _QUESTIONS.get(op, "what the run reads"))
        tx.symbolic_stream_state.run_time_symbols.update(symbols)
    if isinstance(number, SymNodeVariable) and isinstance(result, TensorVariable) and number.python_type() is float:
        number._tensor_var = result  # a float leaves the graph as a tensor, and `result` is one
    return number


def runtime_bool(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """Call the operator as runtime_scalar does, for operators that return 0 or 1; return a bool."""
    from torch._dynamo.variables.base import VariableTracker

    number = runtime_scalar(tx, op, *indices)
    return VariableTracker.build(tx, operator.ne).call_function(tx, [number, VariableTracker.build(tx, 0)], {})


def evaluate_expr(original: Callable[..., Any], number: Any, output: Any = None) -> Any:
    """Wrap the conversion of a symbolic number to a constant: for one of ours, the error says where it comes from."""
    from torch._dynamo.exc import UserError

    try:
        return original(number, output)
    except UserError as error:
        state = getattr(getattr(output, "root_tx", None), "symbolic_stream_state", None)
        known = getattr(state, "run_time_symbols", {})
        asked = [known[s] for s in number.sym_num.node.expr.free_symbols if s in known]
        if not asked:
            raise
        wait = "; or, if it is there to wait for work, call `synchronize()` instead" if "(`query`)" in asked[0] else ""
        raise UserError(
            error.error_type,
            f"A branch on {asked[0]} can't be compiled into one graph: the answer is only known when the code runs. "
            "Leave out fullgraph=True, and the graph breaks here, so that the branch is taken at run time; or return "
            f"the answer and branch outside of the compiled function{wait}.",
        ) from error
