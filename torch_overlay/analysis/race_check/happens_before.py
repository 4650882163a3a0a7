"""Find the accesses of a trace that nothing orders (races), and the waits and records that order nothing.

A stream is a queue: its launches run in order. Launches on different streams are ordered by records and waits, and
through the host: work that the host has waited for is over before anything that the host launches later. So one clock
per stream, which holds a position for every other stream, gives the exact order. Note [Streams are placement,
dependencies are order] in `streams.planner` uses the same clocks for the reverse: to choose the waits.

Note [Memory that the allocator hands on]
A block that is freed goes back to the pool of the stream it was allocated on. The next allocation from that pool may
get the block at once, in whole or in part, although kernels of any stream may still be at work on it. Which block an
allocation gets depends on sizes, fragmentation and history. So the checker assumes that each allocation may reuse every
block freed to its pool before: an access to new memory has to be ordered after every access to freed memory of its
pool. An access is exempt if it is over once the streams named by `record_stream` have done the work they held at the
free, since the allocator waits for that work. A free is no error if its memory is never allocated again.

Kinds of race: RAW, WAR and WAW, by what the two accesses to one memory do; "host" if one of the two is the host's own;
"reuse" if the earlier access was to freed memory that the pool may have reused for the later one; "use-after-free" if
the program accesses memory that it has freed itself. Pure Python; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay.analysis.race_check.trace import (
    Access,
    Alloc,
    Boundary,
    CALLER,
    ENGINE,
    Free,
    HOST,
    Launch,
    Memory,
    Record,
    RecordStream,
    Synchronize,
    View,
    Wait,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_overlay.analysis.race_check.trace import Operation


class VectorClock(dict[str, int]):
    """Maps each stream to the last of its positions that is known to be over."""

    def join(self, other: dict[str, int]) -> None:
        for stream, position in other.items():
            if self.get(stream, 0) < position:
                self[stream] = position

    def covers(self, stream: str, position: int) -> bool:
        return self.get(stream, 0) >= position

    def implies(self, other: dict[str, int]) -> bool:
        return all(self.get(stream, 0) >= position for stream, position in other.items())


class Done(NamedTuple):
    """An access of a launch, with the launch's position on its stream, and its number in the order of the host."""

    launch: Launch
    view: View
    reads: bool
    writes: bool
    position: int
    number: int

    @property
    def does(self) -> str:
        return "updates" if self.reads and self.writes else "writes" if self.writes else "reads"


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders. `edge` describes the missing dependency in words."""

    kind: str
    first: Done
    second: Done
    edge: str

    @property
    def key(self) -> tuple[object, ...]:
        """Identify the race: equal for the same race in several calls."""
        parts = ((d.launch.name, d.launch.stream, d.launch.line, d.view.memory.name) for d in (self.first, self.second))
        return self.kind, *parts


@dataclass(frozen=True)
class Redundant:
    """A wait or record without which the order would be the same; `site` is the statement that issues it."""

    what: str
    why: str
    site: str


@dataclass(frozen=True)
class Reliance:
    """Guarantees for one view at a boundary: who (streams, or waiters for an event) may read it without a further wait,
    who may overwrite it, which streams' use of its memory the allocator knows of, and on which streams the caller may
    have used it before the call: all accesses of the call come after the caller's work there (None: it has none)."""

    readable: frozenset[str]
    writable: frozenset[str]
    known: frozenset[str]
    before: frozenset[str] | None = None
    because: dict[str, str] = field(default_factory=dict, compare=False)  # who may -> site of the wait that allows it
    unordered: dict[str, Done] = field(default_factory=dict, compare=False)  # who may not -> access that isn't over
    early: dict[str, Done] = field(default_factory=dict, compare=False)  # stream that is not in `before` -> access

    def __and__(self, other: Reliance) -> Reliance:
        """Return the guarantees that hold in both of two runs."""
        return Reliance(
            self.readable & other.readable,
            self.writable & other.writable,
            self.known & other.known,
            None if self.before is None or other.before is None else self.before & other.before,
            self.because,
        )


