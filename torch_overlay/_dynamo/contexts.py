"""Traces stream contexts, `with s:`, `with torch.cuda.stream(s):`, `with StreamContext(s):`, and hooks on variables of
streams and events.

Entering a context puts its stream's index on the FX nodes of the block (upstream's annotation) and changes the symbolic
state (state.py). Entering the context of a stream of another device also makes that device current, as in eager.

Contexts that are entered and left by calls of `__enter__` and `__exit__`, as `contextlib.ExitStack` does, need not end
where their block does, nor in reverse order of entry. So a stream context behaves as in eager: `__enter__` makes the
stream current and remembers the stream that was current before, `__exit__` makes that one current again. Both call
`set_stream` on the symbolic state. Profiler ranges (ranges.py) are traced in the same way.

A context that is open when the graph ends is refused: the object that the caller has, or that crosses a graph break,
would not know which stream to restore.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn, TYPE_CHECKING

import torch
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import CUDADeviceVariable, NullContextVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.misc import CallMethodVariable
from torch._dynamo.variables.streams import EventVariable, StreamContextVariable, StreamVariable

from torch_overlay._dynamo import registry
from torch_overlay._dynamo.methods import stream_compare
from torch_overlay._dynamo.state import expects_streams, handled


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


class _StreamBlock(StreamContextVariable):
    """Context of one `with s:` block. A stream may be entered again inside its own block."""


def setup_or_before_with(original: Callable[..., None], tx: InstructionTranslatorBase, inst: Instruction) -> None:
    """Wrap the instruction that begins a with block: a stream becomes the context of its block."""
    context = tx.stack[-1].realize()
    if isinstance(context, StreamVariable) and handled(tx):
        tx.stack[-1] = _StreamBlock(context)
    original(tx, inst)


def create(
    original: Callable[..., VariableTracker], tx: InstructionTranslatorBase, stream: VariableTracker, **kwargs: Any
) -> VariableTracker:
    """Wrap the making of a context: trace torch.cuda.stream(s) and torch.cuda.StreamContext(s)."""
    if not handled(tx):
        return original(tx, stream, **kwargs)
    stream = stream.realize()
    registry.note_streams()
    if stream.is_constant_none():
        return NullContextVariable()
    if not isinstance(stream, StreamVariable):
        unimplemented(
            gb_type="stream context of something that is not a stream",
            context=str(stream),
            explanation="torch.cuda.stream takes a stream or None.",
            hints=[*graph_break_hints.USER_ERROR],
        )
    return StreamContextVariable(stream, **kwargs)


def enter(
    original: Callable[..., VariableTracker],
    context: StreamContextVariable,
    tx: InstructionTranslatorBase,
    *args: VariableTracker,
) -> VariableTracker:
    if not handled(tx):
        return original(context, tx, *args)
    stream = context.get_stream()
    state = tx.symbolic_stream_state
    context.stream_now = stream
    context.overlay_device_context = None
    if stream.device.type == "cuda" and stream.device.index != state.device_index():
        context.overlay_device_context = CUDADeviceVariable.create(tx, stream.device.index)
        context.overlay_device_context.enter(tx)
    result = original(context, tx, *args)
    state.levels[-1].context = context
    return stream if isinstance(context, _StreamBlock) else result


def exit(
    original: Callable[..., VariableTracker],
    context: StreamContextVariable,
    tx: InstructionTranslatorBase,
    *args: VariableTracker,
) -> VariableTracker:
    if not handled(tx):
        return original(context, tx, *args)
    result = original(context, tx, *args)
    if context.overlay_device_context is not None:
        context.overlay_device_context.exit(tx)
    if not tx.output.should_exit:
        # The block has ended. At a graph break it goes on, and entering it again needs the stream that set_stream set.
        context.stream_now = None
    return result if result is not None else ConstantVariable.create(None)


def tp_richcompare_impl(
    original: Callable[..., VariableTracker],
    stream: StreamVariable,
    tx: InstructionTranslatorBase,
    other: VariableTracker,
    op: str,
) -> VariableTracker:
    found = stream_compare(stream, tx, other, op) if handled(tx) else None
    return found or original(stream, tx, other, op)


def reconstruct(original: Callable[..., None], variable: StreamVariable | EventVariable, codegen: PyCodegen) -> None:
    """Push the same object, made by the frame, that the graph used."""
    if handled(codegen.tx) and (index := variable.user_object_index) is not None:
        codegen.append_output(codegen.create_load(registry.local_of(codegen.tx.output, index)))
    else:
        original(variable, codegen)


_METHODS = ("__enter__", "__exit__")


class NvtxRange:
    """Type of torch.cuda.nvtx.range(...) while tracing; contextlib's class doesn't tell which generator it runs."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


