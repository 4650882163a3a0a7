"""Read the timeline of a `torch.profiler.profile` from the Chrome trace that it exports.

Kernels and copies are the trace's own, with one lane per stream. An arrow is a `cudaStreamWaitEvent`. If the profiler
knows the record that it waits for, the arrow goes from the last work launched before the record to the first work
launched after the wait. The profiler doesn't know the record of an event that the driver's own calls record, as in
compiled code; there the records and waits come from the generated module. Memory is the allocator's count at each
allocation. `timelines.lines` finds the source line of a kernel.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TYPE_CHECKING

from torch_overlay.analysis.timelines.lines import argument, Event, LAUNCH, Lines, offloaded, RECORD, Run, WAIT
from torch_overlay.analysis.timelines.model import (
    Arrow,
    FROM_HOST,
    KERNEL,
    Lane,
    lane_name,
    Slice,
    TO_HOST,
    with_hidden,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def read(profile: Any, seen: Any = None, title: str = "profile") -> dict[str, Any]:
    """Return the fields of a `Timeline`. `profile`: a finished profile, or a path of a trace (.json, .json.gz)."""
    with tempfile.TemporaryDirectory() as folder:
        path = profile if isinstance(profile, (str, os.PathLike)) else Path(folder, "trace.json")
        if path is not profile:
            profile.export_chrome_trace(str(path))
        opener = gzip.open if Path(path).suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            return of_trace(json.load(file), seen, title)


def of_trace(trace: Any, seen: Any = None, title: str = "profile") -> dict[str, Any]:
    """Return the fields of a `Timeline`. `trace` is a parsed Chrome trace of kineto. Raise ValueError if it has no
    device work.
    """
    events: list[Event] = trace["traceEvents"] if isinstance(trace, dict) else trace
    work = sorted((e for e in events if e.get("ph") == "X" and e.get("cat") in WORK), key=lambda e: float(e["ts"]))
    base = int(trace.get("baseTimeNanoseconds", 0)) if isinstance(trace, dict) else 0
    if base and seen is not None and seen.began_ns:  # the timeline begins at the first compiled call
        work = [e for e in work if float(e["ts"]) >= (seen.began_ns - base) / 1e3]
    if not work:
        raise ValueError(
            "the profile has no kernels: record it with ProfilerActivity.CUDA, on a GPU, and synchronise before it ends"
        )
    zero = float(work[0]["ts"])
    of_work = [(argument(e, "device"), argument(e, "stream")) for e in work]
    keys = sorted(set(of_work))
    several = len({device for device, _ in keys}) > 1
    lanes = [Lane(f"stream {stream}" + (f" of cuda:{device}" if several else ""), device) for device, stream in keys]
    number = {key: index for index, key in enumerate(keys)}
    lines = Lines(events, work, seen)
    slices = [_slice(e, zero, number[of_work[index]], *lines.of(index)) for index, e in enumerate(work)]
    slices = offloaded(slices, seen)
    lanes = [Lane(lane_name(n.name, [s for s in slices if s.lane == i]), n.device) for i, n in enumerate(lanes)]
    arrows = list(_arrows(events, work, slices, number, zero)) or list(_generated_arrows(lines.runs, slices))
    memory = _memory(events, zero, max(s.end for s in slices))
    notes = ["memory is as the host allocates it, ahead of the device"] if memory else []
    if not arrows and not any(e.get("cat") == "cuda_sync" for e in events) and len(lanes) > 1:
        notes.append(
            "no arrows: the profile has no synchronisation events; torch_overlay.analysis.profiler() asks for them"
        )
    if seen is not None and not seen.regions:
        notes.append("no lines: the function was compiled before")
    return {
        "title": title,
        "lanes": tuple(lanes),
        "slices": tuple(with_hidden(lanes, slices)),
        "arrows": tuple(arrows),
        "memory": memory,
        "simulated": False,
        "notes": tuple(notes),
    }


def _slice(event: Event, zero: float, lane: int, name: str, line: str) -> Slice:
    symbol, kind = str(event["name"]), KERNEL
    nbytes = int(event.get("args", {}).get("bytes", 0))
    if event["cat"] == "gpu_memcpy":
        kind = TO_HOST if "DtoH" in symbol else FROM_HOST if "HtoD" in symbol else KERNEL
    if kind != KERNEL:
        name = kind
    return Slice(lane, float(event["ts"]) - zero, float(event.get("dur", 0.0)), name, line, kind, symbol, nbytes)


# ---- events


def _arrows(
    events: Iterable[Event], work: Sequence[Event], slices: Sequence[Slice], number: Any, zero: float
) -> Iterator[Arrow]:
    """Yield the arrows of the profiler's waits. Launch numbers (correlations) grow in the host's order."""
    launched: dict[int, list[tuple[int, int]]] = {}
    for index, event in enumerate(work):
        launched.setdefault(slices[index].lane, []).append((argument(event, "correlation"), index))
    for rows in launched.values():
        rows.sort()
    waits: dict[tuple[int, int], Arrow] = {}
    for event in events:
        given = event.get("args", {})
        if event.get("cat") != "cuda_sync" or "wait_on_stream" not in given or "Stream Wait" not in event["name"]:
            continue
        device = int(given.get("device", event["pid"]))
        source = number.get((device, int(given["wait_on_stream"])))
        lane = number.get((device, int(given.get("stream", event["tid"]))))
        if source is None or lane is None or source == lane:
            continue
        recorded, waited = argument(event, "wait_on_cuda_event_record_corr_id"), argument(event, "correlation")
        before = bisect.bisect_left(launched[source], (recorded, -1)) - 1
        if before < 0:
            continue  # the profile has no earlier work of the stream
        first = launched[source][before][1]
        following = bisect.bisect_left(launched[lane], (waited, -1))
        target = launched[lane][following][1] if following < len(launched[lane]) else None
        at = slices[target].start if target is not None else max(slices[first].end, float(event["ts"]) - zero)
        name = f"event {given.get('wait_on_cuda_event_id', '')}".strip()
        # Of several waits for one stream before the same work, the last one counts.
        waits[source, -1 if target is None else target] = Arrow(
            name, source, slices[first].end, lane, at, first, target
        )
    yield from waits.values()


def _generated_arrows(runs: Iterable[Run], slices: Sequence[Slice]) -> Iterator[Arrow]:
    """Yield the arrows of the records and waits of generated code whose launches are known."""
    for rows in runs:
        lanes: dict[str, set[int]] = {}  # a statement's stream -> lanes of its work
        for row, done in rows:
            if row.kind == LAUNCH and row.stream:
                lanes.setdefault(row.stream, set()).update(slices[i].lane for i in done)
        lane_of = {stream: found.pop() for stream, found in lanes.items() if len(found) == 1}
        last: dict[int, int] = {}
        recorded: dict[str, int] = {}
        pending: dict[int, dict[int, tuple[str, int]]] = {}
        for row, done in rows:
            lane = lane_of.get(row.stream)
            if row.kind == RECORD and lane in last:
                recorded[row.name] = last[lane]
            source = recorded.get(row.name) if row.kind == WAIT else None
            if source is not None and lane is not None and slices[source].lane != lane:
                pending.setdefault(lane, {})[slices[source].lane] = row.name, source
            for target in done:
                s = slices[target]
                for name, first in pending.pop(s.lane, {}).values():
                    yield Arrow(name, slices[first].lane, slices[first].end, s.lane, s.start, first, target)
                last[s.lane] = target


def _memory(events: Iterable[Event], zero: float, end: float) -> tuple[tuple[float, int], ...]:
    """Return (time, allocated bytes of the first device from then on) for each allocation and free. Times before the
    first work count as its start."""
    found: dict[float, int] = {}
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"])):
        given = event.get("args", {})
        if int(given.get("Device Type", 0)) == 1 and int(given.get("Device Id", 0)) == 0 and "Total Allocated" in given:
            found[min(max(float(event["ts"]) - zero, 0.0), end)] = int(given["Total Allocated"])
    return tuple(found.items())


__all__ = ["of_trace", "read"]
