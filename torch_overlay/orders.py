"""Orders of directed graphs, and what comes before or after a node. A graph is node -> the nodes directly after it."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import TYPE_CHECKING, TypeVar


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

Node = TypeVar("Node", bound="Hashable")


def directly_after(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {node: [] for node in nodes}
    for first, second in edges:
        found[first].append(second)
    return found


def sort(after: Mapping[Node, Collection[Node]]) -> list[Node]:
    """Return the nodes in an order that the edges allow, those that `after` has first as early as can be. Nodes of a
    circle, and those after them, are left out.
    """
    nodes = list(after)
    position = {node: at for at, node in enumerate(nodes)}
    missing = Counter(itertools.chain.from_iterable(after.values()))
    ready = [at for at, node in enumerate(nodes) if not missing[node]]
    order = []
    while ready:
        order.append(node := nodes[heapq.heappop(ready)])
        for following in after[node]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, position[following])
    return order


def only_order(nodes: int, edges: Collection[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return the numbers of the nodes, 0 to `nodes` - 1, in the only order that the edges allow; None if they allow
    several.
    """
    order = tuple(sort(directly_after(range(nodes), edges)))
    return order if len(order) == nodes and {*itertools.pairwise(order)} <= {*edges} else None


def all_before(order: Sequence[Node], after: Mapping[Node, Iterable[Node]]) -> list[int]:
    """Return the nodes before each node, by position in `order`: a bit for each position."""
    position, found = {node: at for at, node in enumerate(order)}, [0] * len(order)
    for at, node in enumerate(order):
        for following in after[node]:
            found[position[following]] |= found[at] | 1 << at
    return found


def all_after(order: Sequence[Node], after: Mapping[Node, Iterable[Node]]) -> list[int]:
    """Return the nodes after each node, by position in `order`: a bit for each position."""
    position, found = {node: at for at, node in enumerate(order)}, [0] * len(order)
    for at in range(len(order) - 1, -1, -1):
        for following in map(position.__getitem__, after[order[at]]):
            found[at] |= found[following] | 1 << following
    return found


def implied_edges(after: Mapping[Node, Collection[Node]]) -> list[tuple[Node, Node]]:
    """Return the edges of an acyclic graph that its transitive reduction lacks, in a fixed order."""
    order = sort(after)
    position, later = {node: at for at, node in enumerate(order)}, all_after(order, after)
    implied = []
    for node in order:
        reached = 0
        for at in (ends := sorted(map(position.__getitem__, after[node]))):
            reached |= later[at]
        implied += [(node, order[at]) for at in ends if reached >> at & 1]
    return implied


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the starts, and all that follows them."""
    found = set(starts)
    todo = list(found)
    while todo:
        new = set(following(todo.pop())) - found
        found |= new
        todo += new
    return found
