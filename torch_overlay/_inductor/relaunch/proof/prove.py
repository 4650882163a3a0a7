"""Finds what has to be patched before a captured graph can run on other memory, and proves that this is all of it.

A region is captured twice, each time in an address range of its own that nothing else in the process uses. Comparing
the arguments of the kernel nodes in the two captures word by word (8 bytes) puts each word into one of a few classes:

    it stands for the same byte of the same region in both         a pointer: it becomes a `PointerSlot` of the template
    equal in both, and in no allocation of the first               a constant
    different, and it has nothing to do with either range          garbage: padding that a launcher left uninitialised
    anything else                                                  unknown: `Unprovable`, and no CUDA graph

A `Segment` says which addresses of a capture stand for which bytes of a region of memory: an input, an output, or the
scratch slab. A relaunch sets each pointer slot to the base of its region + delta. This module imports neither torch nor
a driver.

Note [What a word can hide]
Arguments are compared in windows of 8 bytes at steps of 4, for packed structures align their pointers to 4 bytes at
least. A window that overlaps a proven pointer is a piece of that pointer. The proof looks for three more things, since
each of them would be silent corruption later: an address that is packed with other bits or shifted (descriptors of some
devices do so), an address outside of every allocation that moved just like one of them (a base pointer with an offset
subtracted), and a pointer to memory outside of both ranges that is not the graph's (an allocation that was not seen).
Memory of the captured graph itself, like the state of its random generators, can lie outside as well; its address
differs between the captures, and is not patched.

How far "outside" reaches: a kernel that takes a base minus an offset adds the offset again before it reads, so the
offset is less than a device's memory, and the pointer lies within `REACH` of the range. Two numbers farther away that
differ just like two addresses are remains of addresses: for example a lower half, beside four bytes that a launcher
wrote since. A window whose upper half is zero is always stale, for memory begins at `LOWEST`, and so do
the ranges. It may still be an address that was shifted.

An integer may equal an address by coincidence; then it is the same in the second capture. If it is the address of an
allocation in the first capture, it could also be a pointer that some library kept from there: the proof refuses it, and
another capture, at other addresses, decides. A difference that has nothing to do with addresses counts as garbage (the
byte of an empty functor, padding) unless the parameter is a plain scalar: then the captures differ in more than
addresses.

Remains of the host's stack can be addresses, too: a reduction passes a kilobyte of tables that it fills in part. A word
is stale if it is an address of its own capture in one of the two, and in the other a host address or an address of the
earlier capture, whose memory is freed by then: a kernel could not have used both. Two words that end with three bytes
of zero and stand for different bytes are stale, too: something small, a few flags, was written over an address that was
there before. Where a kernel could use both, another capture decides; the stack is cleared before each capture, so that
what remains there comes from the region itself, and is mostly the same.

An address in one capture and null in the other, inside of a structure, is either stale or an argument that may be
missing. The capture in which it is null is as valid, so the graph is launched as in that one: the word becomes null.
All words must be those of one of the two captures, so no word may be null in the first alone if another one is null in
the second alone.

Note [Ends of allocations]
The address one past an allocation belongs to that allocation (kernels take end pointers), unless another allocation
begins there: then both are candidates, and the second capture must rule out one of them, which it does when the gaps
between its allocations differ.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    CopyNode,
    EmptyNode,
    FillNode,
    FIXED,
    KernelNode,
    Node,
    PointerSlot,
    Template,
    Unprovable,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

ADDRESS = (1 << 48) - 1  # the bits of an address
# Note [What a word can hide].
LOWEST = 1 << 32
OVERWRITTEN = (1 << 24) - 1
SMALL = 1 << 16  # no address, shifted or not, is below it
REACH = 1 << 39


class AddressMap:
    """Maps an address of one capture to the (region, delta) that it stands for."""

    def __init__(self, graph: CapturedGraph) -> None:
        self.low, self.high = graph.low, graph.high
        self.segments = sorted(graph.segments, key=lambda s: s.address)
        self.starts = [s.address for s in self.segments]
        for before, after in zip(self.segments, self.segments[1:]):
            if before.address + before.size > after.address:
                raise Unprovable("segments", f"{before} and {after} overlap")
        if min(self.low, *self.starts[:1]) < LOWEST:
            raise Unprovable("segments", f"memory at {min(self.low, *self.starts[:1]):#x}, below {LOWEST:#x}")
        self.ends = [s.address + s.size for s in self.segments]
        self._places: dict[int, tuple[tuple[int, int], ...]] = {}

    def covers(self, address: int) -> bool:
        return self.low <= address < self.high

    def near(self, address: int) -> bool:
        return max(LOWEST, self.low - REACH) <= address < self.high + REACH

    def upper_halves(self) -> set[int]:
        """Return the upper 32 bits of every address in a segment."""
        ends = ((s.address >> 32, s.address + s.size >> 32) for s in self.segments)
        return {half for first, last in ends for half in range(first, last + 1)}

    def places(self, address: int) -> tuple[tuple[int, int], ...]:
        """Return all (region, delta) of the address: none, one, or two where two segments touch."""
        found = self._places.get(address)
        if found is None:
            last = bisect.bisect_right(self.starts, address)
            found = self._places[address] = tuple(
                [
                    (self.segments[i].region, self.segments[i].delta + address - self.starts[i])
                    for i in (last - 2, last - 1)
                    if i >= 0 and address <= self.ends[i]
                ]
            )
        return found

    def describe(self, address: int) -> str:
        text = " or ".join(f"region {region} + {delta}" for region, delta in sorted(self.places(address)))
        if not text:
            text = "in the range but in no allocation" if self.covers(address) else "outside the range"
        return f"{address:#x} ({text})"


def prove(
    a: CapturedGraph,
    b: CapturedGraph,
    *,
    foreign: Callable[[int], bool] | None = None,
    on_device: Callable[[int], bool] | None = None,
    signatures: Mapping[int, str] | None = None,
) -> Template:
    """Return the template of `a`, proven against `b`: the same program, captured again after `a` at other addresses.

    `foreign(address)` says whether an address outside of both ranges is memory that the graph must not use, like memory
    that is freed. `on_device(address)` says whether an address outside of its range is device memory at all.
    `signatures` has what is known of a kernel, by its function handle: a letter per parameter, "p" pointer, "s" scalar,
    "?" unknown.
    """
    if a.low < b.high and b.low < a.high:
        raise Unprovable("segments", f"the ranges {a.low:#x}..{a.high:#x} and {b.low:#x}..{b.high:#x} overlap")
    _same_structure(a, b)
    scan = _ParameterScan(AddressMap(a), AddressMap(b), foreign, on_device)
    constants, pointers = scan.constants, scan.pointers
    slots: list[PointerSlot] = []
    for node_a, node_b in zip(a.nodes, b.nodes):
        kinds, index = _parameter_kinds(node_a, signatures or {}), node_a.index
        for number, ((_, value_a), (_, value_b)) in enumerate(zip(node_a.parameters, node_b.parameters)):
            kind = kinds[number]
            if value_a == value_b and (kind == "s" or len(value_a) < 8 or value_a in constants):
                continue
            if (place := pointers.get((value_a, value_b, kind))) is not None:
                slots.append(PointerSlot(index, number, 0, *place))
                continue
            slots += scan.parameter(node_a, number, value_a, value_b, kind)
    regions = 1 + max((s.region for s in a.segments), default=-1)
    nodes = _with_nulls(a.nodes, scan.nulls, {slot.node for slot in slots}) if scan.nulls else a.nodes
    return Template(regions, nodes, tuple(slots), conditionals=a.conditionals)


def _with_nulls(nodes: Sequence[Node], nulls: Sequence[_Null], patched: Container[int]) -> tuple[Node, ...]:
    """Return the nodes as in the capture in which the words `nulls` are null. Patching a node writes these values."""
    made = list(nodes)
    for null in nulls:
        node = made[null.node]
        if null.of_first != nulls[0].of_first or null.node not in patched or not isinstance(node, KernelNode):
            where = f"{null.node} ({node.name})"
            raise Unprovable("moved", null.message, node=where, parameter=null.parameter, offset=null.offset)
        if not null.of_first:
            values = list(node.parameters)
            at, value = values[null.parameter]
            values[null.parameter] = at, value[: null.offset] + bytes(8) + value[null.offset + 8 :]
            made[null.node] = dataclasses.replace(node, parameters=tuple(values))
    return tuple(made)


# The fields that must be equal in two captures of a node, besides the name.
_SHAPES = {
    kind: tuple(
        f.name if f.name != "sides" else "strides"
        for f in dataclasses.fields(kind)
        if f.name not in ("handle", "name", "dst", "parameters")
    )
    for kind in (KernelNode, FillNode, CopyNode, EmptyNode)
}
_SHAPE_OF = {kind: attrgetter(*names) for kind, names in _SHAPES.items()}


def _same_structure(a: CapturedGraph, b: CapturedGraph) -> None:
    if len(a.nodes) != len(b.nodes):
        raise Unprovable("nodes", f"{len(a.nodes)} nodes in the first capture, {len(b.nodes)} in the second")
    for number, (x, y) in enumerate(zip(a.nodes, b.nodes)):
        kind = type(x)
        if x.index != number or y.index != number:
            numbers = f"nodes are not numbered in order: {x.index}, {y.index}"
            raise Unprovable("nodes", numbers, node=f"{number} ({x.name})")
        if kind is not type(y) or x.name != y.name:
            raise Unprovable("nodes", f"the second capture has {y.name} in its place", node=f"{number} ({x.name})")
        if (first := _SHAPE_OF[kind](x)) != (second := _SHAPE_OF[kind](y)):
            what = next(trio for trio in zip(_SHAPES[kind], first, second) if trio[1] != trio[2])
            message = "{} is {} in one capture and {} in the other".format(*what)
            raise Unprovable("launch", message, node=f"{number} ({x.name})")
        if [(at, len(value)) for at, value in x.parameters] != [(at, len(value)) for at, value in y.parameters]:
            layouts = [[(at, len(value)) for at, value in node.parameters] for node in (x, y)]
            message = f"parameters (offset, size) are {layouts[0]} and {layouts[1]}"
            raise Unprovable("layout", message, node=f"{number} ({x.name})")
    if a.conditionals != b.conditionals:
        raise Unprovable("nodes", "the nodes of a branch are others in the second capture")
    if a.edges != b.edges and (differ := set(a.edges) ^ set(b.edges)):
        only = ", ".join(f"{u} -> {v}" for u, v in sorted(differ)[:5])
        raise Unprovable("edges", f"edges of one capture only: {only}")


def _parameter_kinds(node: Node, signatures: Mapping[int, str]) -> str:
    count = len(node.parameters)
    if not isinstance(node, KernelNode):
        return "p" * count
    kinds = signatures.get(node.func)
    if kinds is None:
        return "?" * count
    if len(kinds) != count:
        message = f"its declared signature has {len(kinds)} parameters, the node {count}"
        raise Unprovable("signature", message, node=f"{node.index} ({node.name})")
    return kinds


@dataclass(frozen=True)
class _Null:
    """A word that is null in one capture, and an address in the other. `of_first`: it is null in the first one."""

    node: int
    parameter: int
    offset: int
    of_first: bool
    message: str


class _ParameterScan:
    def __init__(
        self,
        a: AddressMap,
        b: AddressMap,
        foreign: Callable[[int], bool] | None,
        on_device: Callable[[int], bool] | None,
    ) -> None:
        self.a, self.b, self.foreign, self.on_device = a, b, foreign, on_device
        at = {(s.region, s.delta): s.address for s in a.segments}
        self.moves = {s.address - at[s.region, s.delta] for s in b.segments if (s.region, s.delta) in at}
        self.upper = a.upper_halves()
        self.first = min((s.address for s in a.segments), default=0)
        self.last = max((s.address + s.size for s in a.segments), default=0)
        # Known results: values that are constants, and (region, delta) of pairs of values that are one pointer.
        self.constants: set[bytes] = set()
        self.pointers: dict[tuple[bytes, bytes, str], tuple[int, int]] = {}
        self.nulls: list[_Null] = []
        self.node: Node = EmptyNode(0, 0)
        self.number = 0  # of the parameter
        self.packed = False  # is the parameter a structure?

    def parameter(self, node: Node, number: int, value_a: bytes, value_b: bytes, kind: str) -> Iterable[PointerSlot]:
        self.node, self.number, self.packed = node, number, len(value_a) > 8
        if value_a == value_b:
            for offset, word, _ in self._windows(value_a, value_a):
                self._unproven(offset, word, word, kind)
            self.constants.add(value_a)
            return ()
        if kind == "s" or len(value_a) == 4:
            message = f"a scalar that differs between the captures: {value_a.hex()}, {value_b.hex()}"
            raise self._found("scalar", 0, message)
        if len(value_a) == 8:  # a plain pointer, as most are
            common = self._common(int.from_bytes(value_a, "little"), int.from_bytes(value_b, "little"))
            if len(common) == 1 and common[0][0] != FIXED:
                self.pointers[value_a, value_b, kind] = common[0]
                return [PointerSlot(node.index, number, 0, *common[0])]
        proven = self._proven(self._windows(value_a, value_b), kind)
        return [
            PointerSlot(node.index, number, offset, *place) for offset, place in proven.items() if place[0] != FIXED
        ]

    def _found(self, reason: str, offset: int, message: str) -> Unprovable:
        node = f"{self.node.index} ({self.node.name})"
        return Unprovable(reason, message, node=node, parameter=self.number, offset=offset)

    def _common(self, word_a: int, word_b: int) -> list[tuple[int, int]]:
        """Return every (region, delta) that both words stand for, each in its own capture."""
        if word_a >> 32 not in self.upper or word_a == word_b:
            return []
        others = self.b.places(word_b)
        return [place for place in self.a.places(word_a) if place in others]

    def _proven(self, windows: Sequence[tuple[int, int, int]], kind: str) -> dict[int, tuple[int, int]]:
        """Return offset -> (region, delta) for the pointers among the windows."""
        proven: dict[int, tuple[int, int]] = {}
        for offset, word_a, word_b in windows:
            common = self._common(word_a, word_b)
            if len(common) > 1 or (common and offset - 4 in proven):
                raise self._found("ambiguous", offset, f"{self.a.describe(word_a)} can be read in two ways")
            if common:
                proven[offset] = common[0]
        for offset, word_a, word_b in windows:
            if offset not in proven and offset - 4 not in proven and offset + 4 not in proven:
                self._unproven(offset, word_a, word_b, kind)
        return proven

    def _windows(self, value_a: bytes, value_b: bytes) -> list[tuple[int, int, int]]:
        """Return (offset, word of a, word of b) where the words differ, or are equal and could be an address."""
        halves, upper = len(value_a) // 4, self.upper
        a, b = struct.unpack_from(f"<{halves}I", value_a), struct.unpack_from(f"<{halves}I", value_b)
        starts = {i - 1 for i, half in enumerate(a) if half in upper}
        if value_a != value_b:
            differ = [i for i, half in enumerate(b) if half != a[i]]
            starts.update(differ, [i - 1 for i in differ])
        inside = sorted([i for i in starts if 0 <= i < halves - 1])
        return [(4 * i, a[i] | a[i + 1] << 32, b[i] | b[i + 1] << 32) for i in inside]

    def _unproven(self, offset: int, word_a: int, word_b: int, kind: str) -> None:
        """Accept a constant or garbage, note a null; raise `Unprovable` for anything else."""
        if word_a == word_b:
            if kind != "s" and self.a.covers(word_a) and self.a.places(word_a):
                message = (
                    f"{self.a.describe(word_a)} of the first capture did not move: a coincidence, or a kept pointer"
                )
                raise self._found("unmoved", offset, message)
            return
        if kind != "p" and (0 < word_a < SMALL or 0 < word_b < SMALL):
            return  # a small number in one capture, so no address in the other: remains of the host's stack
        if (self.a.places(word_a) or self.b.places(word_b)) and not self._stale(kind, word_a, word_b):
            message = f"it did not move with one allocation: {self._both(word_a, word_b)}"
            if kind == "p" or not self.packed or (word_a and word_b):
                raise self._found("moved", offset, message)
            self.nulls.append(_Null(self.node.index, self.number, offset, not word_a, message))
            return
        for shift in range(13):
            hidden_a = (word_a << shift) & ADDRESS
            if self.first <= hidden_a <= self.last:
                hidden_b = (word_b << shift) & ADDRESS
                if not set(self.a.places(hidden_a)).isdisjoint(self.b.places(hidden_b)):
                    how = f"shifted right by {shift} bits" if shift else "packed with other bits"
                    raise self._found("encoded", offset, f"an address, {how}: {self.a.describe(hidden_a)}")
        moved = (word_b - word_a) in self.moves and self.a.near(word_a) and self.b.near(word_b)
        if moved and not self._stale(kind, word_a, word_b):
            message = f"it moved like an allocation, but is in none: {self._both(word_a, word_b)}"
            raise self._found("outside", offset, message)
        covered = self.a.covers(word_a) or self.b.covers(word_b)
        if kind == "p" or (covered and not self._stale(kind, word_a, word_b)):
            message = f"an address that moved in no known way: {self._both(word_a, word_b)}"
            raise self._found("moved", offset, message)
        # The allocator also lists as free what a pool of the capture has freed.
        if self.foreign is not None and not covered and self.foreign(word_a) and self.foreign(word_b):
            message = f"it points to device memory that is no part of the capture: {self._both(word_a, word_b)}"
            raise self._found("foreign", offset, message)

    def _stale(self, kind: str, word_a: int, word_b: int) -> bool:
        """True if the word is stale, and no argument: in one capture no kernel could use it as an address, and neither
        word is null; or both end with three bytes of zero, so something was written over an address."""
        if kind == "p" or self.on_device is None or not (word_a and word_b):
            return False
        if not (word_a | word_b) & OVERWRITTEN:
            return True
        words = ((self.a, self.b, word_a), (self.b, self.a, word_b))
        return any(
            not own.covers(word) and (other.covers(word) or not self.on_device(word)) for own, other, word in words
        )

    def _both(self, word_a: int, word_b: int) -> str:
        return f"{self.a.describe(word_a)} in the first capture, {self.b.describe(word_b)} in the second"
