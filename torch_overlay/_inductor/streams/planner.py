"""Derive the events that order a schedule whose operations run on several streams.

Note [Streams are placement, dependencies are order]
Inside one compiled region the graph is functional, so the only order that a program can observe is data dependence: a
read after the write that it needs, a write after the reads and writes that it must not overtake. The stream of an
operation says where it runs, not when. The waits and records that a user wrote inside the region are therefore not
carried through the compiler as operations. They are read once, in program order, to find the order that the caller may
rely on, the boundary effects of `streams.plan`. The events that the generated code needs are derived here, on the final
schedule, after fusion and reordering, from the buffers that each operation reads and writes.

The plan is sound: any two operations that touch one buffer, one of them writing, are ordered. It is minimal: without
any one of its waits, some pair, or some boundary effect, is no longer ordered. Both hold by construction. Vector clocks
are exact here, because each stream is a total order; an event is emitted only where the clocks do not imply the order
yet; and a predecessor of an operation that another of its predecessors is ordered after gets no event.

The module is a pure function on plain data, and imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch_overlay._functorch.streams.tokens import state, streams_of
from torch_overlay._inductor.streams.plan import BoundaryWait, Buffer, CALLER, ENTRY, Event, HOST, Plan


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay._inductor.streams.plan import Op


@dataclass(slots=True)
class _StreamClock:
    """A vector clock: the position per stream, and the boundary tokens, that a point of a stream is ordered after."""

    seen: dict[int, int] = field(default_factory=dict)
    tokens: set[Token] = field(default_factory=set)

    def copy(self) -> _StreamClock:
        return _StreamClock(dict(self.seen), set(self.tokens))

    def join(self, other: _StreamClock) -> None:
        for stream, position in other.seen.items():
            if self.seen.get(stream, -1) < position:
                self.seen[stream] = position
        self.tokens |= other.tokens

    def covers(self, stream: int, position: int) -> bool:
        return self.seen.get(stream, -1) >= position

    def covers_all(self, accesses: Iterable[tuple[int, int]]) -> bool:
        return all(self.covers(stream, i) for stream, i in accesses)


EarlyWait: TypeAlias = "tuple[Token, int]"
"""The token of a caller's event, and a stream that must wait for the event before the region records it anew."""


