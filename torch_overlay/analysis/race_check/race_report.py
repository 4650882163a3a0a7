"""Define `Report`, the findings of a check, and format it as text.

    report = check(fn, x)
    print(report)
    report.raise_if_any()

`races` are pairs of accesses that nothing orders, `redundant` lists events that order nothing, and `boundary` lists
what the code around a call may rely on, in eager and in the compiled code. A promise in `boundary` is lost if eager
makes it and the compiled code does not keep it. `faults` says which tensors of the caller the compiled code writes
and eager does not, and which misaligned ones a kernel takes for aligned.

A run is judged by eager's promises, in terms of the user's program (`Context.judge`).
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field, replace
from typing import Any, TYPE_CHECKING

from torch_overlay.analysis.race_check.happens_before import analyse, Done, Findings, Reliance
from torch_overlay.analysis.race_check.source_lines import source_line
from torch_overlay.analysis.race_check.trace import HOST, Synchronize, Trace


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch_overlay.analysis.race_check.happens_before import Race, Redundant
    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
    from torch_overlay.analysis.race_check.trace import Launch, Operation
    from torch_overlay.testing import Compiled


class RaceError(RuntimeError):
    """Raised by `Report.raise_if_any` for a race or another fault; the text is the report's."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class LostPromiseError(RaceError):
    """Raised by `Report.raise_if_any` if there is no race, but the compiled code loses a promise of eager."""


@dataclass(frozen=True)
class Promise:
    """A promise that, after the call, `who` may `what` the value without waiting, or before it, if `what` is "use";
    `eager` and `compiled` say if eager and the compiled code keep it.

    `because` is the statement by which eager keeps it, `missing` the access of the compiled code that isn't over,
    `about` a description of the value.
    """

    call: str
    value: str
    what: str
    who: str
    eager: bool
    compiled: bool
    because: str = field(default="", compare=False)
    missing: str = field(default="", compare=False)
    about: str = field(default="", compare=False)

    @property
    def lost(self) -> bool:
        return self.eager and not self.compiled

    @property
    def when(self) -> str:
        return "before" if self.what == "use" else "after"

    @property
    def text(self) -> str:
        who = f"whoever waits for {self.who}" if self.who.startswith("event") else self.who
        if self.what == "drop":
            return f"{who} may drop the {self.value} that it reads"
        if self.what == "reuse":
            return f"{who} may hand on the {self.value}"
        return f"{who} may {self.what} {self.value}"

    def __str__(self) -> str:
        return f"{self.when} {self.call}, {self.text}" if self.call else self.text


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
    # Races of eager's own run with a backward, in which the engine may drop memory that another stream still reads
    in_eager: tuple[Race, ...] = field(default=(), repr=False)
    eager_races: tuple[Race, ...] = ()  # races of eager's own run without a backward
    faults: tuple[str, ...] = ()

    @property
    def lost(self) -> list[Promise]:
        """Promises of eager to the code around the call that the compiled code does not keep."""
        return [p for p in self.boundary if p.lost]

    @property
    def ok(self) -> bool:
        """True if the compiled code has no race, loses no promise, and has no other fault. Redundant events cost time,
        and break nothing. Eager's own races are in `eager_races`: the compiled code may be ordered where the program in
        eager is not.
        """
        return not (self.races or self.lost or self.faults)

    @property
    def unchecked(self) -> str:
        """Why there was nothing to check; empty if there was."""
        if self.compiled is None:
            return ""
        if not self.compiled.frames:
            return "nothing was compiled, so nothing was checked"
        if not any(region.plans for region in self.compiled.regions):
            return "no operation on streams or events was found, so there was nothing to order"
        return ""

    def raise_if_any(self) -> None:
        """Raise `RaceError` if there is a race, and `LostPromiseError` if there is a lost promise only."""
        if not self.ok:
            raise (RaceError if self.races or self.faults else LostPromiseError)(self)

    def __str__(self) -> str:
        lines = []
        causes = by_cause(self.eager_races)
        if causes:
            lines.append(f"in eager the function has {_races(self.eager_races, causes)} of its own:")
            lines += [textwrap.indent(_describe_cause(races), "  ") for races in causes]
        found = by_cause(self.races)
        lines += map(_describe_cause, found)
        alike: dict[str, list[Promise]] = {}
        for promise in self.lost:
            alike.setdefault(promise.because, []).append(promise)
        lines += map(_describe_lost, alike.values())
        lines += self.faults
        lines += [f"redundant: {r.what}: {r.why}" + (f"\n  {r.site}" if r.site else "") for r in self.redundant]
        lines += [f"note: {text}" for text in self.notes]
        counts = [_races(self.races, found)] if self.races or not self.lost else []
        counts += [_count(self.lost, "lost promise"), _count(self.redundant, "redundant event")]
        last = ", ".join(counts)
        if self.compiled is not None:  # of a function, which eager runs as well
            last = f"as compiled: {last}"
        if causes:
            last = f"in eager: {_races(self.eager_races, causes)}; {last}"
        lines.append(f"{last}: {self.unchecked}" if self.unchecked else last)
        return "\n".join(lines)


