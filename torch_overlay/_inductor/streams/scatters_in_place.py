"""Keep updates of parts of one tensor from several streams in place.

`torch.mm(x, w, out=out[:n])` on one stream and `out[n:].copy_(y)` on another are, after functionalization, two
scatters: each makes a whole new tensor, and the second reads what the first made. Inductor turns scatters back into
updates in place where it expects to lose no fusion. Across streams there is no fusion to lose, but for each part a
whole tensor is copied, and another stream is waited for. So such parts are updated in place wherever that is safe. So
are parts of an input in a graph with streams: the code around the graph may be using other parts of the input.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.fx_passes import reinplace

from torch_overlay._functorch.streams.fx import is_stream_op, is_view, node_stream
from torch_overlay._inductor.streams.new_node_placement import NewNodes
from torch_overlay._inductor.streams.pass_log import PassLog


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.fx import Graph, Node

IN_PLACE = "stream_scatter_in_place"  # in `meta`, of a scatter, while upstream decides: make it an update in place


@contextlib.contextmanager
def mark_shared(graph: Graph) -> Iterator[None]:
    """Mark scatters whose values several streams use, in a graph whose pass is logged, until upstream has decided."""
    marked: list[Node] = []
    if (log := PassLog.of(graph)) is not None:
        _remove_writes_of_what_is_there(graph)
        NewNodes(log.replaced(graph), log.before).place()  # the scatters are new in this pass
        marked = list(_shared(graph))
    for node in marked:
        node.meta[IN_PLACE] = True
    try:
        yield
    finally:
        for node in marked:
            del node.meta[IN_PLACE]


def _remove_writes_of_what_is_there(graph: Graph) -> None:
    """Remove scatters that put a part into its own place, as `cache[i] += v` does after it has updated the part."""
    for node in graph.find_nodes(op="call_function", target=reinplace._generalized_scatter):
        base, part, views = node.args
        shown: list[tuple[Any, ...]] = []
        while part is not base and isinstance(part, torch.fx.Node) and is_view(part):
            shown.insert(0, (part.target, part.args[1:], part.kwargs))
            part = part.args[0]
        if part is base and shown == [(view.target, tuple(view.args), view.kwargs) for view in views]:
            node.replace_all_uses_with(base)
            graph.erase_node(node)


def _shared(graph: Graph) -> Iterable[Node]:
    """Yield the scatters of each chain (the base of one is the result of another) whose values several streams use, in
    this graph or, if the base is an input, in the code around the graph.
    """
    has_streams = any(map(node_stream, graph.nodes))
    chains: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=reinplace._generalized_scatter):
        if node.meta["val"].device.type == "cpu":
            continue
        base: Any = node.args[0]
        chains[node] = chains.get(base, [])
        chains[node].append(node)
    for chain in {id(chain): chain for chain in chains.values()}.values():
        is_input = chain[0].args[0].op == "placeholder"  # type: ignore[union-attr]
        if has_streams and is_input or len({*map(node_stream, chain)}.union(*map(_streams_of_readers, chain))) > 1:
            yield from chain


def _streams_of_readers(node: Node) -> set[int]:
    """Return the streams on which a value is read, also through views."""
    found: set[int] = set()
    for user in node.users:
        if is_view(user):
            found |= _streams_of_readers(user)
        elif user.op == "call_function" and not is_stream_op(user):
            found.add(node_stream(user))
    return found
