"""Registers our handlers with upstream's modules when they are loaded, or, in the overlay form, at `enable()`.

In the patched form these functions run at the end of the modules that they change, while torch._dynamo is being
imported. So they register small functions, which import what they need when they are called.

Chooses between two handlers of a method or attribute of a stream or event, or of what they are used in.

Frames whose streams are known for each device (state.py) have handlers of their own; others, of other accelerators,
have those that are given. Tables of handlers are made while torch._dynamo is being imported. So what a handler needs is
imported when it is called.
"""

from __future__ import annotations

import importlib
from typing import Any, TYPE_CHECKING

from torch_overlay.upstream_fixes import recorded_views


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def handler(
    name: str, otherwise: Callable[..., Any] | None, only_cuda: bool = False, module: str = "methods"
) -> Callable[..., Any]:
    """Return a handler that calls `name` of `module` in frames with a StreamState, else `otherwise`; None declines.

    With `only_cuda`, `name` is called for torch.cuda.Stream and classes that derive from it only.
    """

    def handle(variable: Any, tx: Any, *args: Any) -> Any:
        import torch

        from torch_overlay._dynamo.state import handled

        if handled(tx) and (not only_cuda or issubclass(variable.python_type(), torch.cuda.Stream)):
            found = importlib.import_module(f"torch_overlay._dynamo.{module}")
            return getattr(found, name)(variable, tx, *args)
        return None if otherwise is None else otherwise(variable, tx, *args)

    return handle


_STREAM_METHODS = ("wait_event", "wait_stream", "record_event", "query")
_EVENT_METHODS = ("wait", "record", "query", "elapsed_time")
_STREAM_ATTRIBUTES = {
    "device": "stream_device",
    "device_index": "stream_device_index",
    "stream_id": "stream_id",
}
_CUDA_STREAM_ATTRIBUTES = {"priority": "stream_priority", "cuda_stream": "stream_handle"}


def _reconstruct_type(context: Any, codegen: Any) -> None:
    from torch_overlay._dynamo import graph_breaks

    graph_breaks.reconstruct_type(context, codegen)


def register_variables(streams: ModuleType) -> Callable[[], None]:
    """Put our methods, attributes and hash into the tables of upstream's stream and event variables, and pass
    `record_stream` of lazy views on.
    """
    from torch._dynamo.variables import ctx_manager
    from torch._dynamo.variables.base import GetSet, Method, readonly_setter, VariableTracker

    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def update(table: dict[str, Any], entries: dict[str, Any]) -> None:
        saved.append((table, dict(table)))
        table.update(entries)

    def methods(table: dict[str, Any], kind: str, names: tuple[str, ...]) -> None:
        update(table, {n: Method(handler(f"{kind}_{n}", getattr(table.get(n), "handler", None))) for n in names})

    def attributes(table: dict[str, Any], names: dict[str, str], only_cuda: bool) -> None:
        getters = {n: handler(ours, getattr(table.get(n), "getter", None), only_cuda) for n, ours in names.items()}
        update(table, {name: GetSet(getter, readonly_setter) for name, getter in getters.items()})

    methods(streams.StreamVariable.tp_methods, "stream", _STREAM_METHODS)
    methods(streams.EventVariable.tp_methods, "event", _EVENT_METHODS)
    attributes(streams.StreamVariable.tp_getset, _STREAM_ATTRIBUTES, only_cuda=False)
    attributes(streams.StreamVariable.tp_getset, _CUDA_STREAM_ATTRIBUTES, only_cuda=True)
    attributes(streams.CudaStreamVariable.tp_getset, {"cuda_stream": "stream_handle"}, only_cuda=True)
    streams.EventVariable.tp_getset = {"device": GetSet(handler("event_device", None), readonly_setter)}
    streams.StreamVariable.tp_repr_impl = handler("stream_repr", VariableTracker.tp_repr_impl)
    profiled = ctx_manager.ProfilerRecordFunctionContextVariable
    profiled.tp_methods = {
        "__enter__": Method(handler("range_enter", None, module="contexts")),
        "__exit__": Method(handler("range_exit", None, module="contexts")),
    }
    streams.StreamContextVariable.tp_methods = {
        "__enter__": Method(handler("context_enter", None, module="contexts")),
        "__exit__": Method(handler("context_exit", None, module="contexts")),
    }
    streams.StreamContextVariable.reconstruct_type = _reconstruct_type
    streams.StreamVariable.hash_impl = handler("stream_hash", VariableTracker.hash_impl)
    no_longer_pass_on = recorded_views.register()

    def undo() -> None:
        no_longer_pass_on()
        del streams.StreamVariable.hash_impl, streams.StreamVariable.tp_repr_impl
        del streams.StreamContextVariable.reconstruct_type
        del streams.StreamContextVariable.tp_methods, streams.EventVariable.tp_getset, profiled.tp_methods
        for table, contents in reversed(saved):
            table.clear()
            table.update(contents)

    return undo


def state_init(original: Callable[[Any], None], made: Any) -> None:
    """Make the translator's stream state one of ours. Upstream's constructor is called by that of ours, too."""
    from torch_overlay._dynamo import state
    from torch_overlay._stream_handling import handles_streams

    if isinstance(made, state.StreamState) or not (handles_streams() and state.applies()):
        original(made)
    else:
        made.__class__ = state.StreamState
        made.__init__()
