#!/usr/bin/env python3
"""Whole models under torch.compile with no graph, with upstream's cudagraph trees and with relaunch.

    python tools/bench/models.py --out DIR [--rows 'bert,bert training'] [--sides off,trees,relaunch] [--jobs 14]
    python tools/bench/models.py --compare-only ...                 whether the results are equal, and no times

A row is a model of `model_rows` for inference or for training, each side of it a process of its own. Processes of a few
rows compile and warm up together; then each measures alone, in the order of the sides and once more in the reverse
order, while all others wait for their turn.

    gpu      µs a step, many in a row, between two events of the device;  host: µs until a step returns, from idle
    ratio    relaunch's µs a step to the least of the other sides
    noise    the largest relative difference between the two turns of one process
    equal    bits: the outputs (of training: the losses of six steps) are those without graphs, bit for bit; else the
             largest difference of 64 values. Each process chooses the kernels that are the fastest there, and these may
             add up in another order: with --compare-only they are the same in all (Inductor's `deterministic`)
    covered  percentage of kernels of generated code that run in graphs

A JSON line for each row goes to DIR/models.jsonl; the table and the geometric mean of the ratios come last. --jsonl
FILE, with --rounds 3, writes what tools/bench/gate.py compares.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TYPE_CHECKING


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GEOMEAN = 0.85  # limit of the ratios' geometric mean
WARM_UP = 6  # steps before the first measurement
DETERMINISTIC = "MODELS_DETERMINISTIC"  # variable of the environment of a process
SOME = 64  # values of a tensor that are compared where bits differ


# ---- a process of one row and side


def serve(make: Callable[[], Any]) -> None:
    """Answer each line of standard input, the name of a method of what `make` returns, by a JSON line: "warm" compiles
    and captures, "measure" measures."""
    with os.fdopen(os.dup(1), "w") as out, contextlib.redirect_stdout(sys.stderr):
        try:
            work = make()
            for line in sys.stdin:
                answer = getattr(work, line.strip())()
                print(json.dumps(answer), file=out, flush=True)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), file=out, flush=True)
    os._exit(0)


class _Served:
    def __init__(self, row: str, side: str) -> None:
        if os.environ.get("TORCH_OVERLAY_DISABLE") != "1":
            import torch_overlay  # noqa: F401
        import torch
        import torch._inductor.config
        from model_rows import ROWS  # pyrefly: ignore[missing-import]
        from relaunch_process import SIDES  # pyrefly: ignore[missing-import]

        torch.manual_seed(0)
        torch._inductor.config.deterministic = os.environ.get(DETERMINISTIC) == "1"
        graphs = SIDES[side][1]
        self.work = ROWS[row](lambda fn: torch.compile(fn, mode="reduce-overhead" if graphs else None))
        self.trains = self.work.optimizer is not None

    def _gradients(self) -> Any:
        import torch

        return contextlib.nullcontext() if self.trains else torch.no_grad()

    def warm(self) -> dict[str, Any]:
        import torch

        start = time.perf_counter()
        digest, some = hashlib.sha256(), []
        with self._gradients():
            for _ in range(WARM_UP):
                torch.manual_seed(1)
                given = self.work.step()
                tensors = [given] if isinstance(given, torch.Tensor) else list(given)
                for tensor in tensors:
                    digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
                some = [x for t in tensors for x in t.detach().flatten()[:SOME].double().tolist()]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return {"seen": digest.hexdigest(), "some": some, "warm s": seconds} | self._covered()

    def _covered(self) -> dict[str, Any]:
        if os.environ.get("TORCH_OVERLAY_CUDAGRAPHS") != "relaunch":
            return {}
        import torch_overlay

        before = torch_overlay.coverage()
        with self._gradients():
            self.work.step()
        found = torch_overlay.coverage().since(before)
        return {"covered": found.share, "outside": str(found) if found.share < 1 else ""}

    def measure(self) -> dict[str, Any]:
        import torch
        from relaunch_process import gpu_time, host_time, queued_time  # pyrefly: ignore[missing-import]

        step = self.work.step
        with self._gradients():
            for _ in range(3):
                step()
            gpu = gpu_time(step, calls=10, rounds=7)
            host, _ = host_time(step, [0.0], calls=15)
            queued = queued_time(step, host, calls=3)
        return {
            "gpu us": gpu,
            "host us": host,
            "queued us": queued,
            "reserved MiB": torch.cuda.memory_reserved() / 2**20,
        }


# ---- the rows


class Process:
    """A process that runs `script --serve ROW SIDE`, and answers lines by lines of JSON."""

    def __init__(self, row: str, side: str, environment: dict[str, str], script: str = __file__) -> None:
        command = [sys.executable, script, "--serve", row, side]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=max(0.1, timeout))
        except queue.Empty:
            return {"error": "no answer in time"}
        return json.loads(line) if line else {"error": f"ended with status {self.process.wait()}"}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(
    rows: Sequence[str], sides: Sequence[str], jobs: int, deadline: float, compare_only: bool, rounds: int = 1
) -> list[dict[str, Any]]:
    """Rows by rows, as many as have `jobs` processes."""
    from relaunch_process import environment_of  # pyrefly: ignore[missing-import]

    more = {DETERMINISTIC: str(int(compare_only))}
    at_once = max(1, jobs // len(sides))
    results: list[dict[str, Any]] = []
    for begin in range(0, len(rows), at_once):
        group = rows[begin : begin + at_once]
        if time.monotonic() > deadline:
            results += [{"row": row, "errors": ["out of time"], "sides": {}} for row in group]
            continue
        processes = {(r, s): Process(r, s, environment_of(s) | more) for r in group for s in sides}
        for process in processes.values():
            process.tell("warm")
        warm = {key: process.answer(deadline - time.monotonic()) for key, process in processes.items()}
        turns: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in processes}
        for row in [] if compare_only else group:
            for side in [*sides, *reversed(sides)] * rounds:
                if "error" not in warm[row, side]:
                    processes[row, side].tell("measure")
                    turns[row, side].append(processes[row, side].answer(120))
        for process in processes.values():
            process.stop()
        results += [_result(row, {s: warm[row, s] for s in sides}, {s: turns[row, s] for s in sides}) for row in group]
        for result in results[-len(group) :]:
            print("  ".join(_cells(result)), file=sys.stderr, flush=True)
    return results


def _result(row: str, warm: dict[str, Any], turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    result: dict[str, Any] = {"row": row, "sides": {}, "errors": []}
    for side, answer in warm.items():
        errors = [a["error"] for a in [answer, *turns[side]] if "error" in a]
        if errors:
            result["errors"].append(f"{side}: {errors[0]}")
            continue
        result["sides"][side] = answer
        if times := [t["gpu us"] for t in turns[side]]:
            answer |= {key: statistics.median(t[key] for t in turns[side]) for key in turns[side][0]}
            answer["noise"] = max(times) / min(times) - 1
            answer["turns"] = turns[side]
    mine = result["sides"].get("relaunch")
    others = [side["gpu us"] for name, side in result["sides"].items() if name != "relaunch" and "gpu us" in side]
    if mine and others:
        result["ratio"] = mine["gpu us"] / min(others)
        result["noise"] = max(side["noise"] for side in result["sides"].values())
    if mine and (plain := result["sides"].get("off")):
        same = mine["seen"] == plain["seen"]
        difference = max((abs(a - b) for a, b in zip(mine["some"], plain["some"])), default=0.0)
        result["equal"] = "bits" if same else f"{difference:.2g}"
    return result


def figures(result: dict[str, Any]) -> records.Figures:
    """Figures for the gate: a sample is of one turn, divided by that of the other side's."""
    turns = {name: side.get("turns", []) for name, side in result["sides"].items()}
    mine = turns.pop("relaunch", [])
    found: records.Figures = {"device time": {}, "wall time": {}, "bytes": records.samples(mine, ["reserved MiB"])}
    for other, theirs in turns.items():
        for kind, key in (("device time", "queued us"), ("wall time", "gpu us"), ("wall time", "host us")):
            pair = [t[key] for t in mine], [t[key] for t in theirs]
            found[kind][f"{key.partition(' ')[0]} / {other}"] = records.ratios(*pair)
    if (covered := result["sides"].get("relaunch", {}).get("covered")) is not None:
        found["count"] = {"kernels outside of graphs, %": [100 * (1 - covered)]}
    return found


