#!/usr/bin/env python3
"""A bar chart of what `tools/bench/relaunch.py` measured, as SVG.

    python tools/bench/plot.py docs/relaunch.jsonl --rows llama --out docs/relaunch.svg

A group of bars is a row of the benchmark, a bar a side: its median µs a call. The lengths compare within a group.
Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any


SIDES = {"off": "no graph", "trees": "cudagraph trees", "relaunch": "torch_overlay"}
LEFT, WIDTH, BAR, GAP, TITLE = 150, 470, 16, 14, 20  # px
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.note { font-size: 11px; fill: #59636e }
.off { fill: #b6bec8 } .trees { fill: #7d8793 } .relaunch { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .note { fill: #9198a1 }
  .off { fill: #4b535d } .trees { fill: #7d8793 } .relaunch { fill: #3fb950 }
}
"""


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of `relaunch.jsonl`, by row. Raises ValueError for a line that is none."""
    rows = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows[row["row"]] = row
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a line of tools/bench/relaunch.py ({error})") from error
    return rows


def times(row: dict[str, Any]) -> dict[str, float]:
    """Median µs a call, by side."""
    found = {side: row["sides"].get(side, {}).get("median", {}).get("gpu us") for side in SIDES}
    return {side: value for side, value in found.items() if value is not None}


def draw(rows: list[dict[str, Any]], note: str) -> str:
    parts: list[str] = []
    y = 4.0
    for row in rows:
        values = times(row)
        y += TITLE
        parts.append(f'<text class="title" x="0" y="{y - 6}">{escape(row["what"] or row["row"])}</text>')
        for side, value in values.items():
            length = max(2.0, WIDTH * value / max(values.values()))
            middle = y + BAR / 2 + 4
            parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{SIDES[side]}</text>')
            parts.append(f'<rect class="{side}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{value:,.0f} µs</text>')
            y += BAR + 3
        y += GAP
    parts.append(f'<text class="note" x="0" y="{y + 6}">{escape(note)}</text>')
    size = f'width="{LEFT + WIDTH + 90}" height="{y + 16:.0f}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="relaunch.jsonl of a run")
    parser.add_argument("--rows", default="llama")
    parser.add_argument("--note", default="", help="what stands below; default: device and versions of the run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    known = read(args.measured)
    names = args.rows.split(",")
    if missing := [name for name in names if name not in known]:
        parser.error(f"{args.measured} has no row {', '.join(missing)}; it has {', '.join(known)}")
    rows = [known[name] for name in names]
    about = rows[0]
    note = args.note or ", ".join(f"{about[key]}" for key in ("hardware", "torch, cuda, triton") if key in about)
    args.out.write_text(draw(rows, note))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
