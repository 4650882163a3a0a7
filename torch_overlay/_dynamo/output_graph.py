"""Has Dynamo's graphs be of a subclass that overrides methods (seam of the constructor)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay import frame_facts
from torch_overlay._dynamo import graph_breaks, object_hooks, ranges, registry
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.output_graph import OutputGraph


def call_user_compiler(original: Callable[..., Any], output: OutputGraph, *args: Any) -> Any:
    """Hand the frame's facts to the layers that compile its graph."""
    with frame_facts.compiling(registry.facts()):
        return original(output, *args)


def output_graph_init(original: Callable[..., None], output: OutputGraph, *args: Any, **kwargs: Any) -> None:
    override(
        output,
        _get_stack_values_to_restore=graph_breaks.stack_values_to_restore,
        compile_subgraph=graph_breaks.compile_subgraph,
        cleanup_graph=ranges.cleanup_graph,
        check_input_mutation_on_current_stream=object_hooks.check_input_mutation_on_current_stream,
        call_user_compiler=call_user_compiler,
    )
    original(output, *args, **kwargs)
