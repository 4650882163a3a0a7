"""What a check found, as a value and as text.

    report = check(fn, x)
    print(report)
    report.raise_if_any()

`races` are pairs of accesses that nothing orders, `redundant` events that order nothing, `boundary` what the code
around a call may rely on: in eager, and in the compiled code. A row of `boundary` is lost where eager promises
something that the compiled code does not keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

from torch_overlay.analysis.happens_before import analyse


if TYPE_CHECKING:
    from torch_overlay.analysis.happens_before import Done, Race, Redundant
    from torch_overlay.analysis.trace import Trace


class RaceError(RuntimeError):
    """Raised by `Report.raise_if_any`; the text is the report's."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Promise:
    """After the call, `who` may `what` a value without waiting: what eager says to that, and the compiled code."""

    call: str
    value: str
    what: str
    who: str
    eager: bool
    compiled: bool

    @property
    def lost(self) -> bool:
        return self.eager and not self.compiled

    @property
    def text(self) -> str:
        who = f"whoever waits for {self.who}" if self.who.startswith("event") else self.who
        if self.what == "drop":
            return f"{who} may drop the {self.value} that it reads"
        if self.what == "reuse":
            return f"{who} may hand on the {self.value}"
        return f"{who} may {self.what} {self.value}"

    def __str__(self) -> str:
        return f"after {self.call}, {self.text}" if self.call else self.text


@dataclass
class Report:
    races: list[Race] = field(default_factory=list)
    redundant: list[Redundant] = field(default_factory=list)
    boundary: list[Promise] = field(default_factory=list)
    plan: str = ""
    notes: list[str] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list, repr=False)
    compiled: Any = field(default=None, repr=False)
    context: Any = field(default=None, repr=False)
    needed: set[str] = field(default_factory=set, repr=False)
    # Of eager's own run with a backward. (Of one without, `notes` has them.)
    in_eager: tuple[Race, ...] = field(default=(), repr=False)

    @property
    def lost(self) -> list[Promise]:
        """What eager promises to the code around the call, and the compiled code does not keep."""
        return [p for p in self.boundary if p.lost]

    @property
    def ok(self) -> bool:
        """No race, and no promise lost. Redundant events cost time, and break nothing."""
        return not (self.races or self.lost)

    def raise_if_any(self) -> None:
        """Raise `RaceError` if there is a race or a lost promise."""
        if not self.ok:
            raise RaceError(self)

    def __str__(self) -> str:
        lines = [describe(race) for race in self.races]
        lost: dict[str, list[str]] = {}
        for promise in self.lost:
            lost.setdefault(promise.text, []).append(promise.call)
        lines += [
            f"lost: after {', '.join(calls)}, {text}\n  in eager that is so; the compiled code does not order it"
            for text, calls in lost.items()
        ]
        lines += [f"redundant: {r.what}: {r.why}" + (f"\n  {r.site}" if r.site else "") for r in self.redundant]
        lines += [f"note: {text}" for text in self.notes]
        counts = (
            (len(self.races), "race"),
            (len(self.lost), "lost promise"),
            (len(self.redundant), "redundant event"),
        )
        lines.append(", ".join(f"{n or 'no'} {what}{'s' if n != 1 else ''}" for n, what in counts))
        return "\n".join(lines)


def check_trace(trace: Trace) -> Report:
    """The report of a trace that was written by hand. What it asks at a boundary is in `notes`."""
    found = analyse(trace.operations)
    notes = []
    for name, rows in found.boundaries.items():
        for view, reliance in rows.items():
            read, write = (", ".join(sorted(s)) or "nobody" for s in (reliance.readable, reliance.writable))
            may = f"may be handed on by {read}" if view.startswith("free memory") else f"may be read by {read}"
            also = "" if view.startswith("free memory") else f", overwritten by {write}"
            notes.append(f"after {name}, {view} {may}{also}")
    return Report(found.races, found.redundant, notes=notes, traces=[trace])


def describe(race: Race) -> str:
    """A race in four lines: what it is, the two accesses, and the edge that is missing."""
    view = race.second.view
    what = {
        "RAW": f"{view.memory} is read before it is known to be written",
        "WAR": f"{view.memory} is overwritten while it may still be read",
        "WAW": f"{view.memory} is written twice in no order",
        "host": f"{view.memory} is used by the host and by the device in no order",
        "reuse": f"{view.memory} may get memory of {race.first.view.memory} that is still in use",
        "use-after-free": f"{view.memory} is used after it was given back",
    }[race.kind]
    lines = [f"{race.kind}: {what}"]
    if race.kind == "use-after-free":
        lines.append(f"  use     {accessed(race.second)}")
    else:
        lines += [f"  first   {accessed(race.first)}", f"  second  {accessed(race.second)}"]
    lines.append(f"  missing: {race.edge}")
    return "\n".join(lines)


def accessed(done: Done) -> str:
    launch = done.launch
    place = f"  at {launch.line}" if launch.line else ""
    return f"`{launch.name}` on {launch.stream} {done.does} {done.view}{place}"


__all__ = ["check_trace", "describe", "Promise", "RaceError", "Report"]
