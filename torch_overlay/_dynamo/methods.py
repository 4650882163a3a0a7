"""Methods and attributes of streams and events in Dynamo.

Ordering calls become nodes of the `streams` operators, with indices as upstream has them; questions that only the run
can answer become nodes of ours (ops.py). No method touches the object it is called on.

Comparisons and hashes are answered while tracing. What such an answer rests on is guarded: for a stream of the caller
its identity, or, if it is compared with the current stream, only whether it is that. For a stream that the frame makes
only the run can compare, except with itself.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.base import GetSet, Method, readonly_setter, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.streams import CudaStreamVariable, EventVariable, StreamVariable

from torch_overlay._dynamo import ops, registry
from torch_overlay._dynamo.construct import new_event
from torch_overlay._dynamo.ops import runtime_bool, runtime_scalar
from torch_overlay._dynamo.state import AmbientStreamVariable, handled


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

Handler = (
    "Callable[[Any, InstructionTranslatorBase, list[VariableTracker], dict[str, VariableTracker]], VariableTracker]"
)


def _argument(
    variable: VariableTracker, method: str, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker | None:
    """The one argument of a method, given by position or by name; None if it is absent or None."""
    given = [*args, *(value for key, value in kwargs.items() if key == name)]
    if len(given) > 1 or len(given) != len(args) + len(kwargs):
        _refuse(variable, method, f"takes the one argument `{name}`")
    if not given:
        return None
    found = given[0].realize()
    return None if found.is_constant_none() else found


def _refuse(variable: VariableTracker, method: str, why: str) -> Any:
    unimplemented(
        gb_type="stream or event method that can't be traced",
        context=f"{variable.python_type_name()}.{method}",
        explanation=f"{variable.python_type_name()}.{method} {why}.",
        hints=[*graph_break_hints.USER_ERROR],
    )


def _sync(tx: InstructionTranslatorBase, op: Any, *indices: int | None) -> VariableTracker:
    tx.output.create_proxy("call_function", op, indices, {})
    return ConstantVariable.create(None)


def _stream(
    variable: VariableTracker, tx: InstructionTranslatorBase, method: str, args: list[Any], kwargs: dict[str, Any]
) -> StreamVariable:
    """The stream argument of an event's method; without one, the current stream."""
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
    _sync(tx, torch.ops.streams.record_event, event.user_object_index, self.user_object_index)
    return event


