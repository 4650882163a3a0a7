"""Describe a schedule whose operations run on several streams, and the events that order it.

A schedule is a list of operations in launch order, with what each reads and writes, and the memory that the region
allocates or may free. A plan adds records and waits of events, and when the memory may be freed. The order between the
region's operations and the caller's work is given by *boundary effects*, written as tokens on operations:

    after = {s0}        this operation runs after the work that stream 0 held when the region was entered
    after = {e5}        ... after the caller's event 5
    before = {s0}       stream 0, when the region is left, is ordered after this operation
    before = {e5.0}     record 0 of the user's event 5 is ordered after this operation
    before = {h2}       host synchronisation 2 returns only after this operation has finished
    before = {c3}       copy 3, for which the host waits, comes after this operation

The module is plain data. It imports no torch, and can print a plan as a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_overlay.table import aligned


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_overlay._functorch.streams.tokens import Token


HOST = -1
"""The stream of operations that the host runs itself, in program order (CPU kernels)."""

CALLER = 0
"""The caller's stream."""

ENTRY = -1
"""Position of an event that is recorded before the first operation of the region."""


@dataclass(frozen=True)
class Op:
    """One launch of the final schedule.

    `stream` is a planner stream, `HOST`, or None for an operation that launches nothing and only names storage (a
    concatenation of buffers that were written in place). `blocking` says that the host returns from the launch when the
    work is done. `requires` are the tokens of the boundary effects that this operation makes happen: every operation
    that has one of them in its `promised_to` must be ordered before this one. A host operation with `waits` set waits
    itself for those operations and for the tokens in `after` (it synchronises with the device or with an event).
    `order_after` names operations that this one must be ordered after although it uses none of their results, so that
    memory which they use can be freed here. `rerecords` is the token of the caller's event that this operation records
    anew.
    """

    name: str
    stream: int | None
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    after: frozenset[Token] = frozenset()
    promised_to: frozenset[Token] = frozenset()
    requires: frozenset[Token] = frozenset()
    blocking: bool = False
    waits: bool = False
    order_after: frozenset[str] = frozenset()
    rerecords: Token | None = None


@dataclass(frozen=True)
class Buffer:
    """A block of memory that the region allocates, or gets as an input and may free.

    `stream` is the stream that the block was allocated on. `fresh` memory is allocated in the region, at its first
    write; other memory came in as an input. `views` are the names under which ranges of it are written one by one.
    `saved_on` is another stream that an input's block may have been allocated on: the block is freed when both streams
    are ordered after every access. With `settles`, `saved_on` (or `stream`, if `saved_on` is None) is ordered after
    every access at the exit in any case. `size` is in bytes; a buffer that `leaves` is returned to the caller.
    """

    name: str
    stream: int
    fresh: bool = True
    views: frozenset[str] = frozenset()
    saved_on: int | None = None
    settles: bool = False
    size: int = 0
    leaves: bool = False


@dataclass(frozen=True)
class Event:
    """An event, recorded on `stream` right after operation `after` (or at `ENTRY`), waited on at each `(operation,
    stream)` of `waits`.

    An operation index equal to the number of operations means the exit of the region; a wait on `HOST` blocks the host.
    """

    index: int
    after: int
    stream: int
    waits: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BoundaryWait:
    """Stream `stream` waits for the caller's event `token` before operation `before`."""

    before: int
    stream: int
    token: Token


@dataclass(frozen=True)
class Plan:
    """The planner's result: events, waits on the caller's events, and when memory that several streams touched may be
    freed.

    `release[buffer]` is the operation after whose waits the buffer's own stream is ordered after every access;
    `len(ops)` means not before the exit of the region, where eager frees. Buffers that are not listed may be freed
    right after their last use. `uses` are the operations that touch a buffer. `known`: see `plan_streams`.
    `after_caller` are the streams that, at the exit, are ordered after everything that the caller's stream is ordered
    after.
    """

    ops: tuple[Op, ...]
    events: tuple[Event, ...] = ()
    boundary_waits: tuple[BoundaryWait, ...] = ()
    release: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    uses: Mapping[str, frozenset[int]] = field(default_factory=dict)
    known: Mapping[int, frozenset[Token]] = field(default_factory=dict)
    after_caller: frozenset[int] = frozenset()

    @property
    def num_waits(self) -> int:
        return sum(len(e.waits) for e in self.events) + len(self.boundary_waits)

    @property
    def streams(self) -> tuple[int, ...]:
        """Return the planner streams in use, ascending, without the host."""
        used = {op.stream for op in self.ops} | {each.stream for each in (*self.events, *self.boundary_waits)}
        used |= {stream for event in self.events for _, stream in event.waits}
        return tuple(sorted(stream for stream in used if stream is not None and stream != HOST))

    def waits_before(self, position: int) -> list[tuple[Event, int]]:
        return [(e, stream) for e in self.events for at, stream in e.waits if at == position]

    def table(self, lines_of: Callable[[Op], str] = lambda op: "") -> str:
        """Return the plan as fixed-width text: one row an operation, with the waits before and the records after it,
        and the user's line of it, if it is known.
        """
        shown = [lines_of(op) for op in self.ops]
        rows = [("", "stream", "operation", "waits before", "records after", "line" if any(shown) else "")]

        def label(stream: int | None) -> str:
            return "-" if stream is None else "host" if stream == HOST else str(stream)

        def waits(position: int) -> str:
            parts = [f"ev{e.index}@{label(s)}" for e, s in self.waits_before(position)]
            parts += [f"{w.token}@{label(w.stream)}" for w in self.boundary_waits if w.before == position]
            return " ".join(parts)

        def records(position: int) -> str:
            return " ".join(f"ev{e.index}@{label(e.stream)}" for e in self.events if e.after == position)

        rows.append(("", "", "entry", "", records(ENTRY), ""))
        for i, op in enumerate(self.ops):
            rows.append((str(i), label(op.stream), op.name, waits(i), records(i), shown[i]))
        rows.append(("", "", "exit", waits(len(self.ops)), "", ""))
        lines = aligned(rows)
        written = {name for op in self.ops for name in op.writes}
        written |= {b.name for b in self.buffers if not written.isdisjoint(b.views)}
        for name, position in sorted(self.release.items()):
            if name not in written:
                continue
            where = "exit" if position >= len(self.ops) else f"waits of {position}"
            lines.append(f"free {name} (stream {label(self.memory.get(name))}) after {where}")
        return "\n".join(lines)
