"""Mutants of traces: what a compiler could get wrong, one mistake at a time.

    delete      a wait, a record, a host synchronisation, a record_stream
    early free  a free moved one operation forward
    swap        two launches on different streams, one after the other, change places

`of_trace` makes all mutants of a small trace, to be judged by `brute_force`. `of_compiled` makes those of a compiled
program, and only such as are wrong or right by construction: Note [Right and wrong by construction].

Note [Right and wrong by construction]
A plan is minimal: whatever wait or record of generated code is left out, some pair of accesses or some promise to the
caller is no longer ordered. But for these: what the report of the program itself calls redundant; where generated code
waits on the host, or copies between devices, which may order the same; the joins around captured partitions, which come
whether they are needed or not; in a program of several modules, like a training step, what its regions owe to the side
streams of their caller, which is the program itself and need not call it in, and what they wait for at their entry,
which another region may have waited for; and waits for the caller's state before work on memory of the region's own,
which are for memory that the caller freed while a stream still used it: the simulated caller does no such thing; and
where a stream waits for a state of the caller, and once more later, each of the two waits, for the simulated caller
writes inputs on the current stream only, and sees at the end that one of them orders its work. Such mutants are counted
as not decided.

A free that moves before a launch which uses the memory is wrong. One that moves before an operation that neither
uses the memory nor allocates any is right: no allocation can tell. Two launches of different streams with no wait or
record between them are not ordered, and if the program is right they have nothing to do with each other: which of them
the host launches first doesn't matter.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import brute_force
import small_programs

import form  # noqa: F401
from torch_overlay.analysis.race_check.checking import CALLER
from torch_overlay.analysis.race_check.happens_before import analyse
from torch_overlay.analysis.race_check.race_report import Report
from torch_overlay.analysis.race_check.trace import (
    Alloc,
    Boundary,
    Free,
    HOST,
    Launch,
    Operation,
    Record,
    RecordStream,
    Synchronize,
    Wait,
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    kind: str
    what: str
    runs: list[list[Operation]]  # the trace, or those of several runs of one code
    is_wrong: bool | None = None  # None: to be found out


def of_trace(operations: Sequence[Operation]) -> Iterator[Mutant]:
    """Every mutant of a trace."""
    ops = list(operations)
    for i, op in enumerate(ops):
        if isinstance(op, Wait | Record | Synchronize | RecordStream):
            yield Mutant(f"delete {type(op).__name__.lower()}", str(op), [[*ops[:i], *ops[i + 1 :]]])
        if isinstance(op, Free) and i and not (isinstance(ops[i - 1], Alloc) and ops[i - 1].memory is op.memory):
            yield Mutant("early free", str(op), [[*ops[: i - 1], op, ops[i - 1], *ops[i + 1 :]]])
        if isinstance(op, Launch) and i and isinstance(before := ops[i - 1], Launch) and before.stream != op.stream:
            yield Mutant("swap", f"{before.name}, {op.name}", [[*ops[: i - 1], op, before, *ops[i + 1 :]]])


def _site(op: Operation) -> str:
    return "" if isinstance(op, Boundary) else op.site


def _is_emitted(site: str) -> bool:
    """A statement of a generated module on its own events, or its entry or exit."""
    statement = site.rpartition(": ")[2]
    return site.startswith("wrapper") and (statement.startswith("ev") or " ev" in statement)


def _is_recorded_again(ops: Sequence[Operation], record: Operation) -> bool:
    """The caller sees the last record of its event in a call, and perhaps no difference between that and others."""
    event = record.event if isinstance(record, Record) else None
    return len({op.site for op in ops if isinstance(op, Record) and op.event == event}) > 1


def _is_gone(op: Operation, site: str) -> bool:
    return isinstance(op, Wait | Record) and op.site == site


def of_compiled(report: Report) -> Iterator[Mutant]:
    """The mutants of a checked program that are right or wrong by construction."""
    runs = [trace.operations for trace in report.traces]
    redundant = {r.site for r in report.redundant}
    sites: dict[str, Operation] = {}
    waits_of: dict[str, set[str]] = defaultdict(set)  # record -> what waits for it
    for ops in runs:
        last: dict[str, str] = {}
        for op in ops:
            if isinstance(op, Wait | Record) and _is_emitted(op.site):
                sites.setdefault(op.site, op)
            if isinstance(op, Record):
                last[op.event] = op.site
            elif isinstance(op, Wait | Synchronize) and op.event in last:
                waits_of[last[op.event]].add(op.site)
    # Waits before a host synchronisation can be needless for a reason that the planner can't count on. So can waits
    # before a copy between devices, which brings waits of its own.
    others = ("wrapper", "a copy between devices")
    host_waits = any(
        op.site.startswith(others) and (isinstance(op, Synchronize) or not _is_emitted(op.site))
        for op in runs[0]
        if isinstance(op, Synchronize | Wait)
    )
    devices = any(isinstance(op, Launch) and "cuda:" in op.stream and op.name != CALLER for op in runs[0])
    captures = any("_outer" in site for site in sites)
    loose = {site for site in sites if captures and _is_of_capture(site)}
    names = {n for plan in report.compiled.plans for op in plan.ops for n in op.reads | op.writes}
    if any("[" in name for name in names):  # of a buffer in parts, the caller may get one, and be promised all
        loose |= {site for site in sites if _is_of_boundary(site)}
    modules = {_site(op).partition(",")[0] for op in runs[0] if _site(op).startswith("wrapper")}
    if len(modules) > 1 or any(op.site == "autograd's engine" for op in runs[0] if isinstance(op, Record)):
        loose |= {site for site in sites if _is_of_boundary(site)}
        loose |= {wait for site in loose for wait in waits_of[site]}  # what a forward has waited for, too
    waits = {site: op for site, op in sites.items() if isinstance(op, Wait)}
    entries = {site: op for site, op in waits.items() if "wait_entry" in site}
    again = {op.stream for site, op in waits.items() if site not in entries and ".enter()" not in site}
    own = {site for site, op in entries.items() if op.stream in again or _is_for_own(runs[0], op)}
    own |= {s for s, op in waits.items() if "wait_exit" in s and op.stream in {e.stream for e in entries.values()}}
    loose |= own | {site for site in sites if waits_of[site] and waits_of[site] <= own}
    for site, op in sites.items():
        if site in redundant or (waits_of[site] and waits_of[site] <= redundant):
            continue
        kind = "delete wait" if isinstance(op, Wait) else "delete record"
        if _is_of_boundary(site):
            kind = "drop boundary effect"
        is_callers = bool(re.search(r": event\d+\w*\.(record|wait)", site))
        is_again = is_callers and any(_is_recorded_again(ops, op) for ops in runs)
        without = [[o for o in ops if not _is_gone(o, site)] for ops in runs]
        unknown = host_waits or devices or is_again or site in loose or (waits_of[site] and waits_of[site] <= loose)
        yield Mutant(kind, site, without, None if unknown else True)
    for ops in runs[:1]:
        yield from _of_memory(ops)


def _is_for_own(ops: Sequence[Operation], wait: Wait) -> bool:
    """Does the stream touch nothing but memory that the region has made, when it has waited?"""
    made = {op.memory for op in ops if isinstance(op, Alloc)}
    behind = ops[next(i for i, op in enumerate(ops) if op.site == wait.site) :]
    launch = next((op for op in behind if isinstance(op, Launch) and op.stream == wait.stream), None)
    return launch is not None and launch.name != CALLER and all(a.view.memory in made for a in launch.accesses)


def _is_of_boundary(site: str) -> bool:
    return any(word in site for word in ("_entry", "_exit", ": record ev", ": wait ev"))


def _is_of_capture(site: str) -> bool:
    """Where CUDA graphs are captured, everything is joined around and at the end of a partition, needed or not."""
    return "_outer" in site or bool(re.search(r": (record|wait)\w* ev| event\d", site))


def _of_memory(ops: Sequence[Operation]) -> Iterator[Mutant]:
    lent = {op.memory for op in ops if isinstance(op, RecordStream)}
    for i, op in enumerate(ops):
        if i == 0:
            continue
        before = ops[i - 1]
        if isinstance(op, Free) and op.memory not in lent and not isinstance(before, Alloc | Boundary | RecordStream):
            uses = isinstance(before, Launch) and any(a.view.memory is op.memory for a in before.accesses)
            yield Mutant("early free", op.memory.name, [[*ops[: i - 1], op, before, *ops[i + 1 :]]], uses)
        if isinstance(op, Launch) and op.stream != HOST:
            at = i - 1  # allocations of this launch's own results move with it
            while at and isinstance(ops[at], Alloc):
                at -= 1
            other = ops[at]
            if isinstance(other, Launch) and other.stream not in (HOST, op.stream):
                swapped = [*ops[:at], *ops[at + 1 : i + 1], other, *ops[i + 1 :]]
                yield Mutant("swap", f"{other.name}, {op.name}", [swapped], False)


def is_flagged(report: Report, mutant: Mutant) -> bool:
    """Does the checker find in a mutant what it doesn't find in the program itself?"""
    known = _found(report)
    return any(_found(report.context.judge(ops)) - known for ops in mutant.runs)


