"""The doctor's findings, as data, as text, as JSON and as a page with a picture of one step, which was profiled."""

from __future__ import annotations

import dataclasses
import json
import linecache
import re
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.causes import Cause
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


def profiled(step: Callable[[], Any]) -> StepTimeline:
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


EQUAL, DIFFER = "equal", "DIFFER"
VARY = "not compared (those of the unchanged program differ from run to run)"
_OPTION = re.compile(r"([\w.]+) = ")  # in the text of a change


@dataclass(frozen=True)
class Finding(Cause):
    """One cause, and what it costs in one step. Times are microseconds, None if they were not measured."""

    launches: float = 0.0
    host_us: float | None = None
    device_us: float | None = None
    waits: float = 0.0  # of the host for the device, in one step

    @property
    def cost(self) -> tuple[float, float]:
        return (self.host_us or 0.0) + (self.device_us or 0.0), self.launches + self.waits

    def text(self) -> str:
        """The program's text at the line."""
        file, _, rest = self.line.partition(".py:")
        number = rest.partition(":")[0]
        return linecache.getline(f"{file}.py", int(number)).strip() if number.isdigit() else ""


@dataclass(frozen=True)
class Work:
    """What a step costs the host, beside its time; of a script, its run. `share` is the part of launches in graphs."""

    waits: float = 0.0
    launches: float = 0.0
    graph_breaks: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class Trial:
    """A remedy that was tried. Times are milliseconds of one step, None if nothing was timed (a script, a simulated
    device); `after` is None if it failed. `results` are "equal", DIFFER, or "not compared" with the reason."""

    code: str
    change: str
    before: Work
    after: Work | None
    ms_before: float | None = None
    ms_after: float | None = None
    results: str = EQUAL
    error: str = ""

    @property
    def helps(self) -> bool:
        if self.error or self.after is None or self.results == DIFFER:
            return False
        if self.ms_before is not None and self.ms_after is not None:
            return self.ms_after < 0.97 * self.ms_before
        return _order(self.after) < _order(self.before)

    def __str__(self) -> str:
        if self.error or self.after is None:
            return f"{self.change}: fails: {self.error}"
        before, after = self.before, self.after
        effect = f"{100 * before.share:.1f} % -> {100 * after.share:.1f} % of launches in graphs"
        for name, old, new in (
            ("graph breaks", before.graph_breaks, after.graph_breaks),
            ("waits of the host", before.waits, after.waits),
            ("launches by the host", before.launches, after.launches),
        ):
            effect += f", {name} {old:g} -> {new:g}" if old != new else ""
        if self.ms_before is not None and self.ms_after is not None:
            effect += f", {self.ms_before:.3f} -> {self.ms_after:.3f} ms a step"
        return f"{self.change}: {effect}, results {self.results}"


def _order(work: Work) -> tuple[float, float, int, float]:
    """Where nothing is timed, the less work comes first: a wait costs the host more than a launch."""
    return work.waits, work.launches, work.graph_breaks, -work.share


