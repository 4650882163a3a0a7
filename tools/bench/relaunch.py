#!/usr/bin/env python3
"""Compares CUDA graphs under torch.compile: no graph, upstream's trees, relaunch, and a graph made by hand.

    python tools/bench/relaunch.py --out DIR [--rows llama,mlp] [--sides off,trees,relaunch,replay] [--limit 540]
    python tools/bench/relaunch.py --read DIR1/measurements.jsonl DIR2/measurements.jsonl
    python tools/bench/relaunch.py --rounds 3 --jsonl FILE                  for tools/bench/gate.py

Every figure comes from processes of its own, one row on one side each, in both orders (off, trees, relaunch, replay,
and back): a cell is the median of its processes, and the largest difference between two processes of one side is the
noise of the row (A/A). Before the first measurement `--prepare` processes at a time fill the compile caches, so that
`first` (the first call) holds no compilation by Triton. Steps take four sets of inputs in turn; the graph made by hand
reads one, and hands out nothing: it is the limit.

    gpu        µs a step, many in a row, between two events of the device
    queued     the same, with the steps launched ahead, while the device is busy: no step waits for the host, unless it
               has more launches than the queue takes, about a thousand
    host       µs until a step returns, from an idle device;  layer: how many of them the graph layer takes
    reserved, peak    MiB of the allocator after 50 steps (peak: allocated);  device: cudaMemGetInfo, since the start
    first      s of the first call;  warm-up: of it, in the graph layer;  capture: s that the next calls take beyond a
               usual one; all without Python's garbage collector, which comes by when it likes
    graph      MiB of the device that the graphs keep;  at capture: the most that making one of relaunch's takes beyond
               what it keeps
    nodes      of all templates;  patched: nodes a step;  bare: gpu and host µs of launching relaunch's own graphs
    bare layer    host µs of such a launch in the place of the graph layer, with the rest of the step around it; the two
               take turns, a few steps each

After the table come the limits that a release must hold. A JSON line for each row goes to stdout before the table and,
with --out, to DIR/relaunch.jsonl; DIR/measurements.jsonl has a line for each process, and --read makes the table from
such files again, also from several runs on the same machine.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]
from processes import Process  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

COLUMNS = {  # header -> key, digits
    "gpu": ("gpu us", 1),
    "queued": ("queued us", 1),
    "host": ("host us", 1),
    "layer": ("layer us", 1),
    "reserved": ("reserved MiB", 0),
    "peak": ("peak MiB", 0),
    "device": ("device MiB", 0),
    "first": ("first call s", 1),
    "warm-up": ("warm up s", 3),
    "capture": ("capture s", 3),
    "graph": ("graph MiB", 1),
    "at capture": ("capture MiB", 1),
    "nodes": ("nodes", 0),
    "patched": ("patched", 1),
    "bare gpu": ("bare gpu us", 1),
    "bare host": ("bare host us", 1),
    "bare layer": ("bare layer us", 1),
}
COMPARED = (  # in the gate's lines: kind, key, and the sides that relaunch's time is divided by
    ("device time", "queued us", ("trees", "replay")),
    ("wall time", "gpu us", ("off", "trees")),
    ("wall time", "host us", ("off", "trees")),
    ("wall time", "layer us", ("trees",)),
)
COUNTED = ("nodes", "patched", "relaunches", "refusals")
MEMORY = ("reserved MiB", "peak MiB", "device MiB", "graph MiB", "capture MiB")
TOGETHER = 24  # processes that import at a time; nothing else runs while one measures
TRAINED = ("gpt2 training", "llama training")
MODELS = ("gpt2", "bert", "resnet50", "llama")


class Row(streams.Answers):
    def noise(self, key: str) -> float:
        """The largest relative difference between two processes of one side."""
        spread = [0.0]
        for results in self.results.values():
            values = [r[key] for r in results if r.get(key)]
            if len(values) > 1:
                spread.append(max(values) / min(values) - 1)
        return max(spread)

    def ratio(self, key: str, side: str, *others: str) -> float | None:
        """Ratio of the side to the least of the others; None if one of them is missing."""
        mine = self.figure(side, key)
        theirs = [figure for other in others if (figure := self.figure(other, key)) is not None]
        if mine is None or len(theirs) < len(others) or not min(theirs):
            return None
        return mine / min(theirs)

    def figures(self) -> records.Figures:
        """Figures for the gate: a sample is of one process, divided by that of the other side's in the same turn."""
        mine = self.results.get("relaunch", [])
        found: records.Figures = {kind: {} for kind, *_ in COMPARED}
        for kind, key, others in COMPARED:
            for other in others:
                pair = [[r[key] for r in results if r.get(key)] for results in (mine, self.results.get(other, []))]
                found[kind][f"{key.partition(' ')[0]} / {other}"] = records.ratios(*pair)
        return {**found, "count": records.samples(mine, COUNTED), "bytes": records.samples(mine, MEMORY)}

    def line(self, about: dict[str, Any], titles: dict[str, str]) -> str:
        sides = {
            side: {
                "median": {key: self.figure(side, key) for key, _ in COLUMNS.values()},
                "each": results,
            }
            for side, results in self.results.items()
        }
        noise = {key: self.noise(key) for key in ("gpu us", "host us")}
        whole = {**about, "row": self.name, "what": titles.get(self.name, ""), "noise": noise, "sides": sides}
        return json.dumps({**whole, "errors": self.errors})


