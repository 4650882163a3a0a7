"""Lay out a timeline in a picture of fixed width: rows of time, lanes in each row, labels under boxes.

The width is that of a phone, so no page shows the text smaller. Time runs from left to right and continues in the next
row, as in a musical score: a step of 300 kernels fills a page or two and needs no scrolling sideways. All rows have the
same scale, at which three quarters of the slices are wide enough for their line number. A row shows only the lanes that
have something in it.

A label is drawn in its box if it fits there. Otherwise it goes under the box, on the first of `LEVELS` levels that is
free; neighbours of one source line share a label. A label without a place is left out, and counted: its box has a
tooltip like every other box. So labels never collide, by construction.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_overlay.analysis.memory_report import amount
from torch_overlay.analysis.timelines.model import COPIES, place, WAIT


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.analysis.timelines.model import Arrow, Slice
    from torch_overlay.analysis.timelines.timeline import Timeline

WIDTH, LEFT, MARGIN = 400, 84, 8
ROOM = WIDTH - LEFT - MARGIN  # for time
FONT, CHARACTER, LABEL = 9, 5.5, 10  # size of the monospace text, width and height of a character
BOX, PAD, TICKS, GAP = 18, 5, 18, 16  # heights: of a box, around it, of the axis, between rows
LEVELS, MOST_ROWS = 3, 40
LONGEST = 26  # characters of a name
LEAST_IN_ROW = 3  # slices of each lane, on average
MEMORY = 30


@dataclass(frozen=True)
class Label:
    """Text with its upper left corner."""

    text: str
    x: float
    y: float
    inside: bool = False
    at: float = 0.0  # x of its box, if the label is under it

    @property
    def width(self) -> float:
        return _length(self.text)


@dataclass(frozen=True)
class Box:
    index: int  # the slice's index
    x: float
    width: float


@dataclass
class Strip:
    """The part of a lane in one row."""

    lane: int
    y: float
    boxes: list[Box]
    labels: list[Label]
    levels: int = 0

    @property
    def middle(self) -> float:
        return self.y + PAD + BOX / 2

    def label_in(self, box: Box, text: str) -> None:
        self.labels.append(Label(text, box.x + (box.width - _length(text)) / 2, self.middle - LABEL / 2, True))

    @property
    def height(self) -> float:
        return 2 * PAD + BOX + self.levels * LABEL


@dataclass
class LaneRow:
    start: float
    end: float
    y: float
    strips: list[Strip] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)  # those that end in this row
    memory_y: float = 0.0
    height: float = 0.0

    def strip(self, lane: int) -> Strip | None:
        return next((s for s in self.strips if s.lane == lane), None)


@dataclass
class Layout:
    rows: list[LaneRow]
    scale: float  # pixels per microsecond
    unlabelled: int
    bottom: float
    ambiguous: frozenset[str]  # line numbers that occur in several files

    def x(self, row: LaneRow, at: float) -> float:
        return LEFT + min(max((at - row.start) * self.scale, 0.0), ROOM)

    def texts(self, s: Slice) -> tuple[str, ...]:
        """Return the possible labels of a slice, from long to short."""
        name = amount(s.nbytes) if s.kind in COPIES else s.name
        if not s.line:
            return (name,) if s.kind in (*COPIES, WAIT) else (name, clip(name, LONGEST), clip(name, 8))
        number = place(s.line).rpartition(":")[2]
        where = place(s.line) if number in self.ambiguous else number
        return f"{where} {name}", f"{where} {clip(name, LONGEST)}", f"{where} {clip(name, 8)}", where


def clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(most - 1, 1)] + "…"


def lay_out(timeline: Timeline, top: float) -> Layout:
    places = {place(s.line) for s in timeline.slices if s.line}
    numbers = Counter(where.rpartition(":")[2] for where in places)
    ambiguous = frozenset(number for number, files in numbers.items() if files > 1)
    count = _rows(timeline)
    length = max(timeline.end, 1e-3) / count
    layout = Layout([], ROOM / length, 0, top, ambiguous)
    y = top
    for number in range(count):
        row = LaneRow(number * length, (number + 1) * length, y)
        until = row.end if number < count - 1 else math.inf
        row.arrows = [arrow for arrow in timeline.arrows if row.start <= arrow.at < until]
        _fill(timeline, layout, row)
        layout.rows.append(row)
        y += row.height + GAP
    layout.bottom = y
    return layout


def _rows(timeline: Timeline) -> int:
    """Return the number of rows at which only the shortest quarter of the slices is narrower than a line number."""
    widths = sorted(s.duration for s in timeline.slices if s.kind != WAIT)
    if not widths:
        return 1
    wanted = 4.5 * CHARACTER / max(widths[len(widths) // 4], 1e-3)
    most = math.ceil(len(widths) / (LEAST_IN_ROW * len(timeline.lanes)))
    return min(max(math.ceil(timeline.end * wanted / ROOM), 1), MOST_ROWS, most)


def _fill(timeline: Timeline, layout: Layout, row: LaneRow) -> None:
    there: dict[int, list[int]] = {}
    for index, s in enumerate(timeline.slices):
        if s.start < row.end and (s.end > row.start or s.start >= row.start):
            there.setdefault(s.lane, []).append(index)
    for arrow in row.arrows:
        there.setdefault(arrow.lane, [])
        there.setdefault(arrow.source_lane, [])
    y = row.y + TICKS
    for lane in sorted(there):
        strip = Strip(lane, y, [], [])
        for index in sorted(there[lane], key=lambda i: timeline.slices[i].start):
            s = timeline.slices[index]
            left = layout.x(row, s.start)
            strip.boxes.append(Box(index, left, max(layout.x(row, s.end) - left, 1.0)))
        _label(timeline.slices, layout, row, strip)
        row.strips.append(strip)
        y += strip.height
    if timeline.memory:
        row.memory_y = y + PAD
        y += MEMORY + 2 * PAD
    row.height = y - row.y


def _label(slices: Sequence[Slice], layout: Layout, row: LaneRow, strip: Strip) -> None:
    """Label the boxes of a strip. A slice that continues from the previous row is labelled again only if it is wide."""
    levels: list[list[_Below]] = [[] for _ in range(LEVELS)]
    run: list[Box] = []
    boxes = [b for b in strip.boxes if slices[b.index].start >= row.start or b.width > 60]
    for position, box in enumerate(boxes):
        if (text := _inside(slices, layout, box)) is not None:
            strip.label_in(box, text)
            continue
        run.append(box)
        after = boxes[position + 1] if position + 1 < len(boxes) else None
        if after is not None and _same(slices, box, after) and _inside(slices, layout, after) is None:
            continue
        if not _below(layout.texts(slices[run[0].index]), strip, run, levels):
            layout.unlabelled += len(run)
        run = []
    for level, found in enumerate(levels):
        y = strip.y + PAD + BOX + 1 + level * LABEL
        for label, right in zip(found, [*(b.x - CHARACTER for b in found[1:]), WIDTH - MARGIN]):
            text = next((t for t in label.texts if label.x + _length(t) <= right), label.texts[-1])
            strip.labels.append(Label(text, label.x, y, False, label.at))
        strip.levels = level + 1 if found else strip.levels


@dataclass(frozen=True)
class _Below:
    """A label under its box. It has room for the shortest of its texts, the last one, and gets the first text that fits
    before the next label.
    """

    texts: tuple[str, ...]
    x: float
    at: float

    @property
    def end(self) -> float:
        return self.x + _length(self.texts[-1]) + CHARACTER


def _length(text: str) -> float:
    return len(text) * CHARACTER


def _same(slices: Sequence[Slice], a: Box, b: Box) -> bool:
    """True if two boxes have one source line; if neither has a line, one name."""
    first, second = slices[a.index], slices[b.index]
    if first.line or second.line:
        return place(first.line) == place(second.line)
    return first.name == second.name


def _inside(slices: Sequence[Slice], layout: Layout, box: Box) -> str | None:
    """Return the label that fits in the box, if any; only the two longest texts, as one below may say more."""
    return next((t for t in layout.texts(slices[box.index])[:2] if _length(t) <= box.width - 4), None)


def _below(texts: tuple[str, ...], strip: Strip, boxes: list[Box], levels: list[list[_Below]]) -> bool:
    """Add one label for neighbours of one source line: under them or, if there is no room, a short one inside. False
    if there is no room for it there either.
    """
    texts = texts[1:] if len(texts) > 1 else texts
    if len(boxes) > 1:
        texts = (f"{texts[-1]} ×{len(boxes)}", texts[-1])
    width = _length(texts[-1])
    x = min(boxes[0].x, WIDTH - MARGIN - width)
    for level in levels:
        if not level or x >= level[-1].end:
            level.append(_Below(texts, x, boxes[0].x + min(boxes[0].width / 2, 3)))
            return True
    if is_wide := (widest := max(boxes, key=lambda b: b.width)).width >= width + 2:
        strip.label_in(widest, texts[-1])
    return is_wide


__all__ = ["clip", "Label", "lay_out", "Layout", "LaneRow", "Strip"]
