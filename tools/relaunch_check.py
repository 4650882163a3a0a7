#!/usr/bin/env python3
"""CUDA graph relaunch on a GPU in one command: every program of `test/relaunch_programs`, on every side.

    python tools/relaunch_check.py --out DIR [--only 'outputs,decode*'] [--variants relaunch,verify]

Each program runs compiled without graphs, in eager, and with graphs, in one process; what it saw must be equal, graphs
must have been launched, and nothing may be left behind. A case is a program and a variant:

    relaunch   cudagraphs = "relaunch"
    verify     the same, and each launch is compared with the compiled code
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
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "test", "tools", "tools/bench")]

import records  # noqa: E402  # pyrefly: ignore[missing-import]

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
        if device == "cuda":
            if program.ranks > torch.cuda.device_count():
                return "skipped", f"needs {program.ranks} GPUs"
        elif program.gpu_only:
            return "skipped", "needs a GPU"
        settings = Settings(device, timeout=timeout - 15, **VARIANTS[case.variant])
        found = worker_pool.attempt(functools.partial(check, program, settings), Mismatch)
        return worker_pool.settle(*found) if device == "cuda" else found

    worker_pool.serve(handle)


# ---- the parent


class Worker(worker_pool.Worker):
    """Its process belongs to one variant, whose options hold in all its threads."""

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", "--out", str(args.out)]
        command += ["--device", args.device, "--timeout", str(args.timeout)]
        super().__init__(command, {}, args.out / f"worker-{number}.log", args.timeout)
        self.variant = ""

    def run(self, case: Case) -> worker_pool.Result:
        from relaunch_programs import by_name  # pyrefly: ignore[missing-import]

        program = by_name(case.program)
        alone = program.alone or program.exclusive
        if self.process is not None and (alone or case.variant != self.variant):
            self.end()
        if self.process is None:
            self.variant = case.variant
            self.environment = environment(case.variant) | (program.env if alone else {})
        result = super().run(case)
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


def notes(results: Sequence[worker_pool.Result]) -> list[str]:
    """A line for each case that was skipped, and for each program that ran with the policy alone and needs more for its
    graphs."""
    from relaunch_programs._needs import NEEDS  # pyrefly: ignore[missing-import]

    found = [worker_pool.failure(r) for r in results if r.status == "skipped"]
    ran = sorted({r.case.program for r in results if r.case.column == "policy"} & NEEDS.keys())
    found += [f"policy alone: {n} needs the seam {NEEDS[n].seam} for its graphs: {NEEDS[n].why}" for n in ran]
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the details")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="worker processes")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help="patterns of program names, or groups; by commas"
    )
    parser.add_argument(
        "--variants", type=records.names(VARIANTS), default=["relaunch"], help=f"of {', '.join(VARIANTS)}"
    )
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for one case")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no case is started")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the programs' own checks")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


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
    parts = (several, args.jobs), (single, 1)
    return worker_pool.run_and_report(args.out, parts, lambda n: Worker(n, args), args.limit, notes)


if __name__ == "__main__":
    sys.exit(main())
