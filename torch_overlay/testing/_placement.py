"""Checks after each pass that every operation of a graph with streams is placed.

`place_streams` gives each node of a graph its stream and its tokens. A node that a pass makes without them runs on the
caller's stream, and is ordered like all other nodes of that stream. The planner orders the new node correctly, at the
price of events, but an event that the program recorded after it on the side stream no longer covers it.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.utils._pytree as pytree

from torch_overlay.hooks import override, put_in_place


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, Node


class Unplaced(AssertionError):
    """An operation has no placement. The message names the pass, the operation, and what it reads and feeds."""


def _launches(node: Node) -> bool:
    """True if the node computes on the device, or reads a tensor on it."""
    from torch_overlay._functorch.streams.fx import is_stream_op, is_view

    if node.op != "call_function" or is_stream_op(node) or is_view(node) or node.target is operator.getitem:
        return False
    values = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values)


def unplaced(graph: Graph) -> list[Node]:
    """Return the operations without a placement, in a graph in which other operations have one."""
    from torch_overlay._inductor.streams.fx_passes import is_placed, needs_placement

    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not needs_placement(nodes) or not any(is_placed(node.meta.get("custom")) for node in nodes):
        return []
    return [node for node in graph.nodes if _launches(node) and not is_placed(node.meta.get("custom"))]


def _check(graph: Graph, after: str, report: Callable[[str], None]) -> None:
    for node in unplaced(graph):
        reads = ", ".join(n.name for n in node.all_input_nodes) or "nothing"
        feeds = ", ".join(n.name for n in node.users) or "nothing"
        report(f"after {after}, {node.name} = {node.target} has no placement; it reads {reads} and feeds {feeds}")


def _raise(text: str) -> None:
    raise Unplaced(text)


_reports: list[Callable[[str], None]] = []  # of the contexts that this process is in


def _checked_end_pass(original: Callable[..., None], observer: Any, kind: Any, error: Any, traceback: Any) -> None:
    original(observer, kind, error, traceback)
    for report in _reports if kind is None else ():
        _check(observer.gm.graph, f"the pass {observer.passname}", report)


@contextlib.contextmanager
def placement_checked(report: Callable[[str], None] = _raise) -> Iterator[None]:
    """Check the graphs that are compiled inside: after each pass, after a joint graph is partitioned, and when all
    passes are done. Raise `Unplaced`, or call `report`.
    """
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor.graph import GraphLowering
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    put_in_place()
    observe_pass, lower = GraphTransformObserver.__init__, GraphLowering.__init__
    part = graph_compile._partition_joint_graph_into_fw_bw

    def observe_checked_pass(observer: Any, *args: Any, **kwargs: Any) -> None:
        observe_pass(observer, *args, **kwargs)
        override(observer, __exit__=_checked_end_pass)

    def checked_lower(lowering: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        _check(gm.graph, "all passes", report)
        lower(lowering, gm, *args, **kwargs)

    def checked_part(*args: Any, **kwargs: Any) -> Any:
        forward, backward, *rest = part(*args, **kwargs)
        _check(forward.graph, "the partitioner, in the forward", report)
        _check(backward.graph, "the partitioner, in the backward", report)
        return forward, backward, *rest

    with (
        mock.patch.object(GraphTransformObserver, "__init__", observe_checked_pass),
        mock.patch.object(GraphLowering, "__init__", checked_lower),
        mock.patch.object(graph_compile, "_partition_joint_graph_into_fw_bw", checked_part),
    ):
        _reports.append(report)
        try:
            yield
        finally:
            _reports.pop()


__all__ = ["placement_checked", "Unplaced", "unplaced"]
