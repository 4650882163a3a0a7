"""Emits the bytecode around the call of a compiled graph that passes the graph its streams and events.

One call passes the objects, and one after the graph restores the previous table, also if the graph raises (objects.py).
Streams that the frame made current with `set_stream` become current right after the graph's call, before anything else
runs.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.bytecode_transformation import create_dup_top
from torch._dynamo.resume_execution import _bytecode_from_template_with_split

from torch_overlay._dynamo import objects, registry


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch._dynamo.codegen import PyCodegen


def _leave_in_any_case(leave: Any, dummy: Any) -> None:
    """Template of the bytecode around the call; the call replaces `dummy`."""
    try:
        dummy  # noqa: B018
    finally:
        leave()


def call_with_objects(codegen: PyCodegen, emit_call: Callable[[], None]) -> None:
    """Emit the call of a graph by `emit_call`, with what passes the graph its streams and events around it."""
    constructors = list(numbering.index_to_bytecode_constructor)
    if not constructors:
        emit_call()
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
    emit_call()
    codegen.extend_output(after)
    for index in frame.set_streams.values():
        codegen.add_push_null(lambda: codegen.load_import_from("torch.accelerator", "set_stream"))
        codegen.append_output(codegen.create_load(frame.locals[index]))
        codegen.call_function(1, False)
        codegen.pop_top()


def push_callers_stream(codegen: PyCodegen, device: torch.device) -> None:
    """Emit what pushes the current stream of a CUDA device, as a torch.cuda.Stream."""
    codegen.add_push_null(lambda: codegen.load_import_from(objects.__name__, "callers_stream"))
    index = -1 if device.index is None else device.index
    codegen.append_output(codegen.create_load_const(index))
    codegen.call_function(1, False)
