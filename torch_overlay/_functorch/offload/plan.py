"""Chooses which saved activations go to the host, and which are computed again, by a cost model of the step.

Bytes of the candidate with the most slack (`offload.cost_model`) are the cheapest to free, since a hidden copy costs
nothing. `choose` takes candidates in that order until the peak fits, and drops those that the peak doesn't need. If
some copies still aren't hidden, recomputation competes: a value that pointwise operations make of other saved ones is
computed again if that takes less time than the part of its copy that isn't hidden.

The module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._functorch.offload.cost_model import Candidate, Link, Model, Transfer


PARTS = (1.0, 0.9, 0.8, 0.7, 0.6)  # shares of the forward, for `_spread`
MOST_TRIES = 64  # sets that differ in one value, each time that a set is improved


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
    """Return a set whose peak is within `budget` bytes, or as near to it as possible.

    Of several sets the cheapest is taken: the candidates with most slack, as many as it takes if no step waits for a
    copy, or fewer, with steps that wait; and sets that are spread over parts of the forward, where a launch needs
    memory for all values at once.
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
