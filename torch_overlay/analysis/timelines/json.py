"""Write a timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

    X   a slice: a kernel, a copy, a wait of the host; each stream has a track (tid)
    s,f an event: an arrow from inside the slice that was waited for to the slice that waited (`bp: e` binds it there)
    C   memory: a counter
    M   names and order of processes (devices) and threads (streams)

Perfetto takes times in microseconds, and cuts them to nanoseconds; this module rounds them first. Perfetto wants the
slices of a track nested or disjoint, so a slice that seems to start before the end of the previous slice (as clocks
read in two places can make it seem) begins at that end. An arrow needs a slice at each end: a wait for a stream that
held no work, or a wait with no work after it, lacks one, and is shown only in the SVG picture.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, TYPE_CHECKING

from torch_overlay.analysis.timelines.model import COPIES


if TYPE_CHECKING:
    from torch_overlay.analysis.timelines.timeline import Timeline

HOST_PID = 1
DEVICE_PID = 10  # and up: of device 0, 1, ...


def trace(timeline: Timeline) -> str:
    """Return the text of the file."""
    return json.dumps(
        {"displayTimeUnit": "ns", "otherData": {"title": timeline.title}, "traceEvents": events(timeline)}, indent=1
    )


def events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the trace's events: metadata first, then all others in order of time."""
    tracks = [{"pid": _pid(lane.device), "tid": index + 1} for index, lane in enumerate(timeline.lanes)]
    placed = _placed(timeline)
    found: list[dict[str, Any]] = []
    for index, s in enumerate(timeline.slices):
        start, end = placed[index]
        details: dict[str, Any] = {"line": s.line, "kernel": s.symbol, "bytes": s.nbytes}
        if s.hidden is not None:
            details["hidden"] = f"{s.hidden:.0%}"
        name, kind = f"{place(s.line)} {s.name}".strip(), "copy" if s.kind in COPIES else s.kind
        when = {"ts": start, "dur": round(end - start, 3), "args": {k: value for k, value in details.items() if value}}
        found.append({"ph": "X", "name": name, "cat": kind, **tracks[s.lane], **when})
    numbers = itertools.count(1)
    for arrow in timeline.arrows:
        if arrow.source is None or arrow.target is None:
            continue
        common = {"name": arrow.name, "cat": "event", "id": next(numbers)}
        start, end = placed[arrow.source]
        target = placed[arrow.target][0]
        inside = round(max(start, min(end - 0.001, target)), 3)
        for ph, lane, at in (("s", arrow.source_lane, inside), ("f", arrow.lane, max(target, inside))):
            found.append({"ph": ph, **common, **tracks[lane], "ts": at, **({"bp": "e"} if ph == "f" else {})})
    device = next((lane.device for lane in timeline.lanes if lane.device >= 0), 0)
    for at, nbytes in timeline.memory:
        found.append(
            {"ph": "C", "name": "memory", "pid": _pid(device), "tid": 0, "ts": round(at, 3), "args": {"bytes": nbytes}}
        )
    order = {"X": 0, "s": 1, "f": 2, "C": 3}
    found.sort(key=lambda e: (e["ts"], order[e["ph"]], -e.get("dur", 0)))
    return [*_metadata(timeline, tracks), *found]


def place(line: str) -> str:
    """Return the `file:number` of a source line."""
    return ":".join(line.split(":", 2)[:2]) if line.count(":") >= 2 else line


def _pid(device: int) -> int:
    return HOST_PID if device < 0 else DEVICE_PID + device


def _placed(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """Return start and end of each slice, in whole nanoseconds, without overlap on a track."""
    found: dict[int, tuple[float, float]] = {}
    lane_ends: dict[int, float] = {}
    for index in sorted(range(len(timeline.slices)), key=lambda i: (timeline.slices[i].start, timeline.slices[i].end)):
        s = timeline.slices[index]
        start = max(round(s.start, 3), lane_ends.get(s.lane, 0.0))
        end = max(round(s.end, 3), round(start + 0.001, 3))
        found[index] = start, end
        lane_ends[s.lane] = end
    return found


def _metadata(timeline: Timeline, tracks: list[dict[str, int]]) -> list[dict[str, Any]]:
    kind = " (simulated)" if timeline.simulated else ""
    found: list[dict[str, Any]] = []
    for device in dict.fromkeys(lane.device for lane in timeline.lanes):
        name = "host" if device < 0 else f"cuda:{device}"
        found.append({"ph": "M", "name": "process_name", "pid": _pid(device), "tid": 0, "args": {"name": name + kind}})
    for track, lane in zip(tracks, timeline.lanes):
        found.append({"ph": "M", "name": "thread_name", **track, "args": {"name": lane.name}})
        found.append({"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": track["tid"]}})
    return found


__all__ = ["events", "place", "trace"]
