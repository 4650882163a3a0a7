"""Where copies to and from the host stand in a schedule, so that a budget of memory holds: a pure function of lists.

A schedule is a list of steps; `live[i]` is what is in memory during step i. Memory is taken when a load is launched,
and freed when a step has waited for a store. Both cost time at the wrong moment: a load that is launched late
keeps its reader waiting, and a step that waits for a store early waits long. So stores are waited for as late as the
budget allows; but never later than the copy is known to have ended, with a margin, for then the wait costs nothing.
Loads are launched so early that they end well before their readers begin, as far as the budget allows; but no earlier:
a copy under way holds its memory, and a launched graph ends when its last copy has.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


MARGIN = 1.5  # a copy may take so much longer than it should before somebody waits for it
LEAD = 4.0  # so many times what a copy takes it is launched before its reader: steps are long, and may be shorter
STAGES = 6  # of a backward under CUDA graphs, about: `relaunch.memory.arrange`, Note [Stages]


def held_until(step: int, count: int) -> int:
    """The last step of the stage that a step belongs to: what goes in is in memory until then."""
    length = -(-count // STAGES)
    return min((step // length + 1) * length, count) - 1 if count else 0


def held_from(step: int, count: int) -> int:
    """The first step of the stage: what comes out is in memory from then on."""
    length = -(-count // STAGES)
    return step // length * length if count else 0


@dataclass(frozen=True)
class Load:
    """So many bytes, first read in step `first`; they are counted in `live` from there on."""

    first: int
    nbytes: int


@dataclass(frozen=True)
class Store:
    """A copy of what step `made` makes; no step after `last` reads the original. Until a step waits for the copy,
    the original is counted in `live` to the end. `ends` is a step by which the copy has ended, as far as is known."""

    made: int
    last: int
    nbytes: int
    ends: int


def just_in_time(starts: Sequence[float], firsts: Sequence[int], us: Sequence[float]) -> list[int]:
    """For copies that take so many microseconds, one after the other, the last steps before which they can be launched
    and end well before their first readers do anything. `starts` has the time at which each step begins."""
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
    """For each load, the step before which it is launched: as early as the budget allows, but no earlier than `wanted`.
    Loads are launched in the order of their first readers."""
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
    """For each store, the step that waits for it, after which the original's memory is free; the number of steps where
    none needs to."""
    count = len(live)
    places = [min(max(s.ends, s.last + 1), count) for s in stores]
    room = list(live)
    for store, place in zip(stores, places):
        for i in range(place, count):
            room[i] -= store.nbytes
    # What the budget asks for earlier than that: the oldest copies first.
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
