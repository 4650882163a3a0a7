"""What a program does to streams, events and memory, written down in the order in which the host does it.

A trace is the common language of this package: the simulated device writes one while generated code runs, a test or a
person writes one by hand, and `happens_before` reads it. It is plain data; this module imports no torch.

    t = Trace()
    x = t.alloc("x", 64, on="s0")
    t.launch("fill", "s0", writes=[x])
    t.record("done", "s0")
    t.wait("done", "s1")
    t.launch("use", "s1", reads=[x[0:32]])     # bytes 0 to 31
    t.free(x)

Streams and events are names. Memory is an object: `alloc` takes it from the pool of a stream, `free` gives it back,
and two allocations never are the same object, even where an allocator would hand the same block out again. That it
may do so at once is for the checker to consider. `HOST` is the program's own thread: what it launches runs at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOST = "host"
ENGINE = "autograd's engine"
_MOST_RUNS = 4096  # beyond that many pieces a range is told apart from others by arithmetic alone


@dataclass(frozen=True, slots=True)
class Span:
    """A strided set of bytes: at `offset`, `sizes[i]` steps of `strides[i]` bytes, `item` bytes at each place."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @property
    def end(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides)) + self.item

    def simplified(self) -> Span:
        """Dimensions that step over adjacent bytes become part of the item, others are merged where they can be."""
        item, rest = self.item, []
        for stride, size in sorted((s, n) for n, s in zip(self.sizes, self.strides) if n > 1):
            if stride <= item:  # adjacent, overlapping, or the same byte again (expanded)
                item = max(item, (size - 1) * stride + item)
            elif rest and rest[-1][0] * rest[-1][1] == stride:
                rest[-1] = rest[-1][0], rest[-1][1] * size
            else:
                rest.append((stride, size))
        return Span(self.offset, tuple(n for _, n in rest), tuple(s for s, _ in rest), item)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The adjacent pieces, (first byte, end), ascending per innermost dimension; of a simplified span."""
        starts = [self.offset]
        for size, stride in zip(self.sizes, self.strides):
            starts = [at + i * stride for at in starts for i in range(size)]
        return ((at, at + self.item) for at in starts)

    def overlaps(self, other: Span) -> bool:
        """Exact where one of the two has few pieces; otherwise it errs on the side of True."""
        if self == other:
            return True
        if self.end <= other.offset or other.end <= self.offset:
            return False
        a, b = self.simplified(), other.simplified()
        if not a.sizes and not b.sizes:
            return True
        # Modulo the common divisor of all steps each of the two is one interval.
        pitch = math.gcd(*a.strides, *b.strides)
        gap = (b.offset - a.offset) % pitch
        if gap >= a.item and gap + b.item <= pitch:
            return False
        if math.prod(a.sizes) > _MOST_RUNS or math.prod(b.sizes) > _MOST_RUNS:
            return True
        pieces = sorted([*((*run, 0) for run in a.runs()), *((*run, 1) for run in b.runs())])
        reach = [-1, -1]
        for start, end, side in pieces:
            if start < reach[1 - side]:
                return True
            reach[side] = max(reach[side], end)
        return False

    def __str__(self) -> str:
        plain = self.simplified()
        if not plain.sizes:
            return f"bytes {plain.offset} to {plain.end - 1}"
        shape = ", ".join(f"{n} at every {s}" for n, s in zip(plain.sizes, plain.strides))
        return f"bytes {plain.offset} to {plain.end - 1} ({plain.item} bytes, {shape})"


@dataclass(eq=False)
class Memory:
    """One allocation, from its `alloc` to its `free`: for a stream (HOST: host memory), maybe from a private pool."""

    name: str
    size: int
    stream: str
    private: str = ""

    @property
    def pool(self) -> str:
        """What it goes back to."""
        return f"{self.private} of {self.stream}" if self.private else self.stream

    def __getitem__(self, part: slice) -> View:
        start, stop, _ = part.indices(self.size)
        if stop <= start:
            raise ValueError(f"no bytes from {part.start} to {part.stop} in {self.name}, which has {self.size}")
        return View(self, Span(start, (), (), stop - start))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class View:
    """Some bytes of a memory; `span` None: all of them."""

    memory: Memory
    span: Span | None = None

    def __str__(self) -> str:
        return self.memory.name if self.span is None else f"{self.memory.name}, {self.span}"


@dataclass(frozen=True, slots=True)
class Access:
    view: View
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a copy, or what the host computes itself. `line` is the user's source line as text."""

    name: str
    stream: str
    accesses: tuple[Access, ...] = ()
    line: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    event: str
    stream: str
    site: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """`stream` waits for the last record of the event; without any it waits for nothing."""

    event: str
    stream: str
    site: str = ""


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits for an event, for a stream, or (both None) for all streams of the devices. `of_constant`: it waits
    because it copies a constant of its own to the device, which code that has the constant there already doesn't do.
    `implied`: nobody asked for it, for the copy is not to block, but it is to or from pageable memory.
    """

    event: str | None = None
    stream: str | None = None
    streams: tuple[str, ...] | None = None
    site: str = ""
    of_constant: bool = False
    implied: bool = False


@dataclass(frozen=True, slots=True)
class Alloc:
    memory: Memory
    site: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    memory: Memory
    site: str = ""


@dataclass(frozen=True, slots=True)
class RecordStream:
    """The allocator is told that `stream` uses the memory: it hands the block on when that stream is done with it."""

    memory: Memory
    stream: str
    site: str = ""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point at which it is asked what the code after it may rely on, for each named view: code on which streams, and
    code that waits for which events."""

    name: str
    views: tuple[tuple[str, View], ...]
    streams: tuple[str, ...] = ()
    events: tuple[tuple[str, str], ...] = ()  # what to call it, and which it is


