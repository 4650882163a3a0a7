"""Build the report of a run: judge its findings against eager's promises, in terms of the user's program."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_overlay.analysis.race_check.happens_before import analyse, Done, Findings, Reliance
from torch_overlay.analysis.race_check.race_report import accessed, Promise, Report
from torch_overlay.analysis.race_check.source_lines import source_line
from torch_overlay.analysis.race_check.trace import HOST, Synchronize, Trace


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
    from torch_overlay.analysis.race_check.trace import Operation
    from torch_overlay.testing import Compiled


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
        for who in filter(self.pools.__contains__, sorted(before.before or ())):
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


def assemble(
    reports: Sequence[Report], seen: Compiled, traces: list[Trace], notes: list[str], context: Context
) -> Report:
    """Merge the reports of several runs of the same code into one."""
    found = merged(reports, traces)
    # An event is redundant if none of the runs needs it; a run that doesn't reach it doesn't need it.
    needed = {site for report in reports for site in report.needed}
    redundant = list(dict.fromkeys(r for report in reports for r in report.redundant if r.site not in needed))
    frames = {(f.name, f.file, f.line) for region in seen.regions if (f := region.frame) is not None}
    if len(frames) > 1:  # no frame knows what runs between frames
        redundant = [r for r in redundant if not _BOUNDARY.search(r.site)]
    plan = "\n\n".join(p.table() for p in seen.plans)
    return replace(found, redundant=redundant, plan=plan, notes=notes, compiled=seen, context=context)


def merged(reports: Sequence[Report], traces: list[Trace]) -> Report:
    """Return the races and promises of several runs of the same code, and the redundant events of the first run."""
    races = {race.key: race for report in reports for race in report.races}
    boundary = dict.fromkeys(row for report in reports for row in report.boundary)
    return Report(list(races.values()), reports[0].redundant, list(boundary), traces=traces)


def without_eager(device: SimulatedDevice, traces: list[Trace]) -> Report:
    """Return the report of runs for which eager's promises aren't known."""
    context = Context(None, device.current(), frozenset(), frozenset())
    return merged([context.judge(trace.operations) for trace in traces], traces)


_BOUNDARY = re.compile(r": wait_(entry|exit) ")
_COMPILERS_EVENT = re.compile(r"^wrapper .*\bev\d")
