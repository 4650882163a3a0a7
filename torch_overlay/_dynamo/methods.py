"""Traces methods and attributes of streams and events in Dynamo.

Calls that order work become nodes of the `streams` operators, with indices as in upstream; questions that only the run
can answer become nodes of our own operators (ops.py). No method touches the object that it is called on.

In the graph, what the run answers is an unbacked symbol, so it can be returned, computed with, and passed to operators
under fullgraph=True. A branch on it breaks the graph; under fullgraph=True the error says what was asked, and what to
do.

Comparisons and hashes are answered while tracing, under guards: a stream of the caller is guarded by its identity, or,
if it is compared with the current stream, only by whether it is the current stream. A stream that the frame makes can
be compared only at run time, except with itself.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NoReturn, TYPE_CHECKING

import torch
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.streams import EventVariable, StreamVariable

from torch_overlay._dynamo import ops, registry
from torch_overlay._dynamo.construct import new_event
from torch_overlay._dynamo.state import CallersStreamVariable


if TYPE_CHECKING:
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


def _argument(
    variable: VariableTracker, method: str, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    """Return the one argument of a method, given by position or by name; None if it is absent or None."""
    given = [*args, *(value for key, value in kwargs.items() if key == name)]
    if len(given) > 1 or len(given) != len(args) + len(kwargs):
        _refuse(variable, method, f"takes the one argument `{name}`")
    if not given:
        return None
    found = given[0].realize()
    return None if found.is_constant_none() else found


def _refuse(variable: VariableTracker, method: str, why: str) -> NoReturn:
    unimplemented(
        gb_type="stream or event method that can't be traced",
        context=f"{variable.python_type_name()}.{method}",
        explanation=f"{variable.python_type_name()}.{method} {why}.",
        hints=[*graph_break_hints.USER_ERROR],
    )


def _sync(tx: InstructionTranslatorBase, op: Any, *indices: Any) -> VariableTracker:
    tx.output.create_proxy("call_function", op, indices, {})
    return ConstantVariable.create(None)


def _stream(
    variable: VariableTracker, tx: InstructionTranslatorBase, method: str, args: list[Any], kwargs: dict[str, Any]
) -> StreamVariable:
    """Return the stream argument of an event's method; the current stream if there is none."""
    found = _argument(variable, method, "stream", args, kwargs)
    if found is None:
        return tx.symbolic_stream_state.current(tx)
    if not isinstance(found, StreamVariable):
        _refuse(variable, method, f"takes a stream, not a {found.python_type_name()}")
    return found