_STREAMS = (torch.Stream, torch.cuda.StreamContext)
_RANGES = (NvtxRange, torch.profiler.record_function)


def context_enter(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    """Enter a stream context. The result is the stream for a stream, None for a StreamContext."""
    stream, state = self.get_stream(), tx.symbolic_stream_state
    state.manual.append((self, state.current(tx, stream.device.index)))
    state.set_stream(tx, stream)
    return self if isinstance(self, StreamVariable) else ConstantVariable.create(None)


def context_exit(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    state = tx.symbolic_stream_state
    state.set_stream(tx, _leave(tx, self))
    return ConstantVariable.create(None)


def range_enter(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker | None:
    """Enter a range. None declines: upstream then traces the code of the class, or doesn't."""
    if not expects_streams(tx):
        return None
    tx.symbolic_stream_state.manual.append((self, None))
    return self.enter(tx)


def range_exit(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker | None:
    if not expects_streams(tx):
        return None
    _leave(tx, self)
    return self.exit(tx)


def _leave(tx: InstructionTranslatorBase, context: VariableTracker) -> Any:
    """Forget the last entry of the context; return the stream that was current before it."""
    manual = tx.symbolic_stream_state.manual
    last = next((i for i in reversed(range(len(manual))) if manual[i][0] is context), None)
    if last is None:
        _refuse("is left by a call of `__exit__`, and was not entered by one of `__enter__` in the same graph", context)
    return manual.pop(last)[1]


def _refuse(why: str, context: VariableTracker) -> NoReturn:
    unimplemented(
        gb_type="context that is entered by a call",
        context=str(context),
        explanation=f"The context of a stream or a range {why}.",
        hints=["Use a block, such as `with torch.cuda.stream(s):`.", *graph_break_hints.SUPPORTABLE],
    )


def refuse_open_contexts(tx: InstructionTranslatorBase) -> None:
    """Refuse contexts that are open at the end of a graph. Runs before any code is made for the graph."""
    if handled(tx) and (open_ones := tx.symbolic_stream_state.manual):
        _refuse("that was entered by a call of `__enter__` is open where the graph ends", open_ones[-1][0])


class _UnboundMethod(VariableTracker):
    """`__enter__` or `__exit__` as an attribute of torch.cuda.StreamContext or of the class of a stream or a range."""

    _nonvar_fields = {"descriptor", "name", *VariableTracker._nonvar_fields}

    def __init__(self, descriptor: object, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.descriptor, self.name = descriptor, name

    def python_type(self) -> type:
        return type(self.descriptor)

    def as_python_constant(self) -> object:
        return self.descriptor

    def call_function(
        self, tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        context, *rest = args
        return context.realize().call_method(tx, self.name, rest, kwargs)


def unbound_method(tx: InstructionTranslatorBase, cls: type, name: str, descriptor: object) -> VariableTracker | None:
    """Return the variable of `__enter__` or `__exit__` as an attribute of the class of a context; None for others."""
    if name not in _METHODS or not handled(tx) or not tx.symbolic_stream_state.cuda:
        return None
    is_context = issubclass(cls, _STREAMS) or (issubclass(cls, _RANGES) and expects_streams(tx))
    return _UnboundMethod(descriptor, name) if is_context else None


def bind(tx: InstructionTranslatorBase, cls: object, args: Any) -> VariableTracker | None:
    """Trace types.MethodType(torch.cuda.StreamContext.__exit__, context); also for the nullcontext of no stream."""
    if cls is not types.MethodType or len(args) != 2:
        return None
    method, context = args[0], args[1].realize()
    if isinstance(method, _UnboundMethod):
        return CallMethodVariable(context, method.name)
    if isinstance(context, NullContextVariable) and isinstance(method, UserFunctionVariable):
        # `nullcontext() if s is None else torch.cuda.stream(s)`; upstream has no methods for a nullcontext.
        return UserMethodVariable(method, context) if expects_streams(tx) else None
    return None
