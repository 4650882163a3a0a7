"""Packs the scratch allocations of a graph into slabs, where those that live one after the other share memory.

A graph is launched at once, so all memory that it touches is needed at once, unless one allocation can be shown to live
only after another one. Both the program and the graph must show it (`Order.follows`):

    the program    it had freed the first before it allocated the second, as the caching allocator requires
    the graph      every node that may touch the first comes, by the edges, before every node that holds an address in
                   the second

Note [Who may touch an allocation]
A node that holds an address in an allocation may touch all of it. A node that holds none may still get one from another
node: a kernel can leave an address in memory for a later kernel. The program keeps an allocation as long as any of its
kernels needs it. So take an allocation that the program made after it had freed the first one: the nodes that hold an
address in it, and all nodes after those, don't touch the first one. All other nodes after a node that holds an address
in the first one count as touching it.

Note [Slabs]
The caching allocator takes blocks of less than 10 MiB out of segments of 20 MiB, so such a block fits where others
were. A larger block gets a segment of its own size, where no larger block fits later. So a slab is less than 10 MiB,
unless a single allocation is larger, which has a segment of its own without graphs, too. If there is such a slab, a
small slab is appended to it, because each allocation takes the host time.

This module is pure: it calls neither torch nor a driver. Nodes are numbered as in the graph; a set of nodes is an
integer with a bit for each position in an order that the edges allow.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_overlay import orders


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ALIGNMENT = 512  # as the caching allocator aligns
SLAB = (10 << 20) - ALIGNMENT  # Note [Slabs]
LITTLE_SLAB = 4 << 20


@dataclass(frozen=True)
class Life:
    """The life of an allocation: its size in bytes, and two times, which are numbers of the program's allocations.
    `made` is the first one that came with it or after it, `freed` the first one after its end; None if no end is known.
    """

    size: int
    made: int = 0
    freed: int | None = None

    def either(self, other: Life) -> Life:
        """Return the longest life that two captures of one program show."""
        ends = (self.freed, other.freed)
        known = [e for e in ends if e is not None]
        return Life(max(self.size, other.size), min(self.made, other.made), max(known) if len(known) == 2 else None)


class Order:
    """The order of a graph's nodes, and the nodes that touch each allocation. `slots`: (node, allocation) for each
    pointer slot."""

    def __init__(
        self, nodes: int, edges: Iterable[tuple[int, int]], lives: Sequence[Life], slots: Iterable[tuple[int, int]]
    ) -> None:
        self.lives = lives
        self.order, self.position, self.earlier, self.later = _ordered(nodes, tuple(edges))
        self.holders = [0] * len(lives)
        for node, allocation in slots:
            self.holders[allocation] |= 1 << self.position[node]
        self.touching = self._touching()
        everything = (1 << nodes) - 1
        self.after = []  # by allocation: the nodes that come after every node that may touch it
        for touching in self.touching:
            after = everything
            while touching:
                at = touching.bit_length() - 1
                after &= self.later[at]
                touching &= ~(self.earlier[at] | 1 << at)  # a node after this one is also after the earlier ones
            self.after.append(after)

    def _reached(self, holders: int) -> int:
        """Return the nodes `holders`, and all nodes that come after any of them."""
        reached = holders
        while holders:
            at = first_bit(holders)
            reached |= self.later[at]
            holders &= ~(self.later[at] | 1 << at)
        return reached

    def _touching(self) -> list[int]:
        """Return the nodes that may touch each allocation. Note [Who may touch an allocation]."""
        by_time = sorted(range(len(self.lives)), key=lambda a: self.lives[a].made)
        times = [self.lives[a].made for a in by_time]
        late = [0] * (len(by_time) + 1)  # nodes that hold an allocation made from here on, and nodes after them
        reached = [self._reached(holders) for holders in self.holders]
        for i in range(len(by_time) - 1, -1, -1):
            late[i] = late[i + 1] | reached[by_time[i]]
        touching = []
        for allocation, life in enumerate(self.lives):
            first = len(times) if life.freed is None else bisect.bisect_left(times, life.freed)
            touching.append(self.holders[allocation] | (reached[allocation] & ~late[first]))
        return touching

    def follows(self, second: int, first: int) -> bool:
        """True if the second allocation may lie where the first one was."""
        end = self.lives[first].freed
        return end is not None and self.lives[second].made >= end and not self.holders[second] & ~self.after[first]

    def clear(self, a: int, b: int) -> bool:
        """True if the two allocations may share memory."""
        return self.follows(a, b) or self.follows(b, a)

    def span(self, allocation: int) -> tuple[int, int] | None:
        """Return the first and the last position at which the allocation may be touched; None if no node touches it."""
        touching = self.touching[allocation]
        return (first_bit(touching), touching.bit_length() - 1) if touching else None

    def pack(self, allocations: Sequence[int]) -> tuple[dict[int, tuple[int, int]], list[int]]:
        """Return (slab, offset) of the allocations that nodes touch, and the sizes of the slabs. Two allocations
        overlap only if one follows the other. Note [Slabs]."""
        used = [a for a in allocations if self.holders[a] and self.lives[a].size]
        slabs: list[_SlabPacking] = []
        places: dict[int, tuple[int, int]] = {}
        for a in sorted(used, key=lambda a: (-self.lives[a].size, self.lives[a].made)):
            size = aligned(self.lives[a].size)
            best: tuple[int, int, int] | None = None  # bytes that the slab grows by, its number, and the offset
            for number, slab in enumerate(slabs):
                if (at := slab.fit(size, a, self.clear)) is not None:
                    way = max(0, at + size - slab.size), number, at
                    best = way if best is None else min(best, way)
                    if not way[0]:
                        break
            if best is None:
                best = size, len(slabs), 0
                slabs.append(_SlabPacking(max(SLAB, size)))
            _, number, at = best
            slabs[number].put(a, at, size)
            places[a] = number, at
        return _with_least_behind_first(places, [slab.size for slab in slabs])


@functools.lru_cache(16)  # sizes of a region have one graph
def _ordered(nodes: int, edges: tuple[tuple[int, int], ...]) -> tuple[list[int], dict[int, int], list[int], list[int]]:
    """Return an order that the edges allow, the position of each node in it, and by position the nodes before and the
    nodes after each node."""
    order = orders.sort(after := orders.directly_after(range(nodes), edges))
    if len(order) != nodes:
        raise ValueError("the edges of the graph form a circle")
    position = {node: at for at, node in enumerate(order)}
    return order, position, orders.all_before(order, after), orders.all_after(order, after)


def _with_least_behind_first(
    places: dict[int, tuple[int, int]], sizes: list[int]
) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Append the smallest other slab to the first one, if it is small and the first is a large one. Note [Slabs]"""
    if len(sizes) < 2 or sizes[0] <= SLAB:
        return places, sizes
    least = min(range(1, len(sizes)), key=sizes.__getitem__)
    if sizes[least] > LITTLE_SLAB:
        return places, sizes
    moved = {a: (0, sizes[0] + at) for a, (number, at) in places.items() if number == least}
    later = {a: (number - 1, at) for a, (number, at) in places.items() if number > least}
    return {**places, **moved, **later}, [sizes[0] + sizes[least], *sizes[1:least], *sizes[least + 1 :]]


class _SlabPacking:
    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.taken: list[tuple[int, int, int]] = []  # (offset, end, allocation), by offset

    def fit(self, size: int, allocation: int, clear: Callable[[int, int], bool]) -> int | None:
        """Return the first offset where `size` bytes overlap only allocations that this one may share memory with; None
        if there is none."""
        at, last = 0, self.limit - size
        for start, end, other in self.taken:
            if at + size <= start or at > last:
                break
            if end > at and not clear(allocation, other):
                at = end
        return at if at <= last else None

    def put(self, allocation: int, at: int, size: int) -> None:
        bisect.insort(self.taken, (at, at + size, allocation))
        self.size = max(self.size, at + size)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def first_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
