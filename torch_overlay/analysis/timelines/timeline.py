"""Define `Timeline`: what ran when, on which stream, after which event, in a simulated run or a profile.

    from torch_overlay.analysis import timeline, Timeline

    found = timeline(fn, *args)            # on the GPU if there is one, else on a simulated device
    found.save("step.svg")                 # a picture
    found.save("step.json")                # for ui.perfetto.dev
    print(found)

    found = Timeline.from_profile(prof)    # from a finished torch.profiler.profile

A timeline is plain data: lanes (one per stream, and the host if it has work), slices in them (kernels and copies, with
the user's line), arrows (events: one slice waits for another), and memory over time. All times are in microseconds from
the start of the first slice; memory is in bytes.

Note [Times of a simulated run]
Nothing runs on a device, so times are estimates. A kernel takes as long as its memory traffic or its arithmetic,
whichever is longer, at 80 % of the bandwidth and 50 % of the arithmetic of an H200's data sheet, and `LEAST_US` at
least. Inductor's scheduler counts the traffic of a kernel, PyTorch's FLOP counter the arithmetic of an operator. A copy
takes the time of its bytes over the link that `device_rates` assumes. The host launches in no time, and waits where the
program makes it wait, so the device never waits for launches. Kernels on different streams are assumed to run
concurrently at full speed, the best that the order allows. A region that gets a CUDA graph is drawn as it runs without
one.

Note [A timeline as a Chrome trace]
For ui.perfetto.dev and chrome://tracing:

    X   a slice: a kernel, a copy, a wait of the host; each stream has a track (tid)
    s,f an event: an arrow from inside the slice that was waited for to the slice that waited (`bp: e` binds it there)
    C   memory: a counter
    M   names and order of processes (devices) and threads (streams)

Perfetto takes times in microseconds, and cuts them to nanoseconds; they are rounded first. Perfetto wants the slices of
a track nested or disjoint, so a slice that seems to start before the end of the previous slice (as clocks read in two
places can make it seem) begins at that end. An arrow needs a slice at each end: a wait for a stream that held no work,
or a wait with no work after it, lacks one, and is shown only in the SVG picture.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay.analysis.memory_report import amount
from torch_overlay.analysis.timelines.clock import schedule, TimedDevice
from torch_overlay.analysis.timelines.lines import saved_tensors
from torch_overlay.analysis.timelines.model import (
    Arrow,
    copied,
    COPIES,
    count,
    DeviceWork,
    KERNEL,
    Lane,
    microseconds,
    Overlap,
    overlap,
    place,
    Slice,
)
from torch_overlay.analysis.timelines.profile import read
from torch_overlay.analysis.timelines.svg import svg
from torch_overlay.testing import observe, simulated_gpu
from torch_overlay.testing._observe import as_compiled, as_simulated, run_backward
from torch_overlay.testing._simulate import active


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay.testing import Compiled, Simulation


@dataclass(frozen=True)
class Timeline:
    title: str
    lanes: tuple[Lane, ...]
    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()
    """(time, bytes of the device from then on), ascending; in a simulated run the program's allocations, else all."""
    simulated: bool = True
    notes: tuple[str, ...] = field(default=())

    @property
    def end(self) -> float:
        return max((s.end for s in self.slices), default=0.0)

    @property
    def copies(self) -> list[Slice]:
        """Copies between host and device, in order of time."""
        return [s for s in self.slices if s.kind in COPIES]

    @property
    def hidden(self) -> float | None:
        """Fraction of all copies' time in which a kernel ran as well; None without copies."""
        total = sum(s.duration for s in self.copies)
        return sum(s.duration * (s.hidden or 0.0) for s in self.copies) / total if total else None

    @property
    def peak(self) -> int:
        """Peak memory in bytes."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    @property
    def overlap(self) -> Overlap:
        """Time in which work of different streams ran at the same time."""
        return overlap(DeviceWork(s.lane, s.start, s.end) for s in self.slices if self.lanes[s.lane].device >= 0)

    @classmethod
    def from_profile(cls, profile: Any, *, seen: Any = None, title: str = "profile") -> Timeline:
        """Read the timeline of a finished `torch.profiler.profile`, or of an exported Chrome trace, given by its path.

        Arrows need the profiler's synchronisation events, memory needs `profile_memory=True`; both are on in
        `profiler()`. `seen` is the value that `torch_overlay.testing.observe()` yielded while the program was compiled:
        with it, compiled kernels have the user's lines.
        """
        return cls(**read(profile, seen, title))

    def save(self, path: str | Path) -> Path:
        """Write a picture (.svg) or a trace for Perfetto (.json). Raise ValueError for any other suffix."""
        target = Path(path)
        if target.suffix == ".svg":
            text = self.svg()
        elif target.suffix == ".json":
            text = self.json()
        else:
            raise ValueError(f"a timeline is saved as .svg or .json, and {target.name} is neither")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target

    def svg(self) -> str:
        return svg(self)

    def json(self) -> str:
        """Return the text of a Chrome trace: Note [A timeline as a Chrome trace]."""
        about = {"displayTimeUnit": "ns", "otherData": {"title": self.title}, "traceEvents": events(self)}
        return json.dumps(about, indent=1)

    def summary(self) -> str:
        """Return a summary in one line."""
        kernels = sum(s.kind == KERNEL for s in self.slices)
        found = [count(kernels, "kernel"), count(len(self.copies), "copy", "copies")] if self.copies else []
        found = found or [count(kernels, "kernel")]
        found.append(count(sum(lane.device >= 0 for lane in self.lanes), "stream"))
        if self.arrows:
            found.append(count(len(self.arrows), "wait"))
        found.append(("about " if self.simulated else "") + microseconds(self.end))
        if (both := self.overlap).shared:
            found.append(f"streams side by side for {both.fraction:.0%}")
        if self.memory:
            found.append(f"{amount(self.peak)} at the peak")
        if self.hidden is not None:
            found.append(f"copies {self.hidden:.0%} hidden")
        return ", ".join(found)

    def __str__(self) -> str:
        rows = [f"{self.title}: {self.summary()}"]
        for index, lane in enumerate(self.lanes):
            mine = [s for s in self.slices if s.lane == index]
            rows.append(f"  {lane.name}: {count(len(mine), 'slice')}, {microseconds(sum(s.duration for s in mine))}")
        rows += [f"  {copied(s)}" for s in self.copies]
        return "\n".join([*rows, *(f"note: {note}" for note in self.notes)])


HOST_PID = 1
DEVICE_PID = 10  # and up: of device 0, 1, ...


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


WARM_UP = 4  # calls on a GPU before the profiler starts; the second call captures a CUDA graph


def timeline(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 1,
    backward: bool = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    fullgraph: bool = False,
    compile: bool = True,
    simulate: bool | None = None,
    devices: int = 1,
    title: str = "",
) -> Timeline:
    """Compile `fn`, and return the timeline of `calls` calls of it after the first ones, which compile it.

    `backward` runs the backward of the outputs after each call. A function that is compiled already runs as it is, and
    so does, with `compile=False`, one that calls compiled functions. With `simulate` None, the device is simulated if
    there is no GPU, or inside `torch_overlay.testing.simulated_gpu()`, where tensors and streams must then be made;
    `devices` is the number of simulated devices. Times of a simulated run are estimates: Note [Times of a simulated
    run].
    """
    if calls < 1:
        raise ValueError(f"timeline: calls must be at least 1, got {calls}")
    if simulate is None:
        simulate = active() is not None or not torch.cuda.is_available()
    title = title or getattr(fn, "__name__", type(fn).__name__)
    if compile:
        fn = as_compiled(fn, mode=mode, dynamic=dynamic, options=options, fullgraph=fullgraph)
    if not simulate:
        with observe() as seen:
            for _ in range(WARM_UP):
                step(fn, args, backward)
            torch.cuda.synchronize()
        with profiler() as profile:
            for _ in range(calls):
                step(fn, args, backward)
        return Timeline.from_profile(profile, seen=seen, title=title)
    with simulated_gpu(devices) as gpu, observe() as seen:
        given = as_simulated(gpu, args)
        torch._dynamo.reset()  # earlier compiled code has no module on this device
        with TimedDevice(gpu) as device:
            device.seen = seen
            device.begin()
            step(fn, given, backward)
            device.begin()
            kept = None
            for _ in range(calls):
                kept = step(fn, given, backward)
            found = of_device(device, title)
            del kept
            return found


@contextlib.contextmanager
def watching(simulation: Simulation | None, seen: Compiled, title: str) -> Iterator[Callable[[], Timeline]]:
    """Watch what runs inside the context, from the first compiled call on; yield a function that returns its timeline,
    to be called afterwards. `seen` is the value that `observe()` yielded around the context.
    """
    if simulation is None:
        with profiler() as profile:
            yield lambda: Timeline.from_profile(profile, seen=seen, title=title)
        return
    device = TimedDevice(simulation)
    device.seen, seen.at_first = seen, device.begin
    with device:
        device.begin()
        yield lambda: of_device(device, title)


def of_device(device: TimedDevice, title: str) -> Timeline:
    """Return the timeline of all that a device has seen since its last `begin`."""
    device.sweep()
    devices = {name: index for (index, _), name in device.streams.items()}
    operations = device.trace.operations
    saved = saved_tensors(operations, device.seen.offloads if device.seen is not None else ())
    return Timeline(**schedule(operations, device.costs, title=title, devices=devices, saved=saved))


def step(fn: Callable[..., Any], args: Sequence[Any], backward: bool) -> Any:
    """Run one call. A backward makes new gradients; it adds none to those of the previous call."""
    if backward:
        parameters = fn.parameters() if isinstance(fn, torch.nn.Module) else ()
        for tensor in (*pytree.tree_leaves(args), *parameters):
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf:
                tensor.grad = None
    outputs = fn(*args)
    if backward:
        run_backward(outputs)
    return outputs


@contextlib.contextmanager
def profiler() -> Iterator[Any]:
    """Run `torch.profiler.profile` with all that a timeline shows: kernels, events between streams, memory."""
    from torch.profiler import _ExperimentalConfig, profile, ProfilerActivity

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        profile_memory=True,
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
    ) as found:
        yield found
        torch.cuda.synchronize()


__all__ = ["events", "Timeline", "profiler", "timeline", "watching"]
