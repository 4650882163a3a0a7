"""Traces the construction of streams, events and stream contexts in the compiled frame.

Nothing is made while tracing: an object with an id that no stream has stands for a stream, an event that is never
recorded for an event (PyTorch makes the CUDA event at the first record). The frame makes the real ones at run time,
with the same class and arguments (registry.add_owned).
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn, TYPE_CHECKING

import torch
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.ctx_manager import CUDADeviceVariable, NullContextVariable
from torch._dynamo.variables.streams import CudaStreamVariable, EventVariable, StreamContextVariable, StreamVariable
from torch._dynamo.variables.tensor import CurrentDeviceVariable, TensorVariable

from torch_overlay._dynamo import registry
from torch_overlay._dynamo.state import expects_streams, handled


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

# Odd ids, beyond the 32 streams of each of PyTorch's pools, and never those of external streams, which are even.
_placeholder_ids = itertools.count((1 << 40) + 1, 2)


def make(
    tx: InstructionTranslatorBase, cls: object, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> VariableTracker | None:
    """Trace the call of a stream, event or context class of CUDA, or of a device-agnostic one; None for others."""
    maker = _MAKERS.get(cls) if isinstance(cls, type) else None
    if maker is None or not handled(tx) or not tx.symbolic_stream_state.cuda:
        return None
    if maker is make_device_context and not expects_streams(tx):
        return None
    return maker(tx, cls, args, kwargs)


def make_stream(
    tx: InstructionTranslatorBase,
    cls: type[torch.Stream],
    args: Sequence[VariableTracker],
    kwargs: Mapping[str, VariableTracker],
) -> StreamVariable:
    positional, named = _constants(cls, args, kwargs)
    given = {**dict(zip(("device", "priority"), positional)), **named}
    if not given.keys() <= {"device", "priority"} or len(positional) > (2 if cls is torch.cuda.Stream else 1):
        _refuse(cls, f"arguments {positional}, {named}", "Only the arguments device and priority are traced.")
    device = _device(tx, cls, given.get("device"))
    value = cls(stream_id=next(_placeholder_ids), device_index=device.index, device_type=1)
    priority = given.get("priority", 0)
    # The device is fixed here, so that the stream does not depend on which device is current at its first use.
    index = registry.add_owned(value, cls, (), {"device": device, "priority": priority}, priority=priority)
    return stream_variable(tx, value, index)


def make_external_stream(
    tx: InstructionTranslatorBase,
    cls: type[torch.Stream],
    args: Sequence[VariableTracker],
    kwargs: Mapping[str, VariableTracker],
) -> StreamVariable:
    """Make the ExternalStream while tracing: it only names a stream that exists, so the run uses the same object."""
    positional, named = _constants(cls, args, kwargs)
    given = {**dict(zip(("stream_ptr", "device"), positional)), **named}
    if not given.keys() <= {"stream_ptr", "device"} or not isinstance(given.get("stream_ptr"), int):
        _refuse(cls, f"arguments {positional}, {named}", "Only the arguments stream_ptr and device are traced.")
    device = _device(tx, cls, given.get("device"))
    value = torch.cuda.ExternalStream(given["stream_ptr"], device=device)
    index = registry.add_owned(value, cls, (given["stream_ptr"],), {"device": device})
    return stream_variable(tx, value, index)


def new_event(
    tx: InstructionTranslatorBase, cls: type[torch.Event], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
) -> EventVariable:
    """Return the variable of an event that the frame makes."""
    try:
        value = cls(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        _refuse(cls, f"arguments {args}, {kwargs}", f"The constructor fails: {error}")
    index = registry.add_owned(value, cls, args, dict(kwargs))
    return EventVariable(registry.look_up(tx, index, value), value, index)


def make_stream_context(
    tx: InstructionTranslatorBase,
    cls: type,
    args: Sequence[VariableTracker],
    kwargs: Mapping[str, VariableTracker],
) -> VariableTracker:
    given = [*args, *(value for name, value in kwargs.items() if name == "stream")]
    if len(given) != 1 or len(args) + len(kwargs) != 1:
        _refuse(cls, f"arguments {args}, {kwargs}", "StreamContext takes one stream.")
    return StreamContextVariable.create(tx, given[0])  # type: ignore[arg-type]


def make_device_context(
    tx: InstructionTranslatorBase,
    cls: type,
    args: Sequence[VariableTracker],
    kwargs: Mapping[str, VariableTracker],
) -> VariableTracker:
    """Trace torch.cuda.device_of(tensor): make the tensor's device current; change nothing if it has no CUDA device."""
    given = [*args, *(value for name, value in kwargs.items() if name == "obj")]
    tensor = given[0].realize() if given else None
    if len(given) != 1 or len(args) + len(kwargs) != 1 or not isinstance(tensor, TensorVariable):
        _refuse(cls, f"arguments {args}, {kwargs}", "device_of takes one tensor.")
    device = tensor.device
    if device is None or device.type != "cuda":
        return NullContextVariable()
    return CUDADeviceVariable.create(tx, device.index)


def stream_variable(tx: InstructionTranslatorBase, value: torch.Stream, index: int) -> StreamVariable:
    variable_class = CudaStreamVariable if isinstance(value, torch.cuda.Stream) else StreamVariable
    return variable_class(registry.look_up(tx, index, value), value, user_object_index=index)


def _constants(
    cls: type, args: Sequence[VariableTracker], kwargs: Mapping[str, VariableTracker]
) -> tuple[list[Any], dict[str, Any]]:
    from torch._dynamo.utils import specialize_symnode

    def constant(argument: VariableTracker) -> Any:
        # A symbolic int of the caller becomes a constant with a guard.
        argument = specialize_symnode(argument).realize()
        if isinstance(argument, CurrentDeviceVariable):
            return argument.value
        if argument.is_python_constant():
            return argument.as_python_constant()
        _refuse(cls, f"argument {argument}", "An argument of the constructor is known only at run time.")

    return [constant(one) for one in args], {name: constant(one) for name, one in kwargs.items()}


def _device(tx: InstructionTranslatorBase, cls: type, device: object) -> torch.device:
    current = tx.symbolic_stream_state.device_index()
    if device is None or (isinstance(device, int) and device < 0):
        return torch.device("cuda", current)
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)  # type: ignore[arg-type]
    if found.type != "cuda":
        _refuse(cls, f"device {found}", "Only streams of CUDA devices are traced.")
    return torch.device("cuda", current) if found.index is None else found


def _refuse(cls: type, context: str, why: str) -> NoReturn:
    unimplemented(
        gb_type="stream or event constructor that can't be traced",
        context=f"{cls.__module__}.{cls.__qualname__}: {context}",
        explanation=why,
        hints=["Make the object outside the compiled function and pass it in.", *graph_break_hints.SUPPORTABLE],
    )


_MAKERS: dict[type, Callable[..., VariableTracker]] = {
    torch.Stream: make_stream,
    torch.cuda.Stream: make_stream,
    torch.cuda.ExternalStream: make_external_stream,
    torch.Event: lambda tx, cls, args, kwargs: new_event(tx, cls, *_constants(cls, args, kwargs)),
    torch.cuda.Event: lambda tx, cls, args, kwargs: new_event(tx, cls, *_constants(cls, args, kwargs)),
    torch.cuda.StreamContext: make_stream_context,
    torch.cuda.device_of: make_device_context,
}
