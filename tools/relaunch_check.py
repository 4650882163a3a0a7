#!/usr/bin/env python3
"""CUDA graph relaunch on a GPU in one command: every program of `test/relaunch_programs`, on every side.

    python tools/relaunch_check.py --out DIR [--verify] [--only 'outputs,decode*'] [--variants relaunch,trees]

Each program runs compiled without graphs, in eager, and with graphs, in one process; what it saw must be equal, graphs
must have been launched, and nothing may be left behind. A case is a program and a variant:

    relaunch   cudagraphs = "relaunch"
    verify     the same, and each launch is compared with the compiled code (also switched on by --verify)
    policy     cudagraph_policy = RelaunchPolicy(), in processes without any seam of the overlay: what a program needs a
               seam for (`relaunch_programs/_needs.py`) is listed, and its graphs aren't counted
    trees      upstream's graphs, for comparison: many programs fail
    off        no graphs: the programs themselves

Processes take one case after the other; a case that crashes or hangs costs no other. Programs that need a process of
their own get one, and its exit is checked; those that measure the device run when the others are done. The table of
failures comes last; DIR gets the whole table (summary.txt), a JSON line per case (results.jsonl), and what the workers
printed (worker-*.log). The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TYPE_CHECKING


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test"), str(ROOT / "tools")]

import worker_pool  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Sequence

VARIANTS: dict[str, dict[str, Any]] = {
    "relaunch": {},
    "verify": {"verify": True},
    "policy": {"policy": True},
    "trees": {"graphs": "trees"},
    "off": {"graphs": "off"},
}
COMPLAINT = re.compile(r"^.*(Traceback|Exception ignored|terminate called|Segmentation fault|Fatal Python).*$", re.M)


@dataclasses.dataclass(frozen=True)
class Case:
    program: str
    variant: str
    group: str = ""

    @property
    def row(self) -> str:
        return f"{self.group}/{self.program}"

    @property
    def column(self) -> str:
        return self.variant


# ---- a worker


def work(device: str, timeout: float) -> None:
    import torch

    import form  # noqa: F401  # pyrefly: ignore[missing-import]
    from relaunch_programs import by_name  # pyrefly: ignore[missing-import]
    from relaunch_programs._check import check, Mismatch, Settings  # pyrefly: ignore[missing-import]

    torch.set_num_threads(1)

    def handle(fields: dict[str, Any]) -> tuple[str, str]:
        case = Case(**fields)
        program = by_name(case.program)
        status, reason = "ok", ""
        if device == "cuda":
            if program.ranks > torch.cuda.device_count():
                return "skipped", f"needs {program.ranks} GPUs"
        elif program.gpu_only:
            return "skipped", "needs a GPU"
        try:
            check(program, Settings(device, timeout=timeout - 15, **VARIANTS[case.variant]))
        except Mismatch as e:
            traceback.print_exc()
            status, reason = "FAILED", str(e)
        except Exception as e:
            traceback.print_exc()
            status, reason = "ERROR", f"{type(e).__name__}: {e}".strip()
        return worker_pool.settle(status, reason) if device == "cuda" else (status, reason)

    worker_pool.serve(handle)


# ---- the parent


class Worker(worker_pool.Worker):
    """Its process belongs to one variant, whose options hold in all its threads."""

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", "--out", str(args.out)]
        command += ["--device", args.device, "--timeout", str(args.timeout)]
        super().__init__(command, {}, args.out / f"worker-{number}.log", args.timeout)
        self.variant = ""

    def run_case(self, case: Case) -> worker_pool.Result:
        from relaunch_programs import by_name  # pyrefly: ignore[missing-import]

        program = by_name(case.program)
        alone = program.alone or program.exclusive
        if self.process is not None and (alone or case.variant != self.variant):
            self.end()
        if self.process is None:
            self.variant = case.variant
            self.environment = environment(case.variant) | (program.env if alone else {})
        result = self.run(case)
        return self.ended(result) if alone else result

    def ended(self, result: worker_pool.Result) -> worker_pool.Result:
        """The process must exit by itself, without a word."""
        log = Path(self.log.name)
        size = log.stat().st_size
        complaint = self.end()
        with open(log, errors="replace") as file:
            file.seek(size)
            said = COMPLAINT.search(file.read())
        if said and not complaint:
            complaint = f"at exit: {said.group()}"
        if complaint and result.good:
            return dataclasses.replace(result, status="CRASHED", reason=complaint)
        return result


def environment(variant: str) -> dict[str, str]:
    from relaunch_programs._check import Settings  # pyrefly: ignore[missing-import]

    return {
        **worker_pool.environment(),
        **Settings("", **VARIANTS[variant]).environment(),
        "PYTHONFAULTHANDLER": "1",
    }


def choose(only: Sequence[str], variants: Sequence[str]) -> tuple[list[Case], list[Case]]:
    """The cases that may run side by side, and those that need the device for themselves."""
    from relaunch_programs import PROGRAMS  # pyrefly: ignore[missing-import]

    chosen = [
        p
        for p in PROGRAMS
        if not only or any(fnmatch.fnmatch(p.name, pattern) or p.group == pattern for pattern in only)
    ]
    several = [Case(p.name, v, p.group) for v in variants for p in chosen if not p.exclusive]
    single = [Case(p.name, v, p.group) for v in variants for p in chosen if p.exclusive]
    return several, single


def needs(results: Sequence[worker_pool.Result]) -> list[str]:
    """A line for each program that ran with the policy alone and needs more for its graphs."""
    from relaunch_programs._needs import NEEDS  # pyrefly: ignore[missing-import]

    ran = sorted({r.case.program for r in results if r.case.column == "policy"} & NEEDS.keys())
    return [f"policy alone: {name} needs the seam {NEEDS[name].seam} for its graphs: {NEEDS[name].why}" for name in ran]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the details")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="worker processes")
    parser.add_argument("--only", type=names, default=[], help="patterns of program names, or groups; by commas")
    parser.add_argument("--variants", type=names, default=["relaunch"], help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--verify", action="store_true", help="the variant verify, too")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for one case")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no case is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the programs' own checks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    if args.verify and "verify" not in args.variants:
        args.variants.append("verify")
    return args


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work(args.device, args.timeout)
        return 0
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("relaunch_check: no GPU here, nothing to run")
        return 2
    several, single = choose(args.only, args.variants)
    if not several and not single:
        print(f"relaunch_check: no program is named {', '.join(args.only)}")
        return 2
    start = time.monotonic()
    lines = args.out / "results.jsonl"
    lines.write_text(json.dumps(worker_pool.describe()) + "\n")
    results: list[worker_pool.Result] = []
    for cases, jobs in ((several, args.jobs), (single, 1)):
        results += worker_pool.run_all(
            cases,
            lambda number: Worker(number, args),
            jobs,
            max(30.0, args.limit - (time.monotonic() - start)),
            lambda result: worker_pool.write_result(lines, result),
            Worker.run_case,  # pyrefly: ignore[bad-argument-type]
        )
    whole, short = worker_pool.table(results)
    reasons = [f"skipped {r.case.row} {r.case.column}: {r.reason}" for r in results if r.status == "skipped"]
    reasons += needs(results)
    last = f"{len(results)} cases in {time.monotonic() - start:.0f} s: {worker_pool.counted(results)}"
    (args.out / "summary.txt").write_text("\n".join([whole, short, *reasons, last]) + "\n")
    print("\n".join(["", *reasons, short, last]))
    return 0 if all(r.good for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
