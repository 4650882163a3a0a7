"""Draw a timeline as one SVG picture, without script or drawing library.

Boxes are kernels and copies, to scale; a copy is red while no kernel hides it. Arrows are events: from the point that
one stream had reached to the point at which another stream continued. Under the lanes is the memory of the device,
under the memory the source lines whose numbers label the boxes. A tooltip has the name of a box and its time. Colours
are classes, with a value for light and one for dark pages.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
from typing import TYPE_CHECKING

from torch_overlay.analysis.memory_report import amount
from torch_overlay.analysis.timelines.layout import (
    BOX,
    CHARACTER,
    clip,
    FONT,
    LABEL,
    lay_out,
    LEFT,
    MARGIN,
    MEMORY,
    PAD,
    TICKS,
    WIDTH,
)
from torch_overlay.analysis.timelines.model import COPIES, exposed, microseconds, place, WAIT


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay.analysis.timelines.layout import LaneRow, Layout
    from torch_overlay.analysis.timelines.model import Slice
    from torch_overlay.analysis.timelines.timeline import Timeline

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6", "#79706e")
GREY, RED = "#9aa0a8", "#d62728"
NATURAL = 640  # pixels, where a page sets no width
LINE = LABEL + 2
COLUMNS = int((WIDTH - 2 * MARGIN) / CHARACTER)
MOST_LINES = 48
AT_ONCE = 5.0  # us that a device may need to continue after an event

COLOURS_OF = (  # selector, property, on light pages, on dark ones
    ("text", "fill", "#22262c", "#e6e8eb"),
    (".quiet", "fill", "#5b6370", "#a3abb6"),
    (".paper", "fill", "#ffffff", "#14171b"),
    (".shade", "fill", "#f3f4f6", "#1c2026"),
    (".grid", "stroke", "#dfe2e6", "#343a42"),
    (".memory", "fill", "#c7d0dc", "#34404f"),
    (".event", "stroke", "#30343b", "#c9ced6"),
    (".end", "fill", "#30343b", "#c9ced6"),
)
LIGHT, DARK = ("\n".join(f"{row[0]} {{ {row[1]}: {row[i]}; }}" for row in COLOURS_OF) for i in (2, 3))
STYLE = f"""{LIGHT}
text {{ font: {FONT}px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.title {{ font-size: 12px; font-weight: bold; }}
.event {{ fill: none; stroke-width: 0.9; stroke-opacity: 0.7; }}
.slack {{ stroke-opacity: 0.25; }}
@media (prefers-color-scheme: dark) {{
{DARK}
}}"""

HEAD = """<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path class="end" d="M0 0 L8 4 L0 8 z"/></marker></defs>"""


def escape(text: str) -> str:
    """Return text for XML, which has no place for control characters and lone surrogates, however they are written."""
    return html.escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def svg(timeline: Timeline) -> str:
    """Return the text of the picture."""
    summary = textwrap.wrap(timeline.summary(), COLUMNS)
    layout = lay_out(timeline, 24 + LINE * len(summary))
    parts: list[str] = []
    for row in layout.rows:
        parts += _axis(layout, row)
        parts += _strips(timeline, layout, row)
        parts += _arrows(timeline, layout, row)
        parts += _labels(row)
        if timeline.memory:
            parts += _memory(timeline, layout, row)
    legend, height = _legend(timeline, layout)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{NATURAL}" height="{height * NATURAL / WIDTH:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
            f"<title>{escape(timeline.title)}</title>",
            f"<style>{STYLE}</style>",
            HEAD,
            f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>',
            _text(MARGIN, 18, clip(timeline.title, 50), "title"),
            *_column(MARGIN, 18 + LINE, summary, "quiet"),
            *parts,
            *legend,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "") -> str:
    attributes = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _column(x: float, y: float, lines: Iterable[str], style: str = "") -> list[str]:
    return [_text(x, y + number * LINE, line, style) for number, line in enumerate(lines)]


def _axis(layout: Layout, row: LaneRow) -> list[str]:
    """Draw the time axis: lines and times at round distances, with room for the times."""
    step = 10 ** math.ceil(math.log10(60 / layout.scale))
    step = next((step / d for d in (5, 2) if step / d * layout.scale >= 60), step)
    parts = []
    base, bottom = row.y + TICKS, row.y + row.height
    for i, strip in enumerate(row.strips):
        if i % 2 == 0:
            parts.append(f'<rect x="0" y="{strip.y:.1f}" width="{WIDTH}" height="{strip.height:.1f}" class="shade"/>')
    first, last = math.ceil(row.start / step - 1e-9), math.floor(row.end / step + 1e-9)
    for number in range(first, last + 1):
        x = layout.x(row, number * step)
        parts.append(f'<path d="M{x:.1f} {base - 3:.1f} V{bottom:.1f}" class="grid"/>')
        if x < WIDTH - MARGIN - 50:
            value = number * step
            text = f"{value / 1e3:.6g} ms" if layout.rows[-1].end >= 10_000 else f"{value:.6g} µs"
            parts.append(_text(x + 2, row.y + 10, text, "quiet"))
    return parts


def _strips(timeline: Timeline, layout: Layout, row: LaneRow) -> list[str]:
    parts = []
    for strip in row.strips:
        name, shade = timeline.lanes[strip.lane].name, COLOURS[strip.lane % len(COLOURS)]
        parts.append(f'<rect x="{MARGIN}" y="{strip.y + PAD + 2:.1f}" width="5" height="14" rx="2" fill="{shade}"/>')
        names = textwrap.wrap(name, int((LEFT - MARGIN - 11) / CHARACTER), max_lines=2, placeholder="…")
        parts += _column(MARGIN + 9, strip.middle + 9.5 - LINE / 2 * len(names), names)
        for box in strip.boxes:
            s = timeline.slices[box.index]
            ink = GREY if s.kind == WAIT else shade
            y = strip.y + PAD
            body = (
                f'<rect x="{box.x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{BOX}" rx="1.5" '
                f'fill="{ink}" fill-opacity="0.28" stroke="{ink}" stroke-width="0.7"/>'
            )
            if s.kind in COPIES:
                for start, end in exposed(s, timeline.slices):
                    a, b = layout.x(row, start), layout.x(row, end)
                    if b > a:
                        body += (
                            f'<rect x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{BOX}" fill="{RED}" '
                            'fill-opacity="0.55"/>'
                        )
            parts.append(f"<g><title>{escape(_tooltip(s))}</title>{body}</g>")
    return parts


def _tooltip(s: Slice) -> str:
    lines = [s.name + (f" ({s.symbol})" if s.symbol not in ("", s.name) else ""), s.line]
    lines.append(f"{microseconds(s.duration)}, from {s.start:.1f} to {s.end:.1f} µs")
    if s.nbytes:
        lines.append(amount(s.nbytes))
    if s.hidden is not None:
        lines.append(f"{s.hidden:.0%} hidden behind kernels")
    return "\n".join(line for line in lines if line)


def _labels(row: LaneRow) -> list[str]:
    parts, texts = [], []
    for strip in row.strips:
        for label in strip.labels:
            if not label.inside:
                parts.append(
                    f'<path d="M{label.at:.1f} {strip.y + PAD + BOX:.1f} V{label.y + 3:.1f}" stroke="{GREY}" '
                    'stroke-width="0.7"/>'
                )
                texts.append(
                    f'<rect x="{label.x - 1:.1f}" y="{label.y + 1:.1f}" width="{label.width + 2:.1f}" '
                    f'height="{LABEL - 1}" class="paper" fill-opacity="0.8"/>'
                )
            texts.append(_text(label.x, label.y + LABEL - 2.5, label.text))
    return parts + texts


def _arrows(timeline: Timeline, layout: Layout, row: LaneRow) -> list[str]:
    parts = []
    for arrow in row.arrows:
        source, target = row.strip(arrow.source_lane), row.strip(arrow.lane)
        if source is None or target is None:
            continue
        x1, x2 = layout.x(row, arrow.source_at), layout.x(row, arrow.at)
        y1, y2 = source.middle, target.middle
        bend = min(max(10.0, (x2 - x1) / 2), 40.0)
        late = arrow.at - arrow.source_at > (1e-6 if timeline.simulated else AT_ONCE)
        style = "event slack" if late else "event"  # pale: something else delayed the waiting work
        names = timeline.lanes[arrow.lane].name, timeline.lanes[arrow.source_lane].name
        tip = f"{arrow.name}: {names[0]} waits for {names[1]}"
        parts.append(
            f'<path class="{style}" marker-end="url(#head)" d="M{x1:.1f} {y1:.1f} C{x1 + bend:.1f} {y1:.1f} '
            f'{x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"><title>{escape(tip)}</title></path>'
        )
        if arrow.source_at >= row.start:
            parts.append(f'<circle cx="{x1:.1f}" cy="{y1:.1f}" r="1.8" class="end"/>')
    return parts


def _memory(timeline: Timeline, layout: Layout, row: LaneRow) -> list[str]:
    lowest = 0 if timeline.simulated else min(nbytes for _, nbytes in timeline.memory)
    span = max(timeline.peak - lowest, 1)
    bottom = row.memory_y + MEMORY

    def height(nbytes: int) -> float:
        return bottom - (nbytes - lowest) / span * (MEMORY - 2)

    now = next((nbytes for at, nbytes in reversed(timeline.memory) if at <= row.start), lowest)
    right = layout.x(row, timeline.end)
    path = f"M{LEFT} {bottom:.1f} V{height(now):.1f}"
    for at, nbytes in timeline.memory:
        if row.start < at <= row.end:
            path += f" H{layout.x(row, at):.1f} V{height(nbytes):.1f}"
    path += f" H{right:.1f} V{bottom:.1f} Z"
    scale = [amount(timeline.peak), "memory", amount(lowest) if lowest else "0"]
    return [
        f'<path d="{path}" class="memory"/>',
        *_column(MARGIN + 9, row.memory_y + 7, scale, "quiet"),
    ]


def _legend(timeline: Timeline, layout: Layout) -> tuple[list[str], float]:
    """Draw the source lines with their times, and the notes; return them with the height of the whole picture."""
    time: dict[str, float] = {}
    number: dict[str, int] = {}
    for s in timeline.slices:
        if s.line:
            time[s.line] = time.get(s.line, 0.0) + s.duration
            number[s.line] = number.get(s.line, 0) + 1
    shown = sorted(time, key=lambda line: -time[line])[:MOST_LINES]
    y = layout.bottom + 4
    parts = []
    for line in sorted(shown, key=_order):
        where, _, code = line.partition(": ")
        spent = f"{number[line]} ×, {microseconds(time[line])}"
        parts.append(_text(MARGIN, y + LABEL, clip(where, COLUMNS - len(spent) - 1)))
        parts.append(_text(WIDTH - MARGIN, y + LABEL, spent, "quiet", "end"))
        parts.append(_text(MARGIN + 2 * CHARACTER, y + LABEL + LINE, clip(code, COLUMNS - 2)))
        y += LINE * (2 if code else 1) + 2
    notes = [f"and {len(time) - len(shown)} more lines"] if len(shown) < len(time) else []
    if layout.unlabelled:
        notes.append(f"{layout.unlabelled} boxes are too narrow for a label")
    if any(s.kind in COPIES for s in timeline.slices):
        notes.append("red: a copy that no kernel hides")
    if timeline.simulated:
        notes.append("times are estimates, for a device that never waits for the host")
    notes += timeline.notes
    said = textwrap.wrap(" ".join(f"{n[0].upper()}{n[1:]}." for n in notes), COLUMNS)
    parts += _column(MARGIN, y + LABEL + 4, said, "quiet")
    return parts, y + LABEL + 8 + LINE * len(said)


def _order(line: str) -> tuple[str, int, str]:
    file, _, number = place(line).rpartition(":")
    return file, int(number) if number.isdigit() else 0, line


__all__ = ["svg"]
