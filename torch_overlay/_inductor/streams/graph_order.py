"""Order the user's visible stream operations among the nodes of an FX graph.

A record of an event that somebody else reads, a host synchronisation or a query has no tensor that would tie it to its
place. It is ordered after every node that carries its token, and after the visible operations before it: first in the
FX graph, whose passes move nodes towards their users (`order_graph`), so that values that are lowered before it become
buffers before it; then in the scheduler, as dependencies for its order only. The planner makes the order true on the
device.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import (
    is_device_synchronization,
    is_stream_op,
    is_synchronization,
    is_view,
    updated_operands,
    viewed,
)
from torch_overlay._inductor.streams import ranges


if TYPE_CHECKING:
    from torch_overlay._functorch.streams.tokens import Token

RECORD_STREAM = torch.ops.streams.record_stream.default


def order_graph(graph: torch.fx.Graph) -> None:
    """Sort the graph, changing as little as possible, so that visible stream operations stand where the user put
    them.
    """
    visible = [n for n in graph.nodes if n.op == "call_function" and is_stream_op(n)]
    if not visible:
        return
    nodes = list(graph.nodes)
    after: dict[torch.fx.Node, set[torch.fx.Node]] = {node: set(node.all_input_nodes) for node in nodes}
    _keep_updates_in_order(nodes, after)
    carriers: dict[Token | None, list[torch.fx.Node]] = {}
    for node in nodes:
        for token in fact_of(node).before or ():
            carriers.setdefault(token, []).append(node)
    visible.sort(key=lambda n: fact_of(n).order or 0)
    for previous, node in itertools.pairwise(visible):
        after[node].add(previous)
    for node in visible:
        after[node].update(n for n in carriers.get(fact_of(node).requires, ()) if n is not node)
    after[nodes[-1]].update(nodes[:-1])  # the output
    wanted = {node: set(needed) for node, needed in after.items()}
    awaited = barrier = None
    earlier: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # a pass may have merged nodes before and after it into one

    def is_earlier(node: torch.fx.Node, synchronization: torch.fx.Node) -> bool:
        return node in earlier[synchronization] or _promises(node, synchronization)

    for node in nodes:
        if is_synchronization(node):
            awaited, barrier = node, node if is_device_synchronization(node) else barrier
            earlier[node] = _all_before(node, after)
        elif awaited is not None and touches_host_memory(node) and not is_earlier(node, awaited):
            wanted[node].add(awaited)
        if barrier is not None and touches_callers_memory(node) and not is_earlier(node, barrier):
            wanted[node].add(barrier)
    in_ranges = {node: set(needed) for node, needed in wanted.items()}
    for first, second in ranges.order(nodes):
        in_ranges[second].add(first)
    # A pass may have merged nodes before and after the end of a range, too.
    order = next((found for edges in (in_ranges, wanted) if len(found := _sorted(nodes, edges)) == len(nodes)), None)
    if order is None:
        raise AssertionError("the stream program contradicts the order of the data that it synchronises")
    if order != nodes:
        for node in order[:-1]:
            order[-1].prepend(node)


def _all_before(last: torch.fx.Node, after: dict[torch.fx.Node, set[torch.fx.Node]]) -> set[torch.fx.Node]:
    """Return all nodes that come before a node."""
    found: set[torch.fx.Node] = set()
    todo = [last]
    while todo:
        new = after[todo.pop()] - found
        found |= new
        todo += new
    return found


def _keep_updates_in_order(nodes: list[torch.fx.Node], after: dict[torch.fx.Node, set[torch.fx.Node]]) -> None:
    """Order an update in place after the operations that read or write the memory before it, and before those that do
    so later.

    `record_stream` does neither: a `record_stream` that is written after an update may stand before the write-back at
    the graph's end.
    """
    last_write: dict[torch.fx.Node, torch.fx.Node] = {}
    reads: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in nodes:
        if node.op != "call_function" or is_view(node) or node.target is RECORD_STREAM:
            continue
        written = {viewed(value) for value in updated_operands(node)}
        for memory in map(viewed, node.all_input_nodes):
            if memory in last_write:
                after[node].add(last_write[memory])
            if memory not in written:
                reads.setdefault(memory, set()).add(node)
        for memory in written:
            after[node].update(reads.pop(memory, ()))
            last_write[memory] = node


def _sorted(nodes: list[torch.fx.Node], after: dict[torch.fx.Node, set[torch.fx.Node]]) -> list[torch.fx.Node]:
    """Return the nodes, each after those that it must come after, else in the order that they have; fewer nodes if that
    can't be.
    """
    position = {node: i for i, node in enumerate(nodes)}
    users: dict[torch.fx.Node, list[torch.fx.Node]] = {node: [] for node in nodes}
    missing = {node: len(inputs) for node, inputs in after.items()}
    for node, inputs in after.items():
        for needed in inputs:
            users[needed].append(node)
    ready = [position[node] for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    return order


def touches_host_memory(node: torch.fx.Node) -> bool:
    """True for an operation on host memory. What the user does with that memory after a synchronisation comes after it,
    since the device may have written the memory: no data dependence says so.
    """
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    on_host = (isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)
    return node.op == "call_function" and not is_stream_op(node) and any(on_host)


def touches_callers_memory(node: torch.fx.Node) -> bool:
    """True for an operation on the caller's memory. What the user does with that memory after a synchronisation of the
    device comes after it, since any stream may have written the memory, also one that this graph doesn't know.
    """
    return (
        node.op == "call_function"
        and not is_stream_op(node)
        and not is_view(node)
        and any(viewed(value).op == "placeholder" for value in node.all_input_nodes)
    )


def _promises(node: torch.fx.Node, awaited: torch.fx.Node) -> bool:
    """True if the node belongs before that synchronisation though it stands after it, as the write-back to an input
    does.
    """
    return fact_of(awaited).requires in fact_of(node).promises