# ---- limits


@dataclasses.dataclass
class Limit:
    what: str
    limit: float
    value: float | None

    @property
    def ok(self) -> bool:
        return self.value is not None and self.value <= self.limit


def limits(rows: dict[str, Row]) -> list[Limit]:
    """Limits whose rows were measured."""
    found: list[Limit] = []

    def say(row: str, what: str, limit: float, value: Callable[[Row], float | None]) -> None:
        if row in rows and "relaunch" in rows[row].results:
            found.append(Limit(f"{row}: {what}", limit, value(rows[row])))

    def over_bare(row: Row) -> float | None:
        layer, bare = row.figure("relaunch", "layer us"), row.figure("relaunch", "bare layer us")
        return None if layer is None or bare is None else layer - bare

    def until_steady(row: Row) -> float | None:
        """Warm-up and capture, to those of trees."""

        def of(side: str) -> float | None:
            warm_up, capture = row.figure(side, "warm up s"), row.figure(side, "capture s")
            return None if warm_up is None or capture is None else warm_up + capture

        mine, theirs = of("relaunch"), of("trees")
        return mine / theirs if mine is not None and theirs else None

    def ratio(key: str, *others: str) -> Callable[[Row], float | None]:
        return lambda row: row.ratio(key, "relaunch", *others)

    say("llama", "host µs in the graph layer beyond a bare launch", 12.0, over_bare)
    say("llama", "GPU time / trees", 0.85, ratio("gpu us", "trees"))
    say("mlp", "GPU time / trees", 0.60, ratio("gpu us", "trees"))
    say("mlp", "GPU time / no graph", 0.85, ratio("gpu us", "off"))
    say("experts", "GPU time / graph of the eager program by hand", 1.10, ratio("gpu us", "replay"))
    # On a slow host such a short step waits for Dynamo's call, which the graph made by hand hasn't.
    say("experts", "GPU time, queued / graph of the eager program by hand", 1.10, ratio("queued us", "replay"))
    for name in MODELS:
        for row in (name, f"{name} training"):
            if row in rows:
                allowed = 1.0 + rows[row].noise("gpu us")
                say(row, "GPU time / the better of trees and no graph", allowed, ratio("gpu us", "trees", "off"))
    for row in ("one kernel", "four kernels"):
        say(row, "host time / no graph", 1.0, ratio("host us", "off"))
        say(row, "GPU time / no graph", 1.0, ratio("gpu us", "off"))
    for row in TRAINED:
        say(row, "reserved memory / no graph", 1.02, ratio("reserved MiB", "off"))
        say(row, "device memory / no graph", 1.02, ratio("device MiB", "off"))
    for row in rows:
        say(row, "time of warm-up and capture / trees", 1.5, until_steady)
        say(row, "MiB that a capture takes beyond its graph", 16.0, lambda row: row.figure("relaunch", "capture MiB"))
    return found


# ---- the table


def table(rows: Iterable[Row], titles: dict[str, str]) -> str:
    cells: list[list[str]] = [["row", "side", *COLUMNS]]
    notes: list[str] = []
    for row in rows:
        for number, side in enumerate(row.results):
            figures = [row.figure(side, key) for key, _ in COLUMNS.values()]
            texts = ["-" if f is None else f"{f:.{digits}f}" for f, (_, digits) in zip(figures, COLUMNS.values())]
            cells.append([titles.get(row.name, row.name) if number == 0 else "", side, *texts])
        noise = ", ".join(f"{key.split()[0]} {row.noise(key):.1%}" for key in ("gpu us", "host us"))
        notes.append(f"{row.name}: A/A noise {noise}")
        notes += [f"{row.name}, {error}" for error in dict.fromkeys(row.errors)]
        notes += [
            f"{row.name}: {n}"
            for n in dict.fromkeys(r["note"] for rs in row.results.values() for r in rs if "note" in r)
        ]
        refused = row.figure("relaunch", "refusals")
        if refused:
            notes.append(f"{row.name}: {refused:.0f} regions refused")
    return "\n".join([*streams.aligned(cells), "", *notes])


