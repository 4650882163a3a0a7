"""Hooks that put the table of stream objects in place of the process-wide one, and the registry under the numbering.

They wrap functions of `torch._dynamo.graph_bytecode_inputs`, `torch._dynamo.convert_frame` and
`torch._functorch._aot_autograd.runtime_wrappers`.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._dynamo import objects, registry


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.source import Source


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
    return registry.add_callers_object(original, value, source)


def compile_frame(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with registry.inner_frame():
        return original(*args, **kwargs)


def backward_compiler(original: Callable[..., Callable[..., Any]], compiler: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the compiled backward, which runs with the table of its forward."""
    compiled = original(compiler, **kwargs)
    if hasattr(compiled, "runs_with_table_of_forward"):
        return compiled

    def run(*args: Any) -> Any:
        table = objects.take_snapshot()
        return compiled(*args) if table is None else table.run(compiled, args)

    run.runs_with_table_of_forward = True  # type: ignore[attr-defined]
    if hasattr(compiled, "_boxed_call"):
        run._boxed_call = compiled._boxed_call  # type: ignore[attr-defined]
    compiler.compiled_bw = run
    return run


def snapshot_external_objects(original: Callable[[Any], None], ctx: Any) -> None:
    ctx._external_objects = objects.snapshot() or {}
