"""Keeps results apart where passes of upstream remove operations that do nothing (no_op_results.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._stream_handling import handles_streams
from torch_overlay.upstream_fixes.no_op_results import NoOpPass


if TYPE_CHECKING:
    from collections.abc import Callable, Set as AbstractSet

    from torch.fx import Graph, GraphModule, Node


def remove_no_ops(
    original: Callable[..., None], gm: GraphModule, zeros: AbstractSet[Node], ones: AbstractSet[Node]
) -> None:
    begun = NoOpPass(gm.graph)
    original(gm, zeros, ones)
    begun.keep_apart(handles_streams())


def remove_noop_ops(original: Callable[..., None], graph: Graph) -> None:
    begun = NoOpPass(graph)
    original(graph)
    begun.keep_apart(handles_streams())


__all__ = ["remove_no_ops", "remove_noop_ops"]
