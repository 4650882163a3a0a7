"""Finds where to cut a graph into parts that are launched one after the other, so that they need less memory.

A part needs all memory that is held anywhere in it, for it is launched at once. Only memory in slabs can be shared
inside of a part. With many parts a launch takes the host longer, so there are as few as bring most of the gain. This
module is pure: positions are those of an order of the nodes, sizes are bytes.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CANDIDATES = 20  # places for cuts: so many where most bytes begin or end, and about as many at equal distances
LENIENT = 8
IGNORED = 2000  # memory in a slab with less than 1 / IGNORED of all bytes is ignored when cuts are looked for


@dataclass(frozen=True)
class Held:
    """Memory that a launch needs from position `first` to `last`, in a slab with others or by itself."""

    size: int
    first: int
    last: int
    slab: bool = False


def cuts(held: Sequence[Held], length: int, most: int, slack: int) -> list[int]:
    """Return where to cut a graph of `length` nodes into parts that are launched one after the other: the positions at
    which a part begins, including 0. Each part needs all memory that is held anywhere in it, but memory in slabs that
    is held only inside the part can be shared. There are at most `most` parts, and no more than it takes to bring the
    largest need of a part within `slack` of the best.

    Memory that something else keeps alive is counted as freed here. In that case, the part that really needs most may
    be one that needs far more than is held at any moment of it. So the largest excess of a part's need over the most
    held at a moment is limited, too: it is within `LENIENT * slack` of the best."""
    total = sum(h.size for h in held)
    grid = _candidates(held, length)
    slabs = [h for h in held if h.slab and h.size * IGNORED > total]
    sums = _Sums([*slabs, *(h for h in held if not h.slab)])
    need = {(a, b): sums.between(a, b) - shared for (a, b), shared in _shared(slabs, grid).items()}
    goal, starts = _fewest(need, grid, most, slack)
    if len(starts) < 2:
        return [0]
    at_a_moment = _most_at_a_moment(held, grid)
    extra = {pair: cost - at_a_moment[pair] for pair, cost in need.items() if cost <= goal}
    return _fewest(extra, grid, most, LENIENT * slack)[1]


def _fewest(costs: Mapping[tuple[int, int], int], grid: Sequence[int], most: int, slack: int) -> tuple[int, list[int]]:
    """Return the cost of the best cut plus `slack`, and the starts of the fewest parts that each cost no more than
    that."""
    ways: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, ())}]  # by number of parts, and by where they end
    for _ in range(most):
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for (begin, end), cost in costs.items():
            if begin in ways[-1]:
                before, starts = ways[-1][begin]
                worst = max(before, cost)
                if end not in reached or worst < reached[end][0]:
                    reached[end] = worst, (*starts, begin)
        ways.append(reached)
    whole = [reached[grid[-1]] for reached in ways if grid[-1] in reached and grid[-1]]
    if not whole:
        return 0, [0]
    goal = min(cost for cost, _ in whole) + slack
    return goal, list(next(starts for cost, starts in whole if cost <= goal))


def _most_at_a_moment(held: Sequence[Held], grid: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the most bytes held at any one moment of each part between two places of the grid."""
    change: dict[int, int] = dict.fromkeys(grid, 0)
    for h in held:
        change[h.first] = change.get(h.first, 0) + h.size
        change[h.last + 1] = change.get(h.last + 1, 0) - h.size
    live, cell, most = 0, -1, [0] * (len(grid) - 1)
    for at in sorted(change):
        live += change[at]
        cell += cell + 1 < len(grid) and at == grid[cell + 1]
        if cell < len(most):
            most[cell] = max(most[cell], live)
    return {(a, grid[j + 1]): max(most[i : j + 1]) for i, a in enumerate(grid[:-1]) for j in range(i, len(most))}


def _shared(slabs: Sequence[Held], grid: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return, for each part between two places of the grid, the bytes that it saves because memory that is held only
    inside of it is shared."""
    begins = sorted({h.first for h in slabs})
    by_end = [
        (h, bisect.bisect_left(begins, h.first), bisect.bisect_right(begins, h.last))
        for h in sorted(slabs, key=lambda h: h.last)
    ]
    shared: dict[tuple[int, int], int] = {}
    for i, a in enumerate(grid):
        inside = [found for found in by_end if found[0].first >= a]
        live, total, most, k = [0] * len(begins), 0, 0, 0  # live: bytes held at each position of `begins`
        for b in grid[i + 1 :]:
            while k < len(inside) and inside[k][0].last < b:
                held, first, end = inside[k]
                for at in range(first, end):
                    live[at] = now = live[at] + held.size
                    if now > most:
                        most = now
                total += held.size
                k += 1
            shared[a, b] = total - most
    return shared


class _Sums:
    """The bytes held in a part if no memory is shared."""

    def __init__(self, held: Iterable[Held]) -> None:
        held = list(held)
        self.total = sum(h.size for h in held)
        self.begins, self.ends = sorted((h.first, h.size) for h in held), sorted((h.last, h.size) for h in held)
        self.begun, self.ended = ([0, *itertools.accumulate(size for _, size in k)] for k in (self.begins, self.ends))

    def between(self, begin: int, end: int) -> int:
        late = self.total - self.begun[bisect.bisect_left(self.begins, (end, 0))]
        return self.total - late - self.ended[bisect.bisect_left(self.ends, (begin, 0))]


def _candidates(held: Sequence[Held], length: int) -> list[int]:
    """Return positions where most bytes begin or end, and some at equal distances."""
    weight: dict[int, int] = {}
    for h in held:
        for at in (h.first, h.last + 1):
            if 0 < at < length:
                weight[at] = weight.get(at, 0) + h.size
    heavy = sorted(weight, key=lambda at: (-weight[at], at))[:CANDIDATES]
    return sorted({0, length, *heavy, *[length * i // CANDIDATES for i in range(1, CANDIDATES)]})


def _need(held: Sequence[Held], begin: int, end: int) -> int:
    """Return the bytes that the part [begin, end) needs at once."""
    total = 0
    steps: dict[int, int] = {}
    for h in held:
        if h.first >= end or h.last < begin:
            continue
        if h.slab and h.first >= begin and h.last < end:
            steps[h.first] = steps.get(h.first, 0) + h.size
            steps[h.last + 1] = steps.get(h.last + 1, 0) - h.size
        else:
            total += h.size
    live = most = 0
    for at in sorted(steps):
        live += steps[at]
        most = max(most, live)
    return total + most


def need_of(held: Sequence[Held], starts: Sequence[int], length: int) -> int:
    """Return the bytes that the part that needs most needs at once."""
    return max(_need(held, a, b) for a, b in zip(starts, [*starts[1:], length], strict=True))
