"""Define `Trace`: a program's operations on streams, events and memory, in the order in which the host issues them.

A trace is the common language of this package: the simulated device writes one while generated code runs, a test or a
person writes one by hand, and `happens_before` reads it. It is plain data; this module imports no torch.

    t = Trace()
    x = t.alloc("x", 64, on="s0")
    t.launch("fill", "s0", writes=[x])
    t.record("done", "s0")
    t.wait("done", "s1")
    t.launch("use", "s1", reads=[x[0:32]])     # bytes 0 to 31
    t.free(x)

Streams and events are names. Memory is an object: `alloc` takes it from the pool of a stream, `free` returns it to the
pool, and every allocation is a new object, even where an allocator would reuse a freed block. The checker considers
that the allocator may reuse a block at once. `HOST` is the program's own thread: its launches run immediately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOST = "host"
ENGINE = "autograd's engine"
CALLER = "the caller"  # name and site of the launches of the code around a call
_MOST_RUNS = 4096  # a span of more runs is compared with others by arithmetic alone


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """A strided set of bytes: from `offset`, `sizes[i]` steps of `strides[i]` bytes, `item` bytes at each step."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @property
    def end(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides)) + self.item

    def simplified(self) -> ByteSpan:
        """Return an equal span: dimensions over adjacent bytes join the item, others are merged where possible."""
        item, rest = self.item, []
        for stride, size in sorted((s, n) for n, s in zip(self.sizes, self.strides) if n > 1):
            if stride <= item:  # adjacent, overlapping, or the same byte again (expanded)
                item = max(item, (size - 1) * stride + item)
            elif rest and rest[-1][0] * rest[-1][1] == stride:
                rest[-1] = rest[-1][0], rest[-1][1] * size
            else:
                rest.append((stride, size))
        return ByteSpan(self.offset, tuple(n for _, n in rest), tuple(s for s, _ in rest), item)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the contiguous runs of a simplified span as (first byte, end), ascending per innermost dimension."""
        starts = [self.offset]
        for size, stride in zip(self.sizes, self.strides):
            starts = [at + i * stride for at in starts for i in range(size)]
        return ((at, at + self.item) for at in starts)

    def overlaps(self, other: ByteSpan) -> bool:
        """True if the spans share a byte; errs on the side of True if one of them has many runs."""
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
    """One allocation, from `alloc` to `free`, for a stream (HOST: host memory), optionally in a private pool."""

    name: str
    size: int
    stream: str
    private: str = ""

    @property
    def pool(self) -> str:
        """Name of the pool that the memory returns to when it is freed."""
        return f"{self.private} of {self.stream}" if self.private else self.stream

    def __getitem__(self, part: slice) -> View:
        start, stop, _ = part.indices(self.size)
        if stop <= start:
            raise ValueError(f"no bytes from {part.start} to {part.stop} in {self.name}, which has {self.size}")
        return View(self, ByteSpan(start, (), (), stop - start))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class View:
    """A strided set of bytes of a memory; all its bytes if `span` is None."""

    memory: Memory
    span: ByteSpan | None = None

    def __str__(self) -> str:
        return self.memory.name if self.span is None else f"{self.memory.name}, {self.span}"


def as_view(target: Memory | View) -> View:
    return View(target) if isinstance(target, Memory) else target


@dataclass(frozen=True, slots=True)
class Access:
    view: View
    reads: bool
    writes: bool


def accesses(reads: Iterable[View], writes: Iterable[View]) -> tuple[Access, ...]:
    """Return one access for each view; a view that is in both is updated."""
    read, written = dict.fromkeys(reads), dict.fromkeys(writes)
    return tuple(Access(view, view in read, view in written) for view in read | written)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a copy, or a computation of the host. `line` is the user's source line as text."""

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
    """A wait of `stream` for the last record of the event; if there is none, it waits for nothing."""

    event: str
    stream: str
    site: str = ""


@dataclass(frozen=True, slots=True)
class Synchronize:
    """A wait of the host: for an event, for a stream, for `streams`, or (all None) for all streams of the devices.
    `of_constant`: the host waits because it copies a constant of its own to the device; code that already has the
    constant there doesn't wait. `implied`: a non-blocking copy waits anyway, since it is to or from pageable memory.
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
    """A `record_stream`: after the free, the allocator reuses the block only when `stream` is done with it."""

    memory: Memory
    stream: str
    site: str = ""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point at which the checker reports, for each named view, which streams, and which waiters for an event, may use
    the view from there on."""

    name: str
    views: tuple[tuple[str, View], ...]
    streams: tuple[str, ...] = ()
    events: tuple[tuple[str, str], ...] = ()  # (label, event)
    copies_inputs: bool = False  # misaligned ones were copied, which no stream of the caller's is promised to precede


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
        """Add a kernel; it updates each view that is in both `reads` and `writes`."""
        self.add(Launch(name, stream, accesses(map(as_view, reads), map(as_view, writes)), line, site))

    def record(self, event: str, stream: str, site: str = "") -> None:
        self.add(Record(event, stream, site))

    def wait(self, event: str, stream: str, site: str = "") -> None:
        self.add(Wait(event, stream, site))

    def synchronize(self, event: str | None = None, stream: str | None = None, site: str = "") -> None:
        self.add(Synchronize(event, stream, None, site))

    def boundary(
        self, name: str, *views: Memory | View, streams: Iterable[str] = (), events: Iterable[str] = ()
    ) -> None:
        named = tuple((str(v), as_view(v)) for v in views)
        self.add(Boundary(name, named, tuple(streams), tuple((e, e) for e in events)))


__all__ = ["Access", "HOST", "Launch", "Memory", "Operation", "ByteSpan", "Trace", "View"]
