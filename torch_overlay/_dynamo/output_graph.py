"""Has Dynamo's graphs be of a subclass that overrides methods (seam of the constructor)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._dynamo import graph_breaks, object_hooks, ranges
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.output_graph import OutputGraph


def output_graph_init(original: Callable[..., None], output: OutputGraph, *args: Any, **kwargs: Any) -> None:
    override(
        output,
        _get_stack_values_to_restore=graph_breaks.stack_values_to_restore,
        compile_subgraph=graph_breaks.compile_subgraph,
        cleanup_graph=ranges.cleanup_graph,
        check_input_mutation_on_current_stream=object_hooks.check_input_mutation_on_current_stream,
    )
    original(output, *args, **kwargs)
