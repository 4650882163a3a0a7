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
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_overlay.analysis.memory_report import amount
from torch_overlay.analysis.overlap import DeviceWork, overlap
from torch_overlay.analysis.timelines.json import trace
from torch_overlay.analysis.timelines.model import Arrow, copied, COPIES, count, KERNEL, Lane, microseconds, Slice
from torch_overlay.analysis.timelines.profile import read
from torch_overlay.analysis.timelines.svg import svg


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
    def overlap(self) -> Any:
        """Time in which work of different streams ran at the same time, as an `overlap.Overlap`."""
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
        return trace(self)

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
