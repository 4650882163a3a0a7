"""Which saved activations go to the host: a pure plan over two lists of steps.

A forward and its backward are lists of steps with a time, what each allocates, and what it reads. Memory is live from
the step that makes it to its last reader; what is saved is live until its last reader in the backward. A candidate that
goes to the host is live in the forward until its copy has ended, and in the backward from its first reader on.

The peak is a function of the chosen set. The cost is the time that the copies add to the step. The copies of one
direction run one after the other beside the steps. Those to the host begin when their producer has ended, and the
forward ends when the last of them has; those from the host must have ended when their first reader begins. So a
candidate has *slack*: the time between its producer and the forward's end, or between the backward's start and its
first reader, whichever is less. Bytes of the candidate with the most slack are the cheapest to free, since a copy that
is hidden costs nothing. `choose` takes candidates in that order until the peak fits, and gives back what the peak
doesn't need. Where that leaves copies that aren't hidden, recomputation competes: a value that pointwise operations
make of other saved ones is computed again if that takes less time than the part of its copy that shows.

The module imports no torch.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


@dataclass(frozen=True)
class Step:
    """One operation: its device time in microseconds, the bytes that it allocates by name, and what it reads."""

    name: str
    us: float
    makes: Mapping[str, int]
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Again:
    """What it takes to compute a saved value again in the backward: the time, and the saved values that are read."""

    us: float
    reads: frozenset[str]


@dataclass(frozen=True)
class Candidate:
    """A saved value, by the name that it has in both lists. `must` says that the user asked for it to be copied;
    `again` is known for a value that can be computed from other saved ones.
    """

    name: str
    nbytes: int
    must: bool = False
    again: Again | None = None


@dataclass(frozen=True)
class Link:
    """Bytes per microsecond to the host and from it, and what a copy takes besides."""

    out: float
    back: float
    latency_us: float = 8.0


@dataclass(frozen=True)
class Choice:
    chosen: tuple[str, ...]  # to be copied, in the order in which the forward makes them
    recomputed: tuple[str, ...]  # to be computed again
    peak: int  # bytes
    peak_before: int  # bytes, with nothing on the host
    least: int  # bytes: the least peak that can be had
    nbytes: int  # on the host
    step_us: float  # the estimate of forward and backward without copies
    exposed_us: float  # the part of the copies that isn't hidden behind them
    recompute_us: float
    hidden: float  # the part of the copies' time that is, from 0 to 1


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
        """`saved` gives the bytes of what the forward keeps for the backward; `results` are what the caller gets of
        either. `at_once` is for CUDA graphs: what goes in and comes out is in memory from a launch to its end."""
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
        """The last reader in the backward, if some values are computed again there."""
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
        """Microseconds that a copy of it may take and be hidden, in the tighter direction."""
        produced = self.ends[self.made[candidate.name]]
        first = self.first_read[candidate.name]
        return min(self.ends[-1] - produced, self.backward_ends[first - 1] if first else 0.0)

    # -- memory

    def peak(self, chosen: Collection[str], link: Link | None = None, again: Collection[Candidate] = ()) -> int:
        """Bytes, with copies that nobody waits for; without a link, with steps that wait for each copy."""
        away = set(chosen)
        return max(self._forward_peak(away, link, again), self._backward_peak(away, link, again))

    def _forward_peak(self, away: set[str], link: Link | None, again: Collection[Candidate]) -> int:
        copied = dict(self.made) if link is None else self._copied(away, link)
        copied.update({c.name: self.made[c.name] for c in again})
        away = away | {c.name for c in again}
        changes = [0] * (len(self.forward) + 2)
        for i, step in enumerate(self.forward):
            for name, nbytes in step.makes.items():
                last = self.last_read_forward.get(name, i)
                if name in away:
                    last = max(last, copied[name])
                elif name in self.saved or name in self.results:
                    last = len(self.forward)
                    if self.at_once:
                        changes[0] += nbytes
                        changes[i] -= nbytes
                changes[i] += nbytes
                changes[min(last, len(self.forward)) + 1] -= nbytes
        return _highest(changes)

    def _copied(self, away: set[str], link: Link) -> dict[str, int]:
        """The step of the forward during which each copy ends."""
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

    def _begun(self, away: set[str], link: Link, firsts: Mapping[str, int]) -> dict[str, int]:
        """The step of the backward during which each copy has to begin, so that its reader need not wait."""
        found, clock = {}, float("inf")
        for name in sorted(away, key=firsts.__getitem__, reverse=True):
            first = firsts[name]
            clock = min(clock, self.backward_ends[first - 1] if first else 0.0)
            clock -= link.latency_us + self.saved[name] / link.back
            found[name] = min(bisect.bisect_right(self.backward_ends, max(clock, 0.0)), first)
        return found

    def _backward_peak(self, away: set[str], link: Link | None, again: Collection[Candidate]) -> int:
        changes = [0] * (len(self.backward) + 2)
        firsts, lasts = self.first_reads(again), self.last_reads(again)
        begun = dict(firsts) if link is None else self._begun(away, link, firsts)
        begun.update({c.name: self.first_read[c.name] for c in again})
        away = away | {c.name for c in again}
        for name, nbytes in self.saved.items():
            first = begun.get(name, 0) if name in away else 0
            last = len(self.backward) if self.at_once and name not in away else lasts.get(name, 0)
            changes[first] += nbytes
            changes[last + 1] -= nbytes
        for i, step in enumerate(self.backward):
            for name, nbytes in step.makes.items():
                last = len(self.backward) if name in self.results else self.last_read.get(name, i)
                changes[0 if self.at_once and name in self.results else i] += nbytes
                changes[last + 1] -= nbytes
        return _highest(changes)

    # -- time

    def exposed(self, chosen: Collection[str], link: Link, again: Collection[Candidate] = ()) -> float:
        """Microseconds that the copies of the chosen ones add to the step."""
        firsts = self.first_reads(again)
        sizes = {c.name: c.nbytes for c in self.candidates}
        clock = 0.0
        for name in sorted(chosen, key=self.made.__getitem__):
            clock = max(clock, self.ends[self.made[name]]) + link.latency_us + sizes[name] / link.out
        late = max(0.0, clock - self.ends[-1]) if chosen else 0.0
        clock = stalled = 0.0
        for name in sorted(chosen, key=firsts.__getitem__):
            first = firsts[name]
            clock += link.latency_us + sizes[name] / link.back
            needed = (self.backward_ends[first - 1] if first else 0.0) + stalled
            stalled += max(0.0, clock - needed)
        return late + stalled

    def copy_us(self, chosen: Collection[str], link: Link) -> float:
        sizes = {c.name: c.nbytes for c in self.candidates}
        return sum(2 * link.latency_us + sizes[n] / link.out + sizes[n] / link.back for n in chosen)


def _ends(steps: Sequence[Step]) -> list[float]:
    found, clock = [], 0.0
    for step in steps:
        clock += step.us
        found.append(clock)
    return found


def _highest(changes: Sequence[int]) -> int:
    highest = now = 0
    for change in changes:
        now += change
        highest = max(highest, now)
    return highest


def choose(model: Model, budget: int, link: Link) -> Choice:
    """The cheapest set whose peak is within `budget` bytes, or as near to it as can be had.

    Two sets are compared: one that fits though no step waits for a copy, and a smaller one that fits if they wait.
    """
    must = [c.name for c in model.candidates if c.must]
    optional = [c for c in model.candidates if not c.must]
    # A copy that takes longer than its slack is never hidden: what has slack to spare first.
    optional.sort(key=lambda c: (-(model.slack(c) - c.nbytes / min(link.out, link.back)), -c.nbytes, c.name))
    names = [c.name for c in optional]
    found = []
    for rate in (link, None):
        chosen = _fewest(model, must, names, budget, rate)
        found.append((model.peak(chosen, rate) > budget, model.exposed(chosen, link), len(chosen), chosen, rate))
    *_, chosen, rate = min(found, key=lambda item: item[:3])
    chosen, again = _recompute(model, chosen, max(budget, model.peak(chosen, rate)), link, rate)
    sizes = {c.name: c.nbytes for c in model.candidates}
    exposed, total = model.exposed(chosen, link, again), model.copy_us(chosen, link)
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
    )


def _recompute(
    model: Model, chosen: list[str], limit: int, link: Link, rate: Link | None
) -> tuple[list[str], list[Candidate]]:
    """Of what was chosen, compute again what costs less than the part of its copies that isn't hidden; the cheapest by
    the byte first. What is read for that must be at hand: saved, and not itself computed again."""
    known = {c.name: c for c in model.candidates}
    cheap = [c for n in chosen if (c := known[n]).again is not None and not c.must]
    cheap.sort(key=lambda c: (c.again.us / c.nbytes if c.again is not None else 0.0, -c.nbytes, c.name))
    again: list[Candidate] = []
    exposed = model.exposed(chosen, link)
    for candidate in cheap:
        if exposed <= 0 or len(chosen) == 1:
            break
        assert candidate.again is not None
        taken = {c.name for c in again}
        needed = {name for c in again if c.again is not None for name in c.again.reads}
        if candidate.again.reads & taken or candidate.name in needed:
            continue
        copied = [n for n in chosen if n != candidate.name]
        now = model.exposed(copied, link, [*again, candidate])
        if exposed - now > candidate.again.us and model.peak(copied, rate, [*again, candidate]) <= limit:
            chosen, again, exposed = copied, [*again, candidate], now
    return chosen, again


def _fewest(model: Model, must: list[str], names: list[str], budget: int, rate: Link | None) -> list[str]:
    """As many of `names`, from the first on, as it takes."""

    def peak(count: int) -> int:
        return model.peak([*must, *names[:count]], rate)

    low, high = -1, len(names)  # at `low` the peak is over the budget
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle
    chosen = [*must, *names[:high]]
    limit = max(budget, model.peak(chosen, rate))
    # Give back, the least hidden first, what the limit doesn't need; a bounded number of tries.
    for name in reversed(names[max(0, high - 64) : high]):
        without = [n for n in chosen if n != name]
        if model.peak(without, rate) <= limit:
            chosen = without
    return chosen
