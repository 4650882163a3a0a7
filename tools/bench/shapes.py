#!/usr/bin/env python3
"""Sizes and numbers that change from call to call: what a new one costs, what a known one costs, and the memory.

    python tools/bench/shapes.py --out DIR [--rows distilbert,int] [--sides off,trees,relaunch,pad,replay] [--jobs 14]

Each row and side is a process of its own. Processes of a few rows compile together, after the first side's have chosen
the configurations of their Triton kernels, which the others find in the cache; then each measures alone, one after
another, and a second process of the first and of relaunch's side measures last.

    first    µs of the first call of a size, from idle, until the device is done; median over the sizes
    second   of its second call;  later: of calls after these, the sizes in turn
    mean     ms a step over all calls of a row whose sizes are drawn;  last: over the last third of them;
    worst    the 100 calls in a row that are slowest, against the same without a graph
    device   MiB of device memory that the sizes took;  reserved: of the caching allocator's;  host: of host memory

Sides: `off` has no graph; `code` runs the code that relaunch's side compiles, without graphs; `pad` pads to the largest
size, under trees; `replay` is a graph made by hand at the second call of each size, with its inputs copied in: the
floor. The rows are in `shape_rows`. --jsonl FILE writes what tools/bench/gate.py compares.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TextIO, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LATER = 4  # rounds over all sizes
STEPS = 25  # that are timed together, where sizes are drawn
SIDES = {
    "off": "off",
    "code": "relaunch",
    "trees": "trees",
    "pad": "trees",
    "relaunch": "relaunch",
    "replay": "replay",
}  # -> of processes


class _Served:
    def __init__(self, row: str, side: str) -> None:
        import torch
        from relaunch_process import SIDES as KINDS  # pyrefly: ignore[missing-import]
        from shape_rows import ROWS  # pyrefly: ignore[missing-import]

        import torch_overlay  # noqa: F401

        torch.manual_seed(0)
        if side == "code":
            from torch_overlay._inductor.relaunch.runner import Runner

            Runner.__call__ = lambda self, inputs: self.region.plain(inputs)
        mode = "reduce-overhead" if KINDS[SIDES[side]][1] else None
        self.row = ROWS[row](lambda fn: torch.compile(fn, mode=mode, dynamic=side != "pad"), side == "pad")
        # None: the item was called, and so is warm.
        self.by_hand: dict[Any, tuple[Any, list[Any]] | None] | None = {} if side == "replay" else None

    def _call(self, item: Any) -> Any:
        inputs = self.row.inputs(item)
        if self.by_hand is None or not self.row.repeats:
            return self.row.step(*inputs)
        return self._replayed(item, inputs)

    def _replayed(self, item: Any, inputs: Sequence[Any]) -> Any:
        """Launch the graph that was made by hand for an item; make it at the second call."""
        import torch

        assert self.by_hand is not None
        if item not in self.by_hand:
            self.by_hand[item] = None
            return self.row.step(*inputs)
        if (made := self.by_hand[item]) is None:
            held = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.row.step(*held)
            made = self.by_hand[item] = graph, held
        graph, held = made
        for mine, given in zip(held, inputs):
            if isinstance(mine, torch.Tensor):
                mine.copy_(given)
        graph.replay()
        return None

    def _timed(self, item: Any) -> float:
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        result = self._call(item)
        torch.cuda.synchronize()
        del result
        return (time.perf_counter() - start) * 1e6

    def warm(self) -> dict[str, Any]:
        import torch

        start = time.perf_counter()
        for item in self.row.warm:
            for _ in range(3):
                self._call(item)
        torch.cuda.synchronize()
        return {"warm s": time.perf_counter() - start}

    def measure(self) -> dict[str, Any]:
        import gc

        import torch
        from torch._dynamo.utils import counters

        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()
        before, compiled = self._memory(), counters["stats"]["unique_graphs"]
        found: dict[str, Any] = {}
        ours = dict(counters["torch_overlay"])
        if self.row.repeats:
            for name in ("first", "second"):
                found[name] = [self._timed(item) for item in self.row.items]
            rounds = [[self._timed(item) for item in self.row.items] for _ in range(LATER)]
            found["later"] = [statistics.median(times) for times in zip(*rounds)]
            found["rounds"] = rounds
        else:
            results: list[Any] = []
            items, last = self.row.items, len(self.row.items) // STEPS // 3
            parts = [self._many(items[i : i + STEPS], results) / STEPS for i in range(0, len(items), STEPS)]
            found["mean"], found["last"] = statistics.mean(parts), statistics.mean(parts[-last:])
            found["windows"] = [statistics.mean(parts[i : i + 4]) for i in range(len(parts) - 3)]
            found["losses"] = [float(value) for value in results if value is not None]
        gc.collect()
        torch.cuda.empty_cache()
        found |= {name: now - before[name] for name, now in self._memory().items()}
        found["recompiled"] = counters["stats"]["unique_graphs"] - compiled
        for name in ("captures", "nodes"):
            found[name] = counters["torch_overlay"]["cudagraph_" + name] - ours.get("cudagraph_" + name, 0)
        return found | self._kept()

    def _many(self, items: Sequence[Any], results: list[Any]) -> float:
        """Run a step for each item, in a row, and add what is kept to the results. Return the ms of all."""
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        results += [self.row.kept(self._call(item)) for item in items]
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def _memory(self) -> dict[str, float]:
        import torch
        from relaunch_process import device_used, MIB  # pyrefly: ignore[missing-import]

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "device MiB": device_used() / MIB,
            "reserved MiB": torch.cuda.memory_reserved() / MIB,
            "host MiB": pages * resource.getpagesize() / MIB,
        }

    def _kept(self) -> dict[str, Any]:
        from torch_overlay._inductor.relaunch import causes, runners

        return {"executables": runners.counts()["templates"], "refusals": causes.refusals()[:3]}


def measure(
    rows: Sequence[str], sides: Sequence[str], jobs: int, limit: float, note: Callable[[dict[str, Any]], Any] = id
) -> list[dict[str, Any]]:
    """Rows by rows, as many as have `jobs` processes. Each result is noted when it is there."""
    deadline, results = time.monotonic() + limit, []
    order = [*sides, *[side for side in (sides[0], "relaunch") if len(sides) > 1]]
    at_once = max(1, jobs // len(order))
    for begin in range(0, len(rows), at_once):
        for result in _together(rows[begin : begin + at_once], order, deadline):
            results.append(result)
            note(result)
            print("  ".join(_cells(result, results)), file=sys.stderr, flush=True)
    return results


def _together(rows: Sequence[str], sides: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield what the processes of these rows and sides find, which compile together."""
    from models import Process  # pyrefly: ignore[missing-import]
    from relaunch_process import environment_of  # pyrefly: ignore[missing-import]

    processes = [(r, s, Process(r, s, environment_of(SIDES[s]), __file__)) for r in rows for s in sides]
    chosen = processes[:: len(sides)]  # of the first side
    warm: dict[Any, dict[str, Any]] = {}
    for group in (chosen, [each for each in processes if each not in chosen]):
        for *_, process in group:
            process.tell("warm")
        warm |= {process: process.answer(deadline - time.monotonic()) for *_, process in group}
    for row, side, process in processes:
        answer = warm[process]
        if "error" not in answer:
            process.tell("measure")
            answer |= process.answer(deadline - time.monotonic())
        process.stop()
        yield {"row": row, "side": side, **answer}


