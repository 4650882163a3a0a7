"""Hooks that give each thread and call of a compiled frame a table of objects of its own (`objects`).

- The numbering of `torch._dynamo.graph_bytecode_inputs` asks the registry while a frame is traced; look-ups by number
  ask the running call's table.
- The emitted bytecode passes the graph its streams and events, around the call, as a table in place of the process-wide
  one.
- AOTAutograd keeps the table of a forward for its backward.

The seams name upstream's functions, which have the names of the hooks.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.bytecode_transformation import create_dup_top
from torch._dynamo.resume_execution import _bytecode_from_template_with_split

from torch_overlay import config
from torch_overlay._dynamo import objects, registry
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.source import Source


# -- the numbering, and look-ups by number


def get_external_object_by_index(original: Callable[[int], object], index: int) -> object:
    if objects.current() is not None:
        return objects.get(index)
    return original(index)  # while tracing


def set_external_object_by_index(original: Callable[[int, object], None], index: int, value: object) -> None:
    objects.put(index, value)


def store_user_object_weakrefs(original: Callable[..., None], *table: object) -> None:
    objects.install(table)


def stash_graph_created_object(original: Callable[[object], object], value: object) -> object:
    return value  # the table holds it


def reset_user_object_tracking(original: Callable[[], None]) -> None:
    registry.reset()
    original()


def register_user_object(original: Callable[[object, Source], int], value: object, source: Source) -> int:
    if handles_streams():
        return registry.add_callers_object(original, value, source)
    if config.streams and torch.compiler.is_exporting():
        known = _number_in_export(value)
        return original(value, source) if known is None else known
    return original(value, source)


def _number_in_export(value: object) -> int | None:
    """Return the number that a stream or event has already: an exported program keeps the numbers alone, so an event
    under two names has to have one, and a stream that is the current one has the number of that.
    """
    if isinstance(value, torch.Stream):
        if not registry.is_callers(value):
            return None
        # The program keeps this object of the stream alive, and nobody the one that was there.
        reference: weakref.ReferenceType[object] = weakref.ref(value)
        numbering.index_to_external_object_weakref[registry.CALLERS_STREAM_INDEX] = reference
        return registry.CALLERS_STREAM_INDEX
    numbers = enumerate(numbering.index_to_external_object_weakref)
    return next((index for index, reference in numbers if reference() is value), None)


def has_user_objects(original: Callable[[], bool]) -> bool:
    return False  # so that upstream's prologue isn't emitted beside ours


# -- the call of a graph

# One call passes the objects, and one after the graph restores the previous table, also if the graph raises. Streams
# that the frame made current with `set_stream` become current right after the graph's call, before anything else runs.


def _leave_in_any_case(leave: Any, dummy: Any) -> None:
    """Template of the bytecode around the call; the call replaces `dummy`."""
    try:
        dummy  # noqa: B018
    finally:
        leave()


def make_call_generated_code(original: Callable[[PyCodegen, str], None], codegen: PyCodegen, fn_name: str) -> None:
    """Emit the call of a graph, with what passes the graph its streams and events around it."""
    constructors = list(numbering.index_to_bytecode_constructor)
    if not constructors:
        original(codegen, fn_name)
        return
    output = codegen.tx.output
    frame = registry.current()
    for index in frame.set_streams.values():
        registry.local_of(output, index)

    codegen.add_push_null(lambda: codegen.load_import_from(objects.__name__, "enter"))
    for index, constructor in enumerate(constructors):
        constructor(codegen)
        if index in frame.locals:
            codegen.append_output(create_dup_top())
            codegen.store(frame.locals[index])
    codegen.call_function(len(constructors), False)
    leave = output.new_var("leave_stream_objects")
    codegen.store(leave)
    # Nothing is on the stack when Dynamo calls a graph, so an exception unwinds to depth 0.
    before, after = _bytecode_from_template_with_split(_leave_in_any_case, 0, {"leave": leave})
    codegen.extend_output(before)
    original(codegen, fn_name)
    codegen.extend_output(after)
    for index in frame.set_streams.values():
        codegen.add_push_null(lambda: codegen.load_import_from("torch.accelerator", "set_stream"))
        codegen.append_output(codegen.create_load(frame.locals[index]))
        codegen.call_function(1, False)
        codegen.pop_top()


# -- a backward


class _Thread(threading.local):
    table: objects.Snapshot | None = None  # of the backward that is about to run


_thread = _Thread()


class _Announced(objects.Snapshot):
    """Table with the interface of the dict that AOTAutograd expects."""

    __slots__ = ()

    def items(self) -> Iterator[tuple[int, object]]:
        """Note the table for the backward: AOTAutograd calls this just before the compiled code."""
        _thread.table = self
        return iter(())


def _snapshot_external_objects(original: Callable[[Any], None], ctx: Any) -> None:
    table = objects.current()
    ctx._external_objects = {} if table is None else _Announced(table)


def get_or_compile(original: Callable[..., Callable[..., Any]], compiler: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the compiled backward, which runs with the table of its forward."""
    compiled = original(compiler, **kwargs)
    if hasattr(compiled, "runs_with_table_of_forward"):
        return compiled

    def run(*args: Any) -> Any:
        table, _thread.table = _thread.table, None
        return compiled(*args) if table is None else table.run(compiled, args)

    run.runs_with_table_of_forward = True  # type: ignore[attr-defined]
    if hasattr(compiled, "_boxed_call"):
        run._boxed_call = compiled._boxed_call  # type: ignore[attr-defined]
    compiler.compiled_bw = run
    return run
