"""Traces stream contexts, `with s:`, `with torch.cuda.stream(s):`, `with StreamContext(s):`, and hooks on variables of
streams and events.

Entering a context puts its stream's index on the FX nodes of the block (upstream's annotation) and changes the symbolic
state (state.py). Entering the context of a stream of another device also makes that device current, as in eager.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import CUDADeviceVariable, NullContextVariable
from torch._dynamo.variables.streams import EventVariable, StreamContextVariable, StreamVariable

from torch_overlay._dynamo import registry
from torch_overlay._dynamo.methods import stream_compare
from torch_overlay._dynamo.state import handled


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


class _StreamBlock(StreamContextVariable):
    """Context of one `with s:` block. A stream may be entered again inside its own block."""

    def __init__(self, stream: StreamVariable) -> None:
        self.overlay_stream = stream
        super().__init__(stream)


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
    return context.overlay_stream if isinstance(context, _StreamBlock) else result


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
    if not handled(codegen.tx) or variable.user_object_index is None:
        return original(variable, codegen)
    name = registry.local_of(codegen.tx.output, variable.user_object_index)
    codegen.append_output(codegen.create_load(name))
    return None