class _MissingWait:
    """Races that one wait would prevent, before the second launch of the first of them, or one `record_stream`."""

    def __init__(self, race: Race) -> None:
        self.at = race.second.number
        self.memory = _memory_to_record(race)
        self.places: set[str] = set()
        self.races: list[Race] = []

    def covers(self, race: Race) -> bool:
        """True for an access that the wait orders, also in a later call, or in a later turn of a loop."""
        if self.memory:
            return self.memory == _memory_to_record(race)
        return race.first.number < self.at <= race.second.number or _place(race.first.launch) in self.places


def _memory_to_record(race: Race) -> str:
    """Return the name of memory that is handed on too early; empty if only a wait can prevent the race."""
    memory = race.first.view.memory
    handed_on = race.kind == "reuse" and race.first.launch.stream != memory.stream
    return memory.name.partition("#")[0] if handed_on or race.kind == "use-after-free" else ""


def by_cause(races: Iterable[Race]) -> list[list[Race]]:
    """Return the races, which are in the order of their second accesses, in groups with one missing wait or
    `record_stream` each.
    """
    causes: dict[tuple[str, str], list[_MissingWait]] = {}
    for race in sorted(races, key=lambda race: _memory_to_record(race) != ""):  # a missing wait may cover them
        known = causes.setdefault((race.first.launch.stream, race.second.launch.stream), [])
        cause = next((c for c in known if c.covers(race)), None)
        if cause is None:
            known.append(cause := _MissingWait(race))
        cause.places.add(_place(race.first.launch))
        cause.races.append(race)
    found = [cause.races for known in causes.values() for cause in known]
    return sorted(found, key=lambda races: races[0].second.number)


def _place(launch: Launch) -> str:
    return launch.line or launch.name


def _count(found: Sequence[Any], what: str) -> str:
    return f"{len(found) or 'no'} {what}{'s'[: len(found) != 1]}"


def _races(races: Sequence[Race], causes: Sequence[Sequence[Race]]) -> str:
    return _count(races, "race") + (f" of {_count(causes, 'cause')}" if len(causes) < len(races) else "")


def _describe_cause(races: Sequence[Race]) -> str:
    more = f"\n  and {_count(races[1:], 'more race')} of the same cause" if races[1:] else ""
    return describe(races[0]) + more


_LISTED = 3  # at most so many lost promises are listed for one statement


def _describe_lost(promises: list[Promise]) -> str:
    """Describe lost promises that in eager rest on one statement: the first of them, and what isn't ordered."""
    alike: dict[str, list[Promise]] = {}
    for promise in sorted(promises, key=lambda p: p.who.startswith("event")):  # streams first
        alike.setdefault(promise.text, []).append(promise)
    first = {lost[0].value: text for text, lost in reversed(alike.items())}  # each value once before any twice
    lines = []
    for text, lost in sorted(alike.items(), key=lambda row: first[row[1][0].value] != row[0])[:_LISTED]:
        about = f" ({lost[0].about})" if lost[0].about else ""
        missing = f": {lost[0].missing}" if lost[0].missing else ""
        lines.append(f"lost: {lost[0].when} {', '.join(p.call for p in lost)}, {text}{about}")
        lines.append(f"  the compiled code does not order it{missing}")
    if len(alike) > _LISTED:
        lines.append(f"  and {len(alike) - _LISTED} more that eager keeps by the same statement")
    return "\n".join([*lines, f"  in eager that is so{f' by {promises[0].because}' if promises[0].because else ''}"])


