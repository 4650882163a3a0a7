"""Report what streams cost in memory, by the plan: how much is alive at once, and what lives longer than on one stream.

On one stream a buffer can be freed right after the operation that uses it last. If another stream uses it, it is freed
when its own stream is ordered after that use, which may be later (`Plan.release`), and work that could go on in one
block takes two. The report compares the plan with the same operations, launched in the same order, on one stream. It
counts what the region allocates and, in a backward, the saved values that it frees; blocks that the code generator
writes in place are counted twice for a moment, on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch_overlay._inductor.streams.plan import Buffer, Plan

_UNITS = ("B", "KiB", "MiB", "GiB")


@dataclass(frozen=True)
class HeldBuffer:
    """A buffer of `size` bytes in the memory of `stream`, used last by operation `last` on stream `reader`, and freed
    before operation `until`; the number of operations means at the exit.
    """

    name: str
    size: int
    stream: int
    last: int
    reader: int | None
    until: int


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes that are alive at once, with the plan and on one stream, and the buffers that are held longer."""

    peak: int
    peak_on_one_stream: int
    held: tuple[HeldBuffer, ...]


def _freed_before(plan: Plan, buffer: Buffer, on_one_stream: bool) -> int:
    """Return the operation before which the buffer is freed."""
    end = len(plan.ops)
    if buffer.leaves:
        return end
    last = max(plan.uses[buffer.name]) + 1
    return last if on_one_stream else max(last, plan.release.get(buffer.name, 0))


def _peak(plan: Plan, buffers: list[Buffer], on_one_stream: bool) -> int:
    change = [0] * (len(plan.ops) + 1)
    for buffer in buffers:
        change[min(plan.uses[buffer.name]) if buffer.fresh else 0] += buffer.size
        change[_freed_before(plan, buffer, on_one_stream)] -= buffer.size
    alive = peak = 0
    for difference in change[:-1]:
        alive += difference
        peak = max(peak, alive)
    return peak


def account(plan: Plan) -> PeakMemory:
    """Return what the plan keeps alive. A size that is known only at run time counts as it was when it was compiled."""
    buffers = [b for b in plan.buffers if b.size and plan.uses.get(b.name)]
    held = []
    for buffer in buffers:
        last, until = max(plan.uses[buffer.name]), _freed_before(plan, buffer, False)
        if until > _freed_before(plan, buffer, True):
            held.append(HeldBuffer(buffer.name, buffer.size, buffer.stream, last, plan.ops[last].stream, until))
    held.sort(key=lambda h: (-h.size, h.name))
    return PeakMemory(_peak(plan, buffers, False), _peak(plan, buffers, True), tuple(held))


def amount(size: float) -> str:
    """Return a number of bytes as people read it."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def describe(plan: Plan, most: int = 10) -> list[str]:
    """Return the report as lines of text; none for a plan of one stream."""
    if len([s for s in plan.streams if s >= 0]) < 2:
        return []
    memory = account(plan)
    more = memory.peak - memory.peak_on_one_stream
    compared = f"{amount(more)} more than" if more else "as much as"
    lines = [f"Memory: {amount(memory.peak)} at the peak, {compared} in the same order on one stream."]
    for held in memory.held[:most]:
        place = f"before {held.until} ({plan.ops[held.until].name})" if held.until < len(plan.ops) else "at the exit"
        reader = "the host" if held.reader is None or held.reader < 0 else f"stream {held.reader}"
        lines.append(
            f"  {held.name}, {amount(held.size)} of stream {held.stream}, is used last by {held.last} "
            f"({plan.ops[held.last].name}) on {reader}, and freed {place}, where stream {held.stream} is behind it"
        )
    if len(memory.held) > most:
        rest = memory.held[most:]
        lines.append(f"  and {len(rest)} more buffers, {amount(sum(h.size for h in rest))}")
    return lines
