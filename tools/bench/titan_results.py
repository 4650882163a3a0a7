"""Answers of the ranks of the benchmark of training at scale: merged, compared, and as tables.

A turn is what the ranks of one process group say, a side is all turns of one side for a row.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, TYPE_CHECKING

import records  # pyrefly: ignore[missing-import]
import streams  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from titan_config import Row  # pyrefly: ignore[missing-import]

MEMORY = ("reserved MiB", "peak MiB", "device MiB")
COUNTS = ("captures", "nodes", "refusals")
SLOWEST = ("ms", "host ms", *MEMORY, *COUNTS)  # of all ranks, the largest


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A turn: the first error of a rank, or the largest figures of all ranks, and the losses, which all have alike."""
    errors = [rank for rank in ranks if "error" in rank]
    if errors:
        return {"error": min(errors, key=lambda rank: rank["at"])["error"]}
    turn = {key: max(rank[key] for rank in ranks) for key in SLOWEST if key in ranks[0]}
    for key in ("first ms", "each ms"):
        turn[key] = [max(times) for times in zip(*(rank[key] for rank in ranks))]
    turn["reasons"] = list(dict.fromkeys(reason for rank in ranks for reason in rank.get("reasons", ())))
    return turn | {key: ranks[0][key] for key in ("losses", "norms")}


def side_of(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the turns of a side. The first steps are those of the last turn, whose caches are full."""
    if errors := [turn["error"] for turn in turns if "error" in turn]:
        return {"error": errors[0], "turns": turns}
    side = {key: statistics.median(turn[key] for turn in turns) for key in SLOWEST if key in turns[0]}
    times = [turn["ms"] for turn in turns]
    side |= {"noise": max(times) / min(times) - 1} if len(times) > 1 else {}
    side |= {"first ms": turns[-1]["first ms"], "turns": turns}
    return side | {key: turns[0][key] for key in ("losses", "norms", "reasons")}


def figures(sides: Mapping[str, dict[str, Any]]) -> records.Figures:
    """The figures of a row for the gate. A sample of a time is some steps in a row of one turn, divided by those of the
    side without graphs; one of memory and counts is a turn. Sides that failed have none."""
    turns = {name: side["turns"] for name, side in sides.items() if "error" not in side}
    each = {name: [ms for turn in of_side for ms in turn["each ms"]] for name, of_side in turns.items()}
    found: records.Figures = {"wall time": {}, "bytes": {}, "count": {}}
    for name, of_side in turns.items():
        if name != "none":
            found["wall time"][f"{name} / none"] = records.ratios(each[name], each.get("none", []))
        for kind, keys in (("bytes", MEMORY), ("count", COUNTS)):
            found[kind] |= {f"{name} {key}": values for key, values in records.samples(of_side, keys).items()}
    return found


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first step at which two turns differ, None where they are equal bit for bit."""
    for key, what in (("losses", "loss"), ("norms", "gradient's norm")):
        for number, (a, b) in enumerate(zip(ours[key], theirs[key], strict=True), 1):
            if a != b:
                return f"{what} {number} of {len(ours[key])} is {a!r}, not {b!r}"
    return None


def compare(sides: Mapping[str, dict[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """Compare losses and gradient norms of each side's turns with those of the side without graphs.

    Returns a word for each side ("equal", "differs", or "-" where it can't be known, as of the side without graphs that
    was run once), and a sentence for each side that differs although the one without graphs repeats itself.
    """
    words = dict.fromkeys(sides, "-")
    base = sides.get("none")
    if base is None or "error" in base:
        return words, []
    expected = base["turns"][0]
    if any(_difference(turn, expected) for turn in base["turns"]):
        return {**words, "none": "doesn't repeat"}, []
    problems = []
    for name, side in sides.items():
        if "error" in side or (name == "none" and len(side["turns"]) == 1):
            continue
        found = next(filter(None, (_difference(turn, expected) for turn in side["turns"])), None)
        words[name] = "differs" if found else "equal"
        if found:
            known = "repeats itself" if len(base["turns"]) > 1 else "was run once, and may not repeat itself"
            problems.append(f"{name} differs from none, which {known}: {found}")
    return words, problems


def per_layer(measured: Mapping[Row, Mapping[str, dict[str, Any]]], depths: Mapping[str, int]) -> list[list[str]]:
    """Lines about rows that differ in layers alone: for each side, MiB a GPU of a layer and of all layers of the model,
    by a straight line through what was measured."""
    groups: dict[Row, list[Row]] = {}
    for row in measured:
        groups.setdefault(dataclasses.replace(row, layers=depths[row.width]), []).append(row)
    lines = []
    for whole, rows in groups.items():
        for side in dict.fromkeys(name for row in rows for name in measured[row]):
            points = [
                (row.layers, found) for row in rows if (found := measured[row].get(side, {})) and MEMORY[0] in found
            ]
            if len({layers for layers, _ in points}) < 2:
                continue
            cells = []
            for key in MEMORY:
                line = statistics.linear_regression([n for n, _ in points], [found[key] for _, found in points])
                cells.append(f"{line.slope:.0f}, {line.intercept + line.slope * whole.layers:.0f}")
            lines.append([whole.name, side, *cells])
    header = ["MiB of a layer, and of all", "side", *(key.removesuffix(" MiB") for key in MEMORY)]
    return [header, *lines] if lines else []


def cells(row: Row, side: str, found: dict[str, Any], word: str = "") -> list[str]:
    if "error" in found:
        return [row.name, side, *["-"] * 12, found["error"][:120]]

    def number(key: str, digits: int = 0) -> str:
        return f"{found[key]:.{digits}f}" if key in found else "-"

    return [
        row.name,
        side,
        number("ms", 1),
        f"{found['noise']:.1%}" if "noise" in found else "-",
        f"{row.tokens / found['ms'] * 1e3:.0f}",
        number("host ms", 1),
        *(number(key) for key in MEMORY),
        " ".join(f"{ms:.0f}" for ms in found["first ms"]),
        *(number(key) for key in COUNTS),
        f"{found['losses'][0]:.5f} .. {found['losses'][-1]:.5f} {word}".rstrip(),
        "; ".join(found["reasons"])[:120],
    ]


def table(measured: Mapping[Row, Mapping[str, dict[str, Any]]], depths: Mapping[str, int]) -> str:
    """The table of all rows and sides, what a layer takes, and a line for each side whose losses are wrong."""
    header = ["row", "side", "ms a step", "noise", "tokens/s", "host ms", *(key.removesuffix(" MiB") for key in MEMORY)]
    header += ["first five steps, ms", *COUNTS, "losses", ""]
    lines, problems = [header], []
    for row, sides in measured.items():
        words, wrong = compare(sides)
        lines += [cells(row, side, found, words[side]) for side, found in sides.items()]
        hint = "" if row.deterministic else "; --deterministic has all sides choose the same kernels"
        problems += [f"{row.name}: {line}{hint}" for line in wrong]
        if "error" in sides.get("none", {"error": "not run"}):
            what = "failed" if "none" in sides else "is missing"
            problems.append(f"{row.name}: losses were not compared, for the side none {what}")
    parts = [streams.aligned(lines)]
    if layers := per_layer(measured, depths):
        parts.append(streams.aligned(layers))
    return "\n\n".join("\n".join(part) for part in [*parts, problems] if part)


def passed(measured: Mapping[Row, Mapping[str, dict[str, Any]]]) -> bool:
    """True if no side failed, and none has other losses than the one without graphs."""
    failed = any("error" in side for sides in measured.values() for side in sides.values())
    return not failed and not any(compare(sides)[1] for sides in measured.values())
