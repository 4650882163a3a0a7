"""Traces functions of torch.cuda and torch.accelerator that get or set the current stream, or synchronize, and how
programs look up their streams: cached properties of objects, dictionaries with an entry per thread.

If a cached property that holds a stream has not been read yet, the frame makes the stream and stores it in the object
as the property does. The number of the thread is a constant under a guard, since it is the key of a dictionary: each
thread gets code of its own.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NoReturn, TYPE_CHECKING

import torch
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.graph_bytecode_inputs import register_user_object
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, GlobalSource
from torch._dynamo.utils import guard_if_dyn
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.streams import CudaStreamVariable, StreamVariable
from torch._dynamo.variables.tensor import CurrentDeviceVariable

from torch_overlay._dynamo import ops, registry
from torch_overlay._dynamo.methods import runtime_bool, stream_handle
from torch_overlay._dynamo.state import expects_streams, handled


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

    Handler = Callable[..., VariableTracker | None]


def _device_index(
    function: Callable[..., Any], args: tuple[VariableTracker, ...], kwargs: dict[str, VariableTracker]
) -> int | None:
    """Return the device argument as an index; None if there is none or it names no index."""
    given = [*args, *(value for key, value in kwargs.items() if key == "device")]
    name = f"{function.__module__}.{function.__name__}"
    if len(given) > 1 or len(given) != len(args) + len(kwargs):
        _refuse(name, f"args={args}, kwargs={kwargs}", "takes the one argument `device`")
    if not given:
        return None
    argument = given[0].realize()
    device = argument.value if isinstance(argument, CurrentDeviceVariable) else guard_if_dyn(argument)
    if device is None or isinstance(device, int):
        return device if device is not None and device >= 0 else None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        _refuse(name, str(device), f"does not know the device: {error}")
    if found.type != "cuda":
        _refuse(name, str(device), "takes a CUDA device here")
    return found.index


def _refuse(name: str, context: str, why: str) -> NoReturn:
    unimplemented(
        gb_type="stream function that can't be traced",
        context=f"{name}: {context}",
        explanation=f"{name} {why}.",
        hints=[*graph_break_hints.USER_ERROR],
    )


def current_stream(function: Any, tx: InstructionTranslatorBase, *args: Any, **kwargs: Any) -> VariableTracker:
    registry.note_streams()
    index = _device_index(function.value, args, kwargs)
    return tx.symbolic_stream_state.current(tx, index, base=function.value is torch.accelerator.current_stream)


def default_stream(function: Any, tx: InstructionTranslatorBase, *args: Any, **kwargs: Any) -> VariableTracker:
    """Trace default_stream. A device's default stream never changes, so the object lives with the compiled code."""
    state = tx.symbolic_stream_state
    index = _device_index(function.value, args, kwargs)
    index = state.device_index() if index is None else index
    found = state.default_streams.get(index)
    if found is None:
        tx.output.bypass_package("the object of a default stream lives with the compiled code")
        value = torch.cuda.default_stream(index)
        source = GlobalSource(tx.output.install_global_by_id("__default_stream", value))
        number = register_user_object(value, source)
        proxy = registry.look_up(tx, number, value)
        found = CudaStreamVariable(proxy, value, user_object_index=number, source=source)
        state.default_streams[index] = found
    return found


def set_stream(function: Any, tx: InstructionTranslatorBase, stream: Any) -> VariableTracker:
    stream = stream.realize()
    if stream.is_constant_none() and function.value is torch.cuda.set_stream:
        return ConstantVariable.create(None)
    if not isinstance(stream, StreamVariable):
        _refuse(f"{function.value.__module__}.set_stream", str(stream), "takes a stream")
    tx.symbolic_stream_state.set_stream(tx, stream)
    return ConstantVariable.create(None)


def synchronize(function: Any, tx: InstructionTranslatorBase, *args: Any, **kwargs: Any) -> VariableTracker:
    """Trace synchronize; without a device it synchronizes the device that is current at run time."""
    state = tx.symbolic_stream_state
    index = _device_index(function.value, args, kwargs)
    if index is None and state.device_index() != state.entry_device:
        index = state.device_index()
    tx.output.create_proxy("call_function", torch.ops.streams.synchronize_device, ("cuda", index), {})
    return ConstantVariable.create(None)


