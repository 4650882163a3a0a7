"""Keeps the waits of copies between host and device for which the host waits.

A program may rely on such a copy: all that the host launches later comes after it. The compiler may leave a copy out,
and one operation on lists may be several copies, of which only some are between host and device.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.fx import blocks_host, constants, is_backward, is_stream_op, node_stream


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

KEPT_WITH_WAITS = ("custom", "stack_trace", "partitioner_tag", "seq_nr")  # in `meta`, of what the host waits for

_aten = torch.ops.aten
_streams = torch.ops.streams


def _is_number(node: Node) -> bool:
    """True for the upload of a single value, such as a learning rate: nobody takes it for a synchronisation."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.dim() == 0


def orders_by_blocking(nodes: Sequence[Node]) -> bool:
    """True if the host learns from a copy that all work before it is done, in a program that may launch on another
    stream afterwards, in another frame.
    """
    return registry.program_has_streams() and any(blocks_host(n) and not _is_number(n) for n in nodes)


def keep_waits(graph: Graph) -> None:
    """Insert a host wait where a copy that blocks the host may be left out: a copy that nobody reads, or one of a
    constant. The streams of this graph are ordered as if after the copy (`Program.after`). Before a graph break and
    after it there may be other streams, so the host waits for the copy's stream.
    """
    if not (registry.current().goes_on or registry.current().is_resumed):
        return
    read: set[Any] = set()
    known = constants(graph)
    for node in reversed(graph.nodes):
        if is_stream_op(node) or node.op != "call_function":
            read.update(node.all_input_nodes)
            continue
        is_read = node in read or node.is_impure()
        # `copy` takes no more than the layout from the tensor that it overwrites.
        sources = node.args[1:2] if node.target is _aten.copy.default else node.all_input_nodes
        if is_read:
            read.update(sources)
        is_left_out = not is_read or (known.issuperset(sources) and not _is_number(node))
        if blocks_host(node) and not is_backward(node) and is_left_out:
            with graph.inserting_before(node):
                wait = graph.call_function(_streams.synchronize_stream.default, (node_stream(node),))
            wait.meta = {key: node.meta[key] for key in KEPT_WITH_WAITS if key in node.meta}


def split_lists(graph: Graph) -> None:
    """Split `_foreach_copy_` between host and device into single copies, one after the other, as eager does."""
    for node in graph.find_nodes(op="call_function", target=_aten._foreach_copy.default):
        targets, sources, *waits = node.args
        devices = {value.meta["val"].device.type for value in (*targets, *sources)}
        if len(devices) == 1:
            continue
        given = (node.kwargs["non_blocking"],) if "non_blocking" in node.kwargs else tuple(waits)
        made = []
        with graph.inserting_before(node):
            for target, source, value in zip(targets, sources, node.meta["val"]):
                made.append(graph.call_function(_aten.copy.default, (target, source, *given)))
                made[-1].meta = {**node.meta, "val": value}
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