def figures(row: str, results: Sequence[dict[str, Any]]) -> records.Figures:
    """Figures for the gate. A sample of a time is a round over all sizes: the median, over the sizes, of relaunch's
    call to the second call without a graph."""
    sides = {side: [r for r in results if (r["row"], r["side"]) == (row, side)] for side in SIDES}
    mine = sides["relaunch"]
    base = next((r["second"] for r in sides["off"] if "second" in r), [])
    rounds = [times for r in mine for times in r.get("rounds", [])] if base else []
    return {
        "wall time": {"later / off": [statistics.median(a / b for a, b in zip(times, base)) for times in rounds]},
        "count": records.samples(mine, ("captures", "nodes", "executables", "recompiled")),
        "bytes": records.samples(mine, ("device MiB", "reserved MiB")),
    }


def _write(file: TextIO | None, about: dict[str, Any], result: dict[str, Any]) -> None:
    if file is not None:
        print(json.dumps({**about, **result}), file=file)


def _cells(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[str]:
    """The cells of one process. Ratios are to the second calls without a graph, size by size."""
    base = next((r for r in results if r["row"] == result["row"] and r["side"] == "off"), {})

    def times(name: str) -> str:
        if name not in result:
            return "-"
        text = f"{statistics.median(result[name]):.0f}"
        if plain := base.get("second"):
            text += f" ({statistics.median(a / b for a, b in zip(result[name], plain)):.2f})"
        return text

    def steps(name: str) -> str:
        text = f"{result[name]:.3f}" if name in result else "-"
        return f"{text} ({result[name] / base[name]:.2f})" if name in result and name in base else text

    worst = "-"
    if "windows" in result and "windows" in base:
        worst = f"{max(a / b for a, b in zip(result['windows'], base['windows'], strict=True)):.2f}"
    equal = "-"
    if result.get("losses") and base.get("losses"):
        difference = max(abs(a - b) for a, b in zip(result["losses"], base["losses"], strict=True))
        equal = "equal" if not difference else f"{difference:.2g}"
    numbers = [f"{result[k]:.0f}" if k in result else "-" for k in ("device MiB", "reserved MiB", "host MiB")]
    numbers += [str(result.get(k, "-")) for k in ("captures", "executables", "recompiled")]
    errors = result.get("error", "") or "; ".join(result.get("refusals", ()))
    return [
        result["row"],
        result["side"],
        *map(times, ("first", "second", "later")),
        *map(steps, ("mean", "last")),
        worst,
        equal,
        *numbers,
        errors[:90],
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    header = ["row", "side", "first us", "second", "later", "mean ms", "last", "worst", "losses"]
    header += ["device", "reserved", "host"]
    header += ["captures", "executables", "recompiled", ""]
    return "\n".join(streams.aligned([header, *[_cells(result, results) for result in results]]))


def main() -> int:
    from models import serve  # pyrefly: ignore[missing-import]
    from shape_rows import ROWS  # pyrefly: ignore[missing-import]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, metavar=("ROW", "SIDE"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=records.names(ROWS), default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sides", type=records.names(SIDES), default=list(SIDES))
    parser.add_argument("--jobs", type=records.positive, default=14, help="processes that compile together")
    parser.add_argument("--limit", type=records.seconds, default=3600.0, help="seconds for all")
    parser.add_argument("--out", type=Path, help="folder for the JSON lines")
    records.add_option(parser)
    args = parser.parse_args()
    if args.serve:
        serve(lambda: _Served(*args.serve))
    about = streams.describe()
    with contextlib.ExitStack() as stack:
        file = None
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((args.out / "shapes.jsonl").open("w", buffering=1))
        results = measure(args.rows, args.sides, args.jobs, args.limit, functools.partial(_write, file, about))
    records.write(args.jsonl, about, {"shapes": {row: figures(row, results) for row in args.rows}})
    print(f"{about['hardware']}, torch {about['torch, cuda, triton']}, commit {about['commit']}\n\n{table(results)}")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
