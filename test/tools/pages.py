"""Reads the pages: their prose, tables and blocks of code."""

from __future__ import annotations

import re

import form


DOCUMENTS = sorted([*form.ROOT.glob("*.md"), *form.ROOT.glob("docs/*.md"), *form.ROOT.glob("examples/*.md")])
PAGES = [page for page in DOCUMENTS if page.parent.name != "examples" and page.name != "CHANGELOG.md"]


def without_code(text: str) -> str:
    """The page without blocks of code, code in a line, targets of links and remarks."""
    for pattern in (r"^```.*?^```", r"^(?: {4}\S.*\n)+", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.M | re.S if "*?" in pattern else re.M)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", text))


def paragraphs(text: str) -> list[str]:
    """Prose alone: no headings and no tables; an item of a list is a paragraph."""
    parts = re.split(r"\n\s*\n|\n(?=(?:- |\d+\. ))", without_code(text))
    return [part for part in map(str.strip, parts) if part and part[0] not in "#|!"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (form.ROOT / page).read_text(), re.M | re.S)


def tables(text: str) -> list[list[list[str]]]:
    """Tables of a page, as rows of cells; the head is the first row."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    rows = [[[cell.strip() for cell in line[1:-1].split(" | ")] for line in each.splitlines()] for each in found]
    return [[row for n, row in enumerate(table) if n != 1] for table in rows]