class _Planner:
    def __init__(
        self,
        ops: Sequence[Op],
        buffers: Sequence[Buffer],
        early: frozenset[EarlyWait],
        known: Mapping[int, frozenset[Token]],
    ) -> None:
        self.ops = tuple(ops)
        self.early = early
        self.known = known
        self.buffers = tuple(buffers)
        self.fresh = {view: b for b in buffers if b.fresh for view in (b.name, *b.views)}
        self.taken: dict[str, int | None] = {}  # buffer -> last operation of its stream when the block was taken
        self.clocks: dict[int, _StreamClock] = {}
        self.at: list[_StreamClock] = []  # clock of each operation, itself included; empty if it launches nothing
        self.launched: dict[str, int] = {}  # operations by name
        self.on_stream: dict[int, list[int]] = defaultdict(list)
        self.writers: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[str, list[int]] = defaultdict(list)
        self.members: dict[str, frozenset[str]] = {}
        self.touched: dict[str, list[int]] = defaultdict(list)
        self.carriers: dict[Token, dict[int, int]] = defaultdict(dict)  # token -> stream -> its last carrier
        self.waits: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (record position, stream) -> waits
        self.boundary_waits: list[BoundaryWait] = []

    def clock(self, stream: int) -> _StreamClock:
        clock = self.clocks.get(stream)
        if clock is None:
            clock = self.clocks[stream] = _StreamClock({}, self.state_at_entry(stream) if stream != HOST else set())
        return clock

    def state_at_entry(self, stream: int) -> set[Token]:
        return {state(stream), *self.known.get(stream, ())}

    def implied(self, token: Token) -> set[Token]:
        stream = token.stream
        return {token} if stream is None else self.state_at_entry(stream)

    def parts(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the memory that is meant by names, some of which name the memory of several."""
        for name in names:
            yield from self.members.get(name, (name,))

    def needed(self, stream: int, predecessors: Iterable[int]) -> list[int]:
        """Return the predecessors that `stream` has to wait for: the latest of each other stream, unless another of
        these is ordered after it.
        """
        clock = self.clock(stream)
        latest: dict[int, int] = {}
        for i in predecessors:
            p = self.ops[i].stream
            if p is None or p == stream or clock.covers(p, i):
                continue
            if p == HOST:  # the host's operation was done before this launch
                continue
            latest[p] = max(latest.get(p, -1), i)

        def implied(i: int) -> bool:
            mine = self.ops[i].stream
            assert mine is not None
            return any(other != i and self.at[other].covers(mine, i) for other in latest.values())

        return [i for i in latest.values() if not implied(i)]

    def order_after(self, here: int, stream: int, predecessors: Iterable[int], tokens: Iterable[Token]) -> None:
        """Make `stream`, just before position `here`, ordered after `predecessors` and boundary `tokens`."""
        clock, needed = self.clock(stream), self.needed(stream, predecessors)
        for i in sorted(needed):
            source = self.ops[i].stream
            assert source is not None
            self.waits.setdefault((i, source), []).append((here, stream))
            clock.join(self.at[i])
        wanted = set(tokens) - clock.tokens
        for token in sorted(wanted, key=lambda token: (-len(wanted & self.implied(token)), token)):
            if token in clock.tokens:  # implied by the token of a stream that had waited for it
                continue
            source = token.stream
            if source is None:
                self.boundary_waits.append(BoundaryWait(here, stream, token))
            elif source != stream:
                self.waits.setdefault((ENTRY, source), []).append((here, stream))
            clock.tokens |= self.implied(token)

    def predecessors(self, op: Op) -> set[int]:
        found = {self.launched[name] for name in op.order_after if name in self.launched}
        for part in self.parts(op.reads | op.writes):
            found.update(self.writers[part])
        for part in self.parts(op.writes):
            found.update(self.readers[part])
        if not op.waits:
            for token in op.requires:
                found.update(self.carriers[token].values())
        return found

    def latest_state(self, stream: int) -> int | None:
        """Return the stream's latest operation at which a block that was in use before may have become free. A record
        before which the stream waits for nothing new frees no block. None: nothing became free since the entry.
        """
        own = self.on_stream[stream]
        clocks = [_StreamClock({}, self.state_at_entry(stream)), *(self.at[i] for i in own)]

        def waited(clock: _StreamClock) -> tuple[dict[int, int], set[Token]]:
            return {s: position for s, position in clock.seen.items() if s != stream}, clock.tokens

        for i, earlier, known in reversed([*zip(own, clocks, clocks[1:])]):
            if not self.ops[i].rerecords or waited(known) != waited(earlier):
                return i
        return None

    def allocation_order(self, op: Op, stream: int) -> tuple[set[int], set[Token]]:
        """Return the operations and tokens that `op` must be ordered after because it first writes blocks allocated on
        other streams, which may have used those blocks before.
        """
        found: set[int] = set()
        tokens: set[Token] = set()
        for name in op.writes:
            buffer = self.fresh.get(name)
            if buffer is None:
                continue
            self.take(buffer)
            if buffer.stream == stream or self.touched[name]:
                continue
            before = self.taken[buffer.name]
            tokens.add(state(buffer.stream))
            if before is not None:
                found.add(before)
        return found, tokens

    def awaited_next(self, here: int, op: Op) -> set[int]:
        """Return the operations that the stream's next operation waits for, on the streams that `op` must be ordered
        after.

        `op` only fills memory: it needs no computed value, only the caller's state in which that memory became free.
        Waiting for both at once takes no event of its own, and a fill is short.
        """
        following = self.ops[here + 1] if here + 1 < len(self.ops) else None
        if op.stream is None or following is None or following.stream != op.stream:
            return set()
        waited = streams_of(op.after)
        return {i for i in self.needed(op.stream, self.predecessors(following)) if self.ops[i].stream in waited}

    def name_only(self, op: Op) -> None:
        parts = frozenset(self.parts(op.reads | op.writes))
        for name in op.writes:
            self.members[name] = parts
            if not op.reads and name in self.fresh:
                self.take(self.fresh[name])  # the block is allocated here, and written later
        self.at.append(_StreamClock())

    def take(self, buffer: Buffer) -> None:
        if buffer.name not in self.taken:
            self.taken[buffer.name] = self.latest_state(buffer.stream)

    def launch(self, here: int, op: Op) -> None:
        stream = op.stream
        assert stream is not None
        for token, waiting in sorted(self.early):
            if token == op.rerecords:
                self.order_after(here, waiting, (), (token,))
        clock = self.clock(stream)
        if stream != HOST and HOST in self.clocks:
            clock.join(self.clocks[HOST])
        predecessors = self.predecessors(op)
        if op.after and not op.reads and not op.waits:
            predecessors |= self.awaited_next(here, op)
        tokens = set(op.after)
        if stream != HOST:
            extra, states = self.allocation_order(op, stream)
            predecessors |= extra
            tokens |= states
        self.order_after(here, stream, predecessors, () if op.waits else tokens)
        if op.waits:
            clock.tokens.update(*map(self.implied, tokens))
            for token in op.requires:
                for i in self.carriers[token].values():
                    clock.join(self.at[i])
        clock.seen[stream] = here
        self.at.append(clock.copy())
        self.on_stream[stream].append(here)
        self.launched[op.name] = here
        for token in op.promised_to:
            self.carriers[token][stream] = here
        for part in self.parts(op.reads):
            self.readers[part].append(here)
            self.touched[part].append(here)
        for part in self.parts(op.writes):
            self.writers[part] = [here]
            self.readers[part] = []
            self.touched[part].append(here)
        if op.blocking:
            self.clock(HOST).join(clock)

    def leave(self, promised: Mapping[int, frozenset[Token]]) -> None:
        predecessors: dict[int, set[int]] = {stream: set() for stream in promised}
        for token, carriers in self.carriers.items():
            if (stream := token.stream) is not None:
                predecessors.setdefault(stream, set()).update(carriers.values())
        for buffer in self.buffers:
            if buffer.settles:
                owner = buffer.stream if buffer.saved_on is None else buffer.saved_on
                predecessors.setdefault(owner, set()).update(self.uses(buffer))
        for stream in sorted(predecessors):
            if HOST in self.clocks:  # the caller's next launch comes after what the host has waited for
                self.clock(stream).join(self.clocks[HOST])
            self.order_after(len(self.ops), stream, predecessors[stream], promised.get(stream, frozenset()))

    def uses(self, buffer: Buffer) -> set[int]:
        return {i for part in self.parts((buffer.name, *buffer.views)) for i in self.touched[part]}

    def releases(self) -> dict[str, int]:
        """Return, for each buffer, the first operation, if it comes after the last use, at which the buffer's streams
        are ordered after the accesses of other streams: the buffer is freed no earlier.
        """
        release: dict[str, int] = {}
        for buffer in self.buffers:
            uses = self.uses(buffer)
            for owner in {buffer.stream} if buffer.saved_on is None else {buffer.stream, buffer.saved_on}:
                foreign = [(s, i) for i in uses if (s := self.ops[i].stream) is not None and s not in (owner, HOST)]
                if not foreign:
                    continue
                own = self.on_stream[owner]
                position = next((i for i in own if self.at[i].covers_all(foreign)), len(self.ops))
                if position > max(uses):
                    release[buffer.name] = max(release.get(buffer.name, ENTRY), position)
        return release

    def after_caller(self) -> frozenset[int]:
        caller, host = self.clock(CALLER), self.clock(HOST)
        launched = [(s, i) for s, last in caller.seen.items() for i in self.on_stream[s] if i <= last]
        launched = [(s, i) for s, i in launched if not self.ops[i].rerecords]

        def is_after(stream: int) -> bool:
            clock = self.clock(stream).copy()
            clock.join(host)
            return caller.tokens <= clock.tokens and clock.covers_all(launched)

        return frozenset(s for s in {*self.clocks, *self.known} - {CALLER, HOST} if is_after(s))

    def run(self, promised: Mapping[int, frozenset[Token]]) -> Plan:
        for here, op in enumerate(self.ops):
            if op.stream is None:
                self.name_only(op)
            else:
                self.launch(here, op)
        self.leave(promised)
        events = tuple(
            Event(index, after, stream, tuple(waits))
            for index, ((after, stream), waits) in enumerate(sorted(self.waits.items(), key=lambda item: item[0]))
        )
        return Plan(
            self.ops,
            events,
            tuple(self.boundary_waits),
            self.releases(),
            memory={b.name: b.stream for b in self.buffers},
            buffers=self.buffers,
            uses={b.name: frozenset(self.uses(b)) for b in self.buffers},
            known=self.known,
            after_caller=self.after_caller(),
        )


def plan_streams(
    ops: Sequence[Op],
    buffers: Sequence[Buffer] = (),
    promised: Mapping[int, frozenset[Token]] | None = None,
    known: Mapping[int, frozenset[Token]] | None = None,
) -> Plan:
    """Derive the events that order `ops`, given in launch order.

    `buffers` is the memory that the region allocates or frees; memory that is not listed belongs to the caller.
    `promised` says which of the caller's states (tokens) a stream must be ordered after when the region is left,
    whether or not an operation needs them. `known` are the states of other streams that a stream had waited for before
    the region was entered.
    """

    def planned(early: frozenset[EarlyWait]) -> Plan:
        return _Planner(ops, buffers, early, known or {}).run(promised or {})

    early: frozenset[EarlyWait] = frozenset()
    while (late := _late_wait(plan := planned(early))) is not None:
        early |= {late}
    for wait in sorted(early):  # drop those that the others make unnecessary
        if _late_wait(fewer := planned(early - {wait})) is None:
            early, plan = early - {wait}, fewer
    return plan


def _late_wait(plan: Plan) -> EarlyWait | None:
    """Return the first wait for a caller's event that comes after the region has recorded the event anew: it would wait
    for another state.
    """
    renewed: dict[Token | None, int] = {}
    for here, op in enumerate(plan.ops):
        renewed.setdefault(op.rerecords, here)
    late = (w for w in plan.boundary_waits if renewed.get(w.token, w.before) < w.before)
    return next(((w.token, w.stream) for w in late), None)
