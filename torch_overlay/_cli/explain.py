"""Explains what the compiler makes of the streams in a program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import textwrap
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._cli import program
from torch_overlay._cli.commands import Outcome
from torch_overlay._cli.screen import Screen, width
from torch_overlay._inductor.relaunch import causes, coverage
from torch_overlay.analysis.memory_report import account, amount, describe
from torch_overlay.analysis.timelines.lines import own_line
from torch_overlay.analysis.timelines.timeline import step, watching
from torch_overlay.testing import observe
from torch_overlay.testing._text import call_bodies, innermost_frame


if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from torch_overlay._inductor.relaunch.coverage import Coverage
    from torch_overlay._inductor.streams.plan import Op
    from torch_overlay.analysis.timelines.timeline import Timeline
    from torch_overlay.testing import Compiled, Frame, Region

SIMULATED = (
    "Simulated: nothing is computed, and numbers that the program reads are made up. Times are estimates, for a device "
    "that never waits for its host. Nothing is captured: calls count as if a graph had run them."
)


def run(options: argparse.Namespace) -> Outcome:
    refused_before = causes.refused()
    with program.device(options) as simulation, observe() as seen:
        device = torch.cuda.get_device_name()
        watched = watching(simulation, seen, options.target) if options.out else contextlib.nullcontext()
        with watched as draw:
            if options.function:
                ended = program.ended(options.path, lambda: call(options))
            else:
                ended = program.run_script(options.path, options.arguments)
        graphs = coverage.coverage()  # the simulation resets the compiler at its end
    drawn = None
    if draw is not None:
        with contextlib.suppress(ValueError):  # nothing ran on the device
            drawn = draw()
    refused = [r for r in causes.refused() if r not in refused_before]
    report = Report(options, simulation is not None, device, seen, graphs, refused, ended, drawn)
    status = 130 if ended == program.INTERRUPTED else 2 if ended or not seen.frames else 0
    return Outcome(status, report.to_dict(), report.print, functools.partial(save, drawn))


def save(timeline: Timeline | None, name: str) -> None:
    if timeline is None:
        raise ValueError("nothing ran on the device")
    timeline.save(name)


def call(options: argparse.Namespace) -> None:
    with program.importable(options.path):
        fn, inputs = program.load(options.path, options.function)
        compiled = program.as_compiled(fn, mode=options.mode)
        for _ in range(options.calls):
            step(compiled, inputs, options.backward)


@dataclasses.dataclass
class Report:
    options: argparse.Namespace
    simulated: bool
    device: str
    seen: Compiled
    graphs: Coverage
    refused: Sequence[causes.Refused]
    ended: str
    timeline: Timeline | None
    screen: Screen = dataclasses.field(default_factory=Screen)

    def summary(self) -> dict[str, str]:
        """Return what there is, in one line for each kind."""
        seen, plans = self.seen, self.seen.plans
        breaks = [f"{_short(b.file)}:{b.line}" for b in dict.fromkeys(seen.graph_breaks)]
        side = max((sum(stream > 0 for stream in plan.streams) for plan in plans), default=0)
        written = [sum(frame.records for frame in seen.frames), sum(frame.waits for frame in seen.frames)]
        made = [sum(len(plan.events) for plan in plans), sum(plan.num_waits for plan in plans)]
        without = f"; regions without a graph: {len(self.refused)}" if self.refused else ""
        peaks = [f"{amount(account(p).peak)} at the peak of the {r.kind} graph" for r in seen.regions for p in r.plans]
        return {
            "graph breaks": f"{len(breaks)}, at {', '.join(breaks)}" if breaks else "none",
            "streams": f"{side + 1}, with the current stream",
            "events": f"written: {written[0]} records and {written[1]} waits{_others(seen.frames)}; "
            f"generated: {made[0]} records and {made[1]} waits",
            "CUDA graphs": self.graphs.summary() + without,
            "memory": "; ".join(peaks) or "not planned: all is on the current stream",
        }

    def to_dict(self) -> dict[str, Any]:
        regions = [
            {"kind": r.kind, "operations": [(op.stream, op.name, _line(r, op)) for plan in r.plans for op in plan.ops]}
            for r in self.seen.regions
        ]
        shown = {name: getattr(self, name) for name in ("simulated", "device", "graphs", "ended")}
        shown |= {"target": self.options.target, "summary": self.summary(), "regions": regions}
        return {**shown, "graph_breaks": self.seen.graph_breaks, "refused": list(map(str, self.refused))}

    def print(self) -> None:
        screen, seen = self.screen, self.seen
        note = " (simulated: nothing runs on a device)" if self.simulated else ""
        screen.heading(f"{self.options.target} on {self.device}{note}")
        if self.simulated:
            screen.line(textwrap.fill(SIMULATED, width()))
        screen.table("Summary", ("", ""), [*self.summary().items()])
        self._breaks()
        for frame in seen.frames:
            self._frame(frame)
            for region in seen.regions:
                if region.frame is frame:
                    self._region(region)
        for region in seen.regions:
            if region.frame is None:
                self._region(region)
        self._offloads()
        if self.timeline is not None:
            screen.heading("Timeline")
            screen.line(str(self.timeline))
        if self.refused:
            columns = ("region", "code", "cause", "line", "remedy")
            rows = [(r.region.name, r.code, r.message, r.line or r.region.source, r.remedy) for r in self.refused]
            screen.table("Regions without a CUDA graph", columns, rows)
        if self.graphs.functions:
            screen.heading("CUDA graphs")
            screen.line(str(self.graphs))
        if not seen.frames:
            screen.line("Nothing was compiled: no torch.compile'd function was called.")
        if self.ended:
            how, _, why = self.ended.partition(": ")
            screen.heading(f"The program {how}")
            screen.line(why or "This is what it had run until then.")

    def _breaks(self) -> None:
        rows = [
            (f"{_short(b.file)}:{b.line}", b.code, b.reason, b.explanation, "; ".join(b.hints))
            for b in dict.fromkeys(self.seen.graph_breaks)
        ]
        if rows:
            self.screen.table("Graph breaks", ("where", "code", "reason", "explanation", "remedy"), rows)

    def _frame(self, frame: Frame) -> None:
        self.screen.heading(f"{frame.name}  ({_short(frame.file)}:{frame.line})")
        made = {
            "current": "current stream of its device when the function is called",
            "caller": "made outside of the function",
            "frame": "made in the function",
        }
        rows = []
        for info in frame.objects:
            if info.kind == "stream":
                priority = "" if info.priority is None else str(info.priority)
                rows.append((str(info.index), str(info.device or ""), priority, made[info.origin]))
        if rows:
            self.screen.table("Streams", ("stream", "device", "priority", ""), rows)

    def _region(self, region: Region) -> None:
        if self.options.graph:
            streams = ["" if n.stream is None else str(n.stream) for n in region.nodes]
            rows = [(s, n.text, *_where(n.file, n.line, n.code)) for s, n in zip(streams, region.nodes)]
            self.screen.table(f"{region.kind} graph", ("stream", "node", "line", "code"), rows)
        self._blocking(region)
        if not region.plans:
            self.screen.line(f"{region.kind} graph: all on the current stream")
        for plan in region.plans:
            self.screen.line(f"{region.kind} plan")
            self.screen.line(plan.table(lambda op: _line(region, op)))
            for line in describe(plan):
                self.screen.line(line)
        if self.options.wrappers and region.wrapper is not None:
            self.screen.line(call_bodies(region.wrapper))

    def _blocking(self, region: Region) -> None:
        rows = [(*_where(*innermost_frame(copy.stack_trace)), copy.reason) for copy in region.blocking]
        if rows:
            self.screen.table("Copies that block the host", ("line", "code", "why"), rows)

    def _offloads(self) -> None:
        """Print the saved activations in host memory: from which line, and when their copies are launched and waited
        for.
        """
        forward = [r.copies for r in self.seen.regions if r.copies is not None and not r.copies.is_backward]
        backward = [r.copies for r in self.seen.regions if r.copies is not None and r.copies.is_backward]
        for i, report in enumerate(self.seen.offloads):
            self.screen.heading("Saved activations on the host")
            self.screen.line(report.summary() + ".")
            rows = []
            for row in report.rows:
                where, code = _where(*innermost_frame(row.stack_trace))
                out = forward[i].text(row.name) if i < len(forward) else ""
                back = backward[i].text(row.name) if i < len(backward) else ""
                plan = next((t for t in report.choice.transfers if t.name == row.name), None)
                hidden = f"{100 * plan.hidden:.0f} %" if plan is not None else ""
                rows.append((row.name, f"{row.nbytes / 1e6:.2f}", where, code, out, back, hidden))
            columns = ("tensor", "MB", "line", "code", "to the host: launched / awaited", "back: launched / read")
            self.screen.table("Steps are operations of the schedule", (*columns, "hidden by the plan"), rows)


def _line(region: Region, op: Op) -> str:
    """Return the user's line of an operation of a plan."""
    return own_line(region.places.get(op.name.removesuffix(".alias"), ""))


def _others(frames: Iterable[Frame]) -> str:
    counted = {"record_event", "wait_event", "wait_stream"}
    number = sum((frame.syncs for frame in frames), Counter())
    others = [f"{n} {name}" for name, n in sorted(number.items()) if name not in counted]
    return f" ({', '.join(others)})" if others else ""


def _where(file: str, line: int, code: str) -> tuple[str, str]:
    return f"{_short(file)}:{line}" if file else "", code


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