def _cells(result: dict[str, Any]) -> list[str]:
    def times(key: str) -> list[str]:
        of = [result["sides"].get(side, {}).get(key) for side in ("off", "trees", "relaunch")]
        return ["-" if value is None else f"{value:.0f}" for value in of]

    mine = result["sides"].get("relaunch", {})
    numbers = [f"{result[key]:.3f}" if key in result else "-" for key in ("ratio", "noise")]
    covered = f"{mine['covered']:.1%}" if mine.get("covered") is not None else "-"
    columns = [" ".join(times(key)) for key in ("gpu us", "host us", "queued us")]
    return [result["row"], *columns, *numbers, result.get("equal", "-"), covered, "; ".join(result["errors"])[:100]]


def table(results: Sequence[dict[str, Any]]) -> str:
    header = ["row", "gpu: off trees relaunch", "host", "queued", "ratio", "noise", "equal", "covered", ""]
    lines = streams.aligned([header, *map(_cells, results)])
    ratios = [r["ratio"] for r in results if "ratio" in r]
    if ratios:
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        above = [r["row"] for r in results if r.get("ratio", 0) > 1 + r.get("noise", 0)]
        lines += ["", f"{len(ratios)} rows, geometric mean of the ratios {mean:.3f} (limit {GEOMEAN})"]
        lines += [f"above 1 and the noise: {', '.join(above) or 'none'}"]
    return "\n".join(lines)


def main() -> int:
    from model_rows import ROWS  # pyrefly: ignore[missing-import]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, metavar=("ROW", "SIDE"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=records.names(ROWS), default=list(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=["off", "trees", "relaunch"])
    parser.add_argument("--jobs", type=records.positive, default=14, help="processes that compile together")
    parser.add_argument(
        "--rounds", type=records.positive, default=1, help="rounds, each of two turns of a row and a side"
    )
    parser.add_argument("--compare-only", action="store_true", help="compare the results, with the same kernels")
    parser.add_argument(
        "--limit", type=records.seconds, default=3600.0, help="seconds after which no process is started"
    )
    parser.add_argument("--out", type=Path, help="folder for the JSON lines")
    records.add_option(parser)
    args = parser.parse_args()
    if args.serve:
        serve(lambda: _Served(*args.serve))
    results = measure(args.rows, args.sides, args.jobs, time.monotonic() + args.limit, args.compare_only, args.rounds)
    about = streams.describe()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({**about, **result}) for result in results]
        (args.out / "models.jsonl").write_text("\n".join(lines) + "\n")
    records.write(args.jsonl, about, {"models": {result["row"]: figures(result) for result in results}})
    print(f"{about['hardware']}, torch {about['torch, cuda, triton']}, commit {about['commit']}\n\n{table(results)}")
    wanted = "equal" if args.compare_only else "ratio"
    return 0 if all(wanted in r and not r["errors"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