def _found(report: Report) -> set[Any]:
    return {(p.call, p.value, p.what, p.who) for p in report.lost} | {race.key for race in report.races}


@dataclasses.dataclass
class Tally:
    """Counts by kind of mutant, whether it is wrong, and whether it was flagged; and the mutants that were mistaken."""

    counts: Counter[tuple[str, bool | None, bool]] = dataclasses.field(default_factory=Counter)
    mistakes: list[str] = dataclasses.field(default_factory=list)

    def note(self, program: str, mutant: Mutant, is_wrong: bool | None, flagged: bool) -> None:
        self.counts[mutant.kind, is_wrong, flagged] += 1
        if is_wrong is not None and is_wrong != flagged:
            what = "not flagged, and wrong" if is_wrong else "flagged, and right"
            self.mistakes.append(f"{program}: {mutant.kind}, {mutant.what}: {what}")

    @property
    def decided(self) -> int:
        return sum(count for (_, is_wrong, _), count in self.counts.items() if is_wrong is not None)

    def table(self) -> str:
        rows = [("mutants", "wrong", "of these flagged", "right", "of these flagged", "not decided")]
        for kind in sorted({kind for kind, _, _ in self.counts}):
            of = {(w, f): self.counts[kind, w, f] for w in (True, False, None) for f in (True, False)}
            wrong, right, rest = (of[w, True] + of[w, False] for w in (True, False, None))
            rows.append((kind, *map(str, (wrong, of[True, True], right, of[False, True], rest))))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def count_compiled(report: Report, program: str, tally: Tally) -> None:
    """All mutants of a checked program."""
    for mutant in of_compiled(report):
        tally.note(program, mutant, mutant.is_wrong, is_flagged(report, mutant))


def count_small(seed: int, tally: Tally) -> None:
    """A random program of at most eight operations, and all of its mutants, against `brute_force`."""
    ops = small_programs.draw(seed)
    for mutant in (Mutant("none", "the program itself", [ops]), *of_trace(ops)):
        wrong = not brute_force.is_right(mutant.runs[0])
        tally.note(f"small program {seed}", mutant, wrong, bool(analyse(mutant.runs[0]).races))


__all__ = ["count_compiled", "count_small", "Mutant", "of_compiled", "of_trace", "Tally"]
