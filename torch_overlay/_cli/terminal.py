"""Prints lines and tables on a terminal: through rich where it is installed, as plain text elsewhere."""

from __future__ import annotations

import sys
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence

PIPE_WIDTH = 160  # in columns, where the output is no terminal


class Screen:
    def __init__(self) -> None:
        self.console: Any = None
        try:
            from rich.console import Console
        except ImportError:
            return
        self.console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, style=style or None, markup=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.console is None:
            print(plain_table(title, columns, rows), flush=True)
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, title=title, title_justify="left", title_style="bold", show_lines=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [cells for row in (columns, *rows) for cells in _cells(row, len(columns))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join([title, *("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)])


def _cells(row: Sequence[str], columns: int) -> list[list[str]]:
    """Split a row whose cells have several lines into rows whose cells have one line."""
    split = [cell.split("\n") for cell in row]
    return [
        [split[c][i] if i < len(split[c]) else "" for c in range(columns)] for i in range(max(len(s) for s in split))
    ]
