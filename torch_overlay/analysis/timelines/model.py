"""Define the parts of a timeline (lanes, slices and arrows), and compute their texts and overlaps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING

from torch_overlay.analysis.memory_report import amount


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

KERNEL, TO_HOST, FROM_HOST, ON_HOST, WAIT = "kernel", "copy to the host", "copy from the host", "host", "host waits"
COPIES = (TO_HOST, FROM_HOST)


@dataclass(frozen=True)
class Lane:
    """A row of a timeline: a stream, or the host, whose `device` is -1."""

    name: str
    device: int = 0


@dataclass(frozen=True)
class Slice:
    """One kernel, copy, host computation or wait of the host. `name` says what it computes, `symbol` is the device's
    name for it, `line` the user's source line as "file:number: text". `kind` is one of this module's constants;
    `hidden`, known only for a copy, is the fraction of its time, from 0 to 1, in which a kernel of its device ran.
    """

    lane: int
    start: float
    duration: float
    name: str
    line: str = ""
    kind: str = KERNEL
    symbol: str = ""
    nbytes: int = 0
    hidden: float | None = None

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Arrow:
    """A wait of `lane`, at time `at`, for the work of `source_lane` up to `source_at`. `source` and `target` are the
    slices at both ends, by index: None if the stream held no work before, or gets none afterwards.
    """

    name: str
    source_lane: int
    source_at: float
    lane: int
    at: float
    source: int | None = None
    target: int | None = None


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def microseconds(time: float) -> str:
    """Format a time with a readable unit."""
    if time >= 1_000_000:
        return f"{time / 1e6:.2f} s"
    if time >= 10_000:
        return f"{time / 1e3:.1f} ms"
    return f"{time:.0f} µs" if time >= 100 else f"{time:.1f} µs"


def copied(copy: Slice) -> str:
    """Describe a copy in a line of text."""
    hidden = "" if copy.hidden is None else f", {copy.hidden:.0%} hidden"
    when = f"{copy.start:.0f} to {copy.end:.0f} µs"
    return f"{copy.name}, {amount(copy.nbytes)}, {when}{hidden}" + (f", {copy.line}" if copy.line else "")


def place(line: str) -> str:
    """Return the `file:number` of a source line."""
    return ":".join(line.split(":", 2)[:2]) if line.count(":") >= 2 else line


def lane_name(name: str, slices: Iterable[Slice]) -> str:
    """Return the name of a stream, with the direction if it only copies in one direction."""
    kinds = {s.kind for s in slices}
    only = kinds.pop() if len(kinds) == 1 else ""
    return name + {TO_HOST: ", to the host", FROM_HOST: ", from the host"}.get(only, "")


def with_hidden(lanes: Sequence[Lane], slices: Sequence[Slice]) -> list[Slice]:
    """Return the slices, with `hidden` set for each copy."""
    busy: dict[int, list[tuple[float, float]]] = {}
    for s in sorted(slices, key=lambda s: s.start):
        if s.kind == KERNEL:
            spans = busy.setdefault(lanes[s.lane].device, [])
            if spans and s.start <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], s.end)
            else:
                spans.append((s.start, s.end))
    return [
        replace(s, hidden=_covered(s, busy.get(lanes[s.lane].device, []))) if s.kind in COPIES else s for s in slices
    ]


def _covered(copy: Slice, spans: Iterable[tuple[float, float]]) -> float:
    if not copy.duration:
        return 1.0
    beside = sum(max(0.0, min(copy.end, end) - max(copy.start, start)) for start, end in spans)
    return min(beside / copy.duration, 1.0)


def exposed(copy: Slice, slices: Iterable[Slice]) -> Iterator[tuple[float, float]]:
    """Yield the intervals of a copy's time in which no kernel runs."""
    at = copy.start
    for s in sorted((s for s in slices if s.kind == KERNEL and s.end > copy.start), key=lambda s: s.start):
        if at >= copy.end:
            return
        if s.start > at:
            yield at, min(s.start, copy.end)
        at = max(at, s.end)
    if at < copy.end:
        yield at, copy.end


@dataclass(frozen=True)
class DeviceWork:
    """A kernel or a copy, as the device ran it; times in microseconds."""

    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Overlap:
    """Overlap of streams. `busy`: time in which at least one stream ran work; `shared`: in which at least two did."""

    busy: float
    shared: float
    streams: int

    @property
    def fraction(self) -> float:
        return self.shared / self.busy if self.busy else 0.0

    def __str__(self) -> str:
        return f"{self.fraction:.0%} of {self.busy:.0f} µs, {self.streams} stream{'s'[: self.streams != 1]}"


def overlap(work: Iterable[DeviceWork]) -> Overlap:
    """Measure the overlap by a sweep over starts and ends. Work that overlaps on one stream counts once."""
    work = list(work)
    edges = sorted([(w.start, 1, w.stream) for w in work] + [(w.end, -1, w.stream) for w in work])
    running: dict[int, int] = {}
    busy = shared = 0.0
    since = edges[0][0] if edges else 0.0
    for at, change, stream in edges:
        active = sum(1 for count in running.values() if count > 0)
        busy += (at - since) * (active >= 1)
        shared += (at - since) * (active >= 2)
        since = at
        running[stream] = running.get(stream, 0) + change
    return Overlap(busy, shared, len({w.stream for w in work}))


def device_work(profile: Any) -> list[DeviceWork]:
    """Return the kernels and copies of a finished `torch.profiler.profile`."""
    from torch.autograd import DeviceType

    return [
        DeviceWork(event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


__all__ = ["Arrow", "Lane", "Slice"]
