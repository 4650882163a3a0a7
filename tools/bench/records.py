"""JSON lines of benchmarks: what a run measured, in one form for `gate.py`.

    {"bench": "relaunch", "about": {"device": "nvidia-h100-80gb-hbm3", "commit": "1a2b3c4", ...}}
    {"row": "llama", "figures": {"device time": {"relaunch / trees": [0.801, 0.799]}, "count": {"nodes": [265, 265]}}}

A line with `about` says what measured the rows after it, and where. A row has figures by kind (`KINDS`), and a figure
has its repeated samples: one a process, or one a turn of a process. Less is better in every figure but those of the
kind "exact": counts of compiled code have no direction, for a graph that is lost makes fewer nodes. A time is always a
ratio of two times of one run, because times of two machines, or of two days, don't compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Figures = dict[str, dict[str, list[float]]]  # kind -> name -> samples

KINDS = {  # -> the smallest relative change that matters
    "exact": 0.0,  # counts of compiled code: nothing in them is chance, and any other value is a change
    "count": 0.01,  # launches, nodes, events, waits and patches, as a process counted them
    "bytes": 0.01,
    "instructions": 0.01,
    "device time": 0.03,  # ratios of times between two events of the device that no host delays
    "wall time": 0.10,  # ratios of times that the host takes, or takes part in
}
TIMED = ("device time", "wall time")


class BadInput(Exception):
    """An error of a file, in one line: what it lacks, or has wrong."""


@dataclasses.dataclass(frozen=True)
class Record:
    bench: str
    row: str
    about: dict[str, Any]
    figures: Figures

    @property
    def key(self) -> tuple[str, str]:
        return self.bench, self.row


def device_of(hardware: str) -> str:
    """The name of a baseline for a line of nvidia-smi: "NVIDIA H100 80GB HBM3, 580.1" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.splitlines()[0].partition(",")[0].lower()).strip("-") if hardware else ""


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios of each sample to the other side's of the same turn; none where a side lacks a turn."""
    return [a / b for a, b in zip(mine, others) if b] if len(mine) == len(others) else []


def samples(results: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[float]]:
    """The samples of several processes or turns, for each name that all of them have a number for."""
    return {name: [r[name] for r in results] for name in names if all(number(r.get(name)) for r in results)}


def number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def positive(text: str) -> int:
    """An argument of a command line that is a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def seconds(text: str) -> float:
    """An argument of a command line that is a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive, finite number of seconds")
    return value


def names(known: Iterable[str], least: int = 1) -> Callable[[str], list[str]]:
    """An argument of a command line that is at least so many of the known names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if (unknown := [name for name in chosen if name not in known]) or len(chosen) < least:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown) or 'name'}: choose from {', '.join(known)}")
        return chosen

    return parse


def output(text: str) -> Path:
    """An argument of a command line that is a file to write, checked before anything is measured. Makes its folder."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be written ({getattr(error, 'strerror', error)}): name a file in a folder of yours"
        ) from error
    return path


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jsonl", type=output, metavar="FILE", help="JSON lines for tools/bench/gate.py")


def write(path: Path | None, about: Mapping[str, Any], benches: Mapping[str, Mapping[str, Figures]]) -> None:
    """Write the rows of one or more benchmarks, those without figures left out; nothing if there is no path."""
    if path is None:
        return
    where = {"device": device_of(about.get("hardware", "")), **about}
    where.pop("command", None)  # it names the folders of whoever measured
    path.write_text(text(Record(bench, row, where, f) for bench, rows in benches.items() for row, f in rows.items()))


def text(records: Iterable[Record]) -> str:
    lines: list[str] = []
    before: tuple[str, dict[str, Any]] | None = None
    for record in records:
        figures = {kind: {name: s for name, s in named.items() if s} for kind, named in record.figures.items()}
        figures = {kind: named for kind, named in figures.items() if named}
        if not figures:
            continue
        if before != (record.bench, record.about):
            before = record.bench, record.about
            lines.append(json.dumps({"bench": record.bench, "about": record.about}))
        lines.append(json.dumps({"row": record.row, "figures": figures}))
    return "".join(line + "\n" for line in lines)


def read(path: Path) -> list[Record]:
    """Raises BadInput for a file that can't be read, and for the first line that is none of these."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: can't be read: {getattr(error, 'strerror', error)}") from error
    records: dict[tuple[str, str], Record] = {}
    head: dict[str, Any] = {}
    for place, line in ((f"{path}:{i}", line) for i, line in enumerate(lines, start=1)):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = getattr(error, "msg", error)
            raise BadInput(f"{place}: not a JSON line ({why}); measure again") from error
        if isinstance(value, dict) and isinstance(value.get("bench"), str) and isinstance(value.get("about"), dict):
            head = value
            continue
        if problem := _problem(value, head):
            raise BadInput(f"{place}: {problem}; measure again")
        record = Record(head["bench"], value["row"], head["about"], value["figures"])
        if record.key in records:
            raise BadInput(f"{place}: a second row {record.row} of {record.bench}; measure again")
        records[record.key] = record
    if not records:
        raise BadInput(f"{path}: no rows; measure again")
    return list(records.values())


def _problem(value: Any, head: Mapping[str, Any]) -> str:
    """Say what is wrong with a line that should be a row; empty if nothing is."""
    if not isinstance(value, dict) or not isinstance(value.get("row"), str):
        return "neither a row nor a line about rows"
    about = head.get("about", {})
    if not about.get("device"):
        return "no line before this row says on which device it was measured"
    if not isinstance(about["device"], str) or not re.fullmatch("[a-z0-9-]+", about["device"]):
        return f"the device {about['device']!r} is no name of small letters, digits and hyphens"
    if not isinstance(about.get("depends", {}), dict):
        return "what the figures depend on has no names"
    figures = value.get("figures")
    if not isinstance(figures, dict) or not figures:
        return f"row {value['row']} has no figures"
    for kind, named in figures.items():
        if kind not in KINDS:
            return f"row {value['row']} has figures of the unknown kind {kind}"
        if not isinstance(named, dict):
            return f"row {value['row']} has no named figures of the kind {kind}"
        for name, samples in named.items():
            if not isinstance(samples, list) or not samples or not all(number(s) and s >= 0 for s in samples):
                return f"{name} of row {value['row']} has no list of samples, numbers of at least 0"
    return ""
