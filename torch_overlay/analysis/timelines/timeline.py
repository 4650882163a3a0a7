"""What ran when, on which stream, after which event: of a simulated run, or of a profile.

    from torch_overlay.analysis import timeline, Timeline

    found = timeline(fn, *args)            # on the GPU if there is one, else on a simulated one
    found.save("step.svg")                 # a picture
    found.save("step.json")                # for ui.perfetto.dev
    print(found)

    found = Timeline.from_profile(prof)    # of a finished torch.profiler.profile

A timeline is plain data: lanes (one a stream, and the host where it has something to do), slices in them (kernels and
copies, with the user's line), arrows (an event: one slice waits for another), and memory over time. All times are in
microseconds from the start of the first slice; memory is in bytes.

Note [Times of a simulated run]
Nothing runs on a device, so times are estimates. A kernel takes as long as its memory traffic or its arithmetic,
whichever is longer, at 80 % of the bandwidth and 50 % of the arithmetic of an H200's data sheet, and `LEAST_US` at
least. Traffic is what Inductor's scheduler counts for the kernel, arithmetic what PyTorch's FLOP counter counts for the
operator. A copy takes its bytes over the link that `device_rates` assumes. The host launches in no time, and waits
where the program makes it wait: what is drawn is a device that never waits for launches. Kernels on different streams
are taken to run side by side at full speed, which is the best that the order allows. A region that gets a CUDA graph is
drawn as it runs without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_overlay._inductor.streams.memory_report import amount
from torch_overlay.analysis.overlap import overlap, Work
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
    """Bytes of the device from a time on, ascending; in a simulated run what the program allocates, else all."""
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
        """The part of all copies' time in which a kernel ran as well; None without copies."""
        total = sum(s.duration for s in self.copies)
        return sum(s.duration * (s.hidden or 0.0) for s in self.copies) / total if total else None

    @property
    def peak(self) -> int:
        """Bytes."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    @property
    def overlap(self) -> Any:
        """For how long work of different streams ran at the same time: an `overlap.Overlap`."""
        return overlap(Work(s.lane, s.start, s.end) for s in self.slices if self.lanes[s.lane].device >= 0)

    @classmethod
    def from_profile(cls, profile: Any, *, seen: Any = None, title: str = "profile") -> Timeline:
        """The timeline of a finished `torch.profiler.profile`, or of the path of a Chrome trace that one exported.

        Arrows need the profiler's synchronisation events, memory needs `profile_memory=True`; both are on in
        `profiler()`. `seen` is what `torch_overlay.testing.observe()` gave while the program was compiled: with it
        compiled kernels have the user's lines.
        """
        return cls(**read(profile, seen, title))

    def save(self, path: str | Path) -> Path:
        """Write a picture (.svg) or a trace for Perfetto (.json). ValueError for any other suffix."""
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
        """One line."""
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