def stream_wait_event(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    event = _argument(self, "wait_event", "event", args, kwargs)
    if not isinstance(event, EventVariable):
        _refuse(self, "wait_event", "takes an event")
    return _sync(tx, torch.ops.streams.wait_event, event.user_object_index, self.user_object_index)


def stream_wait_stream(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    other = _argument(self, "wait_stream", "stream", args, kwargs)
    if not isinstance(other, StreamVariable):
        _refuse(self, "wait_stream", "takes a stream")
    return _sync(tx, torch.ops.streams.wait_stream, self.user_object_index, other.user_object_index)


def stream_record_event(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    event = _argument(self, "record_event", "event", args, kwargs)
    if event is None:
        event = new_event(tx, torch.cuda.Event if issubclass(self.python_type(), torch.cuda.Stream) else torch.Event)
    if not isinstance(event, EventVariable):
        _refuse(self, "record_event", "takes an event")
    _record(tx, event, self)
    return event


def stream_query(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return runtime_bool(tx, ops.query_stream, self.user_object_index)


def event_wait(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    stream = _stream(self, tx, "wait", args, kwargs)
    return _sync(tx, torch.ops.streams.wait_event, self.user_object_index, stream.user_object_index)


def event_record(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return _record(tx, self, _stream(self, tx, "record", args, kwargs))


def event_query(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return runtime_bool(tx, ops.query_event, self.user_object_index)


def event_elapsed_time(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    end = _argument(self, "elapsed_time", "end_event", args, kwargs)
    if not isinstance(end, EventVariable) or end.user_object_index is None:
        _refuse(self, "elapsed_time", "takes an event")
    return runtime_scalar(tx, ops.elapsed_time, self.user_object_index, end.user_object_index)


def _is_made_here(stream: StreamVariable) -> bool:
    entry = registry.current().entries.get(stream.user_object_index)  # type: ignore[arg-type]
    return entry is not None and entry.origin == "frame"


def _ask_the_run_or_guard(
    stream: StreamVariable, tx: InstructionTranslatorBase, op: Any, attribute: str
) -> VariableTracker:
    if _is_made_here(stream):
        assert stream.user_object_index is not None
        return runtime_scalar(tx, op, stream.user_object_index)
    return _guarded(stream, attribute)


def _guarded(stream: StreamVariable, attribute: str) -> VariableTracker:
    """Return a number that identifies the stream as a constant, under a guard that the stream is the same."""
    _guard_identity(stream)
    return ConstantVariable.create(getattr(stream.value, attribute))


def _guard_identity(stream: StreamVariable) -> None:
    source = stream.callers_source if isinstance(stream, CallersStreamVariable) else stream.source
    if source is not None:
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def stream_device(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    """Return the device; None if the caller made the stream: upstream then reads and guards the object's attribute."""
    return None if self.source is not None else VariableTracker.build(tx, self.value.device)


def stream_device_index(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    return None if self.source is not None else ConstantVariable.create(self.value.device.index)


def stream_priority(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker:
    if not _is_made_here(self):
        return _guarded(self, "priority")
    requested = registry.current().entries[self.user_object_index].priority  # type: ignore[index]
    if requested is None:
        _refuse(self, "priority", "is known only at run time")
    # CUDA clamps the priority to the range.
    least, greatest = getattr(torch.cuda.Stream, "priority_range")()  # noqa: B009, the stub takes it for a method
    return ConstantVariable.create(max(greatest, min(least, requested)))


def stream_repr(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker:
    """Format the stream at run time: upstream does it when the graph has run, so the text needs no guard."""
    return StringFormatVariable.create(tx, "{}", [self], {})


def event_device(self: EventVariable, tx: InstructionTranslatorBase) -> VariableTracker:
    """Return the device of the event's first record; a torch.cuda.Event has none before."""
    recorded = registry.current().recorded.get(self.user_object_index)
    if recorded is None and self.source is not None:
        install_guard(AttrSource(self.source, "device").make_guard(GuardBuilder.EQUALS_MATCH))
    return VariableTracker.build(tx, recorded or self.value.device)


def _record(tx: InstructionTranslatorBase, event: EventVariable, stream: StreamVariable) -> VariableTracker:
    if event.value.device is None:
        registry.current().recorded.setdefault(event.user_object_index, stream.device)
    return _sync(tx, torch.ops.streams.record_event, event.user_object_index, stream.user_object_index)


def stream_hash(self: StreamVariable, tx: InstructionTranslatorBase) -> tuple[int, bool]:
    if _is_made_here(self):
        return id(self.value), True
    _guard_identity(self)
    return hash(self.value), False


def stream_compare(
    self: StreamVariable, tx: InstructionTranslatorBase, other: VariableTracker, op: str
) -> VariableTracker | None:
    """Return whether a stream is equal to another one, or isn't; None for other comparisons."""
    if op not in ("__eq__", "__ne__") or not isinstance(other, StreamVariable):
        return None
    equal = _equal(self, other, tx)
    if isinstance(equal, VariableTracker):
        return equal if op == "__eq__" else VariableTracker.build(tx, operator.not_).call_function(tx, [equal], {})
    return ConstantVariable.create(equal == (op == "__eq__"))


def _equal(left: StreamVariable, right: StreamVariable, tx: InstructionTranslatorBase) -> bool | VariableTracker:
    # torch.cuda.Stream.__eq__ compares the types first; a plain torch.Stream on the left defers to it.
    if issubclass(left.python_type(), torch.cuda.Stream) != issubclass(right.python_type(), torch.cuda.Stream):
        return False
    if left.user_object_index == right.user_object_index:
        return True
    if _is_made_here(left) or _is_made_here(right):
        return runtime_bool(tx, ops.same_stream, left.user_object_index, right.user_object_index)  # type: ignore[arg-type]
    left_is_callers = isinstance(left, CallersStreamVariable)
    right_is_callers = isinstance(right, CallersStreamVariable)
    value = torch.Stream.__eq__(left.value, right.value)
    if left_is_callers and right_is_callers:
        return value  # they are on two devices
    callers_stream, other = (left, right) if left_is_callers else (right, left)
    at_entry_device = callers_stream.user_object_index == registry.CALLERS_STREAM_INDEX
    if (left_is_callers or right_is_callers) and at_entry_device and other.source is not None:
        install_guard(other.source.make_guard(GuardBuilder.CURRENT_STREAM_MATCH))
    else:
        _guard_identity(left)
        _guard_identity(right)
    return value


def stream_handle(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker:
    registry.current().handle_is_read = True
    return _ask_the_run_or_guard(self, tx, ops.stream_handle, "cuda_stream")


def stream_id(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker:
    return _ask_the_run_or_guard(self, tx, ops.stream_id, "stream_id")


# For the operators on which programs branch: the text of the error.
_QUESTIONS = {
    ops.query_event: "whether an event has happened (`query`)",
    ops.query_stream: "whether a stream is done (`query`)",
    ops.same_stream: "whether a stream that the function makes is another one",
    ops.is_capturing: "whether a CUDA graph is being captured (`is_current_stream_capturing`)",
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
    number = runtime_scalar(tx, op, *indices)
    return VariableTracker.build(tx, operator.ne).call_function(tx, [number, VariableTracker.build(tx, 0)], {})


def branch_error(number: Any, output: OutputGraph | None) -> str | None:
    """Return what is wrong with a branch on a symbolic number, if it is one of ours, and what to do."""
    state = getattr(getattr(output, "root_tx", None), "symbolic_stream_state", None)
    known = getattr(state, "run_time_symbols", {})
    asked = [known[s] for s in number.sym_num.node.expr.free_symbols if s in known]
    if not asked:
        return None
    wait = "; or, if it is there to wait for work, call `synchronize()` instead" if "(`query`)" in asked[0] else ""
    return (
        f"A branch on {asked[0]} can't be compiled into one graph: the answer is only known when the code runs. "
        "Leave out fullgraph=True, and the graph breaks here, so that the branch is taken at run time; or return "
        f"the answer and branch outside of the compiled function{wait}."
    )
