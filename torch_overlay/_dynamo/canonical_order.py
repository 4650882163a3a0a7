"""Keeps operations that block the host in place under Dynamo's option `canonicalize_output_graph_node_order`.

The option sorts the operations of Dynamo's graph between those that have effects. In a program with streams a copy to
the host has an effect: a kernel launched after the copy may rely on all that was launched before the copy on its
stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_overlay import config
from torch_overlay._functorch.streams.fx import is_stream_op, node_stream


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def _is_on_host(node: Node) -> bool | None:
    value = node.meta.get("example_value")
    return value.device.type == "cpu" if isinstance(value, torch.Tensor) else None


def _blocks_host(node: Node) -> bool:
    """True if the node copies between host and device and waits for the copy, or reads a number from the device."""
    if node.kwargs.get("non_blocking"):
        return False
    made = _is_on_host(node)
    given = {_is_on_host(n) for n in node.all_input_nodes} - {None}
    if node.target == "item":
        return given == {False}
    return made is not None and (not made) in given


def is_safe_to_reorder(original: Callable[[Node], bool], node: Node) -> bool:
    if not original(node):
        return False
    if not config.streams or node.op not in ("call_function", "call_method") or not _blocks_host(node):
        return True
    return not any(is_stream_op(n) or node_stream(n) for n in node.graph.nodes)


__all__ = ["is_safe_to_reorder"]
