"""Estimates what copies of saved activations to the host cost, and how much memory they free, over two lists of steps.

A forward and its backward are lists of steps; each has a time, the memory that it allocates, and what it reads. Memory
is live from the step that makes it to its last reader; a saved value is live until its last reader in the backward. A
candidate that goes to the host is live in the forward until its copy has ended, and in the backward from its first
reader on.

The peak is a function of the chosen set. The cost is the time that the copies add to forward and backward. The copies
of one direction run one after the other, concurrently with the steps. A copy to the host begins when its producer has
ended, and the forward ends when the last of these copies has; a copy from the host must have ended when its first
reader begins. So a candidate has *slack*: the time between its producer and the forward's end, or between the
backward's start and its first reader, whichever is less.

The module imports no torch.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_overlay._functorch.offload.copy_placement import (
    held_from,
    held_until,
    just_in_time,
    Load,
    MARGIN,
    place_loads,
    place_waits,
    Store,
)


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Step:
    """One operation: its device time in microseconds, the bytes that it allocates by name, and what it reads."""

    name: str
    us: float
    makes: Mapping[str, int]
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Recompute:
    """The cost of computing a saved value again in the backward: the time, and the saved values that are read."""

    us: float
    reads: frozenset[str]


@dataclass(frozen=True)
class Candidate:
    """A saved value, by the name that it has in both lists. `must` says that the user asked for a copy to the
    host; `again` is set for a value that can be computed from other saved ones.
    """

    name: str
    nbytes: int
    must: bool = False
    again: Recompute | None = None


@dataclass(frozen=True)
class Link:
    """Rates of copies: bytes per microsecond to the host and from it, and the latency of each copy."""

    out: float
    back: float
    latency_us: float = 8.0


@dataclass(frozen=True)
class Transfer:
    """The two copies of one value. `out` is (begin, end) of the copy to the host, in microseconds of the forward;
    `back` is that of the copy from the host, in those of the backward; `exposed_us` is how long steps wait for them."""

    name: str
    out: tuple[float, float]
    back: tuple[float, float]
    exposed_us: float

    @property
    def hidden(self) -> float:
        total = self.out[1] - self.out[0] + self.back[1] - self.back[0]
        return max(0.0, 1.0 - self.exposed_us / total) if total else 1.0


class Model:
    """Two lists of steps, and what is saved between them."""

    def __init__(
        self,
        forward: Sequence[Step],
        backward: Sequence[Step],
        saved: Mapping[str, int],
        results: Collection[str] = (),
        candidates: Sequence[Candidate] = (),
        at_once: bool = False,
    ) -> None:
        """Index the steps. `saved` has the bytes of the values that the forward saves for the backward; `results` are
        the values of either that the caller gets. `at_once` is for CUDA graphs: inputs and outputs are in memory from a
        launch to its end."""
        self.at_once = at_once
        self.forward, self.backward, self.saved, self.results = forward, backward, dict(saved), set(results)
        self.made = {name: i for i, step in enumerate(forward) for name in step.makes}
        self.first_read: dict[str, int] = {}
        self.last_read: dict[str, int] = {}
        self.last_read_forward: dict[str, int] = {}
        for i, step in enumerate(forward):
            for name in step.reads:
                self.last_read_forward[name] = i
        for i, step in enumerate(backward):
            for name in step.reads:
                self.first_read.setdefault(name, i)
                self.last_read[name] = i
        self.ends = _ends(forward)
        self.backward_ends = _ends(backward)
        self.candidates = [c for c in candidates if c.name in self.made and c.name in self.first_read]

    def last_reads(self, again: Collection[Candidate]) -> dict[str, int]:
        """Return the last reader of each value in the backward, if the values of `again` are computed again there."""
        found = dict(self.last_read)
        for candidate in again:
            first = self.first_read[candidate.name]
            for name in candidate.again.reads if candidate.again is not None else ():
                found[name] = max(found.get(name, 0), first)
        return found

    def first_reads(self, again: Collection[Candidate]) -> dict[str, int]:
        found = dict(self.first_read)
        for candidate in again:
            first = self.first_read[candidate.name]
            for name in candidate.again.reads if candidate.again is not None else ():
                found[name] = min(found.get(name, first), first)
        return found

    @property
    def step_us(self) -> float:
        return (self.ends[-1] if self.ends else 0.0) + (self.backward_ends[-1] if self.backward_ends else 0.0)

    def slack(self, candidate: Candidate) -> float:
        """Return the microseconds that a copy of it may take and still be hidden, in the tighter direction."""
        produced = self.ends[self.made[candidate.name]]
        first = self.first_read[candidate.name]
        return min(self.ends[-1] - produced, self.backward_ends[first - 1] if first else 0.0)

    # -- memory

    def peak(self, chosen: Collection[str], link: Link | None = None, again: Collection[Candidate] = ()) -> int:
        """Return the peak in bytes if no step waits for a copy; without a link, if steps wait for each copy."""
        firsts = self.first_reads(again)
        copied = {n: self.made[n] for n in chosen} if link is None else self._copied(chosen, link)
        begun = {n: firsts[n] for n in chosen} if link is None else self._begun(chosen, link, firsts)
        return max(*self._forward_live(copied, again), *self._backward_live(begun, again), 0)

    def _forward_live(self, copied: Mapping[str, int], again: Collection[Candidate]) -> list[int]:
        """Return the bytes in memory during each step; a copied value is freed after the step in `copied`."""
        away = {**copied, **{c.name: self.made[c.name] for c in again}}
        count = len(self.forward)
        changes = [0] * (count + 2)
        for i, step in enumerate(self.forward):
            for name, nbytes in step.makes.items():
                last = self.last_read_forward.get(name, i)
                if name in away:
                    last = max(last, away[name])
                elif name in self.saved or name in self.results:
                    last = count
                    if self.at_once:
                        changes[0] += nbytes
                        changes[i] -= nbytes
                changes[i] += nbytes
                changes[min(last, count) + 1] -= nbytes
        return list(itertools.accumulate(changes[:count]))

    def _copied(self, away: Collection[str], link: Link) -> dict[str, int]:
        """Return the step of the forward during which each copy ends."""
        found, clock, at = {}, 0.0, 0
        for i, step in enumerate(self.forward):
            for name, nbytes in step.makes.items():
                if name in away:
                    clock = max(clock, self.ends[i]) + link.latency_us + nbytes / link.out
                    at = max(at, i)
                    while at < len(self.forward) and self.ends[at] < clock:
                        at += 1
                    found[name] = at
        return found

    def _begun(self, away: Collection[str], link: Link, firsts: Mapping[str, int]) -> dict[str, int]:
        """Return the step of the backward during which each copy has to begin, so that its reader need not wait."""
        found, clock = {}, float("inf")
        for name in sorted(away, key=firsts.__getitem__, reverse=True):
            first = firsts[name]
            clock = min(clock, self.backward_ends[first - 1] if first else 0.0)
            clock -= link.latency_us + self.saved[name] / link.back
            found[name] = min(bisect.bisect_right(self.backward_ends, max(clock, 0.0)), first)
        return found

    def _backward_live(self, begun: Mapping[str, int], again: Collection[Candidate]) -> list[int]:
        """Return the bytes in memory during each step; a loaded value is there from the step in `begun` on. With
        `at_once`, inputs and outputs are in memory for whole stages of the launch."""
        count = len(self.backward)
        changes = [0] * (count + 2)
        lasts = self.last_reads(again)
        away = {**begun, **{c.name: self.first_read[c.name] for c in again}}
        for name, nbytes in self.saved.items():
            last = lasts.get(name, 0)
            if self.at_once and name not in away:
                last = held_until(last, count)
            changes[away.get(name, 0)] += nbytes
            changes[last + 1] -= nbytes
        for i, step in enumerate(self.backward):
            for name, nbytes in step.makes.items():
                is_result = name in self.results
                changes[held_from(i, count) if self.at_once and is_result else i] += nbytes
                changes[(count if is_result else self.last_read.get(name, i)) + 1] -= nbytes
        return list(itertools.accumulate(changes[:count]))

    # -- time

    def exposed(
        self, chosen: Collection[str], link: Link, again: Collection[Candidate] = (), budget: int = UNBOUNDED
    ) -> float:
        """Return the microseconds that the copies of the chosen values add to forward and backward."""
        return sum(copy.exposed_us for copy in self.transfers(chosen, link, again, budget))

    def transfers(
        self, chosen: Collection[str], link: Link, again: Collection[Candidate] = (), budget: int = UNBOUNDED
    ) -> list[Transfer]:
        """Return when the copies run, if the schedule places them as `offload.copy_placement` does, and how long steps
        wait for them; in the order of the copies from the host."""
        waited: dict[str, float] = dict.fromkeys(chosen, 0.0)
        out = self._out(chosen, link, again, budget, waited)
        back = self._back(chosen, link, again, budget, waited)
        return [Transfer(name, out[name], times, waited[name]) for name, times in back.items()]

    def _out(
        self,
        chosen: Collection[str],
        link: Link,
        again: Collection[Candidate],
        budget: int,
        waited: dict[str, float],
    ) -> dict[str, tuple[float, float]]:
        names = sorted(chosen, key=self.made.__getitem__)
        count = len(self.forward)
        careful = Link(link.out / MARGIN, link.back, MARGIN * link.latency_us)
        ended = self._copied(chosen, careful)
        stores = [
            Store(made, max(made, self.last_read_forward.get(n, made)), self.saved[n], ended.get(n, count) + 1)
            for n in names
            for made in [self.made[n]]
        ]
        places = place_waits(self._forward_live(dict.fromkeys(names, count), again), stores, budget)
        awaited: dict[int, list[str]] = {}
        launched: dict[int, list[str]] = {}
        for name, store, place in zip(names, stores, places):
            awaited.setdefault(place, []).append(name)
            launched.setdefault(store.made, []).append(name)
        out: dict[str, tuple[float, float]] = {}
        clock = now = 0.0
        for i, step in enumerate(self.forward):
            for name in awaited.get(i, ()):
                waited[name] += max(0.0, out[name][1] - now)
                now = max(now, out[name][1])
            now += step.us
            for name in launched.get(i, ()):
                begin = max(clock, now)
                clock = begin + link.latency_us + self.saved[name] / link.out
                out[name] = begin, clock
        for name, (begin, end) in out.items():  # all copies are joined at the end
            waited[name] += max(0.0, end - max(begin, now))
        return out

    def _back(
        self,
        chosen: Collection[str],
        link: Link,
        again: Collection[Candidate],
        budget: int,
        waited: dict[str, float],
    ) -> dict[str, tuple[float, float]]:
        firsts = self.first_reads(again)
        names = sorted(chosen, key=firsts.__getitem__)
        live = self._backward_live({n: firsts[n] for n in names}, again)
        starts = [0.0, *self.backward_ends[:-1]]
        us = [link.latency_us + self.saved[n] / link.back for n in names]
        wanted = just_in_time(starts, [firsts[n] for n in names], us)
        places = place_loads(live, [Load(firsts[n], self.saved[n]) for n in names], budget, wanted)
        launched: dict[int, list[str]] = {}
        read: dict[int, list[str]] = {}
        for name, place in zip(names, places):
            launched.setdefault(place, []).append(name)
            read.setdefault(firsts[name], []).append(name)
        back: dict[str, tuple[float, float]] = {}
        clock = now = 0.0
        for i, step in enumerate(self.backward):
            for name in launched.get(i, ()):
                begin = max(clock, now)
                clock = begin + link.latency_us + self.saved[name] / link.back
                back[name] = begin, clock
            for name in read.get(i, ()):
                waited[name] += max(0.0, back[name][1] - now)
                now = max(now, back[name][1])
            now += step.us
        return back

    def copy_us(self, chosen: Collection[str], link: Link) -> float:
        sizes = {c.name: c.nbytes for c in self.candidates}
        return sum(2 * link.latency_us + sizes[n] / link.out + sizes[n] / link.back for n in chosen)


def _ends(steps: Sequence[Step]) -> list[float]:
    found, clock = [], 0.0
    for step in steps:
        clock += step.us
        found.append(clock)
    return found
