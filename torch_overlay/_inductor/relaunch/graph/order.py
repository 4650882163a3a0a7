"""Finds the order in which the nodes of a graph run, if its edges allow one only."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable


def only_order(nodes: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return the numbers of the nodes, 0 to `nodes` - 1, in the only order that the edges allow; None if they allow
    several."""
    after: list[list[int]] = [[] for _ in range(nodes)]
    waits_for = [0] * nodes
    for node, later in edges:
        after[node].append(later)
        waits_for[later] += 1
    ready = [node for node in range(nodes) if not waits_for[node]]
    order: list[int] = []
    while len(ready) == 1:
        order.append(node := ready.pop())
        for later in after[node]:
            waits_for[later] -= 1
            if not waits_for[later]:
                ready.append(later)
    return tuple(order) if len(order) == nodes else None
