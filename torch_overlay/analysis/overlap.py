"""Measure how long work of different streams ran at the same time, from a profile.

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    print(overlap(device_work(profile)))

The sweep over intervals is plain Python and needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable


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
