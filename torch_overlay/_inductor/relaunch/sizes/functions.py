"""Finds the pointer slots of a capture without a second one, from what earlier proofs have shown of its functions.

A proof shows at which offsets of its parameters a function takes pointers. Another capture of the region, for another
size, launches many of the same functions, with other numbers and at other addresses. There, what lies at such an offset
is a pointer, and nothing else is. A library may load the same function again for each size, so functions are the same
if their names and the sizes of their parameters are. Nothing is known of a function that no proof has seen, or that has
an address at another place: a second capture proves the nodes that launch it.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    CopyNode,
    EmptyNode,
    FIXED,
    KernelNode,
    PointerSlot,
    Template,
)
from torch_overlay._inductor.relaunch.proof.prove import AddressMap


if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from torch_overlay._inductor.relaunch.proof.nodes import Node

POINTER = 8  # bytes


class Unknown(Exception):
    """A node holds what no proof has explained."""


class Functions:
    """The places at which the functions of a region hold pointers: (parameter, offset) of each."""

    def __init__(self) -> None:
        self.places: dict[Any, frozenset[tuple[int, int]]] = {}

    def learn(self, template: Template) -> None:
        """Learn from a proven template."""
        found: dict[int, set[tuple[int, int]]] = {node.index: set() for node in template.nodes}
        for slot in template.slots:
            found[slot.node].add((slot.parameter, slot.offset))
        for node in template.nodes:
            if isinstance(node, KernelNode):
                key = _identity(node)
                self.places[key] = self.places.get(key, frozenset()) | found[node.index]

    def slots_of(
        self, graph: CapturedGraph, among: Iterable[int] | None = None
    ) -> tuple[list[PointerSlot], dict[int, str]]:
        """Return the pointer slots of the nodes whose functions are known, and why the other nodes are unknown.
        `among`: look at these nodes alone."""
        scan = _Scan(graph)
        slots: list[PointerSlot] = []
        unknown: dict[int, str] = {}
        for node in graph.nodes if among is None else [graph.nodes[index] for index in among]:
            try:
                slots += [slot for slot in self._slots_of(node, scan) if slot.region != FIXED]
            except Unknown as why:
                unknown[node.index] = f"{node.name}: {why}"
        return slots, unknown

    def _slots_of(self, node: Node, scan: _Scan) -> Iterable[PointerSlot]:
        if isinstance(node, EmptyNode):
            return ()
        if not isinstance(node, KernelNode):
            return scan.addresses(node)
        places = self.places.get(_identity(node))
        if places is None:
            raise Unknown("it is launched for the first time")
        return scan.kernel(node, places)


def one_of_each(graph: CapturedGraph, indices: Iterable[int]) -> set[int]:
    """Return one of these nodes for each function that they launch."""
    found: dict[Any, int] = {}
    for index in indices:
        node = graph.nodes[index]
        found.setdefault(_identity(node) if isinstance(node, KernelNode) else index, index)
    return set(found.values())


def _identity(node: KernelNode) -> Any:
    return node.name, tuple([(offset, len(value)) for offset, value in node.parameters])


def without(graph: CapturedGraph, indices: Container[int]) -> CapturedGraph:
    """Return the graph with empty nodes in place of these, which a proof passes over."""
    nodes = [EmptyNode(node.index, node.handle) if node.index in indices else node for node in graph.nodes]
    return dataclasses.replace(graph, nodes=tuple(nodes))


class _Scan:
    def __init__(self, graph: CapturedGraph) -> None:
        self.addresses_of = AddressMap(graph)
        self.upper = self.addresses_of.upper_halves()

    def addresses(self, node: Node) -> Iterator[PointerSlot]:
        """Yield the pointer slots of a memset or memcpy node."""
        on_host = (node.dst_on_host, node.src_on_host) if isinstance(node, CopyNode) else (False, False)
        for number, (_, value) in enumerate(node.parameters):
            if not on_host[number]:
                yield self._slot(node, number, 0, int.from_bytes(value, "little"))

    def kernel(self, node: KernelNode, places: frozenset[tuple[int, int]]) -> Iterator[PointerSlot]:
        for number, (_, value) in enumerate(node.parameters):
            if len(value) == POINTER:
                word = int.from_bytes(value, "little")
                if (number, 0) in places:
                    if word:
                        yield self._slot(node, number, 0, word)
                elif self._is_address(word):
                    raise Unknown(f"parameter {number}: an address where there was none")
            elif len(value) > POINTER:
                yield from self._structure(node, number, value, places)

    def _structure(
        self, node: KernelNode, number: int, value: bytes, places: frozenset[tuple[int, int]]
    ) -> Iterator[PointerSlot]:
        rest = bytearray(value)
        for offset in sorted(offset for parameter, offset in places if parameter == number):
            end = offset + POINTER
            if word := int.from_bytes(value[offset:end], "little"):
                yield self._slot(node, number, offset, word)
            rest[offset:end] = bytes(POINTER)
        halves = struct.unpack_from(f"<{len(rest) // 4}I", rest)
        if self.upper.isdisjoint(halves):
            return
        for i, half in enumerate(halves[1:]):
            if half in self.upper and self._is_address(halves[i] | half << 32):
                raise Unknown(f"parameter {number}, offset {4 * i}: an address where there was none")

    def _is_address(self, word: int) -> bool:
        return self.addresses_of.covers(word) or (word >> 32 in self.upper and bool(self.addresses_of.places(word)))

    def _slot(self, node: Node, number: int, offset: int, word: int) -> PointerSlot:
        places = self.addresses_of.places(word)
        if len(places) != 1:
            raise Unknown(f"parameter {number}: {self.addresses_of.describe(word)}")
        return PointerSlot(node.index, number, offset, *places[0])
