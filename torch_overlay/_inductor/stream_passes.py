"""Placement survives the passes that rewrite FX graphs.

A pass may replace a node by another and overwrite the survivor's metadata with that of the node it removed (`x + 0`
becomes `x`, and `x` takes the addition's place and stream), or create nodes that have no placement. Around each pass:
a node that was there before keeps its stream and tokens, and a new one without a placement between nodes of one
stream joins that stream. What remains without a placement runs on the ambient stream: correct in any case, for the
planner orders it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay import config
from torch_overlay._functorch.stream_placement import AFTER, BEFORE, LEAVE, node_stream


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, Node


def _placements(graph: Graph) -> dict[Node, dict[str, Any]] | None:
    """What each node's `custom` holds; None for a graph in which nothing has a stream."""
    found = {}
    streams = False
    for node in graph.nodes:
        custom = node.meta.get("custom")
        found[node] = custom
        streams = streams or bool(custom and (custom.get("stream") or LEAVE in custom))
    return found if streams else None


def _restore(graph: Graph, before: dict[Node, dict[str, Any]]) -> None:
    for node in graph.nodes:
        if node in before:
            if node.meta.get("custom") is not before[node]:
                if before[node] is None:
                    node.meta.pop("custom", None)
                else:
                    node.meta["custom"] = before[node]
        elif node.op == "call_function" and not node.meta.get("custom"):
            neighbours = [n for n in (*node.all_input_nodes, *node.users) if n.op == "call_function"]
            streams = {node_stream(n) for n in neighbours}
            if len(streams) == 1 and (stream := streams.pop()):
                node.meta["custom"] = {"stream": stream}


def apply_gm_pass(original: Callable[..., Any], observer: Any, pass_fn: Callable[[Any], Any]) -> Any:
    before = _placements(observer.gm.graph) if config.streams else None
    result = original(observer, pass_fn)
    if before is not None:
        _restore(observer.gm.graph, before)
    return result


def reorder_for_locality(original: Callable[[Graph], None], graph: Graph) -> None:
    """Upstream moves producers to just before their consumer. For a side stream's branch that is the latest moment at
    which it can be launched, after all the work that it was to run beside.
    """
    if not (config.streams and _placements(graph)):
        original(graph)


def common_custom_context(original: Callable[..., dict[str, Any]], nodes: Sequence[Node]) -> dict[str, Any]:
    """A pattern's replacement carries the tokens of all that it replaces."""
    context = original(nodes)
    for key in (AFTER, BEFORE):
        known = [tokens for node in nodes if (tokens := node.meta.get("custom", {}).get(key)) is not None]
        if known:
            context[key] = tuple(sorted({token for tokens in known for token in tokens}))
    for node in nodes:
        if LEAVE in node.meta.get("custom", {}):
            context[LEAVE] = node.meta["custom"][LEAVE]
    return context
