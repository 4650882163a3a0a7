"""Order of the user's visible stream operations among the compute that Inductor schedules.

A record of an event that somebody else reads, a host synchronisation or a query has no tensor that would tie it to its place. It is
tied here: behind every node that carries its token, and behind the visible operations before it. These are dependencies for the
scheduler's order only; the planner makes them true on the device.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.virtualized import V
from torch_overlay import config
from torch_overlay._functorch.stream_placement import BEFORE, is_stream_op, REQUIRES
from torch_overlay._inductor.stream_schedule import _origins, stream_operation


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def run_node(original: Callable[..., object], graph: Any, node: torch.fx.Node) -> object:
    """Values that an operation promises to have finished become buffers before it; a later consumer must not absorb them."""
    if config.streams and is_stream_op(node):
        token = node.meta.get("custom", {}).get(REQUIRES)
        for earlier, value in graph.env.items():
            if token in (earlier.meta.get("custom", {}).get(BEFORE) or ()) and isinstance(value, ir.TensorBox):
                value.realize()
    return original(graph, node)


def compute_dependencies(original: Callable[..., None], scheduler: Any) -> None:
    if config.streams:
        order_stream_operations(scheduler)
    original(scheduler)


def order_stream_operations(scheduler: Any) -> None:
    visible = [node for node in scheduler.nodes if stream_operation(node) is not None]
    if not visible:
        return
    carriers: dict[str, list[str]] = {}
    for node in scheduler.nodes:
        names = list(node.get_buffer_names())
        for origin in _origins(node):
            for token in origin.meta.get("custom", {}).get(BEFORE) or ():
                carriers.setdefault(token, []).extend(names)
    earlier: list[str] = []
    for node in visible:
        needed = list(earlier)
        for origin in _origins(node):
            token = origin.meta.get("custom", {}).get(REQUIRES)
            needed += carriers.get(token, ()) if token else ()
        own = set(node.get_buffer_names())
        V.graph.additional_buffer_deps[node.get_name()].update(n for n in needed if n not in own)
        earlier = [*earlier, *own]
