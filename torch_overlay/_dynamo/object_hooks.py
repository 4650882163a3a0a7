"""Hooks that put the table of stream objects in place of the process-wide one, and the registry under the numbering.

They wrap functions of `torch._dynamo.graph_bytecode_inputs`, of the modules of torch._dynamo that make the bytecode
around a graph, and of `torch._functorch._aot_autograd.runtime_wrappers`.
"""

from __future__ import annotations

import threading
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.eval_frame import innermost_backend

from torch_overlay._dynamo import objects, prologue, registry
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.source import CurrentStreamSource, Source


_COMPILER = 5  # the compiler's position among the arguments of `_compile`
_WRAPPERS = "cpp_wrapper", "fx_wrapper"


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
    return registry.add_callers_object(original, value, source) if handles_streams() else original(value, source)


def has_user_objects(original: Callable[[], bool]) -> bool:
    return False  # so that upstream's prologue isn't emitted beside ours


def make_call_generated_code(original: Callable[[PyCodegen, str], None], codegen: PyCodegen, fn_name: str) -> None:
    prologue.call_with_objects(codegen, lambda: original(codegen, fn_name))


def reconstruct_current_stream(
    original: Callable[[CurrentStreamSource, PyCodegen], None], source: CurrentStreamSource, codegen: PyCodegen
) -> None:
    if source.device.type == "cuda" and torch.cuda.is_available():
        prologue.push_callers_stream(codegen, source.device)
    else:
        original(source, codegen)


def compile_frame(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compile a frame, with the wrapper that the options of torch.compile ask for: `handles_streams` looks there."""
    options = getattr(innermost_backend(args[_COMPILER]), "config", None)
    wrapper = {name: options[name] for name in _WRAPPERS if name in options} if isinstance(options, dict) else {}
    with registry.inner_frame(), inductor_config.patch(wrapper):
        return original(*args, **kwargs)


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


def snapshot_external_objects(original: Callable[[Any], None], ctx: Any) -> None:
    table = objects.current()
    ctx._external_objects = {} if table is None else _Announced(table)


def backward_compiler(original: Callable[..., Callable[..., Any]], compiler: Any, **kwargs: Any) -> Callable[..., Any]:
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