def raw_stream(function: Any, tx: InstructionTranslatorBase, *args: Any, **kwargs: Any) -> VariableTracker:
    """Return the handle of the current stream of a device."""
    registry.note_streams()
    index = guard_if_dyn(args[0].realize()) if len(args) == 1 and not kwargs else None
    if not isinstance(index, int):
        _refuse("torch._C._cuda_getCurrentRawStream", f"args={args}, kwargs={kwargs}", "takes the index of a device")
    return stream_handle(tx.symbolic_stream_state.current(tx, index), tx)


def is_current_stream_capturing(function: Any, tx: InstructionTranslatorBase) -> VariableTracker | None:
    """Return whether the current stream or the caller's stream is being captured.

    A side stream joins the capture of the caller's stream by a wait, and compiled code may issue this wait later than
    the program does, so the run asks both.
    """
    if not expects_streams(tx):
        return None
    state = tx.symbolic_stream_state
    stream = state.current(tx)
    caller = state.callers_stream(tx, stream.device.index)
    return runtime_bool(tx, ops.is_capturing, stream.user_object_index, caller.user_object_index)


def handlers() -> dict[Callable[..., Any], Handler]:
    """Return the function that traces each function; it returns None to decline."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not in builds without CUDA
    return {
        torch.cuda.current_stream: current_stream,
        torch.accelerator.current_stream: current_stream,
        torch.cuda.default_stream: default_stream,
        torch.cuda.set_stream: set_stream,
        torch.accelerator.set_stream: set_stream,
        torch.cuda.synchronize: synchronize,
        torch.accelerator.synchronize: synchronize,
        torch.cuda.is_current_stream_capturing: is_current_stream_capturing,
        **({raw: raw_stream} if raw is not None else {}),
    }


def choose(ours: Handler, other: Callable[..., Any] | None) -> Handler:
    """Return a handler: `ours` in frames with a StreamState of CUDA, `other` in the rest or if it declines."""

    def handler(function: Any, tx: InstructionTranslatorBase, *args: Any, **kwargs: Any) -> VariableTracker | None:
        if handled(tx) and tx.symbolic_stream_state.cuda:
            found = ours(function, tx, *args, **kwargs)
            if found is not None:
                return found
        return None if other is None else other(function, tx, *args, **kwargs)

    return handler


_THREAD = {threading.get_ident: "get_ident", threading.get_native_id: "get_native_id"}


def call_skipped(
    original: Callable[..., VariableTracker],
    variable: Any,
    tx: InstructionTranslatorBase,
    args: list[VariableTracker],
    kwargs: dict[str, VariableTracker],
) -> VariableTracker:
    """Wrap the call of a function that Dynamo doesn't trace: thread numbers and the raw current stream."""
    function = variable.value
    # Looked up by name at each call, because a simulated GPU replaces the function.
    if function is torch._C._cuda_getCurrentRawStream and expects_streams(tx):
        return raw_stream(variable, tx, *args, **kwargs)
    name = _THREAD.get(function) if type(function) is type(threading.get_ident) else None
    if name is None or args or kwargs or not expects_streams(tx):
        return original(variable, tx, args, kwargs)
    source = CallFunctionNoArgsSource(AttrSource(tx.import_source("threading"), name))
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
    return ConstantVariable.create(function())


def invoke_descriptor_get(
    original: Callable[..., VariableTracker],
    owner: Any,
    tx: InstructionTranslatorBase,
    name: str,
    descriptor: object,
    source: Any,
) -> VariableTracker:
    """Wrap `__get__` of a descriptor: trace functools.cached_property, which holds a lock in some Python versions."""
    is_cached = type(descriptor) is functools.cached_property and descriptor.attrname == name
    if not is_cached or not expects_streams(tx):
        return original(owner, tx, name, descriptor, source)
    where = owner.get_source_by_walking_mro(tx, name) if owner.cls_source is not None else None
    getter = UserFunctionVariable(descriptor.func, source=where and AttrSource(where, "func"))
    value = UserMethodVariable(getter, owner).call_function(tx, [], {})
    tx.output.side_effects.store_instance_dict_attr(owner, name, value)
    return value
