"""Find the disjoint parts of a buffer that several streams access: accesses to disjoint parts need no order.

Inductor's dependencies name buffers. Where several streams use one buffer and one of them writes only a part of it, the
planner gets names of parts in place of the buffer's name: two operations touch a common part unless their accesses are
provably disjoint.

The parts of a buffer are groups of writes, small ones first; a write that may overlap several groups is in none of
them. All elements that are in no group are called the rest. An access touches each part that it may overlap, and the
rest unless it lies within one write of a part. So accesses that overlap have a part in common: the element that both
touch is in a part, which both touch, or in none, and then both touch the rest.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TYPE_CHECKING

import sympy
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep

from torch_overlay._inductor.streams.host_copies import AsyncCopy


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._inductor.dependencies import Dep
    from torch._inductor.scheduler import BaseSchedulerNode


@dataclasses.dataclass(frozen=True)
class ElementSpan:
    """The elements offset + sum(i * stride for i in range(size)) of a buffer, over all dimensions (size, stride)."""

    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in self.dims)

    @property
    def count(self) -> int:
        """Return the number of elements, at most: there are fewer where two indices name one element."""
        return math.prod(size for size, _ in self.dims)

    @property
    def is_dense(self) -> bool:
        """True if the span has all elements from the first to the last."""
        reached = 0  # beyond the first
        for size, stride in sorted(self.dims, key=lambda dim: dim[1]):
            if stride > reached + 1:
                return False
            reached += (size - 1) * stride
        return True

    def contains(self, other: ElementSpan) -> bool:
        return self == other or (self.is_dense and self.offset <= other.offset and other.last <= self.last)

    def residues(self, period: int) -> range | None:
        """Return the remainders of the elements' positions, as one interval; None if they aren't in one."""
        first = self.offset % period
        width = sum((size - 1) * stride for size, stride in self.dims if stride % period)
        return range(first, first + width + 1) if first + width < period else None

    def is_disjoint(self, other: ElementSpan) -> bool:
        """True if the spans are provably disjoint: by their intervals, or by the intervals of remainders (columns, and
        elements in turns).
        """
        if self.last < other.offset or other.last < self.offset:
            return True
        strides = {stride for _, stride in (*self.dims, *other.dims)}
        for period in strides | {math.gcd(*strides)} - {0, 1}:
            a, b = self.residues(period), other.residues(period)
            if a is not None and b is not None and (a[-1] < b[0] or b[-1] < a[0]):
                return True
        return False


def span_of(offset: Any, sizes: Iterable[Any], strides: Iterable[Any]) -> ElementSpan | None:
    """Return the span; None unless all are numbers, and none of the strides is negative."""
    dims = tuple((size, stride) for size, stride in zip(sizes, strides) if size != 1 and stride != 0)
    numbers = [offset, *(number for dim in dims for number in dim)]
    if not all(isinstance(n, int | sympy.Integer) and n >= 0 for n in numbers) or any(not size for size, _ in dims):
        return None
    return ElementSpan(int(offset), tuple((int(size), int(stride)) for size, stride in dims))


def _span_of_dep(dep: Dep) -> ElementSpan | None:
    if not isinstance(dep, MemoryDep) or not isinstance(dep.index, sympy.Expr):
        return None
    strides: list[Any] = [dep.index.coeff(var) for var in dep.var_names]
    offset = dep.index
    for stride, var in zip(strides, dep.var_names):
        offset = offset - stride * var
    return span_of(sympy.expand(offset), dep.size, strides)


@dataclasses.dataclass(frozen=True)
class PartAccess:
    storage: str
    span: ElementSpan | None  # None: the whole buffer, or an unknown part
    writes: bool


def accesses(node: BaseSchedulerNode, storage: Callable[[str], str]) -> Iterator[PartAccess]:
    """Yield the accesses of a scheduler node. `storage` names the buffer that an update in place updates."""
    for part in node.get_nodes():
        mutated = {storage(name) for output in part.get_outputs() for name in output.get_mutations()}
        kernel = part.node
        inputs: Any = getattr(kernel, "inputs", ())
        if isinstance(kernel, AsyncCopy):
            memory, source = inputs
            layout = kernel.part
            is_same = layout.dtype == memory.get_dtype()  # else a real part of complex memory
            span = span_of(layout.offset, layout.size, layout.stride) if is_same else None
            yield PartAccess(storage(memory.get_name()), span, True)
            yield PartAccess(storage(source.get_name()), _span_of_view(source), False)
            continue
        if type(kernel) is ir.ExternKernelOut:
            yield PartAccess(storage(kernel.get_name()), _span_of_view(kernel.output_view) if mutated else None, True)
            yield from (PartAccess(storage(value.get_name()), _span_of_view(value), False) for value in inputs)
            continue
        yield from (
            PartAccess(name, None, True) for name in mutated - {storage(d.name) for d in part.read_writes.writes}
        )
        for dep in part.read_writes.writes:
            yield PartAccess(storage(dep.name), _span_of_dep(dep), True)
        for dep in part.read_writes.reads:
            is_order = not isinstance(dep, MemoryDep) and isinstance(kernel, ir.ComputedBuffer)
            if not (is_order and storage(dep.name) in mutated):
                yield PartAccess(storage(dep.name), _span_of_dep(dep), False)


def _span_of_view(value: Any) -> ElementSpan | None:
    if not isinstance(value, ir.ReinterpretView) or value.get_dtype() != value.unwrap_view().get_dtype():
        return None
    return span_of(value.layout.offset, value.layout.size, value.layout.stride)


def parts(known: Sequence[ElementSpan | None], written: Iterable[ElementSpan | None]) -> list[frozenset[int]] | None:
    """Return, for each known access, the numbers of the parts that it touches; 0 is the rest. None if all touch a
    common one.
    """
    groups: list[list[ElementSpan]] = []

    def met(span: ElementSpan) -> list[int]:
        return [n for n, group in enumerate(groups, 1) if not all(span.is_disjoint(other) for other in group)]

    for span in sorted({span for span in written if span is not None}, key=lambda span: span.count):
        near = met(span)
        if not near:
            groups.append([span])
        elif len(near) == 1:
            groups[near[0] - 1].append(span)
    found = []
    for span in known:
        touched = met(span) if span is not None else range(1, len(groups) + 1)
        inside = span is not None and any(other.contains(span) for n in touched for other in groups[n - 1])
        found.append(frozenset(touched if inside else (0, *touched)))
    return found if found and not frozenset.intersection(*found) else None
