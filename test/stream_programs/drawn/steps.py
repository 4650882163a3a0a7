"""The data that a program is written from: a few settings and a list of steps, of which each may be left out.

A step is a kind and three small numbers; the writer takes them modulo what there is to choose from, so that any list
is a program, and a shorter list, or smaller numbers, is a simpler one. Hypothesis draws and shrinks such data
(`specs`); `random_spec` makes the program of a number, and `smaller` the simpler neighbours of a program, without it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any


Step = tuple[str, int, int, int]

# Kind -> how often it is drawn.
KINDS = {
    "compute": 30,
    "enter": 14,
    "leave": 9,
    "in_place": 9,
    "view": 6,
    "wait_stream": 3,
    "record": 4,
    "wait_event": 3,
    "synchronize": 1,
    "to_host": 2,
    "host_compute": 2,
    "to_device": 3,
    "delete": 3,
    "record_stream": 2,
    "fill": 3,
    "branch": 2,
    "loop": 1,
    "item": 1,
    "graph_break": 1,
}
# Copies between device and host that don't block, into memory that is there: in some programs, among the other steps.
COPY_KINDS = {"copy_in": 1, "copy_out": 1}
LARGEST = 63


@dataclasses.dataclass(frozen=True)
class Spec:
    """`unjoined` streams are left for the caller to join. `wide` programs have more operators, and aren't exact. The
    inputs of `misaligned` programs are aligned at the first call only. `loader`: the caller fills inputs on that
    stream, in its memory, and doesn't wait.
    """

    streams: int
    train: bool = False
    unjoined: bool = False
    steps: tuple[Step, ...] = ()
    wide: bool = False
    misaligned: bool = False
    loader: int = 0

    def as_data(self) -> list[Any]:
        steps = [list(step) for step in self.steps]
        return [self.streams, self.train, self.unjoined, steps, self.wide, self.misaligned, self.loader]

    @classmethod
    def of_data(cls, data: Any) -> Spec:
        streams, train, unjoined, steps, *others = data
        return cls(streams, train, unjoined, tuple((k, a, b, c) for k, a, b, c in steps), *others)


def random_spec(seed: int, number: int, wide: bool = False) -> Spec:
    rng = random.Random(f"{seed}/{number}")
    kinds, weights = list(KINDS), list(KINDS.values())
    count = rng.randint(5, 25)

    def step() -> Step:
        (kind,) = rng.choices(kinds, weights)
        return kind, *(rng.randint(0, LARGEST) for _ in range(3))  # type: ignore[return-value]

    streams, train, unjoined = rng.choice((1, 2, 2, 3, 3, 4, 5)), rng.random() < 0.4, rng.random() < 0.25
    steps = [step() for _ in range(count)]
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        kind = rng.choice(list(COPY_KINDS))
        copy = (kind, *(rng.randint(0, LARGEST) for _ in range(3)))
        steps.insert(rng.randint(0, len(steps)), copy)  # type: ignore[arg-type]
    misaligned, loader = rng.random() < 0.4, rng.choice((0, 0, 1))
    if loader:  # who takes what another stream has filled tells the allocator first
        steps[:0] = [("record_stream", 0, rng.randint(0, LARGEST), 0) for _ in range(2)]
    # A loader's memory that an unjoined stream still uses is handed on too early in eager, too.
    return Spec(streams, train, unjoined and not loader, tuple(steps), wide, misaligned, loader)


def specs() -> Any:
    """Hypothesis' strategy."""
    from hypothesis import strategies as st

    weighted = [kind for kind, weight in (KINDS | COPY_KINDS).items() for _ in range(weight)]
    number = st.integers(0, LARGEST)
    step = st.tuples(st.sampled_from(weighted), number, number, number)
    steps = st.lists(step, max_size=25).map(tuple)
    flags = st.booleans()
    return st.builds(Spec, st.integers(1, 5), flags, flags, steps, misaligned=flags, loader=st.integers(0, 1))


def smaller(spec: Spec) -> Iterator[Spec]:
    """Simpler programs: with fewer steps, then fewer streams, then smaller numbers."""
    length = len(spec.steps)
    size = length
    while size:
        for begin in range(0, length, size):
            yield dataclasses.replace(spec, steps=spec.steps[:begin] + spec.steps[begin + size :])
        size //= 2
    for name in ("unjoined", "train", "misaligned", "loader"):
        if getattr(spec, name):
            yield dataclasses.replace(spec, **{name: getattr(Spec, name)})  # its default
    if spec.streams > 1:
        yield dataclasses.replace(spec, streams=spec.streams - 1)
    for i, step in enumerate(spec.steps):
        for j in (1, 2, 3):
            if step[j]:
                changed = (*step[:j], 0, *step[j + 1 :])
                yield dataclasses.replace(spec, steps=(*spec.steps[:i], changed, *spec.steps[i + 1 :]))
