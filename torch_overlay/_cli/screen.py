"""Prints lines and tables on a terminal: through rich where it is installed, as plain text elsewhere."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TYPE_CHECKING

from torch_overlay.table import titled


if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 160  # columns, if nothing says how wide the terminal is


def width() -> int:
    """Return the terminal's width, also if the output goes into a pipe: COLUMNS, or that of any standard stream."""
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns):
        return int(columns)
    for stream in (1, 2, 0):
        with contextlib.suppress(OSError):
            return os.get_terminal_size(stream).columns or WIDTH
    return WIDTH


class Screen:
    def __init__(self) -> None:
        self.console: Any = None
        with contextlib.suppress(ImportError):
            from rich.console import Console

            self.console = Console(width=width(), highlight=False)

    def heading(self, text: str) -> None:
        if self.console is None:
            print(f"\n{text}\n{'=' * len(text)}", flush=True)
            return
        from rich.text import Text

        self.console.print()
        self.console.rule(Text(text), align="left")

    def line(self, text: str = "") -> None:
        if self.console is None:
            print(text, flush=True)
        else:
            self.console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; cells may have several lines."""
        if self.console is None:
            print(titled(title, columns, rows), flush=True)
            return
        from rich.table import Table
        from rich.text import Text

        lines = any("\n" in cell for row in rows for cell in row)
        table = Table(
            *columns, title=title, title_justify="left", title_style="bold", show_lines=lines, show_header=any(columns)
        )
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        self.console.print(table)


__all__ = ["Screen", "width"]
