"""Compute when each operation of a trace would run, in one pass with a clock for each stream and one for the host.

A stream runs its launches in order. A record notes the time of its stream, a wait advances its stream to the time of
the record, a synchronisation advances the host. Copies between host and device run one after the other in each
direction, whatever their streams, since they share the link.

Memory is counted in device time: it counts as allocated when its first kernel starts, and as freed when its own stream
has reached the point at which the host freed it, and every kernel that used it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_overlay.analysis.race_check.trace import Alloc, Free, HOST, Launch, Record, Synchronize, Wait
from torch_overlay.analysis.timelines.lines import own_line, readable
from torch_overlay.analysis.timelines.model import (
    Arrow,
    COPIES,
    KERNEL,
    Lane,
    lane_name,
    ON_HOST,
    Slice,
    WAIT,
    with_hidden,
)
from torch_overlay.analysis.timelines.timeline import Timeline


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch_overlay.analysis.race_check.trace import Memory, Operation


@dataclass(frozen=True)
class Cost:
    """The duration of a launch, in microseconds, the kind of its slice, and the bytes it moves."""

    us: float
    kind: str = KERNEL
    nbytes: int = 0


@dataclass
class _Stream:
    free: float = 0.0
    last: int | None = None  # its last slice, by index
    pending: list[tuple[str, _Moment]] = field(default_factory=list)  # events that its next slice waits for


@dataclass(frozen=True)
class _Moment:
    stream: str
    at: float
    source: int | None


class _SimulatedClock:
    def __init__(self, costs: Mapping[int, Cost], saved: Mapping[int, tuple[str, str]]) -> None:
        self.costs, self.saved = costs, saved
        self.host = 0.0
        self.streams: dict[str, _Stream] = {}
        self.links: dict[str, float] = {}  # direction -> time at which the link is free
        self.events: dict[str, _Moment] = {}
        self.slices: list[tuple[str, Slice]] = []
        self.arrows: list[tuple[str, _Moment, str, float, int | None]] = []
        self.used: dict[Memory, list[float]] = {}  # -> [start of the first use, end of the last one]
        self.fresh: set[Memory] = set()
        self.changes: list[tuple[float, int]] = []

    def stream(self, name: str) -> _Stream:
        return self.streams.setdefault(name, _Stream())

    def launch(self, index: int, launch: Launch) -> None:
        cost = self.costs.get(index, Cost(0.0, ON_HOST if launch.stream == HOST else KERNEL))
        stream = self.stream(launch.stream)
        start = max(self.host, stream.free, self.links.get(cost.kind, 0.0) if cost.kind in COPIES else 0.0)
        end = start + cost.us
        number = len(self.slices)
        what, line = self.saved.get(index, ("", own_line(launch.line)))
        name = readable(launch.name) if cost.kind not in COPIES else f"{cost.kind} {what}".strip()
        self.slices.append((launch.stream, Slice(0, start, cost.us, name, line, cost.kind, launch.name, cost.nbytes)))
        for event, moment in stream.pending:
            self.arrows.append((event, moment, launch.stream, start, number))
        stream.pending, stream.free, stream.last = [], end, number
        if cost.kind in COPIES:
            self.links[cost.kind] = end
        if launch.stream == HOST:
            self.host = end
        for access in launch.accesses:
            memory = access.view.memory
            if memory.stream != HOST:
                span = self.used.setdefault(memory, [start, end])
                span[1] = max(span[1], end)

    def record(self, event: str, name: str) -> None:
        stream = self.stream(name)
        self.events[event] = _Moment(name, max(stream.free, self.host), stream.last)

    def wait(self, event: str, name: str) -> None:
        moment = self.events.get(event)
        if moment is None or moment.stream == name:
            return
        stream = self.stream(name)
        stream.free = max(stream.free, moment.at)
        stream.pending = [(e, m) for e, m in stream.pending if m.stream != moment.stream] + [(event, moment)]

    def synchronize(self, operation: Synchronize) -> None:
        if operation.event is not None:
            moment = self.events.get(operation.event)
            ready, on = (0.0, "") if moment is None else (moment.at, operation.event)
        else:
            names = (operation.stream,) if operation.stream is not None else operation.streams or tuple(self.streams)
            ready = max((self.streams[n].free for n in names if n in self.streams), default=0.0)
            on = names[0] if len(names) == 1 else "the device"
        if ready > self.host:
            self.slices.append((HOST, Slice(0, self.host, ready - self.host, f"waits for {on}", kind=WAIT)))
            self.stream(HOST).free = self.host = ready

    def free(self, memory: Memory) -> None:
        if memory in self.fresh and memory in self.used:
            start, end = self.used.pop(memory)
            self.fresh.discard(memory)
            self.changes += [(start, memory.size), (max(end, self.stream(memory.stream).free), -memory.size)]

    def finish(self) -> None:
        for memory in self.fresh & self.used.keys():
            self.changes.append((self.used[memory][0], memory.size))
        for name, stream in self.streams.items():
            for event, moment in stream.pending:
                self.arrows.append((event, moment, name, stream.free, None))


def schedule(
    operations: Iterable[Operation],
    costs: Mapping[int, Cost],
    *,
    title: str,
    devices: Mapping[str, int] | None = None,
    saved: Mapping[int, tuple[str, str]] | None = None,
    notes: tuple[str, ...] = (),
) -> Timeline:
    """Return the timeline of a trace. `costs` maps the index of a launch to its cost, `devices` a stream to its device,
    and `saved` the index of a copy of a saved activation to the activation's name and line.
    """
    clock = _SimulatedClock(costs, saved or {})
    for index, operation in enumerate(operations):
        match operation:
            case Launch():
                clock.launch(index, operation)
            case Record():
                clock.record(operation.event, operation.stream)
            case Wait():
                clock.wait(operation.event, operation.stream)
            case Synchronize():
                clock.synchronize(operation)
            case Alloc() if operation.memory.stream != HOST:
                clock.fresh.add(operation.memory)
            case Free():
                clock.free(operation.memory)
    clock.finish()
    return _assemble(clock, title, devices or {}, notes)


def _assemble(clock: _SimulatedClock, title: str, devices: Mapping[str, int], notes: tuple[str, ...]) -> Timeline:
    names = list(dict.fromkeys((*(name for name, _ in clock.slices), *(m.stream for _, m, *_ in clock.arrows))))
    titles = {n: lane_name(n, [s for lane, s in clock.slices if lane == n]) for n in names}
    # Order: default streams, other streams in order of use, streams of copies, the host.
    names.sort(key=lambda n: (n == HOST, titles[n] != n, not n.startswith("default stream")))
    lanes = [Lane(titles[n], -1 if n == HOST else devices.get(n, 0)) for n in names]
    number = {name: index for index, name in enumerate(names)}
    slices = [replace(s, lane=number[name]) for name, s in clock.slices]
    arrows = [
        Arrow(event, number[m.stream], m.at, number[lane], at, m.source, target)
        for event, m, lane, at, target in clock.arrows
        if lane in number
    ]
    return Timeline(
        title, tuple(lanes), tuple(with_hidden(lanes, slices)), tuple(arrows), running_sum(clock.changes), True, notes
    )


def running_sum(changes: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return (time, bytes from then on). At equal times, frees count before allocations."""
    found: dict[float, int] = {}
    total = 0
    for at, change in sorted(changes):
        total += change
        found[at] = total
    return tuple(found.items())


__all__ = ["Cost", "running_sum", "schedule"]
