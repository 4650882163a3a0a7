#!/usr/bin/env python3
"""Measures what streams cost and gain under torch.compile, with the overlay and on stock PyTorch, in one run.

    python tools/bench/streams.py [--rows 'two chains,experts'] [--rounds 2] [--out DIR]

Every round measures both sides in both orders (overlay, stock, stock, overlay), each in a process of its own, stock
with TORCH_OVERLAY_DISABLE=1; a row's figure is the median over processes of medians over calls. A row that fails on
one side says why, and the rest goes on. The table is printed last; a JSON line per row goes to stdout before it and,
with --out, to DIR/bench.jsonl. --jsonl FILE, with --rounds 3, writes what tools/bench/gate.py compares.
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


@dataclasses.dataclass(frozen=True)
class Row:
    """`ratio` divides one process's medians; `against_stock` instead divides the overlay's figure by stock's."""

    name: str
    what: str
    limit: float
    ratio: Callable[[dict[str, float]], float]
    against_stock: bool = False
    unit: str = "us"


ROWS = [
    Row("two chains", "two 2 ms chains on two streams / one chain", 1.15, lambda r: r["two"] / r["one"]),
    Row("sixteen blocks", "host time: 16 blocks on 4 streams / without", 1.35, lambda r: r["streams"] / r["plain"]),
    Row("experts", "8 experts on 8 streams / on one", 1.08, lambda r: r["eight streams"] / r["one stream"]),
    Row(
        "experts graphed",
        "8 experts, reduce-overhead / graph by hand",
        1.4,
        lambda r: r["reduce-overhead"] / r["graph by hand"],
    ),
    Row(
        "experts memory",
        "peak memory, compiled / eager, 8 streams",
        1.10,
        lambda r: r["compiled"] / r["eager"],
        unit="bytes",
    ),
    Row(
        "training",
        "training step of two branches, on two streams / on one",
        0.75,
        lambda r: r["two streams"] / r["one stream"],
    ),
    Row(
        "training graphed",
        "the same under reduce-overhead, on two streams / on one",
        0.75,
        lambda r: r["two streams"] / r["one stream"],
    ),
    Row(
        "training memory",
        "peak memory of a training step, on streams / on one: two branches, eight experts; the larger",
        1.05,
        lambda r: max(r["two streams"] / r["one stream"], r["experts, eight streams"] / r["experts, one stream"]),
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
class Side:
    """Answers of the processes of one side about one row."""

    results: list[dict[str, float]] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)

    def figure(self, row: Row) -> float | None:
        return statistics.median(map(row.ratio, self.results)) if self.results else None

    def medians(self) -> dict[str, float]:
        keys = self.results[0] if self.results else {}
        return {key: statistics.median(r[key] for r in self.results if key in r) for key in keys}


def ask_process(
    command: Sequence[str], environment: dict[str, str], timeout: float
) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines about rows that a process prints, and how it ended."""
    return answers_of(start_process(command, environment), timeout)


def start_process(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def answers_of(process: subprocess.Popen[str], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """A process that waits for a line on its standard input goes on now."""
    try:
        text, complaints = process.communicate("\n", timeout=timeout)
        ended = f"ended with status {process.returncode}: {complaints.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        ended = f"no answer in {timeout:.0f} s"
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"row"')], ended


def measure(rows: list[str], stock: bool, timeout: float) -> list[dict[str, Any]]:
    """One process; where it dies, another one for the rows after the one that killed it."""
    answers: list[dict[str, Any]] = []
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_OVERLAY_DISABLE"}
    if stock:
        environment["TORCH_OVERLAY_DISABLE"] = "1"
    while rows:
        found, ended = ask_process([sys.executable, str(HERE / "stream_rows.py"), *rows], environment, timeout)
        answers += found
        rows = [r for r in rows if r not in {a["row"] for a in found}]
        if rows:
            answers.append({"row": rows[0], "error": f"the process {ended}"})
            rows = rows[1:]
    return answers


def describe() -> dict[str, Any]:
    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            return "unknown"

    versions = ask(
        sys.executable, "-c", "import torch, triton; print(torch.__version__, torch.version.cuda, triton.__version__)"
    )
    return {
        "hardware": ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "torch, cuda, triton": versions,
        "commit": ask("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "command": " ".join(sys.argv),
    }


def judge(row: Row, overlay: Side, stock: Side) -> dict[str, Any]:
    ours, theirs = overlay.figure(row), stock.figure(row)
    if row.against_stock:
        ours, theirs = (ours / theirs if ours and theirs else None), 1.0 if theirs else None
    return {
        "row": row.name,
        "what": row.what,
        "limit": row.limit,
        "overlay": ours,
        "stock": theirs,
        "ok": ours is not None and ours <= row.limit,
        f"overlay, {row.unit}": overlay.medians(),
        f"stock, {row.unit}": stock.medians(),
        "overlay, each": [row.ratio(r) for r in overlay.results],
        "stock, each": [row.ratio(r) for r in stock.results],
        "errors": [
            *(f"overlay: {e}" for e in dict.fromkeys(overlay.errors)),
            *(f"stock: {e}" for e in dict.fromkeys(stock.errors)),
        ],
    }


def figures(row: Row, overlay: Side, stock: Side) -> records.Figures:
    """Figures for the gate: the row's ratio in each process, against stock's in the same turn if that is the row."""
    found = [row.ratio(r) for r in overlay.results]
    if row.against_stock:
        found = records.ratios(found, [row.ratio(r) for r in stock.results])
    return {"bytes" if row.unit == "bytes" else "wall time": {row.what: found}}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def table(judged: list[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    rows = [("what", "limit", "overlay", "stock", "")]
    for j in judged:
        rows.append(
            (j["what"], number(j["limit"]), number(j["overlay"]), number(j["stock"]), "ok" if j["ok"] else "MISSED")
        )
    lines = aligned(rows)
    for j in judged:
        if "overlap" in j.get("overlay, us", {}):
            lines.append(f"{j['row']}: overlap, as the profiler sees it: {j['overlay, us']['overlap']:.2f} of the time")
        lines += [f"{j['row']}: {e}" for e in j["errors"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(r.name for r in ROWS), help="names, separated by commas")
    parser.add_argument("--rounds", type=records.positive, default=1, help="rounds of four processes")
    parser.add_argument("--timeout", type=records.seconds, default=240.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, help="folder for bench.jsonl")
    records.add_option(parser)
    args = parser.parse_args()
    chosen = [r for r in ROWS if r.name in args.rows.split(",")]
    sides = {(r.name, stock): Side() for r in chosen for stock in (False, True)}
    for stock in (False, True, True, False) * args.rounds:
        print(f"measuring {'stock' if stock else 'the overlay'}", file=sys.stderr, flush=True)
        for answer in measure([r.name for r in chosen], stock, args.timeout):
            side = sides[answer["row"], stock]
            if "error" in answer:
                side.errors.append(" ".join(answer["error"].split()))
            else:
                side.results.append(answer["result"])
    about = describe()
    judged = [judge(r, sides[r.name, False], sides[r.name, True]) for r in chosen]
    lines = [json.dumps({**about, **j}) for j in judged]
    print("\n".join(lines))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.jsonl").write_text("\n".join(lines) + "\n")
    found = {r.name: figures(r, sides[r.name, False], sides[r.name, True]) for r in chosen}
    records.write(args.jsonl, about, {"streams": found})
    print(f"\n{about['hardware']}, torch {about['torch, cuda, triton']}, commit {about['commit']}\n\n{table(judged)}")
    return 0 if all(j["ok"] for j in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