def limit_table(found: Sequence[Limit]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    cells = [("limit", "at most", "seen", "")]
    cells += [(f.what, number(f.limit), number(f.value), "ok" if f.ok else "MISSED") for f in found]
    return "\n".join(streams.aligned(cells))


# ---- processes


def start(row: str, side: str, is_compiled: bool = False) -> Process:
    """If the kernels of its row and side are in the compile caches, it needs no processes that compile beside it."""
    from relaunch_process import environment_of  # pyrefly: ignore[missing-import]

    environment = environment_of(side) | ({"TORCHINDUCTOR_COMPILE_THREADS": "1"} if is_compiled else {})
    return Process(row, side, environment, str(HERE / "relaunch_process.py"))


def prepare(names: Sequence[str], sides: Sequence[str], jobs: int, timeout: float) -> None:
    """Fill the compile caches. What fails here fails again, and is told then."""
    pairs = [(name, side) for name in names for side in sides if side not in ("replay", "chain")]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda pair: start(*pair).ask_and_stop("warm", timeout), pairs))


def measure(args: argparse.Namespace, about: dict[str, Any]) -> dict[str, Row]:
    rows = {name: Row(name) for name in args.rows}
    deadline = time.monotonic() + args.limit
    if args.prepare:
        print(f"filling the compile caches, {args.prepare} processes at a time", file=sys.stderr, flush=True)
        prepare(args.rows, args.sides, args.prepare, args.timeout)
    order = [(name, side) for name in args.rows for side in [*args.sides, *reversed(args.sides)] * args.rounds]
    waiting: collections.deque[Process] = collections.deque()
    for number, (name, side) in enumerate(order):
        if time.monotonic() > deadline:
            rows[name].errors.append(f"{side}: out of time")
            continue
        if not waiting:
            waiting.extend(start(*pair, bool(args.prepare)) for pair in order[number : number + TOGETHER])
            for process in waiting:
                process.tell("ready")
            for process in waiting:
                process.answer(args.timeout)
        begin = time.monotonic()
        answer = {"row": name, "side": side, **waiting.popleft().ask_and_stop("measure", args.timeout)}
        rows[name].add(answer)
        print(f"measured {name}, {side} in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        if args.out:
            with open(args.out / "measurements.jsonl", "a") as file:
                print(json.dumps({**answer, "about": about}), file=file)
    for process in waiting:
        process.stop()
    return rows


def read(files: Iterable[Path]) -> tuple[dict[str, Row], dict[str, Any]]:
    rows: dict[str, Row] = {}
    about: dict[str, Any] = {}
    for file in files:
        for line in file.read_text().splitlines():
            measurement = json.loads(line)
            about = measurement.pop("about", about)
            if (name := measurement["row"]) not in rows:
                rows[name] = Row(name)
            rows[name].add(measurement)
    return rows, about


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from relaunch_process import ROWS, SIDES  # pyrefly: ignore[missing-import]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=records.names(ROWS), default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument(
        "--sides",
        type=records.names(SIDES),
        default=["off", "trees", "relaunch", "replay"],
        help=f"of {', '.join(SIDES)}; stock: trees without the overlay; python: relaunch without the C helper",
    )
    parser.add_argument(
        "--rounds", type=records.positive, default=1, help="rounds, each of two processes for a row and a side"
    )
    parser.add_argument("--prepare", type=int, default=6, help="processes that fill the compile caches; 0 for none")
    parser.add_argument("--timeout", type=records.seconds, default=240.0, help="seconds for one process")
    parser.add_argument(
        "--limit", type=records.seconds, default=3600.0, help="seconds after which no process is started"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON lines")
    records.add_option(parser)
    parser.add_argument("--read", type=Path, nargs="+", help="measure nothing: the table of these measurements")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    from relaunch_rows import ROWS  # pyrefly: ignore[missing-import]

    titles = {name: title for name, (title, _) in ROWS.items()}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if args.read:
        rows, about = read(args.read)
    else:
        about = streams.describe()
        rows = measure(args, about)
    lines = [row.line(about, titles) for row in rows.values()]
    print("\n".join(lines))
    if args.out:
        (args.out / "relaunch.jsonl").write_text("\n".join(lines) + "\n")
    records.write(args.jsonl, about, {"relaunch": {row.name: row.figures() for row in rows.values()}})
    found = limits(rows)
    print(f"\n{about.get('hardware')}, torch {about.get('torch, cuda, triton')}, commit {about.get('commit')}\n")
    print(f"{table(rows.values(), titles)}\n\n{limit_table(found)}")
    return 0 if found and all(f.ok for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
