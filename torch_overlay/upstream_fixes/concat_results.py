"""Allocate memory of its own for a result that is a view of a concatenation's input.

Inductor computes the inputs of a concatenation in place, as parts of its result, unless the inputs are results of the
graph themselves. It didn't recognise an input of which the graph returns a view. So two results shared memory, and a
write to one changed the other.

    y = x * 2
    return torch.cat([y, b]), y.view(64, 16)  # the second shares memory with the first
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.fx_utils import get_node_storage
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Seam of ConcatKernel.create, which computes no input in place if the storage of one is written to. Storages that
    results show count as written.
    """
    graph: Any = V.graph
    written = graph.mutated_storages
    graph.mutated_storages = written | _shown_by_results(graph.current_node)
    try:
        return original(*args, **kwargs)
    finally:
        graph.mutated_storages = written


def _shown_by_results(concat: Node) -> set[int]:
    """Return the storages of a concatenation's inputs of which the graph returns views. Inputs that are views
    themselves, or inputs of the graph, are copied in any case.
    """
    own = {get_node_storage(n) for n in concat.all_input_nodes if n.op != "placeholder" and not _is_view(n)}
    results = concat.graph.output_node().all_input_nodes
    shown = {get_node_storage(result) for result in results if _is_view(result)}
    return {storage for storage in own & shown if storage is not None}


def _is_view(node: Node) -> bool:
    storage = get_node_storage(node)
    return storage is not None and any(get_node_storage(n) == storage for n in node.all_input_nodes)


__all__ = ["create"]
