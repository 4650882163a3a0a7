#!/usr/bin/env python3
"""PyTorch's own operators on a GPU, each in the middle of a side stream, compiled, against ordered eager.

    python tools/operators.py --out results.jsonl [--jobs 14] [--seconds 460] [--only 'fft.*'] [--variants out,backward]

A case is an operator of `op_db` or of the foreach operators, a variant (`test/operator_programs`), a type, a mode
(default, reduce-overhead, and folded: with graphs, and small branches folded into the caller's stream) and a sample.
Worker processes take one case after the other. A case that fails runs again in a process without the overlay:
eager itself, as the same unfriendly caller would call it, and then compiled in default mode, without streams. If one of
them fails as well, the case counts as stock's and is skipped. Skipped are those, too, that eager can't do.

With `--device simulated` the cases are compiled for a simulated GPU and given to the happens-before check.

The failures come last, with operator, variant, type, mode, sample and the first line of the error; --out gets a JSON
line for each case, and what the workers print goes to a folder beside it. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TYPE_CHECKING


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "test", "tools", "tools/bench")]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]

import worker_pool  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Sequence

    from operator_programs import Case  # pyrefly: ignore[missing-import]


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


# ---- a worker


def work(device: str, stock: bool) -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    import form  # pyrefly: ignore[missing-import]
    from operator_programs import Case, checked, gpu  # pyrefly: ignore[missing-import]

    def attempt(case: Case, **how: Any) -> tuple[str, str]:
        try:
            if device == "simulated":
                if faults := checked.faults(case):
                    return "FAILED", faults[0]
            else:
                gpu.check(case, device, **how)
        except (checked.Unfit, gpu.Unfit) as e:
            return "skipped", first_line(e).removeprefix("Unfit: ")
        except gpu.Mismatch as e:
            return "FAILED", str(e)
        except Exception as e:
            traceback.print_exc()
            return "ERROR", first_line(e)
        return "ok", ""

    def handle(fields: dict[str, Any]) -> tuple[str, str]:
        case = Case(**fields)
        if not stock:
            found = attempt(case, config=form.overlay.config)
        else:
            found = "ok", ""
            for who, how in (("eager", {"compiled": False}), ("stock", {"streams": False})):
                status, reason = attempt(case, **how)
                if status not in worker_pool.GOOD:
                    found = status, f"{who}: {reason}"
                    break
        return worker_pool.settle(*found) if device == "cuda" else found

    worker_pool.serve(handle)


# ---- the parent


class Pair:
    """A worker with the overlay, and one without it for what fails."""

    verdicts: dict[Case, worker_pool.Result] = {}  # of stock, whose mode is always the default one
    lock = threading.Lock()

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", "--device", args.device]
        environment = worker_pool.environment() | {"OMP_NUM_THREADS": "1"}
        log = args.logs / f"worker-{number}.log"
        self.simulated = args.device == "simulated"
        self.mine = worker_pool.Worker(command, environment, log, args.timeout)
        without = environment | {"TORCH_OVERLAY_DISABLE": "1"}
        self.stock = worker_pool.Worker([*command, "--stock"], without, log, args.timeout)

    def run(self, case: Case) -> worker_pool.Result:
        result = self.mine.run(case)
        if result.good or self.simulated:
            return result
        key = dataclasses.replace(case, mode="default")
        with self.lock:
            verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = self.stock.run(key)
            with self.lock:
                self.verdicts[key] = verdict
        if verdict.good:
            return result
        return dataclasses.replace(result, status="skipped", reason=f"without the overlay, {verdict.reason}")

    def close(self) -> None:
        self.mine.close()
        self.stock.close()


def choose(args: argparse.Namespace) -> list[Case]:
    """The cases in an order that is random, and the same in every run: what time is too short for is a fair sample."""
    from operator_programs import cases  # pyrefly: ignore[missing-import]

    chosen = [
        case
        for case in cases(args.variants, args.modes)
        if not args.only or any(fnmatch.fnmatch(case.operator, pattern) for pattern in args.only)
    ]
    random.Random(0).shuffle(chosen)
    return chosen


def kind_of(reason: str) -> str:
    """A reason without what differs from case to case."""
    return ": ".join(reason.split(": ")[:2])[:70] if reason.startswith("without the overlay") else reason[:70]


def summary(results: Sequence[worker_pool.Result]) -> list[str]:
    skipped = collections.Counter(kind_of(r.reason) for r in results if r.status == "skipped")
    late = collections.Counter(r.case.variant for r in results if r.reason == "out of time")
    lines = [f"skipped {count:5}  {reason}" for reason, count in skipped.most_common(40)]
    lines += [f"out of time: {', '.join(f'{count} {name}' for name, count in sorted(late.items()))}"] if late else []
    bad = [r for r in results if not r.good]
    return lines + list(map(worker_pool.failure, sorted(bad, key=lambda r: (r.case.operator, r.case.column))))


def parse() -> argparse.Namespace:
    from operator_programs import MODES, VARIANTS  # pyrefly: ignore[missing-import]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "operators" / "results.jsonl", help="JSON lines")
    parser.add_argument("--jobs", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)), help="processes")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help="patterns of operator names; by commas"
    )
    parser.add_argument(
        "--variants", type=records.names(VARIANTS), default=list(VARIANTS), help=f"of {', '.join(VARIANTS)}"
    )
    parser.add_argument(
        "--modes", type=records.names(MODES), default=[], help=f"of {', '.join(MODES)} (each variant has its own)"
    )
    parser.add_argument("--seconds", type=float, default=450.0, help="after which no case is started")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one case")
    parser.add_argument("--device", choices=("cuda", "cpu", "simulated"), default="cuda", help="cpu: no streams")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.logs = args.out.with_suffix("")
    return args


def main() -> int:
    args = parse()
    if args.worker:
        work(args.device, args.stock)
        return 0
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("operators: no GPU here, nothing to run")
        return 2
    start = time.monotonic()
    args.logs.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(streams.describe()) + "\n")
    chosen = choose(args)
    if not chosen:
        print("operators: no such case")
        return 2
    results = worker_pool.run_all(
        chosen,
        lambda number: Pair(number, args),
        args.jobs,
        args.seconds - (time.monotonic() - start),
        args.out,
    )
    print("\n".join(["", *summary(results)]))
    print(f"{len(results)} cases in {time.monotonic() - start:.0f} s: {worker_pool.counted(results)}")
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
