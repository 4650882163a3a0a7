"""Which parts of memory operations touch that is copied part by part between device and host.

A ring of pinned memory is one buffer. Its rows are filled by copies on several streams, and the host reads one while
others are still being filled. To the planner memory is a name, and two operations that touch one name are ordered.
So memory of which such copies touch a part is given a name for each stretch of elements that operations touch alike,
where it is known which: of copies and of kernels that index it by sizes. Any other operation touches all of it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TYPE_CHECKING

import sympy
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep

from torch_overlay._inductor.host_copies import AsyncCopy


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch_overlay._inductor.stream_planner import Buffer, Op

Stretch = tuple[int, int]  # of elements, the last one excluded
Accesses = tuple[dict[str, "set[Stretch] | None"], dict[str, "set[Stretch] | None"]]  # None: all of it


def name_parts(
    nodes: Sequence[Any],
    index: Mapping[Any, int],
    ops: Sequence[Op],
    buffers: Sequence[Buffer],
    storage: Callable[[str], str],
) -> tuple[list[Op], list[Buffer]]:
    """The operations, and the memory, with such names."""
    copied = {storage(name) for node in nodes if isinstance(node.node, AsyncCopy) for name in _parts(node.node)}
    if not copied:
        return list(ops), list(buffers)
    known = {index[n]: _accesses(n, storage) for n in nodes if copied & (ops[index[n]].reads | ops[index[n]].writes)}
    cuts: dict[str, set[int]] = {name: set() for name in copied}
    for touched in itertools.chain.from_iterable(known.values()):
        for name in copied.intersection(touched):
            cuts[name].update(itertools.chain.from_iterable(touched[name] or ()))
    pieces = {name: list(itertools.pairwise(sorted(cuts[name]))) for name in copied}
    pieces = {name: found for name, found in pieces.items() if len(found) > 1}

    def named(names: Iterable[str], touched: Mapping[str, set[Stretch] | None]) -> frozenset[str]:
        found: set[str] = set()
        for name in names:
            stretches = touched.get(name)
            if stretches is None or name not in pieces:
                found.add(name)
            for first, last in pieces.get(name, ()):
                if stretches is None or any(a < last and first < b for a, b in stretches):
                    found.add(f"{name}[{first}:{last}]")
        return frozenset(found)

    made = list(ops)
    for i, op in enumerate(ops):
        reads, writes = known.get(i, ({}, {}))
        made[i] = replace(op, reads=named(op.reads, reads), writes=named(op.writes, writes))
    parts = [replace(b, views=b.views | named((b.name,), {})) if b.name in pieces else b for b in buffers]
    return made, parts


def _accesses(node: Any, storage: Callable[[str], str]) -> Accesses:
    reads: dict[str, set[Stretch] | None] = {}
    writes: dict[str, set[Stretch] | None] = {}
    for part in node.get_nodes():
        if isinstance(part.node, AsyncCopy):
            memory, source = part.node.memory, part.node.source
            _add(writes, storage(memory.get_name()), _of_layout(part.node.part))
            _add(reads, storage(source.get_name()), _of_layout(source.get_layout()))
            reads.setdefault(storage(memory.get_name()), set())  # a dependency for the order
        elif isinstance(part.node, ir.ComputedBuffer):
            own = part.node.get_read_writes()
            for found, dependencies in ((reads, own.reads), (writes, own.writes)):
                for dependency in dependencies:
                    _add(found, storage(dependency.name), _of_dependency(dependency))
            for name in map(storage, part.node.get_mutation_names()):
                reads.setdefault(name, set())
        else:
            for found, dependencies in ((reads, part.read_writes.reads), (writes, part.read_writes.writes)):
                for dependency in dependencies:
                    _add(found, storage(dependency.name), None)
    return reads, writes


def _add(found: dict[str, set[Stretch] | None], name: str, stretch: Stretch | None) -> None:
    known = found.setdefault(name, set())
    if stretch is None:
        found[name] = None
    elif known is not None:
        known.add(stretch)


def _parts(copy: AsyncCopy) -> list[str]:
    """The memory of which a copy touches a part."""
    touched = ((copy.memory, copy.part), (copy.source, copy.source.get_layout()))
    return [memory.get_name() for memory, layout in touched if _of_layout(layout) is not None]


def _of_layout(layout: Any) -> Stretch | None:
    sizes, strides, offset = layout.size, layout.stride, layout.offset
    if not all(isinstance(n, (int, sympy.Integer)) for n in (*sizes, *strides, offset)):
        return None
    first, last = int(offset), int(offset) + 1
    for size, stride in zip(sizes, strides):
        last += (int(size) - 1) * int(stride)
    return first, last


def _of_dependency(dependency: Any) -> Stretch | None:
    if not isinstance(dependency, MemoryDep):
        return None
    rest = sympy.expand(dependency.index)
    first = last = 0
    for variable, size in dependency.ranges.items():
        step = rest.coeff(variable)
        rest = sympy.expand(rest - step * variable)
        if not step.is_Integer or not sympy.sympify(size).is_Integer:
            return None
        first += min(0, int(step) * (int(size) - 1))
        last += max(0, int(step) * (int(size) - 1))
    return (int(rest) + first, int(rest) + last + 1) if rest.is_Integer else None
