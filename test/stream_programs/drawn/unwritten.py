"""Memory that is read before anything has written it: no race, and no less wrong.

`analyse` asks in which order two accesses of a byte happen, and says nothing of a byte that has one only. Compiled code
that allocates a result a second time, or writes half of it, has no more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay.analysis.trace import Alloc, Free, Launch


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch_overlay.analysis.trace import Memory, Operation, View


def _bytes(view: View) -> Iterator[tuple[int, int]]:
    return iter([(0, view.memory.size)]) if view.span is None else view.span.runs()


def unwritten(operations: Iterable[Operation]) -> list[str]:
    """In words, once for each reader: who reads which bytes of an allocation that nobody has written by then. What is
    read and written by one kernel doesn't count: of a C++ kernel's outputs nobody knows which it reads.
    """
    written: dict[Memory, bytearray] = {}
    found: dict[str, None] = {}
    for operation in operations:
        match operation:
            case Alloc(memory):
                written[memory] = bytearray(memory.size)
            case Free(memory):
                written.pop(memory, None)
            case Launch(name, accesses=accesses):
                for access in accesses:
                    known = written.get(access.view.memory)
                    if known is None or not access.reads or access.writes:
                        continue
                    missing = sum(known[start:end].count(0) for start, end in _bytes(access.view))
                    if missing:
                        found[f"{name} reads {missing} bytes of {access.view} that nobody has written"] = None
                for access in accesses:
                    known = written.get(access.view.memory)
                    if known is None or not access.writes:
                        continue
                    for start, end in _bytes(access.view):
                        known[start:end] = b"\1" * (end - start)
    return list(found)


__all__ = ["unwritten"]
