#!/usr/bin/env python3
"""The GPU correctness tier in one command: every program of `test/stream_programs`, compiled, against ordered eager.

    python tools/gpu_check.py --out DIR [--jobs 12] [--calls 50] [--seeds 1] [--only 'prefetch*']

Worker processes take one case after the other, so one that crashes or hangs costs its own case and no more. A case is
a program, a mode of torch.compile, a variant and a seed, which draws the delays. Variants are `outside` (delays around
the call), `inside` (operators that sleep between the program's own, too) and `folded` (small branches folded into the
current stream, which is the default outside these tests). If asked for, `cpp` is `outside` with a C++ wrapper, which
takes longer to compile; a program that C++ wrappers refuse is skipped, with the reason. The table comes last, failures
only; DIR gets the whole table (summary.txt), a JSON line per case (results.jsonl), and what the workers printed
(worker-*.log). The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import os
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "test", "tools", "tools/bench")]

import records  # noqa: E402  # pyrefly: ignore[missing-import]

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

    def handle(fields: dict[str, Any]) -> tuple[str, str]:
        case = Case(**fields)
        program = by_name(case.program)
        if program.devices > gpu.devices():
            return "skipped", f"needs {program.devices} GPUs"
        sleeps, fold = VARIANTS.get(case.variant, (False, False))
        mode = None if case.mode == "default" else case.mode
        inductor_config.cpp_wrapper = case.variant == CPP
        with contextlib.nullcontext() if fold else form.overlay.config.patch(fold_branches_below_us=0.0):
            check = functools.partial(gpu.check, program, mode, sleeps=sleeps, calls=calls, seed=case.seed)
            status, reason = worker_pool.attempt(check, gpu.Mismatch)
        if case.variant == CPP and "cpp_wrapper can't compile" in reason:
            status, reason = "skipped", reason.partition(": ")[2].partition("\n")[0]
        return worker_pool.settle(status, reason)

    worker_pool.serve(handle)


# ---- the parent


def make_worker(number: int, args: argparse.Namespace) -> worker_pool.Worker:
    command = [sys.executable, __file__, "--worker", "--calls", str(args.calls), "--out", str(args.out)]
    return worker_pool.Worker(command, worker_pool.environment(), args.out / f"worker-{number}.log", args.timeout)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the details")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="worker processes")
    parser.add_argument("--calls", type=int, default=50, help="calls of each compiled program")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the delays, each a case of its own")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one case")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no case is started")
    parser.add_argument("--only", action="append", default=[], help="pattern of program names; may be repeated")
    variants, modes = (*VARIANTS, CPP), ("default", "reduce-overhead")
    parser.add_argument("--variants", type=records.names(variants), default=VARIANTS, help=f"of {', '.join(variants)}")
    parser.add_argument("--modes", type=records.names(modes), default=modes, help=f"of {', '.join(modes)}")
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
        if (mode or "default") in args.modes
        for variant in args.variants
        if mode is None or variant != "folded"
    ]
    return worker_pool.run_and_report(args.out, [(cases, args.jobs)], lambda n: make_worker(n, args), args.limit)


if __name__ == "__main__":
    sys.exit(main())
