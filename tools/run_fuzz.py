"""Random stream programs, as many as one wants.

    tools/fuzz --compile-only -n 1000                compiled for a simulated GPU and checked there
    tools/fuzz --compile-only --wide -n 1000         of more operators, whose values can't be compared exactly
    tools/fuzz -n 1000 --seeds 5 --jobs 15           on the GPU, against eager, under five draws of delays each
    tools/fuzz --planner -n 10000                    the planner alone, on random schedules

Program N of seed S is the same program everywhere. Each is compiled in the default mode, under reduce-overhead, and
on a GPU once more with PyTorch's own CUDA graphs. A failure is shrunk, and written as a test to --out/failures,
beside the code that was generated for it. Results go to --out/results.jsonl; run again with the same --out, a run goes
on where it was stopped. The exit status is 1 if a program failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "test", "tools", "tools/bench")]

import streams  # noqa: E402  # pyrefly: ignore[missing-import]

import worker_pool  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    number: int

    @property
    def row(self) -> str:
        return f"program {self.number}"

    @property
    def column(self) -> str:
        return f"seed {self.seed}"


# ---- a worker


def work(args: argparse.Namespace) -> None:
    import warnings

    import form  # noqa: F401  # pyrefly: ignore[missing-import]
    from stream_programs.drawn import trial  # pyrefly: ignore[missing-import]
    from stream_programs.drawn.steps import random_spec  # pyrefly: ignore[missing-import]
    from stream_programs.drawn.writer import write  # pyrefly: ignore[missing-import]

    on_gpu = not args.compile_only
    modes = ["default", "reduce-overhead", *["trees"] * on_gpu]
    warnings.filterwarnings("ignore")

    def handle(fields: dict[str, Any]) -> tuple[str, str]:
        case = Case(**fields)
        spec = random_spec(case.seed, case.number, args.wide)
        verdict = trial.judge(write(spec), modes, on_gpu, args.seeds)
        if verdict is None:
            return settled("ok", "", on_gpu)
        reason = f"{verdict.mode}: {verdict.kind}: {verdict.text}"
        is_lost = settled("FAILED", reason, on_gpu)[0] == "CRASHED"
        if not is_lost:
            spec, verdict = trial.shrink(spec, verdict, on_gpu, args.shrink)
        name = f"drawn_{case.seed}_{case.number}"
        text = trial.as_test(write(spec), verdict, f"seed {case.seed}, program {case.number}", name, on_gpu)
        folder = args.out / "failures"
        folder.mkdir(exist_ok=True)
        (folder / f"test_{name}.py").write_text(text)
        (folder / f"{name}.code.txt").write_text(verdict.code)
        return ("CRASHED" if is_lost else "FAILED"), reason

    worker_pool.serve(handle)


def settled(status: str, reason: str, on_gpu: bool) -> tuple[str, str]:
    return worker_pool.settle(status, reason) if on_gpu else (status, reason)


# ---- the parent


def make_worker(number: int, args: argparse.Namespace) -> worker_pool.Worker:
    environment = {**worker_pool.environment(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", "--out", str(args.out)]
    command += ["--seeds", str(args.seeds), "--shrink", str(args.shrink)]
    command += ["--compile-only"] * args.compile_only + ["--wide"] * args.wide
    return worker_pool.Worker(command, environment, args.out / f"worker-{number}.log", args.timeout + args.shrink)


def done_before(lines: Path, head: dict[str, Any]) -> dict[tuple[int, int], worker_pool.Result]:
    """Results of an earlier run of the same programs; its skipped ones are to be done."""
    if not lines.exists():
        return {}
    first, *rest = [json.loads(line) for line in lines.read_text().splitlines()]
    changed = [key for key in head if first.get(key) != head[key]]
    if changed:
        raise SystemExit(f"fuzz: {lines} is of a run with other {', '.join(changed)}; choose another --out")
    found = {}
    for fields in rest:
        case = Case(**fields["case"])
        found[case.seed, case.number] = worker_pool.Result(case, *(fields[k] for k in ("status", "reason", "seconds")))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=200, help="programs (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the programs (0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program (0)")
    parser.add_argument("--compile-only", action="store_true", help="on a simulated GPU")
    parser.add_argument("--wide", action="store_true", help="more operators; their values aren't exact: compile only")
    parser.add_argument("--planner", action="store_true", help="schedules for the planner in the place of programs")
    parser.add_argument("--seeds", type=int, default=5, help="draws of delays for each compiled program, on a GPU (5)")
    parser.add_argument("--out", type=Path, help="folder for results and failures (build/fuzz/...)")
    parser.add_argument("--jobs", type=int, default=max(1, min(15, (os.cpu_count() or 2) - 1)), help="processes")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no program is started")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one program (120)")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for shrinking a failure (60)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.wide and not args.compile_only:
        parser.error("--wide goes with --compile-only: the results of its operators can't be compared exactly")
    kind = ("wide" if args.wide else "compiled") if args.compile_only else "gpu"
    args.out = args.out or ROOT / "build" / "fuzz" / f"{kind}-{args.seed}"
    return args


def main() -> int:
    args = parse()
    if args.planner:
        import planner_fuzz

        return planner_fuzz.run(args.n, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        work(args)
        return 0
    if not args.compile_only:
        from stream_programs import gpu  # pyrefly: ignore[missing-import]

        if not gpu.devices():
            print("fuzz: no GPU here; with --compile-only programs are checked on a simulated one")
            return 2
    lines = args.out / "results.jsonl"
    head = {"seeds": args.seeds, "compile_only": args.compile_only, "wide": args.wide}
    before = done_before(lines, head)
    if not lines.exists():
        lines.write_text(json.dumps({**streams.describe(), **head}) + "\n")
    wanted = [Case(args.seed, number) for number in range(args.first, args.first + args.n)]
    earlier = [before[c.seed, c.number] for c in wanted if (c.seed, c.number) in before]
    cases = [c for c in wanted if (c.seed, c.number) not in before]
    start = time.monotonic()
    results = earlier + worker_pool.run_all(cases, lambda n: make_worker(n, args), args.jobs, args.limit, lines)
    run = [r for r in results if r.status != "skipped"]
    bad = [r for r in run if not r.good]
    for r in sorted(bad, key=lambda r: r.case.number):
        print(worker_pool.failure(r))
    spent = time.monotonic() - start
    again = f", {len(earlier)} of them in an earlier run" if earlier else ""
    print(f"{len(run)} of {len(wanted)} programs{again}, {spent:.0f} s: {len(run) - len(bad)} ok, {len(bad)} failed")
    if bad:
        print(f"their tests: {args.out / 'failures'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
