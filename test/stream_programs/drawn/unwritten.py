"""Memory that is read before anything has written it: no race, and no less wrong.

`analyse` asks in which order two accesses of a byte happen, and says nothing of a byte that has one only. Compiled code
that allocates a result a second time, or writes half of it, has no more than that.
"""

from collections.abc import Iterable

from torch_overlay.analysis.race_check.trace import Alloc, Free, Launch, Memory, Operation, View


def pieces(view: View) -> list[tuple[int, int]]:
    """(first byte, end) of what the view has of its memory."""
    return [(0, view.memory.size)] if view.span is None else [*view.span.simplified().runs()]


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
                known = [(a, written[a.view.memory]) for a in accesses if a.view.memory in written]
                for access, memory in known:
                    if access.reads and not access.writes:
                        missing = sum(memory[start:end].count(0) for start, end in pieces(access.view))
                        if missing:
                            found[f"{name} reads {missing} bytes of {access.view} that nobody has written"] = None
                for access, memory in known:
                    if access.writes:
                        for start, end in pieces(access.view):
                            memory[start:end] = b"\1" * (end - start)
    return list(found)
