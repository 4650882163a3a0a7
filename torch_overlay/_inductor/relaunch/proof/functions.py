"""Finds the pointer slots of a capture without a second one, from what earlier proofs have shown of its functions.

A proof shows at which offsets of its parameters a function takes pointers. Another capture of the region, for another
size, launches many of the same functions, with other numbers and at other addresses. There, what lies at such an offset
is a pointer, and nothing else is. A library may load the same function again for each size, so functions are the same
if their names and the sizes of their parameters are. Nothing is known of a function that no proof has seen, or that has
an address at another place: a second capture proves the nodes that launch it.

Reads the declared parameters of the kernels in a generated module, for `prove.prove(signatures=...)`.

Triton knows of each parameter whether it is a pointer or a number. The proof uses that twice: a pointer that moved in
no known way is refused even where it could pass for garbage, and a number that equals an address by coincidence is no
reason for another capture. Kernels are identified by their function handle, since names repeat.
"""

from __future__ import annotations

import dataclasses
import re
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
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Node


POINTER_BYTES = 8  # bytes


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
        scan = _FunctionScan(graph)
        slots: list[PointerSlot] = []
        unknown: dict[int, str] = {}
        for node in graph.nodes if among is None else [graph.nodes[index] for index in among]:
            try:
                slots += self._slots_of(node, scan)
            except Unknown as why:
                unknown[node.index] = f"{node.name}: {why}"
        return slots, unknown

    def _slots_of(self, node: Node, scan: _FunctionScan) -> Iterable[PointerSlot]:
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
                self.text, self.items, at = f"{self.text}Q", self.items + 1, offset + POINTER_BYTES
            end = len(value) // 4 * 4 if len(value) >= POINTER_BYTES else at
            self._skip(number, at, end)
            self.text += f"{len(value) - end}x"
        self.unpack = struct.Struct(self.text).unpack

    def _skip(self, number: int, at: int, end: int) -> None:
        """Read what is no pointer from byte `at` to `end`."""
        many = (end - at) // 4
        self.halves += [(self.items + k, number, at + 4 * k) for k in range(1, many)]
        self.text, self.items = f"{self.text}{many}I", self.items + many


class _FunctionScan:
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


POINTER, SCALAR, UNKNOWN = "p", "s", "?"
READ, WRITE, HIDDEN = "r", "w", "h"  # hidden: memory that the program doesn't know of
ONLY_READ = re.compile(r"in_ptr\d+")
# Kernels that Inductor writes itself: they load and store at their parameters, and look for addresses nowhere else.
WRITTEN_BY_INDUCTOR = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
SCRATCH = POINTER * 2  # Triton's global and profile scratch, after the declared parameters


def signatures_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return function handle -> a letter per parameter, for the Triton kernels among a module's globals. Kernels that
    have not been loaded yet, and those with parameters of other kinds, are left out."""
    found: dict[int, str] = {}
    for value in list(namespace.values()):
        for launcher in getattr(value, "launchers", None) or ():
            binary = binary_of(launcher)
            letters = _letters(binary)
            if letters is not None:
                found.update(dict.fromkeys(_handles(binary), letters))
    return found


def parameters_of(namespace: Mapping[str, Any]) -> dict[int, str]:
    """Return function handle -> a letter per parameter, for the kernels that Inductor writes. The letter of a pointer
    says whether the kernel only reads there, or may write."""
    found: dict[int, str] = {}
    for value in list(namespace.values()):
        if getattr(getattr(value, "heuristic_type", None), "name", None) not in WRITTEN_BY_INDUCTOR:
            continue
        letters = _reads_and_writes(value)
        for launcher in getattr(value, "launchers", None) or ():
            binary = binary_of(launcher)
            declared = _letters(binary)
            # Triton's scratch memories are after the parameters that have names.
            if declared is not None and declared.translate(UNNAMED).startswith(letters.translate(UNNAMED)):
                whole = letters + HIDDEN * (len(declared) - len(letters))
                found.update(dict.fromkeys(_handles(binary), whole))
    return found


UNNAMED = str.maketrans({READ: POINTER, WRITE: POINTER})


def _reads_and_writes(kernel: Any) -> str:
    """Return a letter per parameter. A kernel only reads a pointer called in_ptr<n>, unless it is listed as mutated."""
    letters = ""
    constants = kernel.triton_meta.get("constants", {})
    for position, (name, kind) in enumerate(kernel.triton_meta["signature"].items()):
        if kind == "constexpr" or name in constants or (position,) in constants:
            continue
        if not str(kind).startswith("*"):
            letters += SCALAR
        else:
            letters += READ if ONLY_READ.fullmatch(name) and name not in kernel.mutated_arg_names else WRITE
    return letters


def binary_of(launcher: Any) -> Any:
    """Return the kernel object of a launcher: Triton's, or that of torch's static launcher, whose method it runs."""
    scope = getattr(launcher, "__globals__", {})
    return getattr(launcher, "bin", None) or scope.get("bin") or getattr(scope.get("runner"), "__self__", None)


def _handles(binary: Any) -> Iterator[int]:
    """Yield the kernel's function handles: torch's static launcher has one for each device that the kernel ran on."""
    functions = getattr(binary, "functions", None) or {}
    for function in (getattr(binary, "function", None), *functions.values()):
        if function:
            yield int(function)


def _letters(binary: Any) -> str | None:
    static = getattr(binary, "arg_tys", None)
    if static is not None:
        letters = "".join({"O": POINTER, "M": UNKNOWN}.get(letter, SCALAR) for letter in static)
        for flag in ("has_global_scratch", "has_profile_scratch"):
            letters += POINTER if getattr(binary, flag, False) else ""
        return letters
    source = getattr(binary, "src", None)
    signature = getattr(source, "signature", None)
    if signature is None:
        return None
    constants = {key[0] for key in getattr(source, "constants", {}) if isinstance(key, tuple) and len(key) == 1}
    letters = ""
    for position, kind in enumerate(signature.values()):
        if kind == "constexpr" or position in constants:
            continue
        if not isinstance(kind, str) or kind.startswith(("tensordesc", "nvTmaDesc")):
            return None
        letters += POINTER if kind.startswith("*") else SCALAR
    return letters + SCRATCH
