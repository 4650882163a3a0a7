#!/usr/bin/env python3
"""Measures what streams cost and gain under torch.compile, with the overlay and on stock PyTorch, in one run.

    python tools/bench/streams.py [--rows 'two chains,experts'] [--rounds 2]

Every round measures both sides in both orders (overlay, stock, stock, overlay), each in a process of its own, stock
with TORCH_OVERLAY_DISABLE=1; a row's figure is the median over processes of medians over calls. A row that fails on
one side says why, and the rest goes on. A JSON line for each row is printed, and the table last. --jsonl FILE, with
--rounds 3, writes what tools/bench/gate.py compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]


SIDES = ("overlay", "stock")


@dataclasses.dataclass(frozen=True)
class Row:
    """`ratio` divides one process's medians; `against_stock` instead divides the overlay's figure by stock's."""

    name: str
    what: str
    limit: float
    ratio: Callable[[dict[str, float]], float]
    against_stock: bool = False
    unit: str = "us"


def over(above: str, below: str) -> Callable[[dict[str, float]], float]:
    return lambda result: result[above] / result[below]


on_two = over("two streams", "one stream")
on_eight = over("experts, eight streams", "experts, one stream")
ROWS = [
    Row("two chains", "two 2 ms chains on two streams / one chain", 1.15, over("two", "one")),
    Row("sixteen blocks", "host time: 16 blocks on 4 streams / without", 1.35, over("streams", "plain")),
    Row("experts", "8 experts on 8 streams / on one", 1.08, over("eight streams", "one stream")),
    Row("experts graphed", "8 experts, reduce-overhead / graph by hand", 1.4, over("reduce-overhead", "graph by hand")),
    Row("experts memory", "peak memory, compiled / eager, 8 streams", 1.10, over("compiled", "eager"), unit="bytes"),
    Row("training", "training step of two branches, on two streams / on one", 0.75, on_two),
    Row("training graphed", "the same under reduce-overhead, on two streams / on one", 0.75, on_two),
    Row(
        "training memory",
        "peak memory of a training step, on streams / on one: two branches, eight experts; the larger",
        1.05,
        lambda result: max(on_two(result), on_eight(result)),
        unit="bytes",
    ),
    Row(
        "compile time",
        "compile time of GPT-2 small / stock",
        1.03,
        lambda r: r["seconds"],
        against_stock=True,
        unit="s",
    ),
]


@dataclasses.dataclass
class Answers:
    """Answers of the processes about one row: side -> results, in order; and errors."""

    name: str
    results: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.errors.append(f"{answer['side']}: {' '.join(answer['error'].split())}")
        else:
            self.results.setdefault(answer["side"], []).append(answer["result"])

    def figure(self, side: str, key: str) -> float | None:
        values = [r[key] for r in self.results.get(side, []) if isinstance(r.get(key), (int, float))]
        return statistics.median(values) if values else None


def measure(rows: list[str], side: str, timeout: float) -> list[dict[str, Any]]:
    """One process; where it dies, another one for the rows after the one that killed it."""
    answers: list[dict[str, Any]] = []
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_OVERLAY_DISABLE"}
    if side == "stock":
        environment["TORCH_OVERLAY_DISABLE"] = "1"
    while rows:
        command = [sys.executable, str(HERE / "stream_rows.py"), *rows]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
            text, ended = done.stdout, f"ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired as error:
            text, ended = (error.stdout or b"").decode(), f"no answer in {timeout:.0f} s"
        found = [json.loads(line) for line in text.splitlines() if line.startswith('{"row"')]
        answers += found
        rows = [r for r in rows if r not in {a["row"] for a in found}]
        if rows:
            answers.append({"row": rows[0], "error": f"the process {ended}"})
            rows = rows[1:]
    return answers


def describe() -> dict[str, Any]:
    import torch
    import triton

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            return "unknown"

    return {
        "hardware": ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "torch, cuda, triton": f"{torch.__version__} {torch.version.cuda} {triton.__version__}",
        "commit": ask("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "command": " ".join(sys.argv),
    }


def judge(row: Row, answers: Answers) -> dict[str, Any]:
    each = {side: list(map(row.ratio, answers.results.get(side, []))) for side in SIDES}
    ours, theirs = (statistics.median(each[side]) if each[side] else None for side in SIDES)
    if row.against_stock:
        ours, theirs = (ours / theirs if ours and theirs else None), 1.0 if theirs else None
    found: dict[str, Any] = {"overlay": ours, "stock": theirs, "ok": ours is not None and ours <= row.limit}
    for side, results in answers.results.items():
        found[f"{side}, {row.unit}"] = {key: answers.figure(side, key) for key in results[0]}
        found[f"{side}, each"] = each[side]
    return {
        "row": row.name,
        "what": row.what,
        "limit": row.limit,
        **found,
        "errors": list(dict.fromkeys(answers.errors)),
    }


def figures(row: Row, answers: Answers) -> records.Figures:
    """Figures for the gate: the row's ratio in each process, against stock's in the same turn if that is the row."""
    found, stock = (list(map(row.ratio, answers.results.get(side, []))) for side in SIDES)
    if row.against_stock:
        found = records.ratios(found, stock)
    return {"bytes" if row.unit == "bytes" else "wall time": {row.what: found}}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def table(judged: list[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    rows = [("what", "limit", "overlay", "stock", "")]
    rows += [
        (j["what"], *(number(j[key]) for key in ("limit", "overlay", "stock")), "ok" if j["ok"] else "MISSED")
        for j in judged
    ]
    lines = aligned(rows)
    for j in judged:
        if "overlap" in j.get("overlay, us", {}):
            lines.append(f"{j['row']}: overlap, as the profiler sees it: {j['overlay, us']['overlap']:.2f} of the time")
        lines += [f"{j['row']}: {error}" for error in j["errors"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {row.name: row for row in ROWS}
    parser.add_argument("--rows", type=records.names(known), default=list(known), help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=records.positive, default=1, help="rounds of four processes")
    parser.add_argument("--timeout", type=records.seconds, default=240.0, help="seconds for one process")
    records.add_option(parser)
    args = parser.parse_args()
    chosen = [known[name] for name in args.rows]
    answers = {row.name: Answers(row.name) for row in chosen}
    for side in (*SIDES, *reversed(SIDES)) * args.rounds:
        print(f"measuring {side}", file=sys.stderr, flush=True)
        for answer in measure(list(answers), side, args.timeout):
            answers[answer["row"]].add({**answer, "side": side})
    about = describe()
    judged = [judge(row, answers[row.name]) for row in chosen]
    print("\n".join(json.dumps({**about, **j}) for j in judged))
    records.write(args.jsonl, about, {"streams": {row.name: figures(row, answers[row.name]) for row in chosen}})
    print(f"\n{about['hardware']}, torch {about['torch, cuda, triton']}, commit {about['commit']}\n\n{table(judged)}")
    return 0 if all(j["ok"] for j in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
