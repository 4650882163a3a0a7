"""Chooses which saved activations go to the host: a pure plan over two lists of steps.

A forward and its backward are lists of steps; each has a time, the memory that it allocates, and what it reads. Memory
is live from the step that makes it to its last reader; a saved value is live until its last reader in the backward. A
candidate that goes to the host is live in the forward until its copy has ended, and in the backward from its first
reader on.

The peak is a function of the chosen set. The cost is the time that the copies add to forward and backward. The copies
of one direction run one after the other, concurrently with the steps. A copy to the host begins when its producer has
ended, and the forward ends when the last of these copies has; a copy from the host must have ended when its first
reader begins. So a candidate has *slack*: the time between its producer and the forward's end, or between the
backward's start and its first reader, whichever is less. Bytes of the candidate with the most slack are the cheapest to
free, since a hidden copy costs nothing. `choose` takes candidates in that order until the peak fits, and drops those
that the peak doesn't need. If some copies still aren't hidden, recomputation competes: a value that pointwise
operations make of other saved ones is computed again if that takes less time than the part of its copy that isn't
hidden.

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
PARTS = (1.0, 0.9, 0.8, 0.7, 0.6)  # shares of the forward, for `_spread`
MOST_TRIES = 64  # sets that differ in one value, each time that a set is improved


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


@dataclass(frozen=True)
class Choice:
    chosen: tuple[str, ...]  # to be copied, in the order in which the forward makes them
    recomputed: tuple[str, ...]  # to be computed again
    peak: int  # bytes
    peak_before: int  # bytes, with nothing on the host
    least: int  # bytes: the lowest peak that is possible
    nbytes: int  # on the host
    step_us: float  # the estimate of forward and backward without copies
    exposed_us: float  # the time that steps wait for copies
    recompute_us: float
    hidden: float  # the share of the copies' time in which no step waits, from 0 to 1
    transfers: tuple[Transfer, ...] = ()


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


def _spread(model: Model, candidates: Sequence[Candidate], part: float) -> list[str]:
    """Return the names of the candidates; first those that are made in the first `part` of the forward, in an order in
    which the first n, for any n, are spread evenly over it: copies then keep up with what is made, and little memory
    waits for them. The other candidates follow, by slack."""
    early = [c for c in candidates if model.ends[model.made[c.name]] <= part * model.ends[-1]]
    early.sort(key=lambda c: model.made[c.name])
    order = sorted(range(len(early)), key=lambda i: int(f"{i:032b}"[::-1], 2))
    names = [early[i].name for i in order]
    taken = set(names)
    return names + [c.name for c in candidates if c.name not in taken]


def choose(model: Model, budget: int, link: Link) -> Choice:
    """Return the cheapest set whose peak is within `budget` bytes, or as near to it as possible.

    Several sets are compared: the candidates with most slack, as many as it takes if no step waits for a copy, or
    fewer, with steps that wait; and sets that are spread over parts of the forward, where a launch needs memory for all
    values at once.
    """
    must = [c.name for c in model.candidates if c.must]
    optional = [c for c in model.candidates if not c.must]
    # A copy that takes longer than its slack is never hidden: candidates with slack to spare come first.
    optional.sort(key=lambda c: (-(model.slack(c) - c.nbytes / min(link.out, link.back)), -c.nbytes, c.name))
    names = [c.name for c in optional]
    orders: list[tuple[list[str], Link | None]] = [(names, link), (names, None)]
    best = min((_tried(model, must, order, budget, link, rate) for order, rate in orders), key=Tried.cost)
    if best.cost()[:2] != (0, 0.0):
        orders += [(_spread(model, optional, part), link) for part in PARTS]
        found = [_tried(model, must, order, budget, link, rate) for order, rate in orders[2:]]
        best = _recompute(model, min([best, *found], key=Tried.cost), budget, link)
    if best.exposed > 0 and (cheap := _all_cheap(model)):
        found = [_tried(model, must, order, budget, link, rate, cheap) for order, rate in orders]
        if found := [tried for tried in found if tried.chosen]:  # at least one value is copied in any case
            best = min(best, _without_superfluous(model, min(found, key=Tried.cost), budget, link), key=Tried.cost)
    chosen, rate, again = best.chosen, best.rate, best.again
    limit = max(budget, model.peak(chosen, rate, again))
    sizes = {c.name: c.nbytes for c in model.candidates}
    exposed, total = model.exposed(chosen, link, again, limit), model.copy_us(chosen, link)
    before = model.peak(())
    return Choice(
        tuple(sorted(chosen, key=model.made.__getitem__)),
        tuple(sorted((c.name for c in again), key=model.made.__getitem__)),
        model.peak(chosen, rate, again),
        before,
        min(model.peak([*must, *names]), before),
        sum(sizes[name] for name in chosen),
        model.step_us,
        exposed,
        sum(c.again.us for c in again if c.again is not None),
        max(0.0, 1.0 - exposed / total) if total else 1.0,
        tuple(model.transfers(chosen, link, again, limit)),
    )


@dataclass(frozen=True)
class Tried:
    """A set of candidates: the bytes by which its peak exceeds the budget, the microseconds that steps wait for its
    copies, what is copied, and what is computed again; `rate` is None if the set fits because steps wait."""

    missing: int
    exposed: float
    chosen: list[str]
    rate: Link | None
    again: list[Candidate]

    def cost(self) -> tuple[int, float, int]:
        return self.missing, self.exposed + sum(c.again.us for c in self.again if c.again is not None), len(self.chosen)


def _set(model: Model, chosen: list[str], budget: int, link: Link, rate: Link | None, again: list[Candidate]) -> Tried:
    peak = model.peak(chosen, rate, again)
    exposed = model.exposed(chosen, link, again, max(budget, peak))
    return Tried(max(0, peak - budget), exposed, chosen, rate, again)


def _tried(
    model: Model,
    must: list[str],
    order: list[str],
    budget: int,
    link: Link,
    rate: Link | None,
    again: Sequence[Candidate] = (),
) -> Tried:
    taken = {c.name for c in again}
    names = [n for n in order if n not in taken]
    return _set(model, _fewest(model, must, names, budget, rate, again), budget, link, rate, list(again))


def _cheap(model: Model) -> list[Candidate]:
    """Return the candidates that can be computed again, the cheapest per byte first."""
    found = [c for c in model.candidates if c.again is not None and not c.must]
    return sorted(found, key=lambda c: (c.again.us / c.nbytes if c.again else 0.0, -c.nbytes, c.name))


def _fits(candidate: Candidate, again: Sequence[Candidate]) -> bool:
    """True if the candidate can join `again`: what is read to compute a value again must itself stay saved."""
    taken = {c.name for c in again}
    needed = {name for c in again if c.again is not None for name in c.again.reads}
    return candidate.again is not None and not candidate.again.reads & taken and candidate.name not in needed


def _all_cheap(model: Model) -> list[Candidate]:
    again: list[Candidate] = []
    for candidate in _cheap(model):
        if _fits(candidate, again):
            again.append(candidate)
    return again


def _without_superfluous(model: Model, tried: Tried, budget: int, link: Link) -> Tried:
    """Leave a value saved if computing it again helps neither the peak nor the copies; the most expensive first."""
    for candidate in reversed(tried.again[-MOST_TRIES:]):
        again = [c for c in tried.again if c is not candidate]
        without = _set(model, tried.chosen, budget, link, tried.rate, again)
        if without.cost() < tried.cost():
            tried = without
    return tried


def _recompute(model: Model, tried: Tried, budget: int, link: Link) -> Tried:
    """Compute a value again where that takes less time than the copies that it makes superfluous are exposed: its own
    copy, or others that the peak no longer needs. Values that were chosen for a copy are tried first."""
    must = {c.name for c in model.candidates if c.must}
    before = set(tried.chosen)
    for candidate in sorted(_cheap(model), key=lambda c: c.name not in before)[:MOST_TRIES]:
        if tried.exposed <= 0 or len(tried.chosen) == 1:
            break
        if not _fits(candidate, tried.again):
            continue
        again = [*tried.again, candidate]
        copied = [n for n in tried.chosen if n != candidate.name]
        if len(copied) == len(tried.chosen):
            limit = max(budget, model.peak(tried.chosen, tried.rate, tried.again))
            copied = _given_back(model, copied, must, limit, tried.rate, again)
        now = _set(model, copied, budget, link, tried.rate, again)
        if now.cost()[:2] < tried.cost()[:2]:
            tried = now
    return tried


def _given_back(
    model: Model, chosen: list[str], must: set[str], limit: int, rate: Link | None, again: list[Candidate]
) -> list[str]:
    """Return `chosen` without the least hidden values, which it has last, that the peak doesn't need; at least one
    value remains."""
    for name in reversed(chosen[-MOST_TRIES:]):
        without = [n for n in chosen if n != name]
        if name not in must and without and model.peak(without, rate, again) <= limit:
            chosen = without
    return chosen


def _fewest(
    model: Model, must: list[str], names: list[str], budget: int, rate: Link | None, again: Sequence[Candidate] = ()
) -> list[str]:
    """Return `must` and, from the first on, as many of `names` as the peak takes to be within the budget."""

    def peak(count: int) -> int:
        return model.peak([*must, *names[:count]], rate, again)

    low, high = -1, len(names)  # at `low` the peak is over the budget
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle
    chosen = [*must, *names[:high]]
    limit = max(budget, model.peak(chosen, rate, again))
    # Drop, the least hidden first, the names that the limit doesn't need; a bounded number of tries.
    for name in reversed(names[max(0, high - MOST_TRIES) : high]):
        without = [n for n in chosen if n != name]
        if model.peak(without, rate, again) <= limit:
            chosen = without
    return chosen
