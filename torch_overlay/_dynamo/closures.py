"""Finds functions whose closure cells or default arguments hold streams or events, and gives them a source.

The methods of an object that a frame makes have no source: Dynamo takes the contents of their cells and defaults for
constants, and can't make a constant of a stream. With a source, a weak reference in the globals of the compiled code,
it looks up and guards their cells as those of a function of the caller.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch
from torch._dynamo.source import GlobalWeakRefSource


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._dynamo.source import Source
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

_STREAM_TYPES = (torch.Stream, torch.Event, torch.cuda.StreamContext)
_MOST_OBJECTS = 1000  # searched per function


def _inside(value: object) -> Iterable[object]:
    """Return the objects that a value holds, as far as they are searched for streams."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _held(value)
    if isinstance(value, (type, types.ModuleType, torch.Tensor)):
        return ()
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else ()


def _held(function: types.FunctionType) -> list[object]:
    held: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the cell has not been assigned
            continue
    return held


def holds_streams(function: types.FunctionType) -> bool:
    """True if a cell or a default of the function holds a stream or event, or an object that holds one."""
    todo, seen = _held(function), set()
    while todo and len(seen) < _MOST_OBJECTS:
        value = todo.pop()
        if isinstance(value, _STREAM_TYPES):
            return True
        if id(value) not in seen:
            seen.add(id(value))
            todo.extend(_inside(value))
    return False


def weak_source(tx: InstructionTranslatorBase, function: types.FunctionType) -> Source:
    """Return a source of a function that has none: a weak reference in the globals of the compiled code."""
    tx.output.bypass_package("the compiled code has a reference to a function that the frame reaches on its own")
    return GlobalWeakRefSource(tx.store_global_weakref_by_id("__stream_function", function))
