"""Profiles one step: what the host launched when, what ran on the device, and what of it in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay.analysis.timelines.svg import escape


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_overlay.analysis.doctor.eager import EagerLaunches

MOST = 2000  # spans in a picture
HEIGHT = 22  # pixels of a lane


@dataclass(frozen=True)
class Span:
    """Something that took time: on the device, or a launch by the host. Times are microseconds since the first one."""

    name: str
    lane: str  # "host" or "stream N"
    start_us: float
    duration_us: float
    in_graph: bool


@dataclass(frozen=True)
class StepTimeline:
    """One step. `operators`: (host us, device us) of each operator that torch ran, by "namespace::name"."""

    spans: tuple[Span, ...] = ()
    operators: dict[str, tuple[float, float]] | None = None

    def device_us(self, in_graph: bool) -> float:
        return sum(s.duration_us for s in self.spans if s.lane != "host" and s.in_graph is in_graph)

    def of(self, seen: EagerLaunches) -> dict[Any, tuple[float, float]]:
        """Return the times of each operator, and of each line of eager code."""
        known = self.operators or {}
        return {**known, **seen.times(known)}

    def to_html(self) -> str:
        """Return a picture as wide as the page, a lane each for the host and the streams; empty without spans."""
        if not self.spans:
            return ""
        end = max(s.start_us + s.duration_us for s in self.spans)
        lanes = sorted({s.lane for s in self.spans}, key=lambda lane: (lane != "host", lane))
        shown = sorted(self.spans, key=lambda s: -s.duration_us)[:MOST]
        bars = "".join(
            f'<rect x="{100 * s.start_us / end:.3f}%" width="{max(100 * s.duration_us / end, 0.05):.3f}%" '
            f'y="{HEIGHT * lanes.index(s.lane) + 2}" height="{HEIGHT - 4}" class="{"in" if s.in_graph else "out"}">'
            f"<title>{escape(s.name)}: {s.duration_us:.1f} us at {s.start_us:.1f} us</title></rect>"
            for s in shown
        )
        names = "".join(f"<li>{escape(lane)}" for lane in lanes)
        return (
            f'<ol class="lanes">{names}</ol><svg class="timeline" height="{HEIGHT * len(lanes)}">{bars}</svg>'
            f"<p><small>0 to {end:.0f} us, under a profiler. <span class=in>In graphs</span>, "
            f"<span class=out>outside</span>; point at a bar for its name.</small>"
        )


def take(step: Callable[[], Any]) -> StepTimeline:
    """Run a step under torch's profiler."""
    from torch.profiler import profile, ProfilerActivity

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    operators = {e.key: (e.cpu_time_total, e.device_time_total) for e in profiled.key_averages() if "::" in e.key}
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    return StepTimeline(tuple(spans_of(results.events() if results is not None else ())), operators)


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Return the launches and what they ran, of Kineto's events. A launch and its work have one correlation."""
    events = list(events)
    launches = [
        e for e in events if not _is_on_device(e) and "launch" in e.name().lower() and e.name().startswith("cu")
    ]
    of_graphs = {e.correlation_id() for e in launches if "GraphLaunch" in e.name()}
    ran = [e for e in events if _is_on_device(e) and e.duration_ns() and not e.is_user_annotation()]
    begin = min((e.start_ns() for e in (*launches, *ran)), default=0)

    def span(e: Any, lane: str) -> Span:
        start, duration = (e.start_ns() - begin) / 1e3, e.duration_ns() / 1e3
        return Span(e.name(), lane, start, duration, e.correlation_id() in of_graphs)

    return [*[span(e, "host") for e in launches], *[span(e, f"stream {e.device_resource_id()}") for e in ran]]


def _is_on_device(event: Any) -> bool:
    return event.device_type() == torch.autograd.DeviceType.CUDA
