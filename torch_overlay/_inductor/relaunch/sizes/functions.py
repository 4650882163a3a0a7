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
    from collections.abc import Container, Iterable, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Node

POINTER = 8  # bytes


class Unknown(Exception):
    """A node holds what no proof has explained."""


class Functions:
    """The places at which the functions of a region hold pointers: (parameter, offset) of each."""

    def __init__(self) -> None:
        self.places: dict[Any, frozenset[tuple[int, int]]] = {}
        self._forms: dict[Any, _Form] = {}

    def learn(self, template: Template) -> None:
        """Learn from a proven template."""
        found: dict[int, set[tuple[int, int]]] = {node.index: set() for node in template.nodes}
        for slot in template.slots:
            found[slot.node].add((slot.parameter, slot.offset))
        for node in template.nodes:
            if isinstance(node, KernelNode):
                key = _identity(node)
                self.places[key] = self.places.get(key, frozenset()) | found[node.index]
                self._forms.pop(key, None)

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
                slots += self._slots_of(node, scan)
            except Unknown as why:
                unknown[node.index] = f"{node.name}: {why}"
        return slots, unknown

    def _slots_of(self, node: Node, scan: _Scan) -> Iterable[PointerSlot]:
        if isinstance(node, EmptyNode):
            return ()
        if not isinstance(node, KernelNode):
            return scan.addresses(node)
        function = node.func, node.kern
        form = scan.forms.get(function)
        if form is None:
            form = scan.forms[function] = self._form(node)
        return scan.kernel(node, form)

    def _form(self, node: KernelNode) -> _Form:
        key = _identity(node)
        if (form := self._forms.get(key)) is None:
            if key not in self.places:
                raise Unknown("it is launched for the first time")
            form = self._forms[key] = _Form(node, self.places[key])
        return form


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


class _Form:
    """How to read the parameters of a function, all at once: its pointers as words, the rest as halves of words.
    `slots`: (item, parameter, offset) of each pointer; `halves`: likewise of each half that follows another one."""

    def __init__(self, node: KernelNode, places: frozenset[tuple[int, int]]) -> None:
        self.slots: list[tuple[int, int, int]] = []
        self.halves: list[tuple[int, int, int]] = []
        self.text, self.items = "<", 0
        for number, (_, value) in enumerate(node.parameters):
            at = 0
            for offset in sorted(offset for parameter, offset in places if parameter == number):
                if offset < at or offset % 4:
                    raise Unknown(f"parameter {number}: no word begins at offset {offset}")
                self._skip(number, at, offset)
                self.slots.append((self.items, number, offset))
                self.text, self.items, at = f"{self.text}Q", self.items + 1, offset + POINTER
            end = len(value) // 4 * 4 if len(value) >= POINTER else at
            self._skip(number, at, end)
            self.text += f"{len(value) - end}x"
        self.unpack = struct.Struct(self.text).unpack

    def _skip(self, number: int, at: int, end: int) -> None:
        """Read what is no pointer from byte `at` to `end`."""
        many = (end - at) // 4
        self.halves += [(self.items + k, number, at + 4 * k) for k in range(1, many)]
        self.text, self.items = f"{self.text}{many}I", self.items + many


class _Scan:
    def __init__(self, graph: CapturedGraph) -> None:
        self.addresses_of = addresses = AddressMap(graph)
        self.upper = addresses.upper_halves() | {*range(addresses.low >> 32, (addresses.high - 1 >> 32) + 1)}
        self.forms: dict[tuple[int, int], _Form] = {}
        self.found: dict[int, tuple[int, int]] = {}

    def addresses(self, node: Node) -> list[PointerSlot]:
        """Return the pointer slots of a memset or memcpy node."""
        on_host = (node.dst_on_host, node.src_on_host) if isinstance(node, CopyNode) else (False, False)
        words = [int.from_bytes(value, "little") for _, value in node.parameters]
        return self._slots(node, words, [(k, k, 0) for k in range(len(words)) if not on_host[k]])

    def kernel(self, node: KernelNode, form: _Form) -> list[PointerSlot]:
        items = form.unpack(b"".join([value for _, value in node.parameters]))
        if not self.upper.isdisjoint(items):
            for item, number, offset in form.halves:
                half = items[item]
                if half in self.upper and self._is_address(items[item - 1] | half << 32):
                    raise Unknown(f"parameter {number}, offset {offset - 4}: an address where there was none")
        return self._slots(node, items, [word for word in form.slots if items[word[0]]])

    def _is_address(self, word: int) -> bool:
        return self.addresses_of.covers(word) or bool(self.addresses_of.places(word))

    def _slots(self, node: Node, items: Sequence[int], words: Sequence[tuple[int, int, int]]) -> list[PointerSlot]:
        """Return the slots of the `words`, (item, parameter, offset) of each."""
        index, found, slots = node.index, self.found, []
        for item, number, offset in words:
            word = items[item]
            place = found.get(word) or self._place(number, word)
            if place[0] != FIXED:
                slots.append(PointerSlot(index, number, offset, *place))
        return slots

    def _place(self, number: int, word: int) -> tuple[int, int]:
        places = self.addresses_of.places(word)
        if len(places) != 1:
            raise Unknown(f"parameter {number}: {self.addresses_of.describe(word)}")
        place = self.found[word] = places[0]
        return place
