"""Report who holds device memory: the plan's buffers, before a program runs, and the blocks of a snapshot, after it.

On one stream a buffer can be freed right after the operation that uses it last. If another stream uses it, it is freed
when its own stream is ordered after that use, which may be later (`Plan.release`), and work that could go on in one
block takes two. The report on a plan (`account`) compares it with the same operations, launched in the same order, on
one stream. It counts what the region allocates and, in a backward, the saved values that it frees; blocks that the code
generator writes in place are counted twice for a moment, on both sides.

A snapshot of PyTorch's, with the text of generated code, gives each block of memory its owner (`memory_blocks`):

    torch.cuda.memory._record_memory_history(stacks="python")
    with torch_overlay.testing.observe() as seen:   # around the compilation: knows the user's lines
        step()
    print(memory_blocks(torch.cuda.memory._snapshot(), seen))

In a snapshot of a compiled program, the innermost frames of a block are in a generated module, at the line of the
allocation. The block gets the name of its buffer, and the user's line of the kernel that uses the buffer first. The
memory that a CUDA graph allocates for a call is one block, or a few, for many tensors; the frames of the relaunch
identify it. Every other block gets the innermost frame outside of torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay.testing._text import as_line, OURS, TORCH


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


BUFFER, GRAPH, EAGER, UNKNOWN = "compiled code", "CUDA graph", "eager", "no frames"
_RELAUNCH = os.path.join("_inductor", "relaunch") + os.sep
_SOURCES = re.compile(r"\s*# Topologically Sorted Source Nodes: \[(.*?)\]")
_BEFORE_A_LAUNCH = re.compile(r"\s*(#|set_stream\(|if multi_stream: set_stream\()")
_ASSIGNED = re.compile(r"\s*(\w+) = ")


@dataclass(frozen=True)
class Block:
    """A block of device memory. `stream` is the handle of its pool's stream, `name` the name of a compiled buffer."""

    address: int
    nbytes: int
    device: int
    stream: int
    state: str
    kind: str
    name: str = ""
    line: str = ""


class Blocks(tuple[Block, ...]):
    """Blocks, sorted by address. The text lists the blocks in use by source line, the largest first."""

    def __str__(self) -> str:
        total: dict[tuple[str, str, int], list[int]] = {}
        for block in self:
            if block.state.startswith("active"):
                total.setdefault((block.kind, block.line, block.stream), []).append(block.nbytes)
        rows = sorted(total.items(), key=lambda row: (-sum(row[1]), row[0]))
        lines = [
            f"{amount(sum(sizes)):>10}  {len(sizes):4} of stream {stream:#x}, {kind}" + (f", {line}" if line else "")
            for (kind, line, stream), sizes in rows
        ]
        used = sum(sum(sizes) for sizes in total.values())
        return "\n".join([f"{amount(used)} in {sum(map(len, total.values()))} blocks", *lines])


def memory_blocks(snapshot: Mapping[str, Any], seen: Any = None) -> Blocks:
    """Return the blocks of a `torch.cuda.memory._snapshot()` with their owners. `seen` is the value that
    `torch_overlay.testing.observe()` yielded while the program was compiled; without it, the line of a compiled buffer
    is the names of its graph's nodes.
    """
    reader = _SnapshotReader(seen)
    found = [
        reader.block(segment, block)
        for segment in snapshot["segments"]
        for block in _placed(segment, segment["blocks"])
    ]
    return Blocks(sorted(found, key=lambda block: (block.device, block.address)))


def _placed(segment: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the blocks with their addresses; in older snapshots, addresses follow from the sizes."""
    at = segment["address"]
    for block in blocks:
        yield {"address": at, **block}
        at += block["size"]


class _SnapshotReader:
    def __init__(self, seen: Any) -> None:
        regions = seen.regions if seen is not None else ()
        # text of a generated module -> the user's lines of each of its lines
        self.lines = {region.wrapper.strip(): region.lines for region in regions if region.wrapper is not None}
        self.modules: dict[str, GeneratedModule | None] = {}

    def block(self, segment: Mapping[str, Any], block: Mapping[str, Any]) -> Block:
        kind, name, line = self.whose(block.get("frames") or ())
        return Block(
            block["address"],
            block.get("requested_size") or block["size"],
            segment.get("device", 0),
            segment["stream"],
            block["state"],
            kind,
            name,
            line,
        )

    def whose(self, frames: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
        """Return kind, buffer name and line of a block, from its frames, innermost first."""
        for frame in frames:
            file = frame["filename"]
            if file.startswith(OURS) and _RELAUNCH in file:
                return GRAPH, "", _users(frames)
            if (module := self.module(file)) is not None:
                name, line = module.allocated(frame["line"])
                return BUFFER, name, line
        line = _users(frames)
        return (EAGER, "", line) if line else (UNKNOWN, "", "")

    def module(self, file: str) -> GeneratedModule | None:
        if file not in self.modules:
            self.modules[file] = None
            if file.endswith(".py") and not file.startswith((TORCH, OURS)) and os.path.isfile(file):
                with open(file, encoding="utf-8", errors="replace") as opened:
                    text = opened.read()
                if "async_compile = AsyncCompile()" in text:
                    self.modules[file] = GeneratedModule(text, self.lines.get(text.strip(), ()))
        return self.modules[file]


class GeneratedModule:
    """The text of a generated module, split in lines."""

    def __init__(self, text: str, lines: Sequence[str]) -> None:
        self.text, self.lines = text.split("\n"), lines

    def allocated(self, number: int) -> tuple[str, str]:
        """Return the buffer that line `number` (from 1) allocates, and the user's lines of its first kernel."""
        if not 1 <= number <= len(self.text):
            return "", ""
        statement = self.text[number - 1]
        match = _ASSIGNED.match(statement)
        name = match[1] if match else ""
        if match is None or "empty_strided" not in statement:  # an operator that allocates its own result
            return name, self.label(number)
        used = re.compile(rf"\b{re.escape(name)}\b")
        for later in range(number + 1, len(self.text) + 1):
            text = self.text[later - 1]
            if used.search(text) and "(" in text and not text.lstrip().startswith(("#", "del ", "assert_")):
                return name, self.label(later)
        return name, ""

    def label(self, number: int) -> str:
        """Return the user's lines for a line, or the names of the nodes in its own comment if no lines are known."""
        if self.lines:
            return self.lines[number - 1]
        for text in reversed(self.text[: number - 1]):
            if match := _SOURCES.match(text):
                return match[1]
            if not _BEFORE_A_LAUNCH.match(text):
                break
        return ""


def _users(frames: Sequence[Mapping[str, Any]]) -> str:
    """Format the innermost frame of the user's code as file, line and function."""
    for frame in frames:
        file = frame["filename"]
        if file.endswith(".py") and not file.startswith((TORCH, OURS)) and not file.startswith("<"):
            return as_line(file, frame["line"], frame["name"])
    return ""


__all__ = ["Block", "Blocks", "memory_blocks"]
