#!/usr/bin/env python3
"""The GPU correctness tier in one command: every program of `test/stream_programs`, compiled, against ordered eager.

    python tools/gpu_check.py --out DIR [--jobs 12] [--calls 50] [--seeds 1] [--only 'prefetch*'] [--stock]

Worker processes take one case after the other, so one that crashes or hangs costs its own case and no more. A case is
a program, a mode of torch.compile, a variant and a seed, which draws the delays. Variants are `outside` (delays around
the call), `inside` (operators that sleep between the program's own, too) and `folded` (small branches folded into the
current stream, which is the default outside these tests). If asked for, `cpp` is `outside` with a C++ wrapper, which
takes longer to compile; a program that C++ wrappers refuse is skipped, with the reason. The table comes last, failures
only; DIR gets the whole table (summary.txt), a JSON line per case (results.jsonl), and what the workers printed
(worker-*.log). The exit status is 1 if a case failed. With --stock the same programs run without the overlay.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(ROOT / "tools")]

import worker_pool  # noqa: E402


VARIANTS = {"outside": (False, False), "inside": (True, False), "folded": (False, True)}  # name -> (sleeps, fold)
CPP = "cpp"  # `outside`, with a C++ wrapper


@dataclasses.dataclass(frozen=True)
class Case:
    program: str
    mode: str
    variant: str
    seed: int = 0

    @property
    def row(self) -> str:
        return self.program

    @property
    def column(self) -> str:
        return f"{self.mode}/{self.variant}" + (f"/{self.seed}" if self.seed else "")


# ---- a worker


def work(calls: int) -> None:

    import torch._inductor.config as inductor_config

    import form  # pyrefly: ignore[missing-import]
    from stream_programs import by_name, gpu  # pyrefly: ignore[missing-import]

    stock = os.environ.get("TORCH_OVERLAY_DISABLE") == "1"
    config = None if stock else form.overlay.config

    def handle(fields: dict[str, Any]) -> tuple[str, str]:
        case = Case(**fields)
        status, reason = "ok", ""
        program = by_name(case.program)
        sleeps, fold = VARIANTS.get(case.variant, (False, False))
        inductor_config.cpp_wrapper = case.variant == CPP
        try:
            if program.devices > gpu.devices():
                status, reason = "skipped", f"needs {program.devices} GPUs"
            else:
                mode = None if case.mode == "default" else case.mode
                if config is None or fold:
                    gpu.check(program, mode, sleeps=sleeps, calls=calls, seed=case.seed)
                else:
                    with config.patch(fold_branches_below_us=0.0):
                        gpu.check(program, mode, sleeps=sleeps, calls=calls, seed=case.seed)
        except gpu.Mismatch as e:
            status, reason = "FAILED", str(e)
        except Exception as e:
            if case.variant == CPP and "cpp_wrapper can't compile" in str(e):
                return worker_pool.settle("skipped", str(e).partition("\n")[0])
            traceback.print_exc()
            status, reason = "ERROR", f"{type(e).__name__}: {e}".strip()
        return worker_pool.settle(status, reason)

    worker_pool.serve(handle)


# ---- the parent


def make_worker(number: int, args: argparse.Namespace) -> worker_pool.Worker:
    environment = worker_pool.environment()
    if args.stock:
        environment["TORCH_OVERLAY_DISABLE"] = "1"
    command = [sys.executable, __file__, "--worker", "--calls", str(args.calls), "--out", str(args.out)]
    return worker_pool.Worker(command, environment, args.out / f"worker-{number}.log", args.timeout)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the details")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="worker processes")
    parser.add_argument("--calls", type=int, default=50, help="calls of each compiled program")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the delays, each a case of its own")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one case")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no case is started")
    parser.add_argument("--only", action="append", default=[], help="pattern of program names; may be repeated")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of outside, inside, folded, cpp")
    parser.add_argument("--modes", default="default,reduce-overhead", help="of default, reduce-overhead")
    parser.add_argument("--stock", action="store_true", help="without the overlay")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work(args.calls)
        return 0
    from stream_programs import gpu, PROGRAMS  # pyrefly: ignore[missing-import]

    if not gpu.devices():
        print("gpu_check: no GPU here, nothing to run")
        return 2
    cases = [
        Case(p.name, mode or "default", variant, seed)
        for seed in range(args.seeds)
        for p in PROGRAMS
        if not args.only or any(fnmatch.fnmatch(p.name, pattern) for pattern in args.only)
        for mode in p.modes
        if (mode or "default") in args.modes.split(",")
        for variant in args.variants.split(",")
        if mode is None or variant != "folded"
    ]
    start = time.monotonic()
    lines = args.out / "results.jsonl"
    lines.write_text(json.dumps(worker_pool.describe()) + "\n")
    results = worker_pool.run_all(
        cases,
        lambda number: make_worker(number, args),
        args.jobs,
        args.limit,
        lambda result: worker_pool.write_result(lines, result),
    )
    whole, short = worker_pool.table(results)
    last = f"{len(results)} cases in {time.monotonic() - start:.0f} s: {worker_pool.counted(results)}"
    (args.out / "summary.txt").write_text(f"{whole}\n{short}\n{last}\n")
    print(f"\n{short}\n{last}")
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
