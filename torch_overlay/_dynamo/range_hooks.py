"""Hooks on the context of torch.profiler.record_function, and on the end of a graph, which trace profiler ranges."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._dynamo.ranges import close_record, finish, name_of, open_record
from torch_overlay._dynamo.state import handled
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


def create(original: Callable[..., Any], func: Any, record_args: Any, record_kwargs: Any, **kwargs: Any) -> Any:
    context = original(func, record_args, record_kwargs, **kwargs)
    override(context, enter=enter, exit=exit)
    context.overlay_name = name_of(record_args, record_kwargs)
    return context


def enter(original: Callable[..., Any], context: Any, tx: InstructionTranslatorBase) -> Any:
    open_record(tx, getattr(context, "overlay_name", None))
    return original(context, tx)


def exit(original: Callable[..., Any], context: Any, tx: InstructionTranslatorBase, *args: Any) -> Any:
    close_record(tx, getattr(context, "overlay_name", None))
    return original(context, tx, *args)


def cleanup_graph(original: Callable[[OutputGraph], None], output: OutputGraph) -> None:
    """Wrap the cleanup of a graph: `finish` it after the contexts that a graph break leaves have ended."""
    original(output)
    if handled(output.root_tx):
        finish(output.graph)