def check_trace(trace: Trace) -> Report:
    """Return the report of a trace that was written by hand. `notes` lists the guarantees at its boundaries."""
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
    """Describe a race in four lines: its kind, the two accesses, and the missing edge."""
    view = race.second.view
    what = {
        "RAW": f"{view.memory} is read before it is known to be written",
        "WAR": f"{view.memory} is overwritten while it may still be read",
        "WAW": f"{view.memory} is written twice in no order",
        "host": f"{view.memory} is used by the host and by the device in no order",
        "reuse": f"{view.memory} may get memory of {race.first.view.memory} that is still in use",
        "use-after-free": f"{view.memory} is used after it was freed",
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


Promises = dict[str, dict[str, Reliance]]


@dataclass(frozen=True)
class Context:
    """The facts that a run is judged by: eager's promises, and the streams and events that the caller has."""

    promises: Promises | None
    current: str
    public: frozenset[str]
    events: frozenset[str]
    pools: frozenset[str] = frozenset()  # the caller's streams; code after the call allocates from their pools
    about: dict[str, str] = field(default_factory=dict)  # captured tensor -> its description

    @classmethod
    def of(cls, device: SimulatedDevice, current: str, promises: Promises | None, events: frozenset[str]) -> Context:
        # A backward makes promises to its caller's stream only.
        return cls(
            promises,
            current,
            frozenset({HOST, current, *(() if device.ran_backward else device.public)}),
            events,
            frozenset(device.public),
            dict(device.described),
        )

    def boundary(self, found: Findings) -> Iterator[Promise]:
        """Yield every promise at the boundaries, kept or lost."""
        for call, rows in found.boundaries.items():
            for name, now in rows.items():
                if self.promises is None:
                    yield from self._presumed(call, name, now)
                elif (before := self.promises.get(call, {}).get(name)) is not None:
                    yield from self._compared(call, name, before, now)
                elif (pool := name.removeprefix("free memory of ")) != name and pool in self.pools:
                    row = "reuse", pool, True, pool in now.readable
                    yield Promise(call, name, *row, "freeing nothing there", _in_the_way(now.unordered, pool))

    def is_public(self, who: str) -> bool:
        return who in self.public or who in self.events or who.endswith(" of the output")

    def _presumed(self, call: str, name: str, now: Reliance) -> Iterator[Promise]:
        if name.startswith(("output", "gradient")) and HOST not in now.known:
            yield Promise(call, name, "read", self.current, True, self.current in now.readable)
            if name.startswith("gradient"):
                yield Promise(call, name, "drop", self.current, True, self.current in now.known)

    def _compared(self, call: str, name: str, before: Reliance, now: Reliance) -> Iterator[Promise]:
        if name.startswith("gradient"):
            known = not before.known.isdisjoint(now.known) or self.current in now.known
            yield Promise(call, name, "drop", self.current, True, known)
        elif name.startswith("output"):
            for who in filter(self.is_public, sorted(before.known - {HOST})):
                yield Promise(call, name, "drop", who, True, who in now.known)
        is_pool = name.startswith("free memory")
        for what, eager, compiled in (
            ("reuse" if is_pool else "read", before.readable, now.readable),
            ("overwrite", before.writable, now.writable),
        ):
            done = HOST in compiled  # over for the host: over for later launches
            for who in filter(self.pools.__contains__ if is_pool else self.is_public, sorted(eager | compiled)):
                yield Promise(
                    call,
                    name,
                    what,
                    who,
                    who in eager,
                    done or who in compiled,
                    _statement(before.because.get(who, "")),
                    _in_the_way(now.unordered, who),
                    self.about.get(name, ""),
                )
        for who in filter(self.public.__contains__, sorted(before.before or ())):
            row = "use", who, True, now.before is None or who in now.before, "", _in_the_way(now.early, who)
            yield Promise(call, name, *row, self.about.get(name, ""))

    def judge(self, operations: Iterable[Operation]) -> Report:
        """Return the report of one run, or of a variation of it. Only events of the compiler are reported as redundant.
        No code may count on the waits that copies of pageable memory imply: an event is redundant only if it is so
        without those waits, too.
        """
        operations = list(operations)
        found = analyse(operations)
        redundant = [r for r in found.redundant if _COMPILERS_EVENT.search(r.site)]
        asked = [op for op in operations if not (isinstance(op, Synchronize) and op.implied)]
        if redundant and len(asked) < len(operations):
            still = {r.site for r in analyse(asked).redundant}
            redundant = [r for r in redundant if r.site in still]
        return Report(found.races, redundant, list(self.boundary(found)), needed=found.needed)


def _statement(site: str) -> str:
    """Format the site of a user's statement with its source text."""
    path, _, line = site.rpartition(":")
    return source_line(path, int(line)) if line.isdigit() else site


def _in_the_way(accesses: dict[str, Done], who: str) -> str:
    return accessed(accesses[who]) if who in accesses else ""


def assemble(traces: list[Trace], seen: Compiled, notes: list[str], context: Context) -> Report:
    """Return one report of several runs of the same code."""
    reports = [context.judge(trace.operations) for trace in traces]
    # An event is redundant if none of the runs needs it; a run that doesn't reach it doesn't need it.
    needed = {site for report in reports for site in report.needed}
    redundant = list(dict.fromkeys(r for report in reports for r in report.redundant if r.site not in needed))
    frames = {(f.name, f.file, f.line) for region in seen.regions if (f := region.frame) is not None}
    if len(frames) > 1:  # no frame knows what runs between frames
        redundant = [r for r in redundant if not _BOUNDARY.search(r.site)]
    plan = "\n\n".join(p.table() for p in seen.plans)
    found = _merged(reports, traces)
    return replace(found, redundant=redundant, plan=plan, notes=notes, compiled=seen, context=context)


def without_eager(device: SimulatedDevice) -> Report:
    """Return the report of the runs of a device for which eager's promises aren't known."""
    context = Context(None, device.current(), frozenset(), frozenset())
    return _merged([context.judge(trace.operations) for trace in device.traces], device.traces)


def _merged(reports: Sequence[Report], traces: list[Trace]) -> Report:
    """Return the races and promises of several runs of the same code, and the redundant events of the first run."""
    races = {race.key: race for report in reports for race in report.races}
    boundary = dict.fromkeys(row for report in reports for row in report.boundary)
    return Report(list(races.values()), reports[0].redundant, list(boundary), traces=traces)


_BOUNDARY = re.compile(r": wait_(entry|exit) ")
_COMPILERS_EVENT = re.compile(r"^wrapper .*\bev\d")


__all__ = ["accessed", "check_trace", "describe", "LostPromiseError", "Promise", "RaceError", "Report"]
