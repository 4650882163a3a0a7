"""Stream contexts that are entered and left by calls of `__enter__` and `__exit__`, as `contextlib.ExitStack` does.

Such a context need not end where its block does, nor in the order in which others do. So it is what it is in eager:
`__enter__` makes the stream current and remembers which one was, `__exit__` makes that one current again. Both are
`set_stream` to the symbolic state (state.py).

A context that is open when the graph ends is refused: the object that the caller has, or that crosses a graph break,
would not know what to go back to.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn, TYPE_CHECKING

import torch
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import NullContextVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.misc import CallMethodVariable
from torch._dynamo.variables.streams import StreamVariable

from torch_overlay._dynamo.state import handled
from torch_overlay._dynamo.stream_frames import expects_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

_METHODS = ("__enter__", "__exit__")


def context_enter(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    """A stream returns itself, a StreamContext None."""
    stream, state = self.get_stream(), tx.symbolic_stream_state
    state.manual.append((self, state.current(tx, stream.device.index)))
    state.set_stream(tx, stream)
    return self if isinstance(self, StreamVariable) else ConstantVariable.create(None)


def context_exit(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> VariableTracker:
    state = tx.symbolic_stream_state
    last = next((i for i in reversed(range(len(state.manual))) if state.manual[i][0] is self), None)
    if last is None:
        _refuse("is left by a call of `__exit__`, and was not entered by one of `__enter__` in the same graph", self)
    _, previous = state.manual.pop(last)
    state.set_stream(tx, previous)
    return ConstantVariable.create(None)


def _refuse(why: str, context: VariableTracker) -> NoReturn:
    unimplemented(
        gb_type="stream context that is entered by a call",
        context=str(context),
        explanation=f"A stream context {why}.",
        hints=["Use `with torch.cuda.stream(s):`.", *graph_break_hints.SUPPORTABLE],
    )


def refuse_open_contexts(tx: InstructionTranslatorBase) -> None:
    """At the end of a graph, before anything is made of it."""
    if open_ones := tx.symbolic_stream_state.manual:
        _refuse("that was entered by a call of `__enter__` is open where the graph ends", open_ones[-1][0])


class _UnboundMethod(VariableTracker):
    """`torch.cuda.StreamContext.__enter__`, or `__exit__`, or one of a stream class."""

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


def resolve_cls_descriptor(
    original: Callable[..., VariableTracker],
    variable: Any,
    tx: InstructionTranslatorBase,
    name: str,
    descriptor: object,
    source: Any,
) -> VariableTracker:
    """Around the attribute of a class that is a descriptor."""
    if (
        name in _METHODS
        and issubclass(variable.value, (torch.Stream, torch.cuda.StreamContext))
        and handled(tx)
        and tx.symbolic_stream_state.cuda
    ):
        return _UnboundMethod(descriptor, name)
    return original(variable, tx, name, descriptor, source)


def bind(tx: InstructionTranslatorBase, cls: object, args: Any) -> VariableTracker | None:
    """types.MethodType(torch.cuda.StreamContext.__exit__, context), and what takes its place for no stream."""
    if cls is not types.MethodType or len(args) != 2:
        return None
    method, context = args[0], args[1].realize()
    if isinstance(method, _UnboundMethod):
        return CallMethodVariable(context, method.name)
    if isinstance(context, NullContextVariable) and isinstance(method, UserFunctionVariable):
        # `nullcontext() if s is None else torch.cuda.stream(s)`; upstream knows no methods of it.
        return UserMethodVariable(method, context) if expects_streams(tx) else None
    return None