def stream_synchronize(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return _sync(tx, torch.ops.streams.synchronize_stream, self.user_object_index)


def stream_query(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return runtime_bool(tx, ops.query_stream, self.user_object_index)


def event_wait(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    stream = _stream(self, tx, "wait", args, kwargs)
    return _sync(tx, torch.ops.streams.wait_event, self.user_object_index, stream.user_object_index)


def event_record(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    stream = _stream(self, tx, "record", args, kwargs)
    return _sync(tx, torch.ops.streams.record_event, self.user_object_index, stream.user_object_index)


def event_synchronize(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return _sync(tx, torch.ops.streams.synchronize_event, self.user_object_index)


def event_query(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    return runtime_bool(tx, ops.query_event, self.user_object_index)


def event_elapsed_time(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    end = _argument(self, "elapsed_time", "end_event", args, kwargs)
    if not isinstance(end, EventVariable):
        _refuse(self, "elapsed_time", "takes an event")
    return runtime_scalar(tx, ops.elapsed_time, self.user_object_index, end.user_object_index)


def _is_made_here(stream: StreamVariable) -> bool:
    entry = registry.current().entries.get(stream.user_object_index)  # type: ignore[arg-type]
    return entry is not None and entry.origin == "frame"


def _ask_the_run(op: Any, attribute: str) -> Callable[[Any, InstructionTranslatorBase], VariableTracker | None]:
    def getter(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
        if not handled(tx):
            return None
        if _is_made_here(self):
            return runtime_scalar(tx, op, self.user_object_index)  # type: ignore[arg-type]
        return _guarded(self, attribute)

    return getter


def _guarded(stream: StreamVariable, attribute: str) -> VariableTracker:
    """A number that names the stream: right for as long as the stream is the same."""
    _guard_identity(stream)
    return ConstantVariable.create(getattr(stream.value, attribute))


def _guard_identity(stream: StreamVariable) -> None:
    source = stream.ambient_source if isinstance(stream, AmbientStreamVariable) else stream.source
    if source is not None:
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def stream_device(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    if not handled(tx) or (self.source is not None and self.current_device is None):
        return self._stream_device_get(tx)
    return VariableTracker.build(tx, self.value.device)


def stream_device_index(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    if not handled(tx) or (self.source is not None and self.current_device is None):
        return self._stream_device_index_get(tx)
    return ConstantVariable.create(self.value.device.index)


def stream_priority(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
    if not handled(tx) or not issubclass(self.python_type(), torch.cuda.Stream):
        return None
    if not _is_made_here(self):
        return _guarded(self, "priority")
    requested = registry.current().entries[self.user_object_index].priority  # type: ignore[index]
    if requested is None:
        _refuse(self, "priority", "is known only at run time")
    # CUDA takes what is outside the range to its nearest end.
    least, greatest = torch.cuda.Stream.priority_range()
    return ConstantVariable.create(max(greatest, min(least, requested)))


def stream_hash(self: StreamVariable, tx: InstructionTranslatorBase) -> tuple[int, bool]:
    if not handled(tx):
        return VariableTracker.hash_impl(self, tx)
    if _is_made_here(self):
        return id(self.value), True
    _guard_identity(self)
    return hash(self.value), False


def stream_compare(
    original: Callable[..., VariableTracker],
    self: StreamVariable,
    tx: InstructionTranslatorBase,
    other: VariableTracker,
    op: str,
) -> VariableTracker:
    if not handled(tx) or op not in ("__eq__", "__ne__") or not isinstance(other, StreamVariable):
        return original(self, tx, other, op)
    equal = _equal(self, other, tx)
    if isinstance(equal, VariableTracker):
        return equal if op == "__eq__" else _negation(tx, equal)
    return ConstantVariable.create(equal == (op == "__eq__"))


def _negation(tx: InstructionTranslatorBase, value: VariableTracker) -> VariableTracker:
    import operator

    return VariableTracker.build(tx, operator.not_).call_function(tx, [value], {})


def _equal(left: StreamVariable, right: StreamVariable, tx: InstructionTranslatorBase) -> bool | VariableTracker:
    # torch.cuda.Stream.__eq__ asks for the type first; a plain torch.Stream on the left defers to it.
    if issubclass(left.python_type(), torch.cuda.Stream) != issubclass(right.python_type(), torch.cuda.Stream):
        return False
    if left.user_object_index == right.user_object_index:
        return True
    if _is_made_here(left) or _is_made_here(right):
        return runtime_bool(tx, ops.same_stream, left.user_object_index, right.user_object_index)  # type: ignore[arg-type]
    left_ambient, right_ambient = isinstance(left, AmbientStreamVariable), isinstance(right, AmbientStreamVariable)
    value = torch.Stream.__eq__(left.value, right.value)
    if left_ambient and right_ambient:
        return value  # of two devices
    ambient, other = (left, right) if left_ambient else (right, left)
    at_entry_device = ambient.user_object_index == registry.AMBIENT_INDEX
    if (left_ambient or right_ambient) and at_entry_device and other.source is not None:
        install_guard(other.source.make_guard(GuardBuilder.CURRENT_STREAM_MATCH))
    else:
        _guard_identity(left)
        _guard_identity(right)
    return value


def reconstruct(original: Callable[..., None], self: StreamVariable | EventVariable, codegen: PyCodegen) -> None:
    """Pushes an object that the frame made: the very one that the graph used."""
    if not handled(codegen.tx) or self.user_object_index is None:
        return original(self, codegen)
    name = registry.local_of(codegen.tx.output, self.user_object_index)
    codegen.append_output(codegen.create_load(name))
    return None


_STREAM_METHODS = {
    "wait_event": stream_wait_event,
    "wait_stream": stream_wait_stream,
    "record_event": stream_record_event,
    "synchronize": stream_synchronize,
    "query": stream_query,
}
_EVENT_METHODS = {
    "wait": event_wait,
    "record": event_record,
    "synchronize": event_synchronize,
    "query": event_query,
    "elapsed_time": event_elapsed_time,
}


def register(streams: ModuleType) -> Callable[[], None]:
    """Puts our methods and attributes in the tables of upstream's variables; they decline where we don't handle."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def update(table: dict[str, Any], entries: dict[str, Any]) -> None:
        saved.append((table, dict(table)))
        table.update(entries)

    def methods(cls: Any, ours: dict[str, Any]) -> dict[str, Any]:
        return {name: Method(_choose(ours[name], cls.tp_methods.get(name))) for name in ours}

    update(streams.StreamVariable.tp_methods, methods(streams.StreamVariable, _STREAM_METHODS))
    update(streams.EventVariable.tp_methods, methods(streams.EventVariable, _EVENT_METHODS))
    update(
        streams.StreamVariable.tp_getset,
        {
            "device": GetSet(stream_device, readonly_setter),
            "device_index": GetSet(stream_device_index, readonly_setter),
            "stream_id": GetSet(_ask_the_run(ops.stream_id, "stream_id"), readonly_setter),
            "priority": GetSet(stream_priority, readonly_setter),
            "cuda_stream": GetSet(_cuda_stream(None), readonly_setter),
        },
    )
    upstream_getter = streams.CudaStreamVariable.tp_getset["cuda_stream"].getter
    update(
        streams.CudaStreamVariable.tp_getset, {"cuda_stream": GetSet(_cuda_stream(upstream_getter), readonly_setter)}
    )

    streams.StreamVariable.hash_impl = stream_hash

    def undo() -> None:
        del streams.StreamVariable.hash_impl
        for table, contents in reversed(saved):
            table.clear()
            table.update(contents)

    return undo


def _cuda_stream(upstream: Callable[..., Any] | None) -> Callable[..., VariableTracker | None]:
    ours = _ask_the_run(ops.stream_handle, "cuda_stream")

    def getter(self: StreamVariable, tx: InstructionTranslatorBase) -> VariableTracker | None:
        if handled(tx) and issubclass(self.python_type(), torch.cuda.Stream):
            return ours(self, tx)
        return None if upstream is None else upstream(self, tx)

    return getter


def _choose(ours: Callable[..., Any], upstream: Method | None) -> Callable[..., VariableTracker | None]:
    def handler(
        self: Any, tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker | None:
        if handled(tx):
            return ours(self, tx, list(args), dict(kwargs))
        return None if upstream is None else upstream.handler(self, tx, args, kwargs)

    return handler
