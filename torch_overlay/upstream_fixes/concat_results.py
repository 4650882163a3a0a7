"""A result that shows a part of a concatenation has memory of its own.

Inductor computes the inputs of a concatenation in place, as parts of its result, unless they are results of the graph
themselves. Of a view of one it didn't see that, so two results shared memory, and who wrote to one changed the other.

    y = x * 2
    return torch.cat([y, b]), y.view(64, 16)  # the second lies in the first
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.fx_utils import get_node_storage
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph


def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Seam of ConcatKernel.create, which computes no input in place whose storage is written to."""
    graph: Any = V.graph
    written = graph.mutated_storages
    graph.mutated_storages = written | _shown_by_results(graph.current_node.graph)
    try:
        return original(*args, **kwargs)
    finally:
        graph.mutated_storages = written


def _shown_by_results(graph: Graph) -> set[int]:
    """Storages that the graph computes and returns views of. Nothing is computed in place of the graph's inputs."""
    inputs = set(map(get_node_storage, graph.find_nodes(op="placeholder")))
    found = set()
    for result in graph.output_node().all_input_nodes:
        storage = get_node_storage(result)
        if storage is not None and any(get_node_storage(n) == storage for n in result.all_input_nodes):
            found.add(storage)
    return found - inputs


__all__ = ["create"]