Operation: TypeAlias = Launch | Record | Wait | Synchronize | Alloc | Free | RecordStream | Boundary


@dataclass
class Trace:
    """Operations in host order, and short ways to write them."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def alloc(self, name: str, size: int, on: str, pool: str = "", site: str = "") -> Memory:
        memory = Memory(name, size, on, pool)
        self.add(Alloc(memory, site))
        return memory

    def free(self, memory: Memory, site: str = "") -> None:
        self.add(Free(memory, site))

    def record_stream(self, memory: Memory, stream: str) -> None:
        self.add(RecordStream(memory, stream))

    def launch(
        self,
        name: str,
        stream: str,
        reads: Iterable[Memory | View] = (),
        writes: Iterable[Memory | View] = (),
        line: str = "",
        site: str = "",
    ) -> None:
        """A kernel; what is in both `reads` and `writes` is updated."""
        modes: dict[View, list[bool]] = {}
        for target, which in [*((v, 0) for v in reads), *((v, 1) for v in writes)]:
            view = View(target) if isinstance(target, Memory) else target
            modes.setdefault(view, [False, False])[which] = True
        self.add(Launch(name, stream, tuple(Access(v, r, w) for v, (r, w) in modes.items()), line, site))

    def record(self, event: str, stream: str, site: str = "") -> None:
        self.add(Record(event, stream, site))

    def wait(self, event: str, stream: str, site: str = "") -> None:
        self.add(Wait(event, stream, site))

    def synchronize(self, event: str | None = None, stream: str | None = None, site: str = "") -> None:
        self.add(Synchronize(event, stream, None, site))

    def boundary(
        self, name: str, *views: Memory | View, streams: Iterable[str] = (), events: Iterable[str] = ()
    ) -> None:
        found = tuple(View(v) if isinstance(v, Memory) else v for v in views)
        self.add(Boundary(name, tuple((str(v), v) for v in found), tuple(streams), tuple((e, e) for e in events)))


__all__ = ["Access", "HOST", "Launch", "Memory", "Operation", "Span", "Trace", "View"]
