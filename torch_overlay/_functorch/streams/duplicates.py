"""Merge duplicates, equal operations on two streams, in the graph that is partitioned, and keep them in the graph that
runs.

Users let two branches begin with the same operation, or the compiler does it for them: under autocast each branch casts
the weight that both read. The branches stay independent, so duplicates are not merged in the code that runs. But the
partitioner decides on the joint graph what the backward saves and what it computes again, by the number of readers and
the distance to the backward of each value, and duplicates change both. In the joint graph they are merged, as they are
in the same program without streams: the partitioner's own elimination of common subexpressions is made to take no
notice of streams. A merged operation remembers the streams that its duplicates were on. When the graph has been
partitioned, the merged operation is divided again among its readers, in the half that it comes from. The other half
has one value, saved or computed again.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.fx import is_backward, node_stream, place_on
from torch_overlay._functorch.streams.ids import CALLERS_STREAM


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

# In `meta`: stream of a duplicate that was merged into this node -> the `custom` of that duplicate.
DUPLICATES = "stream_duplicates"
_CUSTOM = "stream_custom"  # in `meta`, while duplicates are merged: the node's `custom`


def _remember(before: Graph, after: Graph, key: Callable[[Node], Any]) -> None:
    """Note on each node of `after` the streams of the nodes of `before` that were merged into it."""
    kept = {node.name: node for node in after.nodes}
    known: dict[Any, Node] = {}
    names: dict[Node, str] = {}
    for node in before.nodes:
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"value {names[n]}")  # type: ignore[arg-type]
        value = (node.target, repr(operands), key(node))
        if node.name in kept:
            names[node] = node.name
            known.setdefault(value, kept[node.name])
            continue
        survivor = known.get(value)
        names[node] = node.name if survivor is None else survivor.name
        custom = node.meta.get("custom", {})
        stream = custom.get("stream") or 0
        if survivor is not None and stream != node_stream(survivor):
            survivor.meta[DUPLICATES] = {stream: custom, **survivor.meta.get(DUPLICATES, {})}


def split_duplicates(graph: Graph, of_backward: bool) -> None:
    """Divide merged operations among their readers: each reader reads the duplicate on its own stream."""
    made: dict[tuple[Node, int], Node] = {}

    def is_divided(node: Node) -> bool:
        return node.op == "call_function" and is_backward(node) == of_backward

    def on_stream(node: Node, stream: int) -> Node:
        duplicates = node.meta.get(DUPLICATES, {})
        if stream not in duplicates or stream == node_stream(node) or not is_divided(node):
            return node
        found = made.get((node, stream))
        if found is None:
            with graph.inserting_after(node):
                found = made[node, stream] = graph.node_copy(node, lambda n: on_stream(n, stream))
            del found.meta[DUPLICATES]
            found.meta["custom"] = duplicates[stream]
        return found

    for node in list(graph.nodes):
        if DUPLICATES not in node.meta or not is_divided(node):
            continue
        for reader in list(node.users):
            if reader.op == "call_function":
                reader.replace_input_with(node, on_stream(node, node_stream(reader)))
        if not node.users:
            graph.erase_node(node)


def merge_duplicates(graph: Graph, eliminate: Callable[[Graph], Graph], key: Callable[[Node], Any]) -> Graph:
    """Return what `eliminate`, a pass that merges equal operations, makes of the graph without its streams. Operations
    with another `key` are not equal to the pass. The result has the streams of the operations that are left.
    """
    if not any(map(node_stream, graph.nodes)):
        return eliminate(graph)
    for node in graph.nodes:
        node.meta[_CUSTOM] = node.meta.get("custom")
        place_on(node, CALLERS_STREAM)
    merged = eliminate(graph)
    for node in (*graph.nodes, *merged.nodes):
        custom = node.meta.pop(_CUSTOM, None)
        if custom is not None:
            node.meta["custom"] = custom
    _remember(graph, merged, key)
    return merged
