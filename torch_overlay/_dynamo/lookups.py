"""Traces how programs look up their streams: cached properties of objects, dictionaries with an entry per thread.

If a cached property that holds a stream has not been read yet, the frame makes the stream and stores it in the object
as the property does. The number of the thread is a constant under a guard, since it is the key of a dictionary: each
thread gets code of its own.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable

from torch_overlay._dynamo.functions import raw_stream
from torch_overlay._dynamo.state import expects_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

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
