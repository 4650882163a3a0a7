"""Is a small trace right? Decided by running it in every order that a device may choose.

The oracle of the checker's tests knows nothing of clocks. It is a machine: the host runs ahead and puts launches,
records and waits into the queues of the streams; a queue's front may run at any time, a wait only when its record has
run; the host stands still where it synchronises. Memory is cells with values. A kernel's new values depend on all that
it reads and on what it overwrites, so that two kernels which touch the same cell in another order compute something
else. `alloc` gives any block of the pool that was freed, or a new one; a block that `record_stream` knows is handed on
when those streams have done what they held at the free.

A trace is right if every order gives each kernel the values that it gets when each operation is over before the next
one begins, leaves the same values in the memory that is still allocated, and uses no memory after its free, nor after
its next owner has begun to.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import form  # noqa: F401
from torch_overlay.analysis.race_check.trace import (
    Alloc,
    Free,
    HOST,
    Launch,
    Memory,
    Operation,
    Record,
    RecordStream,
    Synchronize,
    View,
    Wait,
)


CELL = 8  # bytes
MOST_STATES = 200_000
_EMPTY = (0, -1)


class TooLarge(Exception):
    """More states than anybody wants to wait for."""


class State(NamedTuple):
    """`next`: of the host. A cell is a value and the memory through which it was written."""

    next: int
    queues: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    done: frozenset[int] = frozenset()  # records that ran
    events: tuple[tuple[str, int], ...] = ()  # event -> its last record
    cells: tuple[tuple[tuple[int, int], ...], ...] = ()  # per block
    place: tuple[tuple[int, int], ...] = ()  # memory -> block
    free: tuple[tuple[int, str, frozenset[int]], ...] = ()  # blocks: index, pool, records that have to run first
    used: frozenset[int] = frozenset()  # memories that some kernel has touched
    seen: tuple[tuple[int, Any], ...] = ()  # what each kernel saw


class Machine:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self.ops = list(operations)
        memories: dict[Memory, int] = {}
        for op in self.ops:
            if isinstance(op, Alloc):
                memories[op.memory] = len(memories)
        self.memories = memories
        self.uses_freed = self._uses_freed()

    def _uses_freed(self) -> bool:
        freed: set[Memory] = set()
        for op in self.ops:
            if isinstance(op, Free):
                freed.add(op.memory)
            elif isinstance(op, Launch) and any(a.view.memory in freed for a in op.accesses):
                return True
        return False

    def start(self) -> State:
        return State(0)

    # ---- one step

    def run(self, state: State, task: tuple[str, int]) -> State:
        kind, index = task
        if kind == "record":
            return state._replace(done=state.done | {index})
        if kind == "wait":
            return state
        op = self.ops[index]
        assert isinstance(op, Launch)
        cells = [list(block) for block in state.cells]
        place = dict(state.place)
        seen: list[Any] = []
        for access in op.accesses:
            mine = self.memories[access.view.memory]
            block = cells[place[mine]]
            if any(place[other] == place[mine] and other > mine for other in state.used):
                seen.append("memory of another one")
            values = [block[i] for i in _cells(access.view)]
            seen += [value for value, writer in values if access.reads or writer == mine]
        result = hash((op.name, index, tuple(seen)))
        for access in op.accesses:
            mine = self.memories[access.view.memory]
            if access.writes:
                for i in _cells(access.view):
                    cells[place[mine]][i] = result, mine
        touched = {self.memories[access.view.memory] for access in op.accesses}
        return state._replace(
            cells=tuple(map(tuple, cells)),
            used=state.used | touched,
            seen=tuple(sorted([*state.seen, (index, tuple(seen))])),
        )

    def host(self, state: State, reuse: bool = True) -> Iterator[State]:
        """What the host may do next: nothing, one thing, or take one of several blocks."""
        if state.next == len(self.ops):
            return
        index, op = state.next, self.ops[state.next]
        after = state._replace(next=index + 1)
        queues, events = dict(state.queues), dict(state.events)
        if isinstance(op, Launch):
            if op.stream == HOST:
                yield self.run(after, ("launch", index))
            else:
                yield _queued(after, op.stream, ("launch", index))
        elif isinstance(op, Record):
            events[op.event] = index
            yield _queued(after._replace(events=tuple(sorted(events.items()))), op.stream, ("record", index))
        elif isinstance(op, Wait):
            yield _queued(after, op.stream, ("wait", events[op.event])) if op.event in events else after
        elif isinstance(op, Synchronize):
            if op.event is not None:
                over = op.event not in events or events[op.event] in state.done
            elif op.stream is not None:
                over = not queues.get(op.stream)
            else:
                over = not any(queues.values())
            if over:
                yield after
        elif isinstance(op, RecordStream):
            yield after
        elif isinstance(op, Free):
            yield self._freed(after, index, op.memory)
        elif isinstance(op, Alloc):
            yield from self._allocated(after, op.memory, reuse)
        else:
            yield after

    def _freed(self, state: State, index: int, memory: Memory) -> State:
        number = self.memories[memory]
        block = dict(state.place)[number]
        if any(b == block for b, _, _ in state.free):
            return state
        first = []
        lent = {op.stream for op in self.ops[:index] if isinstance(op, RecordStream) and op.memory is memory}
        for count, stream in enumerate(sorted(lent)):
            marker = -(index * 10 + count + 1)
            state = _queued(state, stream, ("record", marker))
            first.append(marker)
        return state._replace(free=(*state.free, (block, memory.pool, frozenset(first))))

    def _allocated(self, state: State, memory: Memory, reuse: bool) -> Iterator[State]:
        number = self.memories[memory]
        size = max(1, -(-memory.size // CELL))
        yield state._replace(cells=(*state.cells, (_EMPTY,) * size), place=(*state.place, (number, len(state.cells))))
        for at, (block, pool, first) in enumerate(state.free if reuse else ()):
            if pool == memory.pool and pool != HOST and first <= state.done and len(state.cells[block]) == size:
                free = (*state.free[:at], *state.free[at + 1 :])
                yield state._replace(place=(*state.place, (number, block)), free=free)

    def device(self, state: State) -> Iterator[State]:
        for stream, tasks in state.queues:
            if tasks and not (tasks[0][0] == "wait" and tasks[0][1] not in state.done):
                queues = tuple((s, t[1:] if s == stream else t) for s, t in state.queues)
                yield self.run(state._replace(queues=tuple((s, t) for s, t in queues if t)), tasks[0])

    # ---- all orders

    def in_order(self) -> tuple[Any, ...]:
        """Each operation over before the next begins, no memory used twice."""
        state = self.start()
        while True:
            if moved := next(self.device(state), None) or next(self.host(state, reuse=False), None):
                state = moved
            else:
                return self.outcome(state)

    def outcome(self, state: State) -> tuple[Any, ...]:
        gone = {self.memories[op.memory] for op in self.ops if isinstance(op, Free)}
        live = [
            (number, tuple(value for value, writer in state.cells[block] if writer == number))
            for number, block in sorted(state.place)
            if number not in gone
        ]
        return state.seen, tuple(live)

    def is_right(self) -> bool:
        if self.uses_freed:
            return False
        expected = self.in_order()
        todo, seen = [self.start()], set()
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            if len(seen) > MOST_STATES:
                raise TooLarge(f"{len(self.ops)} operations")
            following = [*self.host(state), *self.device(state)]
            if not following and (state.next < len(self.ops) or self.outcome(state) != expected):
                return False
            todo += following
        return True


def _queued(state: State, stream: str, task: tuple[str, int]) -> State:
    queues = dict(state.queues)
    queues[stream] = (*queues.get(stream, ()), task)
    return state._replace(queues=tuple(sorted(queues.items())))


def _cells(view: View) -> range:
    if view.span is None:
        return range(max(1, -(-view.memory.size // CELL)))
    assert not view.span.sizes, "plain intervals only"
    return range(view.span.offset // CELL, -(-(view.span.offset + view.span.item) // CELL))


def is_right(operations: Sequence[Operation]) -> bool:
    """Whether the trace computes the same in every order."""
    return Machine(operations).is_right()
