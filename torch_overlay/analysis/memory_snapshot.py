"""Find the owner of each block of device memory, from PyTorch's memory snapshot and the text of generated code.

    torch.cuda.memory._record_memory_history(stacks="python")
    with torch_overlay.testing.observe() as seen:   # around the compilation: knows the user's lines
        step()
    print(memory_blocks(torch.cuda.memory._snapshot(), seen))

In a snapshot of a compiled program, the innermost frames of a block are in a generated module, at the line of the
allocation. This module gives the block the name of its buffer, and the user's line of the kernel that uses the buffer
first. The memory that a CUDA graph allocates for a call is one block, or a few, for many tensors; the frames of the
relaunch identify it. Every other block gets the innermost frame outside of torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay.analysis.memory_report import amount
from torch_overlay.testing._text import as_line, OURS, TORCH


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
