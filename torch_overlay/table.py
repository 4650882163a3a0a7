"""Tables of text."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, in which the cells of a column begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def titled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells may have several lines; without a head if no column has a name."""
    lines = []
    for row in (*([columns] if any(columns) else ()), *rows):
        cells = [cell.split("\n") for cell in row]
        lines += [[c[i] if i < len(c) else "" for c in cells] for i in range(max(map(len, cells)))]
    return "\n".join([title, *aligned(lines)])
