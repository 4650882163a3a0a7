"""Where copies to and from the host stand in a schedule, so that a budget of memory holds: a pure function of lists.

A schedule is a list of steps; `live[i]` is what is in memory during step i. Memory is taken when a load is launched,
and given back when a step has waited for a store. Both cost time at the wrong moment: a load that is launched late
keeps its reader waiting, and a step that waits for a store early waits long. So loads are launched as early as the
budget allows, and stores are waited for as late as it does; but never later than the copy is known to have ended, with
a margin, for then the wait costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Load:
    """So many bytes, first read in step `first`; they are counted in `live` from there on."""

    first: int
    nbytes: int


@dataclass(frozen=True)
class Store:
    """A copy of what step `made` makes; no step behind `last` reads the original. Until a step waits for the copy,
    the original is counted in `live` to the end. `ends` is a step by which the copy has ended, as far as is known."""

    made: int
    last: int
    nbytes: int
    ends: int


def place_loads(live: Sequence[int], loads: Sequence[Load], budget: int) -> list[int]:
    """For each load, the step before which it is launched. Loads are launched in the order of their first readers."""
    room = list(live)
    places = [0] * len(loads)
    earliest = 0
    for number in sorted(range(len(loads)), key=lambda n: loads[n].first):
        load = loads[number]
        place = load.first
        while place > earliest and room[place - 1] + load.nbytes <= budget:
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
