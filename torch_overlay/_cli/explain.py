"""python -m torch_overlay explain FILE[:FUNCTION] -- what the compiler makes of the streams in a program.

    explain train.py               runs the script as `python train.py` would, and watches every torch.compile in it
    explain model.py:forward       compiles `forward` and calls it with the inputs that `forward_inputs()` or
                                   `example_inputs()` of that file returns (a tuple or a tensor); a function without
                                   parameters needs none

On a machine with a GPU the program runs there. Elsewhere, or with --simulate, it is compiled for a simulated H200: the
command then prints only facts known from compiling, and values that the program prints from device tensors are made up.

For each piece of code that Dynamo compiled, the command prints: graph breaks with reason and line; the streams in use;
each node of the graph with its stream and line; the plan, that is the order of launches with the events waited for
before and recorded after each; how much memory is alive at the peak, and which buffers live longer than on one stream,
and why; and the number of events of the generated code against those that the user wrote. With --timeline NAME.svg or
NAME.json, it also draws everything that the program runs on the device, and says for activations in host memory how
much of each copy is hidden behind kernels: on a GPU by the profiler, in a simulated run by estimates. Regions that
asked for a CUDA graph and got none come last, with the reason, which is found at a region's second call, on a GPU.

The exit status is 0; 1 if the program failed, or exited with another status than 0; 130 if it was interrupted, after a
report of what had run; 2 if there is no such program, if nothing in it was compiled, or if a picture can't be written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._cli import program
from torch_overlay._inductor.relaunch import causes, coverage
from torch_overlay._inductor.streams import memory_report
from torch_overlay.analysis.timelines.run import watching
from torch_overlay.table import aligned
from torch_overlay.testing import observe, simulated_gpu
from torch_overlay.testing._text import innermost_frame


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.coverage import Coverage
    from torch_overlay.analysis.timelines.timeline import Timeline
    from torch_overlay.testing import Compiled, Frame, Region

SIMULATED = (
    "Simulated: nothing is computed, and numbers that the program reads are made up. Times, and parts of copies that "
    "are hidden, are estimates from memory traffic and arithmetic at the rates of a data sheet, for a device that "
    "never waits for its host. Nothing is captured: calls count as if a graph had run them."
)


def main(argv: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = program.parser("explain", __doc__)
    parser.add_argument(
        "--simulate", action="store_true", help="compile for a simulated GPU even where there is a real one"
    )
    parser.add_argument("--devices", type=int, default=1, help="how many GPUs to simulate")
    parser.add_argument("--wrappers", action="store_true", help="print the generated call() functions as well")
    parser.add_argument("--timeline", action="append", metavar="NAME", help="a picture to write: .svg or .json")
    parser.add_argument("target", metavar="FILE[:FUNCTION]")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    path, _, function = options.target.partition(":")
    if function and options.arguments:  # a function has no arguments, so they are options
        options = parser.parse_args([*options.arguments, options.target], options)
        if options.arguments:
            parser.error(f"{function} is called on its example inputs, and takes no arguments here")
    try:
        program.check_file(path, options.target)
        program.check_pictures("--timeline", options.timeline or ())
        program.check_devices(options.devices)
    except program.UsageError as wrong:
        print(f"explain: {wrong}", file=sys.stderr)
        return 2

    simulate = options.simulate or not torch.cuda.is_available()
    refused_before = causes.refused()
    with contextlib.ExitStack() as stack:
        simulation = stack.enter_context(simulated_gpu(options.devices)) if simulate else None
        seen = stack.enter_context(observe())
        draw = stack.enter_context(watching(simulation, seen, options.target)) if options.timeline else None
        where = f"{torch.cuda.get_device_name()}{' (simulated: nothing runs on a device)' if simulate else ''}"
        try:
            if function:
                ended = program.ended(path, lambda: run_function(path, function))
            else:
                ended = program.run_script(path, options.arguments)
        except program.UsageError as e:
            print(f"explain: {e}", file=sys.stderr)
            return 2
        graphs = coverage.coverage()  # the simulation resets the compiler at its end
    drawn, written, undrawn = None, [], False
    try:
        if draw is not None:
            drawn = draw()
            written = [str(drawn.save(name)) for name in options.timeline]
    except (OSError, ValueError) as e:  # the folder doesn't exist, or nothing ran on the device
        print(f"explain: no timeline: {e}", file=sys.stderr)
        undrawn = True
    report = Report(f"{options.target} on {where}", wrappers=options.wrappers, timeline=drawn, written=written)
    report.simulated = simulate
    report.print(seen, [r for r in causes.refused() if r not in refused_before], graphs, ended)
    if ended:
        return 130 if ended == program.INTERRUPTED else 1
    return 0 if seen.frames and not undrawn else 2


def run_function(path: str, name: str) -> None:
    with program.importable(path):
        fn, inputs = program.load(path, name)
        compiled = hasattr(fn, "_torchdynamo_orig_callable") or isinstance(fn, torch._dynamo.OptimizedModule)
        (fn if compiled else torch.compile(fn))(*inputs)


class Report:
    """Prints tables, with rich where it is installed, else as plain columns."""

    def __init__(
        self, title: str, *, wrappers: bool, timeline: Timeline | None = None, written: Sequence[str] = ()
    ) -> None:
        self._title = title
        self._wrappers = wrappers
        self._timeline, self._written = timeline, written
        self.simulated = False
        self._console: Any = None
        with contextlib.suppress(ImportError):
            from rich.console import Console

            self._console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)

    def print(self, seen: Compiled, refused: Sequence[causes.Refused], graphs: Coverage, ended: str) -> None:
        self._heading(self._title)
        if self.simulated:
            self._line(SIMULATED)
        self._breaks(seen)
        for frame in seen.frames:
            self._frame(frame)
            for region in seen.regions:
                if region.frame is frame:
                    self._region(region)
            self._events(frame, [r for r in seen.regions if r.frame is frame])
        for region in seen.regions:
            if region.frame is None:
                self._region(region)
        self._offloads(seen)
        if self._timeline is not None:
            self._heading("Timeline")
            self._line("\n".join([str(self._timeline), *(f"wrote {name}" for name in self._written)]))
        if refused:
            rows = [(r.region.name, r.code, r.message, r.line or r.region.source, r.remedy) for r in refused]
            self._table("Regions without a CUDA graph", ("region", "code", "what it is", "line", "what to do"), rows)
        if graphs.functions:
            self._heading("CUDA graphs")
            self._line(str(graphs))
        if not seen.frames:
            self._line("Nothing was compiled: no torch.compile'd function was called.")
        if ended:
            how, _, why = ended.partition(": ")
            self._heading(f"The program {how}")
            self._line(why or "This is what it had run until then.")

    def _breaks(self, seen: Compiled) -> None:
        rows = [
            (f"{_short(b.file)}:{b.line}", b.code, b.reason, b.explanation, "; ".join(b.hints))
            for b in dict.fromkeys(seen.graph_breaks)
        ]
        if rows:
            self._table("Graph breaks", ("where", "code", "reason", "explanation", "what to change"), rows)
        else:
            self._line("Graph breaks: none")

    def _frame(self, frame: Frame) -> None:
        self._heading(f"{frame.name}  ({_short(frame.file)}:{frame.line})")
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
            self._table("Streams", ("stream", "device", "priority", ""), rows)

    def _region(self, region: Region) -> None:
        placed = {n.stream for n in region.nodes if n.stream is not None}
        rows = [
            ("" if n.stream is None else str(n.stream), n.text, f"{_short(n.file)}:{n.line}" if n.file else "", n.code)
            for n in region.nodes
        ]
        note = "" if placed else ", all on the current stream"
        self._table(f"{region.kind} graph{note}", ("stream", "node", "line", "code"), rows)
        self._blocking(region)
        for plan in region.plans:
            self._line(f"{region.kind} plan")
            self._text(plan.table())
            for line in memory_report.describe(plan):
                self._line(line)
        if self._wrappers and region.wrapper is not None:
            from torch_overlay.testing._text import call_bodies

            self._text(call_bodies(region.wrapper))

    def _blocking(self, region: Region) -> None:
        rows = []
        for copy in region.blocking:
            file, line, code = innermost_frame(copy.stack_trace)
            rows.append((f"{_short(file)}:{line}" if file else "", code, copy.reason))
        if rows:
            self._table("Copies that block the host", ("line", "code", "why"), rows)

    def _offloads(self, seen: Compiled) -> None:
        """Print the saved activations in host memory: from which line, and when their copies are launched and waited
        for.
        """
        forward = [r.copies for r in seen.regions if r.copies is not None and not r.copies.is_backward]
        backward = [r.copies for r in seen.regions if r.copies is not None and r.copies.is_backward]
        for i, report in enumerate(seen.offloads):
            self._heading("Saved activations on the host")
            self._line(report.summary() + ".")
            rows = []
            for row in report.rows:
                file, line, code = innermost_frame(row.stack_trace)
                where = f"{_short(file)}:{line}" if file else ""
                out = forward[i].text(row.name) if i < len(forward) else ""
                back = backward[i].text(row.name) if i < len(backward) else ""
                plan = next((t for t in report.choice.transfers if t.name == row.name), None)
                hidden = f"{100 * plan.hidden:.0f} %" if plan is not None else ""
                rows.append((row.name, f"{row.nbytes / 1e6:.2f}", where, code, out, back, hidden))
            columns = ("tensor", "MB", "line", "code", "to the host: launched / awaited", "back: launched / read")
            self._table("Steps are operations of the schedule", (*columns, "hidden by the plan"), rows)

    def _events(self, frame: Frame, regions: list[Region]) -> None:
        forward = [p for r in regions if r.kind != "backward" for p in r.plans]
        backward = [p for r in regions if r.kind == "backward" for p in r.plans]
        if not (frame.syncs or forward or backward):
            return
        written = f"{frame.records} records and {frame.waits} waits" + _others(frame)
        used = f"{sum(len(p.events) for p in forward)} events and {sum(p.num_waits for p in forward)} waits"
        line = f"Events: the function has {written}; its generated code has {used}"
        if backward:
            line += f", and {sum(len(p.events) for p in backward)} events and "
            line += f"{sum(p.num_waits for p in backward)} waits in the backward"
        self._line(line + ".")

    def _heading(self, text: str) -> None:
        if self._console is None:
            print(f"\n{text}\n{'=' * len(text)}")
        else:
            from rich.text import Text

            self._console.print()
            self._console.rule(Text(text), align="left")

    def _line(self, text: str) -> None:
        self._text(text)

    def _text(self, text: str) -> None:
        if self._console is None:
            print(text)
        else:
            self._console.print(text, markup=False, soft_wrap=True)

    def _table(self, title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        if self._console is None:
            print("\n  ".join([title, *aligned([columns, *rows])]))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        self._console.print(table)


def _others(frame: Frame) -> str:
    counted = {"record_event", "wait_event", "wait_stream"}
    others = [f"{n} {name}" for name, n in sorted(frame.syncs.items()) if name not in counted]
    return f" ({', '.join(others)})" if others else ""


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
