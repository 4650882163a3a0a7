"""Finds the nodes of a captured graph that may run concurrently, and relaxes the edges between them.

A stream runs kernels one after the other, and so does the graph that was captured from it, though many kernels don't
need each other's results: the projections of an attention block, the two halves of a gated MLP, the gradients of a
weight and of the input. Where a batch is small, each of them leaves most of the device idle. In a graph only the edges
give the order, so neighbours that are known to be independent get no edge.

Note [What is independent]
Two nodes are independent if neither may write memory that the other one may access. A node accesses the memory that the
proof found among its arguments (`proof.prove`). What it only reads is declared: by the parameter names of an Inductor
kernel, and by the arguments of a matrix product. Nothing is known of any other node, which could look for addresses in
memory, so it stays in order with all nodes before and after it. All inputs count as one memory, for a call may pass two
views of one tensor; so do addresses outside of the capture that a node holds: they belong to the compiled module or to
a library, and their extent is unknown. Regions of temporary memory share addresses only if the remaining edges order
one after the other.

The memory that operators allocate internally is one region; the program knows, and reuses, only the tensors that they
returned from it. So an argument of the program's own kernels stands for the tensor that was returned at that address. A
library's own pointer stands for the whole region, since its memory could have begun at the same address at another
time, and be larger.

Note [How far ahead]
A node waits for the nodes that it depends on among the eight before it, and for every node before those; so memory
lives hardly longer, and at most nine nodes run at once. The gain is that a kernel is launched, and fills its pipelines,
while others compute. Two kernels that fill the device by themselves gain nothing, and an edge to another stream takes
time; so one waits for the other if together they take more than twice as many blocks as the device has room for, by
their registers and shared memory.

Note [Training]
The graphs of a training step keep their edges: BERT's step gained hardly anything from fewer of them, and finding the
independent nodes lengthens the capture.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import struct
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.proof.functions import HIDDEN, READ, WRITE
from torch_overlay._inductor.relaunch.proof.nodes import KernelNode
from torch_overlay.orders import only_order


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Conditional, Segment, Template


CALLER, OUTSIDE = -2, -3  # all inputs; all memory outside of the regions
Place: TypeAlias = "int | tuple[int, int]"  # a region, or (region, address) of a tensor returned in it
NEAR = 8  # nodes
FULL = 2.0  # of the device
ADDRESSES = 1 << 16  # the upper half of an address is less than this


@dataclass(frozen=True)
class NodeUse:
    """The memory that a node only reads, the memory that it may write, and its share of the device."""

    reads: frozenset[Place]
    writes: frozenset[Place]
    share: float = 0.0

    def conflicts(self, other: NodeUse) -> bool:
        return not (self.writes.isdisjoint(other.reads | other.writes) and other.writes.isdisjoint(self.reads))


@dataclass(frozen=True)
class Product:
    """A call of a matrix product in a capture: its nodes [first, end) in the order of the stream, and (address, bytes)
    of the tensors that it reads, and of those that it writes."""

    first: int
    end: int
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]


@functools.cache
def is_product(operator: Any) -> bool:
    aten = torch.ops.aten
    return getattr(operator, "overloadpacket", None) in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def uses_of(
    template: Template,
    order: Sequence[int],
    segments: Iterable[Segment],
    inputs: int,
    letters: Mapping[int, str],
    products: Iterable[Product],
    results: Iterable[tuple[int, int]],
    is_device_memory: Callable[[int], bool],
    room: Callable[[KernelNode], int],
    extent: Callable[[KernelNode], int | None],
) -> list[NodeUse | None]:
    """Return the `NodeUse` of each node; None if nothing is known of it. `segments` are those of the capture, whose
    first `inputs` regions are inputs; `results` has (address, bytes) of the tensors that operators returned; `letters`
    says what kernels do with their parameters, by function handle; `room`, how many blocks of a kernel the device runs
    at once; `extent`, how many bytes its pointers stand for, if that is known."""
    memory = _CaptureMemory(segments, inputs, results)
    slots: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    for slot in template.slots:
        slots.setdefault(slot.node, {})[slot.parameter, slot.offset] = slot.region, slot.delta
    at = {order[position]: product for product in products for position in range(product.first, product.end)}
    found: list[NodeUse | None] = []
    for node in template.nodes:
        use, held = None, slots.get(node.index, {})
        if isinstance(node, KernelNode):
            declared = letters.get(node.func)
            if declared is not None and len(declared) == len(node.parameters):
                use = _by_letters(node, declared, held, memory, extent(node))
            elif (product := at.get(node.index)) is not None:
                use = _of_product(node, product, held, memory, is_device_memory)
            if use is not None:
                x, y, z = node.grid
                use = dataclasses.replace(use, reads=use.reads - use.writes, share=x * y * z / room(node))
        found.append(use)
    return found


class _CaptureMemory:
    """Memory of a capture, by region and by the tensors that operators returned in it."""

    def __init__(self, segments: Iterable[Segment], inputs: int, results: Iterable[tuple[int, int]]) -> None:
        self.inputs = inputs
        segments = list(segments)
        self.base = {s.region: s.address - s.delta for s in segments if s.region >= 0}
        segments = sorted(segments, key=lambda s: s.address)
        starts = [s.address for s in segments]
        self.returned: dict[int, list[tuple[int, int]]] = {}  # by region: [start, end), in order and disjoint
        for start, size in sorted(results):
            segment = segments[max(bisect.bisect_right(starts, start) - 1, 0)]
            if segment.address <= start < segment.address + segment.size:
                ranges = self.returned.setdefault(segment.region, [])
                end = start + size
                if ranges and start < ranges[-1][1]:
                    start, last = ranges.pop()
                    end = max(last, end)
                ranges.append((start, end))

    def address(self, region: int, delta: int) -> int:
        return self.base.get(region, 0) + delta

    def whole(self, region: int) -> set[Place]:
        if region < self.inputs:
            return {CALLER}
        return {region, *((region, start) for start, _ in self.returned.get(region, ()))}

    def visible(self, region: int, delta: int) -> set[Place]:
        """Return the memory that an argument of a kernel of the program's own stands for."""
        ranges = self.returned.get(region)
        if region >= self.inputs and ranges:
            address = self.address(region, delta)
            start, end = ranges[max(bisect.bisect_right(ranges, (address, sys.maxsize)) - 1, 0)]
            if start <= address < end:
                return {(region, start)}
        return self.whole(region)

    def bytes(self, region: int, delta: int, size: int) -> set[Place]:
        """Return the memory that `size` bytes from (region, delta) on stand for."""
        ranges = self.returned.get(region)
        if region < self.inputs or not ranges:
            return self.whole(region)
        address = self.address(region, delta)
        return {region, *((region, start) for start, end in ranges if start < address + size and address < end)}