@dataclass(frozen=True)
class Diagnosis:
    """`coverage` is that of the steps after the first ones, as `Coverage.to_json()` gives it. Printing a diagnosis
    gives a report whose last line says what to do first. `ended` says how a script ended that did not run through:
    "failed: ...", "exited with status 3", "was interrupted"."""

    target: str
    where: str  # the device's name
    simulated: bool
    share: float
    ms: float | None
    ms_without_graphs: float | None
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...] = ()
    coverage: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    ended: str = ""
    of_run: bool = False  # a script: counts are those of its run, from the first compiled code on
    work: Work = Work()
    timeline: StepTimeline = field(default=StepTimeline(), repr=False)  # one step; empty if nothing was timed
    guards_us: float | None = None  # of a step; None if it was not measured
    results: tuple[torch.Tensor, ...] = field(default=(), repr=False, compare=False)  # of the last step counted

    def first(self) -> str:
        """What to do first, and what it brings."""
        if self.ended.startswith("failed"):
            return f"First: the program {self.ended}"
        if not self.coverage.get("functions") and not self.findings:
            return 'First: torch.compile(..., mode="reduce-overhead"): nothing that was compiled asks for CUDA graphs.'
        helping = [trial for trial in self.trials if trial.helps]
        if helping:
            best = min(helping, key=lambda t: (t.ms_after or 0.0, _order(t.after or t.before)))
            return f"First: {best}."
        vain = {name for trial in self.trials if not trial.helps for name in _OPTION.findall(trial.change)}
        remedies = [f for f in self.findings if f.remedy and not any(name in f.remedy for name in vain)]
        if remedies:
            worst = remedies[0]
            where = f" at {worst.line.partition(': ')[0]}" if worst.line else ""
            return f"First: [{worst.code}]{where}: {worst.remedy.removesuffix('.')}."
        if any(f.remedy for f in self.findings):
            return "First: nothing: no remedy that was tried helps."
        if self.share < 1:
            return "First: nothing: no cause of what is outside of graphs has a remedy."
        if not self.work.launches:
            return "First: tensors on the device: no work was launched there."
        return "First: nothing: all that can be in graphs is."

    def remarks(self) -> list[str]:
        """Say what the figures leave out."""
        said = [f"The program {self.ended}: this is what it had run until then."] * bool(self.ended)
        said += [_SIMULATED] * self.simulated
        if self.of_run:
            said.append(
                "Counts are those of the whole run, from the first compiled code on; an operator is one launch."
            )
        if self.ms is not None and self.work.launches and not self.timeline.spans:
            said.append("The profiler saw nothing of the device (CUPTI is missing?): its times are not known.")
        return said

    def __str__(self) -> str:
        lines = [f"{self.target} on {self.where}", ""]
        lines += [line for remark in self.remarks() for line in (remark, "")]
        lines += self.figures()
        lines += [self.table or "nothing was compiled that asks for CUDA graphs", ""]
        for number, finding in enumerate(self.findings, 1):
            lines += [f"{number}. [{finding.code}] {finding.message}{_cost(finding, self.of_run)}"]
            if finding.line:
                lines += [f"   {finding.line.partition(': ')[0]}"]
            if text := finding.text():
                lines += [f"   - {text}"]
            if finding.remedy:
                lines += [f"   + {finding.remedy}"]
        if self.trials:
            lines += ["", "Tried:", *(f"   {trial}" for trial in self.trials)]
        return "\n".join([*lines, "", self.first()])

    def to_dict(self) -> dict[str, Any]:
        plain = dataclasses.asdict(dataclasses.replace(self, results=()))
        return {**plain, **self.device_us(), "first": self.first()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def figures(self) -> list[str]:
        """Return the times of a step, as far as they were measured; that of Dynamo's guards only if it is large."""
        lines = []
        if self.ms is not None:
            compared = f", {self.ms_without_graphs:.3f} ms without graphs" if self.ms_without_graphs is not None else ""
            lines += [f"{self.ms:.3f} ms a step{compared}"]
        if self.guards_us and self.ms and self.guards_us >= GUARDS * 1e3 * self.ms:
            lines += [f"Dynamo's guards: {self.guards_us:.1f} us of a step ({_STANCE})"]
        if times := self.device_us():
            inside, outside = times["device_us_in_graphs"], times["device_us_outside"]
            lines += [f"device time of a step: {inside:.1f} us in graphs, {outside:.1f} us outside"]
        return lines

    def device_us(self) -> dict[str, float]:
        """Device time of a step, in graphs and outside; empty if nothing was timed."""
        if not self.timeline.spans:
            return {}
        return {f"device_us_{k}": self.timeline.device_us(k == "in_graphs") for k in ("in_graphs", "outside")}

    def to_html(self) -> str:
        """A page that needs no other file."""
        esc = escape
        rows = ""
        for f in self.findings:
            rows += f"<tr><td><code>{esc(f.code)}</code><td>{esc(f.message)}<br><small>{esc(f.line)}</small>"
            rows += f"<pre>{esc(f.text())}</pre><td>{esc(f.remedy)}"
            times = (("host us", f.host_us), ("device us", f.device_us))
            for of, number in (("launches", f.launches), ("waits", f.waits), *times):
                rows += f'<td class=n data-of="{of}">{"" if number is None else f"{number:.1f}".removesuffix(".0")}'
        trials = "".join(f"<li>{esc(str(trial))}" for trial in self.trials)
        picture = self.timeline.to_html()
        return _PAGE.format(
            title=esc(self.target),
            where=esc(self.where),
            first=esc(self.first()),
            share=f"{100 * self.share:.1f}",
            step="".join(f"<p>{esc(line)}" for line in self.figures()),
            table=esc(self.table),
            rows=rows or "<tr><td colspan=7>none",
            timeline=f"<h2>One step</h2>{picture}" if picture else "",
            remarks="".join(f"<p>{esc(remark)}" for remark in self.remarks()),
            trials=f"<h2>Tried</h2><ul>{trials}</ul>" if trials else "",
        )


GUARDS = 0.05  # of a step's time; less is not shown
_STANCE = 'torch.compiler.set_stance("default", skip_guard_eval_unsafe=True), once all inputs were seen'


def _cost(finding: Finding, of_run: bool) -> str:
    of = "" if of_run else " a step"
    parts = [f"{finding.launches:g} launches{of}"] if finding.launches else []
    parts += [f"{finding.waits:g} waits of the host{of}"] if finding.waits else []
    parts += [f"{finding.host_us:.1f} us of the host"] if finding.host_us is not None else []
    parts += [f"{finding.device_us:.1f} us of the device"] if finding.device_us is not None else []
    return f": {', '.join(parts)}" if parts else ""


_SIMULATED = (
    "No GPU: compiled for a simulated one. Nothing is computed there, and numbers that the program reads are made up. "
    "What only a capture or a run shows is not here: operators that fail in a capture, numbers that change, waits "
    "inside of operators, times."
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: CUDA graphs</title><style>
:root {{ color-scheme: light dark; --in: #0b7a53; --out: #b23c00 }}
@media (prefers-color-scheme: dark) {{ :root {{ --in: #3fc08f; --out: #ff9050 }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }}
small, code, pre {{ font-size: 13px }}
h1, li, td, p {{ overflow-wrap: anywhere }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ border-bottom: 1px solid #8886; padding: .5rem; text-align: left; vertical-align: top }}
.n {{ text-align: right; white-space: nowrap }}
pre {{ margin: .3rem 0; white-space: pre-wrap; overflow-wrap: anywhere }}
.timeline {{ width: 100%; background: #8882 }}
.lanes {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0 1rem; margin: .3rem 0 }}
rect.in {{ fill: var(--in) }} rect.out {{ fill: var(--out) }}
span.in {{ color: var(--in) }} span.out {{ color: var(--out) }}
.first {{ border-left: 4px solid var(--in); padding: .3rem .8rem }}
@media (max-width: 40rem) {{ th {{ display: none }}
td {{ display: block; border: 0; padding: .2rem 0; text-align: left }}
td.n {{ display: inline-block; padding-right: 1rem }} td.n:not(:empty)::before {{ content: attr(data-of) " " }}
tr {{ display: block; border-bottom: 1px solid #8886; padding: .5rem 0 }} }}
</style></head><body><h1>{title}</h1><p>{where}: {share} % of kernel launches are in CUDA graphs.{step}
{remarks}<p class="first">{first}</p>
<h2>Outside of graphs</h2><div class="scroll"><table>
<tr><th>code<th>cause<th>remedy<th class=n>launches<th class=n>waits<th class=n>host us<th class=n>device us
{rows}</table></div>
{trials}{timeline}<h2>Coverage</h2><div class="scroll"><pre style="white-space: pre">{table}</pre></div></body></html>
"""