@dataclass
class Findings:
    races: list[Race] = field(default_factory=list)
    redundant: list[Redundant] = field(default_factory=list)
    boundaries: dict[str, dict[str, Reliance]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)  # sites of events that order something


@dataclass
class _MemoryState:
    """State of one memory while the trace is read: accesses to it, and those inherited from its pool."""

    inherited: dict[str, Done]
    done: dict[tuple[object, ...], Done] = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)  # stream -> site of its record_stream
    freed: Free | None = None
    made: bool = False  # allocated inside the trace
    # stream -> access that its work before the call doesn't precede; None: the call has not accessed it
    early: dict[str, Done] | None = None


class _TraceReader:
    def __init__(self) -> None:
        self.found = Findings()
        self.seen: set[tuple[object, ...]] = set()
        self.clocks: dict[str, VectorClock] = {HOST: VectorClock()}
        self.events: dict[str, VectorClock] = {}
        self.recorded_at: dict[str, str] = {}
        self.why: dict[str, dict[str, str]] = {HOST: {}}  # stream -> other -> site of the last wait for it
        self.blocks: dict[Memory, _MemoryState] = {}
        self.pools: dict[str, dict[str, Done]] = {}  # pool -> stream -> the last access of freed memory
        self.pool_streams: dict[str, str] = {}
        self.record_sites: dict[str, str] = {}  # pool -> site of a record_stream that covers an access
        self.never_recorded: set[tuple[str, str]] = set()  # waits before the first record of their event
        self.orders: dict[tuple[str, str], bool] = {}  # wait -> did any of its executions order something?
        self.records: dict[tuple[str, str], bool] = {}  # record -> was any of its executions waited for?
        self.last_record: dict[str, tuple[str, str]] = {}
        self.launched = 0
        self.work: dict[str, int] = {}  # stream -> position of the caller's work on it before the call
        self.is_in_call = False

    def clock(self, stream: str) -> VectorClock:
        """Return the clock of a stream: everything that its next launch is ordered after."""
        clock = self.clocks.setdefault(stream, VectorClock())
        self.why.setdefault(stream, {})
        if stream != HOST:
            for other, position in self.clocks[HOST].items():
                if clock.get(other, 0) < position:
                    clock[other] = position
                    self.why[stream][other] = self.why[HOST].get(other, "")
        return clock

    def learn(self, who: str, state: dict[str, int], site: str) -> None:
        """Advance the clock of `who` to cover `state`, by the wait at `site`."""
        clock = self.clocks[who]
        for other, position in state.items():
            if clock.get(other, 0) < position:
                clock[other] = position
                self.why[who][other] = site

    def block(self, memory: Memory) -> _MemoryState:
        return self.blocks.setdefault(memory, _MemoryState({}))

    # ---- order

    def record(self, op: Record) -> None:
        self.events[op.event] = VectorClock(self.clock(op.stream))
        self.recorded_at[op.event] = op.site
        where = _place(op.site, f"record of {op.event} on {op.stream}")
        self.records.setdefault(where, False)
        self.last_record[op.event] = where

    def _is_waited_for(self, event: str) -> None:
        if event in self.last_record:
            self.records[self.last_record[event]] = True

    def wait(self, op: Wait) -> None:
        clock, state = self.clock(op.stream), self.events.get(op.event)
        where = _place(op.site, f"wait of {op.stream} for {op.event}")
        self.orders.setdefault(where, False)
        if state is None:
            self.never_recorded.add(where)
            return
        # The code under check must not rely on order that comes from waits of autograd's engine.
        by_engine = any(self.why[op.stream].get(other) == ENGINE for other in state)
        self.orders[where] |= by_engine or not clock.implies(state)
        self._is_waited_for(op.event)
        self.learn(op.stream, state, op.site)

    def synchronize(self, op: Synchronize) -> None:
        host, over = self.clocks[HOST], VectorClock()
        if op.event is not None:
            self._is_waited_for(op.event)
            over.join(self.events.get(op.event, {}))
        elif op.stream is not None:
            over.join(self.clock(op.stream))
        else:
            for stream in list(self.clocks) if op.streams is None else op.streams:
                over.join(self.clock(stream))
        where = _place(op.site, "host synchronisation")
        self.orders[where] = self.orders.get(where, False) or not host.implies(over)
        self.learn(HOST, over, op.site)

    # ---- memory

    def alloc(self, op: Alloc) -> None:
        pool = self.pools.get(op.memory.pool, {}) if op.memory.stream != HOST else {}
        self.blocks[op.memory] = _MemoryState(dict(pool), made=True)

    def free(self, op: Free) -> None:
        block = self.block(op.memory)
        if block.freed is not None:
            return
        block.freed = op
        if op.memory.stream == HOST:
            return
        self.pool_streams[op.memory.pool] = op.memory.stream
        pool = self.pools.setdefault(op.memory.pool, {})
        for done in block.done.values():
            stream = done.launch.stream
            sites = [site for other, site in block.recorded.items() if self.clock(other).covers(stream, done.position)]
            if sites:
                self.record_sites.setdefault(op.memory.pool, sites[0])
                continue
            if stream not in pool or pool[stream].position < done.position:
                pool[stream] = done

    def record_stream(self, op: RecordStream) -> None:
        self.block(op.memory).recorded.setdefault(op.stream, op.site)

    def launch(self, op: Launch) -> None:
        clock = self.clock(op.stream)
        position = clock.get(op.stream, 0) + 1
        self.launched += 1
        self.is_in_call |= op.name != CALLER
        early = [who for who, at in self.work.items() if not clock.covers(who, at)]
        for access in op.accesses:
            self.access(op, access, clock, position)
        for access in op.accesses:
            done = Done(op, access.view, access.reads, access.writes, position, self.launched)
            key = (op.stream, access.view.span, access.reads, access.writes)
            block = self.block(access.view.memory)
            block.done[key] = done
            if op.name != CALLER:
                block.early = (block.early or {}) | dict.fromkeys(early, done)
        clock[op.stream] = position
        if not self.is_in_call:
            self.work[op.stream] = position

    def access(self, op: Launch, access: Access, clock: VectorClock, position: int) -> None:
        block = self.block(access.view.memory)
        mine = Done(op, access.view, access.reads, access.writes, position, self.launched)
        if block.freed is not None:
            self.race("use-after-free", mine, mine)
        for stream, earlier in block.inherited.items():
            if not clock.covers(stream, earlier.position):
                self.race("reuse", earlier, mine)
        for earlier in block.done.values():
            if not (access.writes or earlier.writes) or clock.covers(earlier.launch.stream, earlier.position):
                continue
            if _overlap(earlier.view, access.view):
                self.race(_kind(earlier, mine), earlier, mine)

    def race(self, kind: str, first: Done, second: Done) -> None:
        race = Race(kind, first, second, missing_edge(kind, first, second))
        if race.key not in self.seen:
            self.seen.add(race.key)
            self.found.races.append(race)

    # ---- boundaries: what the code around may rely on

    def boundary(self, op: Boundary) -> None:
        rows = self.found.boundaries[op.name] = {}
        ends = {stream: self.clock(stream) for stream in dict.fromkeys((*op.streams, *self.clocks))}
        for label, event in op.events:  # a later waiter is launched after the host's own work so far
            ends[label] = VectorClock(self.events.get(event, {}))
            ends[label].join({HOST: self.clocks[HOST].get(HOST, 0)})
        recorded = {label: self.recorded_at.get(event, "") for label, event in op.events}
        for name, view in op.views:
            block = self.block(view.memory)
            touched = [d for d in block.done.values() if _overlap(d.view, view)]
            written = [d for d in touched if d.writes]
            may = ends
            stream, before = view.memory.stream, None
            if block.made and stream != HOST and not written:  # without a value: it is only known whose memory it is
                behind = {stream: self.clock(stream).get(stream, 0)}
                may = {who: clock for who, clock in ends.items() if who != HOST and clock.implies(behind)}
            if block.early is not None and not (block.made or op.copies_inputs):
                before = frozenset(self.work.keys() - block.early)
            found = Reliance(
                frozenset(who for who, clock in may.items() if _over(clock, written)),
                frozenset(who for who, clock in may.items() if _over(clock, touched)),
                frozenset({stream, *block.recorded}),
                before,
                early=block.early or {},
            )
            for who, clock in ends.items():
                self.explain(found, who, clock, [*written, *touched], recorded.get(who))
            rows[name] = found
        self.is_in_call = False
        for block in self.blocks.values():
            block.early = None
        for pool, freed in self.pools.items():
            stream = self.pool_streams[pool]
            over = _over(self.clock(stream), freed.values())
            found = Reliance(frozenset([stream] if over else ()), frozenset(), frozenset())
            if pool in self.record_sites:
                found.because[stream] = self.record_sites[pool]
            self.explain(found, stream, self.clock(stream), freed.values(), None)
            rows[f"free memory of {pool}"] = found

    def explain(
        self, found: Reliance, who: str, clock: VectorClock, accesses: Iterable[Done], recorded: str | None
    ) -> None:
        """Note the statement by which the accesses are over for `who`, or the first access that may not be over."""
        for done in accesses:
            stream = done.launch.stream
            if not clock.covers(stream, done.position):
                found.unordered.setdefault(who, done)
            elif stream != who:
                found.because.setdefault(who, self.why.get(who, {}).get(stream, "") if recorded is None else recorded)

    def finish(self) -> Findings:
        never = dict.fromkeys(self.never_recorded, "the event was not recorded before")
        for events, why in (
            (self.orders, "what it orders is ordered without it"),
            (self.records, "nobody waits for it"),
        ):
            for (site, what), is_needed in events.items():
                if is_needed:
                    self.found.needed.add(site)
                else:
                    self.found.redundant.append(Redundant(what, never.get((site, what), why), site))
        return self.found


