"""Put the blocks of side streams into ranges that profiles show: `profiler_ranges`, Note [Names in profiles].

The emitter has marked where work on a stream begins, with the name of its range. `show_blocks` opens the range before
the first line that allocates or launches there. It closes it where work on another stream begins, and where a block of
Python or a range of the program's begins or ends, since ranges have to nest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch._inductor.codegen import wrapper as upstream

from torch_overlay._inductor.streams.switching import needs
from torch_overlay._inductor.streams.wrapper_lines import BeginRegion, EndRegion, OnStream, StreamLine


if TYPE_CHECKING:
    from torch_overlay._inductor.streams.wrapper_lines import Emitter

RANGE_CALLS = ("torch.cuda.nvtx.", "push_range(", "pop_range(")  # those that `ranges.write` writes
_BOUNDARIES = (EndRegion, upstream.EnterSubgraphLine, upstream.ExitSubgraphLine)


@dataclass
class _Place:
    """Where the lines of a region are."""

    emitter: Emitter
    stream: int | None = None
    range: str = ""
    is_open: bool = False

    def write(self, out: list[Any], text: str) -> None:
        out.append(StreamLine(self.emitter.if_multi_stream(text)))
        self.is_open = not self.is_open


def show_blocks(lines: list[Any]) -> list[Any]:
    out: list[Any] = []
    regions: list[_Place] = []
    for line in lines:
        if isinstance(line, BeginRegion):
            regions.append(_Place(line.emitter))
        elif regions:
            _pass(out, regions[-1], line)
        out.append(line)
        if isinstance(line, EndRegion):
            regions.pop()
    return out


def _pass(out: list[Any], place: _Place, line: Any) -> None:
    moves = isinstance(line, OnStream) and line.stream != place.stream
    is_boundary = isinstance(line, _BOUNDARIES) or _is_statement_apart(line)
    if place.is_open and (moves or is_boundary):
        place.write(out, "profiler_ranges.pop()")
    if moves:
        place.stream, place.range = line.stream, line.range
    works = isinstance(line, upstream.KernelCallLine) or needs(line, place.stream, place.emitter) is not None
    if place.range and not (place.is_open or is_boundary or isinstance(line, OnStream)) and works:
        place.write(out, f"profiler_ranges.push({place.range!r})")


def _is_statement_apart(line: Any) -> bool:
    """True for the head of a block of Python, and for a range of the program's."""
    return isinstance(line, str) and (line.rstrip().endswith(":") or line.startswith(RANGE_CALLS))


__all__ = ["show_blocks"]
