"""Places copies to and from the host in a schedule, so that a memory budget holds: a pure function of lists.

A schedule is a list of steps; `live[i]` is the bytes in memory during step i. Memory is allocated when a load is
launched, and freed when a step has waited for a store. Both cost time at the wrong moment: a load that is launched late
keeps its reader waiting, and a step that waits for a store early waits long. So stores are waited for as late as the
budget allows; but never later than the copy is known to have ended, with a margin, since a wait costs nothing then.
Loads are launched early enough to end well before their readers begin, as far as the budget allows; but no earlier: a
copy in progress holds its memory, and a launched graph ends only when its last copy has ended.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


MARGIN = 1.5  # a copy may take this many times its estimated time before a step waits for it
# A load is launched this many times its duration before its reader: steps are long, and may be shorter than estimated.
LEAD = 4.0
STAGES = 6  # about as many as a backward has that is launched as CUDA graphs: Note [Stages]


def held_until(step: int, count: int) -> int:
    """Return the last step of the stage that a step belongs to: an input is in memory until then."""
    length = -(-count // STAGES)
    return min((step // length + 1) * length, count) - 1 if count else 0


def held_from(step: int, count: int) -> int:
    """Return the first step of the stage that a step belongs to: an output is in memory from then on."""
    length = -(-count // STAGES)
    return step // length * length if count else 0


@dataclass(frozen=True)
class Load:
    """A copy of `nbytes` bytes from the host, first read in step `first`; `live` counts the bytes from that step on."""

    first: int
    nbytes: int


@dataclass(frozen=True)
class Store:
    """A copy to the host of a value that step `made` makes; no step after `last` reads the original. `live` counts the
    original to the end, as if no step waited for the copy. `ends` is a step by which the copy has ended, as far as is
    known."""

    made: int
    last: int
    nbytes: int
    ends: int


def just_in_time(starts: Sequence[float], firsts: Sequence[int], us: Sequence[float]) -> list[int]:
    """Return, for each copy, the last step before which it can be launched and end well before its first reader begins.
    The copies run one after the other and take `us` microseconds each; `starts` has the time when each step begins."""
    places = [0] * len(firsts)
    clock = float("inf")
    for number in sorted(range(len(firsts)), key=lambda n: firsts[n], reverse=True):
        start = starts[min(firsts[number], len(starts) - 1)] if starts else 0.0
        clock = min(clock, start) - MARGIN * us[number]
        launch = min(clock, start - LEAD * us[number])
        places[number] = min(max(bisect.bisect_right(starts, launch) - 1, 0), firsts[number])
    return places


def place_loads(
    live: Sequence[int], loads: Sequence[Load], budget: int, wanted: Sequence[int] | None = None
) -> list[int]:
    """Return, for each load, the step before which it is launched: as early as the budget allows, but no earlier than
    `wanted`. Loads are launched in the order of their first readers."""
    room = list(live)
    places = [0] * len(loads)
    earliest = 0
    for number in sorted(range(len(loads)), key=lambda n: loads[n].first):
        load = loads[number]
        place = load.first
        least = max(earliest, wanted[number]) if wanted is not None else earliest
        while place > least and room[place - 1] + load.nbytes <= budget:
            place -= 1
            room[place] += load.nbytes
        places[number] = earliest = place
    return places


def place_waits(live: Sequence[int], stores: Sequence[Store], budget: int) -> list[int]:
    """Return, for each store, the step that waits for it, after which the original's memory is free; or the number of
    steps if no step needs to wait."""
    count = len(live)
    places = [min(max(s.ends, s.last + 1), count) for s in stores]
    room = list(live)
    for store, place in zip(stores, places):
        for i in range(place, count):
            room[i] -= store.nbytes
    # Where the budget needs it, wait earlier: for the oldest copies first.
    order = sorted(range(len(stores)), key=lambda n: (stores[n].made, n))
    for step in range(count):
        for number in order:
            if room[step] <= budget:
                break
            store = stores[number]
            if max(store.made, store.last) < step < places[number]:
                for i in range(step, places[number]):
                    room[i] -= store.nbytes
                places[number] = step
    return places