def _place(site: str, what: str) -> tuple[str, str]:
    """Identify a wait or record: a statement of generated code counts once, whatever event objects it runs with."""
    return (site, site.rpartition(": ")[2]) if site.startswith("wrapper") else (site, what)


def _over(clock: VectorClock, accesses: Iterable[Done]) -> bool:
    return all(clock.covers(d.launch.stream, d.position) for d in accesses)


def _overlap(first: View, second: View) -> bool:
    return first.span is None or second.span is None or first.span.overlaps(second.span)


def _kind(first: Done, second: Done) -> str:
    if HOST in (first.launch.stream, second.launch.stream):
        return "host"
    if first.writes and second.reads:
        return "RAW"
    return "WAW" if first.writes else "WAR"


def missing_edge(kind: str, first: Done, second: Done) -> str:
    """Describe the dependency that would order the two accesses."""
    early, late = first.launch, second.launch
    if kind == "use-after-free":
        return f"{second.view.memory} must be freed after the launch of `{late.name}`"
    if late.stream == HOST:
        return f"the host must wait for `{early.name}` on {early.stream} before `{late.name}`"
    edge = (
        f"{late.stream} must wait, before `{late.name}`, for an event that {early.stream} records after `{early.name}`"
    )
    if kind == "reuse" and early.stream != first.view.memory.stream:
        return f"{edge},\n           or {first.view.memory} needs record_stream({early.stream}) before it is freed"
    return edge


def analyse(operations: Iterable[Operation]) -> Findings:
    """Return all findings of a trace. Linear in its length for a bounded number of streams."""
    reader = _TraceReader()
    read: dict[type, Callable[[Any], None]] = {
        Alloc: reader.alloc,
        Boundary: reader.boundary,
        Free: reader.free,
        Launch: reader.launch,
        Record: reader.record,
        RecordStream: reader.record_stream,
        Synchronize: reader.synchronize,
        Wait: reader.wait,
    }
    for operation in operations:
        read[type(operation)](operation)
    return reader.finish()


__all__ = ["analyse", "VectorClock", "Done", "Findings", "Race", "Redundant", "Reliance"]
