"""A stream plan as a picture: one lane a stream, one box an operation, one arrow an event.

Nothing has run when the picture is drawn, so it knows order and not time. An operation stands in the first column that
the plan's order allows: behind the one before it on its stream, and behind every event that it waits for. Boxes in one
column may run at the same time; boxes that may not never share one. All boxes are equally wide.

    svg = plan_svg(plan, title="experts", labels={"op0": "mm"})

Plain text out, no drawing library. Labels are cut to the width of their box; the whole text is the box's tooltip.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from torch_overlay._inductor.stream_planner import ENTRY, HOST


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_overlay._inductor.stream_planner import Plan

BOX_WIDTH, BOX_HEIGHT, GAP, LANE_HEIGHT = 104, 30, 32, 58
MARGIN, TOP, LEFT, LEGEND = 20, 64, 146, 46
CHARACTER = 7.2  # width of a character of the 11-pixel monospace text
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6")
HOST_COLOUR = "#8c8c8c"
ANOTHER_DEVICE = 1_000_000  # planner numbers from here on are other devices' current streams


@dataclass(frozen=True)
class Layout:
    """The lane and the column of every operation that launches something."""

    lanes: tuple[int, ...]
    columns: Mapping[int, int]
    end: int

    def x(self, column: int) -> int:
        return LEFT + GAP + column * (BOX_WIDTH + GAP)

    def y(self, stream: int) -> int:
        """The middle of a lane."""
        return TOP + self.lanes.index(stream) * LANE_HEIGHT + LANE_HEIGHT // 2

    @property
    def exit(self) -> int:
        return self.x(self.end) - GAP // 2

    @property
    def width(self) -> int:
        return self.exit + MARGIN + 8

    @property
    def height(self) -> int:
        return TOP + len(self.lanes) * LANE_HEIGHT + LEGEND


def lay_out(plan: Plan) -> Layout:
    """Place every operation in the first column that the order of the plan allows."""
    free: dict[int, int] = {}  # stream -> the first column behind what it holds
    columns: dict[int, int] = {}
    host = 0  # what is launched from now on is launched after this column
    for here, op in enumerate(plan.ops):
        if op.stream is None:
            continue
        column = max(free.get(op.stream, 0), host)
        for event, stream in plan.waits_before(here):
            if stream == op.stream and event.after != ENTRY:
                column = max(column, columns[event.after] + 1)
        columns[here] = column
        free[op.stream] = column + 1
        if op.stream == HOST or op.blocking:
            host = column + 1
    used = {*plan.streams, *(op.stream for op in plan.ops if op.stream is not None)}
    lanes = sorted(used, key=lambda s: (s != HOST, ANOTHER_DEVICE > s > 0, s))
    return Layout(tuple(lanes), columns, max([1, *free.values()]))


def stream_name(stream: int) -> str:
    if stream == HOST:
        return "host"
    if stream == 0:
        return "current stream"
    return f"cuda:{stream - ANOTHER_DEVICE} current" if stream >= ANOTHER_DEVICE else f"stream {stream}"


def shorten(text: str, width: float) -> str:
    room = int(width / CHARACTER)
    return text if len(text) <= room else text[: max(room - 1, 1)] + "…"


def colour(stream: int) -> str:
    return HOST_COLOUR if stream == HOST else COLOURS[stream % len(COLOURS)]


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _lanes(layout: Layout) -> list[str]:
    parts = []
    for i, stream in enumerate(layout.lanes):
        top = TOP + i * LANE_HEIGHT
        shade = "#f6f7f9" if i % 2 == 0 else "#ffffff"
        parts.append(f'<rect x="0" y="{top}" width="{layout.width}" height="{LANE_HEIGHT}" fill="{shade}"/>')
        parts.append(f'<rect x="{MARGIN}" y="{top + 22}" width="6" height="14" rx="2" fill="{colour(stream)}"/>')
        parts.append(_text(MARGIN + 14, layout.y(stream) + 4, shorten(stream_name(stream), LEFT - MARGIN - 14)))
    bottom = TOP + len(layout.lanes) * LANE_HEIGHT
    for x, name, anchor in ((LEFT, "entry", "middle"), (layout.exit, "exit", "middle")):
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="#b0b5bd" stroke-dasharray="3 3"/>')
        parts.append(_text(x, TOP - 7, name, "small", anchor))
    return parts


def _boxes(plan: Plan, layout: Layout, labels: Mapping[str, str]) -> list[str]:
    parts = []
    for here, column in layout.columns.items():
        op = plan.ops[here]
        assert op.stream is not None
        label = labels.get(op.name, op.name)
        x, y = layout.x(column), layout.y(op.stream) - BOX_HEIGHT // 2
        tip = f"{here}: {op.name}" + (f": {label}" if label != op.name else "")
        parts.append(
            f"<g><title>{escape(tip)}</title>"
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4" '
            f'fill="{colour(op.stream)}" fill-opacity="0.18" stroke="{colour(op.stream)}"/>'
            + _text(x + BOX_WIDTH / 2, y + BOX_HEIGHT / 2 + 4, shorten(label, BOX_WIDTH - 8), anchor="middle")
            + "</g>"
        )
    return parts


def _arrow(layout: Layout, start: tuple[int, int], end: tuple[int, int], tip: str) -> str:
    (x1, y1), (x2, y2) = start, end
    if y1 == y2:
        path = f"M{x1} {y1} H{x2}"
    else:
        # Along the lane of the target, between two lanes where the way is long, and across lanes only in the gap
        # between two columns: an arrow crosses no box.
        bend, radius, down = x1 + GAP // 2, 8, 1 if y2 > y1 else -1
        rail = y2 - down * (BOX_HEIGHT // 2 + 8)
        if x2 - bend <= GAP:
            path = (
                f"M{x1} {y1} H{bend - radius} Q{bend} {y1} {bend} {y1 + down * radius} V{y2 - down * radius} "
                f"Q{bend} {y2} {bend + radius} {y2} H{x2}"
            )
        else:
            last = x2 - GAP // 2
            path = (
                f"M{x1} {y1} H{bend - radius} Q{bend} {y1} {bend} {y1 + down * radius} V{rail - down * radius} "
                f"Q{bend} {rail} {bend + radius} {rail} H{last - 6} Q{last} {rail} {last} {rail + down * 6} "
                f"V{y2 - down * 6} Q{last} {y2} {last + 6} {y2} H{x2}"
            )
    return f'<path d="{path}" class="event" marker-end="url(#head)"><title>{escape(tip)}</title></path>'


def _arrows(plan: Plan, layout: Layout) -> list[str]:
    parts = []
    for event in plan.events:
        source = LEFT if event.after == ENTRY else layout.x(layout.columns[event.after]) + BOX_WIDTH
        y = layout.y(event.stream)
        for at, stream in event.waits:
            end = layout.exit if at >= len(plan.ops) else layout.x(layout.columns[at])
            tip = f"event {event.index}: {stream_name(stream)} waits for {stream_name(event.stream)}"
            parts.append(_arrow(layout, (source, y), (end - 2, layout.y(stream)), tip))
        parts.append(f'<circle cx="{source}" cy="{y}" r="3" fill="#30343b"/>')
    for wait in plan.boundary_waits:
        end = layout.exit if wait.before >= len(plan.ops) else layout.x(layout.columns[wait.before])
        y = layout.y(wait.stream)
        parts.append(_arrow(layout, (end - GAP + 8, y), (end - 2, y), f"waits for the caller's event {wait.token[1:]}"))
    return parts


STYLE = """text { font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: #22262c; }
.title { font-size: 15px; font-weight: bold; }
.small { font-size: 10px; fill: #6b7280; }
.event { fill: none; stroke: #30343b; stroke-width: 1.2; }"""

HEAD = """<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#30343b"/></marker></defs>"""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plan_svg(plan: Plan, *, title: str = "", labels: Mapping[str, str] | None = None) -> str:
    """The picture of a plan. `labels` says what to write into the box of an operation, by the operation's name."""
    layout = lay_out(plan)
    summary = ", ".join(
        _count(number, noun)
        for number, noun in ((len(layout.columns), "operation"), (len(plan.events), "event"), (plan.num_waits, "wait"))
    )
    legend = (
        "Box: an operation, in the first column that order allows; widths are not times.",
        "Arrow: an event. What shares a column may run at the same time.",
    )
    width = max(layout.width, int(MARGIN * 2 + CHARACTER * max(len(line) for line in (summary, *legend))))
    bottom = TOP + len(layout.lanes) * LANE_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{layout.height}" '
        f'viewBox="0 0 {width} {layout.height}" role="img">',
        f"<title>{escape(title or 'stream plan')}</title>",
        f"<style>{STYLE}</style>",
        HEAD,
        f'<rect width="{width}" height="{layout.height}" fill="#ffffff"/>',
        _text(MARGIN, 24, title or "stream plan", "title"),
        _text(MARGIN, 42, summary, "small"),
        *_lanes(layout),
        *_arrows(plan, layout),
        *_boxes(plan, layout, labels or {}),
        *(_text(MARGIN, bottom + 20 + 14 * i, line, "small") for i, line in enumerate(legend)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
