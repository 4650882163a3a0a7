"""Defines the proof's input, a captured graph, and its result, a template: plain data, without torch or a driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    from collections.abc import Callable


# The region of a segment whose memory keeps its address after the capture: pointers to it are not patched.
FIXED = -1


class Unprovable(Exception):
    """A capture can't become a template. `reason` is a short code; the text names the node and the offset in it."""

    def __init__(
        self, reason: str, message: str, *, node: str = "", parameter: int | None = None, offset: int | None = None
    ) -> None:
        where = f"node {node}" if node else ""
        if parameter is not None:
            where += f", parameter {parameter}"
        if offset is not None:
            where += f", offset {offset}"
        super().__init__(f"{where}: {message}" if where else message)
        self.reason, self.node, self.parameter, self.offset = reason, node, parameter, offset


@dataclass(frozen=True)
class Segment:
    """Addresses of a capture: [address, address + size) stands for the bytes [delta, delta + size) of a region."""

    address: int
    size: int
    region: int
    delta: int = 0


@dataclass(frozen=True)
class KernelNode:
    index: int
    handle: int
    name: str
    func: int
    kern: int
    ctx: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[tuple[int, bytes], ...]  # (offset in the packed block, value), one per parameter


@dataclass(frozen=True)
class FillNode:
    """A memset node. Its only address, `dst`, counts as parameter 0."""

    index: int
    handle: int
    dst: int
    value: int
    element_size: int
    width: int  # elements in a row
    height: int
    pitch: int
    name: str = "memset"

    @property
    def parameters(self) -> tuple[tuple[int, bytes], ...]:
        return ((0, self.dst.to_bytes(8, "little")),)


class CopySide(NamedTuple):
    """One end of a copy."""

    address: int
    pitch: int = 0
    rows: int = 0  # of a plane
    on_host: bool = False  # pinned memory, which keeps its address


@dataclass(frozen=True)
class CopyNode:
    """A memcpy node. The address of each side counts as a parameter: 0 of the destination, 1 of the source."""

    index: int
    handle: int
    sides: tuple[CopySide, CopySide]
    width: int  # bytes in a row
    height: int
    depth: int
    name: str = "memcpy"

    @property
    def parameters(self) -> tuple[tuple[int, bytes], ...]:
        return tuple([(8 * i, side.address.to_bytes(8, "little")) for i, side in enumerate(self.sides)])

    @property
    def strides(self) -> tuple[tuple[Any, ...], ...]:
        """Return all of the sides but their addresses."""
        return tuple([side[1:] for side in self.sides])


@dataclass(frozen=True)
class EmptyNode:
    """A node without work, which only orders other nodes."""

    index: int
    handle: int
    name: str = "empty"
    parameters: tuple[tuple[int, bytes], ...] = ()


Node: TypeAlias = KernelNode | FillNode | CopyNode | EmptyNode


@dataclass(frozen=True)
class Conditional:
    """A choice of the device between two branches, whose nodes are captured one branch after the other. Nodes are
    handles, or indices; those of a conditional in a branch are nodes of the branch, too."""

    setter: int  # reads the predicate
    branches: tuple[frozenset[int], ...]  # for a true predicate, and for a false one

    def renamed(self, name: Callable[[int], int]) -> Conditional:
        return Conditional(name(self.setter), tuple([frozenset(map(name, nodes)) for nodes in self.branches]))


@dataclass(frozen=True)
class CapturedGraph:
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]  # indices of nodes
    segments: tuple[Segment, ...]
    low: int
    high: int  # [low, high) is the capture's own address range
    conditionals: tuple[Conditional, ...] = ()  # an outer one before those in its branches


class PointerSlot(NamedTuple):
    """Eight bytes at `offset` in a node's parameter, which hold the base of the region + delta."""

    node: int
    parameter: int
    offset: int
    region: int
    delta: int


class NumberSlot(NamedTuple):
    """A parameter of a kernel node that a launch computes from the region's numbers, by an expression. `letter` has the
    parameter's type."""

    node: int
    parameter: int
    letter: str
    expression: tuple[Any, ...]


@dataclass(frozen=True)
class Template:
    regions: int
    nodes: tuple[Node, ...]
    slots: tuple[PointerSlot, ...]
    numbers: tuple[NumberSlot, ...] = ()
    conditionals: tuple[Conditional, ...] = ()