def _by_letters(
    node: KernelNode,
    letters: str,
    held: Mapping[tuple[int, int], tuple[int, int]],
    memory: _CaptureMemory,
    extent: int | None,
) -> NodeUse:
    reads: set[Place] = set()
    writes: set[Place] = set()
    for number, (letter, (_, value)) in enumerate(zip(letters, node.parameters)):
        if letter not in (READ, WRITE, HIDDEN) or not any(value):
            continue
        if (at := held.get((number, 0))) is None:
            places: set[Place] = {OUTSIDE}
        elif letter == HIDDEN:
            places = memory.whole(at[0])
        else:
            places = memory.visible(*at) if extent is None else memory.bytes(*at, extent)
        (reads if letter == READ else writes).update(places)
    return NodeUse(frozenset(reads), frozenset(writes))


def _of_product(
    node: KernelNode,
    product: Product,
    held: Mapping[tuple[int, int], tuple[int, int]],
    memory: _CaptureMemory,
    is_device_memory: Callable[[int], bool],
) -> NodeUse:
    reads: set[Place] = set()
    writes: set[Place] = set()
    for at in held.values():
        address = memory.address(*at)
        if _within(address, product.writes):
            writes |= memory.visible(*at)
        elif _within(address, product.reads):
            reads |= memory.visible(*at)
        else:
            writes |= memory.whole(at[0])
    for number, (_, value) in enumerate(node.parameters):
        for offset, word in _addresses(value):
            if not any((number, offset + shift) in held for shift in (-4, 0, 4)) and is_device_memory(word):
                (reads if _within(word, product.reads) else writes).add(OUTSIDE)
    return NodeUse(frozenset(reads), frozenset(writes))


def _within(address: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start <= address < start + size for start, size in ranges)


def _addresses(value: bytes) -> list[tuple[int, int]]:
    """Return (offset, word) for each word of the value that could be an address."""
    halves = struct.unpack_from(f"<{len(value) // 4}I", value)
    found = [i for i, half in enumerate(halves[1:]) if 0 < half < ADDRESSES]
    return [(4 * i, halves[i] | halves[i + 1] << 32) for i in found]


def parts_of(conditionals: Iterable[Conditional]) -> dict[int, tuple[int, int]]:
    """Return (conditional, branch) of the nodes in a branch, the innermost one, and of the nodes that choose one."""
    found: dict[int, tuple[int, int]] = {}
    for number, each in enumerate(conditionals):
        found[each.setter] = number, len(each.branches)
        for branch, nodes in enumerate(each.branches):
            found |= dict.fromkeys(nodes, (number, branch))
    return found


def side_by_side(
    order: Sequence[int], uses: Sequence[NodeUse | None], parts: Mapping[int, Any] = MappingProxyType({})
) -> list[tuple[int, int]] | None:
    """Return the edges that nodes need which ran in the order of the chain `order`; None if all must stay a chain.
    Nodes of different parts stay in order."""

    def may_run_beside(u: int, v: int) -> bool:
        if parts.get(u) != parts.get(v):
            return False
        a, b = uses[u], uses[v]
        return a is not None and b is not None and a.share + b.share <= FULL and not a.conflicts(b)

    edges: list[tuple[int, int]] = []
    ahead: list[int] = []  # by position: a bit for each position that the node comes after
    for position, node in enumerate(order):
        known = 0
        # From the nearest on, so that no edge is implied by others. A node farther away is before one in this range.
        for other in range(position - 1, max(position - 2 * NEAR - 2, -1), -1):
            if known >> other & 1:
                continue
            if position - other > NEAR or not may_run_beside(order[other], node):
                edges.append((order[other], node))
                known |= ahead[other] | 1 << other
        ahead.append(known)
    is_chain = all(known == (1 << position) - 1 for position, known in enumerate(ahead))
    return None if is_chain else sorted(edges)


def relaxed(template: Template, edges: Sequence[tuple[int, int]], **known: Any) -> list[tuple[int, int]] | None:
    """Return new edges for the graph if it is a chain with independent neighbours, else None. `known` has the further
    arguments of `uses_of`."""
    order = only_order(nodes := len(template.nodes), edges)
    if order is None or len(edges) != nodes - 1:
        return None
    return side_by_side(order, uses_of(template, order, **known), parts_of(template.conditionals))
