"""Runs the programs on a GPU, each in a process of its own: results, causes, and what the fixed form brings.

    python test/outside_programs/run.py [--jobs 8] [--out DIR] [NAME ...]

For each program: the results of its calls are those of eager; the causes outside of graphs are those that its comments
name, each with operator and line; and of the fixed form all kernels are in graphs from the second call on. With
--doctor, the doctor then tries its own switches and the fixed form of each program, and says which of them help: equal
results in less time. One doctor works at a time, after all programs are judged, for it measures times.
"""

import argparse
import concurrent.futures
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]


def judge(name: str) -> dict[str, Any]:
    """What one program does, in this process."""
    import torch

    import torch_overlay
    from outside_programs import by_name
    from outside_programs._program import CALLS, causes_of, results
    from torch_overlay.testing import observe

    program = by_name(name)
    found: dict[str, Any] = {"name": name, "errors": []}
    with program.options():
        for kind, body in (("body", program.body), ("fixed", program.fixed)):
            if body is None:
                continue
            torch._dynamo.reset()
            torch.manual_seed(0)
            expected = [results(body, program, n) for n in range(CALLS)]
            torch.manual_seed(0)
            with observe() as seen:
                fn = torch.compile(body, mode="reduce-overhead", dynamic=program.dynamic)
                got = [results(fn, program, n) for n in range(CALLS // 2)]
                before = torch_overlay.coverage()
                got += [results(fn, program, n) for n in range(CALLS // 2, CALLS)]
            coverage = torch_overlay.coverage().since(before)
            for n, (want, have) in enumerate(zip(expected, got)):
                for i, (a, b) in enumerate(zip(want, have, strict=True)):
                    if not torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True):
                        found["errors"].append(f"{kind}, call {n}, result {i}: off by {(a - b).abs().max()}")
            causes = causes_of(coverage, seen)
            found[kind] = sorted(causes)
            found[f"{kind} share"] = round(coverage.share, 4)
            found[f"{kind} messages"] = sorted({o.message for f in coverage.functions for o in f.outside})
            if kind == "body":
                found["errors"] += program.differences(causes)
            elif coverage.share < 1 or causes:
                found["errors"].append(f"fixed: {coverage.share:.1%} in graphs, {sorted(causes)}")
    return found


def consult(name: str, lock: str) -> dict[str, Any]:
    """All that the doctor tries, and what of it helps."""
    import torch

    import torch_overlay
    from outside_programs import by_name

    program = by_name(name)

    def compiled(fn: Any) -> Any:
        return fn and torch.compile(fn, mode="reduce-overhead", dynamic=program.dynamic)

    with open(lock) as file, program.options():
        fcntl.flock(file, fcntl.LOCK_EX)
        diagnosis = torch_overlay.doctor(
            compiled(program.body), *program.arguments(0), backward=program.backward, remedy=compiled(program.fixed)
        )
    trials = diagnosis.trials
    return {"name": name, "trials": list(map(str, trials)), "confirmed": [t.change for t in trials if t.helps]}


def run(name: str, timeout: float, cache: str, *more: str) -> dict[str, Any]:
    """Judge one program in a process, whose compile cache is kept; or what else `more` asks for."""
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(cache) / name),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, *(more or ("--judge", name))]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"name": name, "errors": ["timed out"]}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"name": name, "errors": [f"status {done.returncode}: {done.stderr[-1500:]}"]}


def report(one: dict[str, Any]) -> None:
    print("failed" if one["errors"] else "ok", one["name"], one.get("body share", ""), one.get("fixed share", ""))
    for line in (*one["errors"], *one.get("trials", ())):
        print("    ", line)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=150)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--doctor", action="store_true", help="then have the doctor try the remedies")
    parser.add_argument("--judge", help=argparse.SUPPRESS)
    parser.add_argument("--consult", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge or options.consult:
        print(json.dumps(judge(options.judge) if options.judge else consult(*options.consult)))
        return 0
    from outside_programs import PROGRAMS

    names = options.names or [program.name for program in PROGRAMS]
    with tempfile.TemporaryDirectory() as cache:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            found = []
            for one in pool.map(lambda name: run(name, options.timeout, cache), names):
                found.append(one)
                report(one)
        if options.doctor:
            (lock := Path(cache) / "lock").touch()
            most = options.timeout * len(names)  # most of it is waiting
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                said = pool.map(lambda name: run(name, most, cache, "--consult", name, str(lock)), names)
                for one, other in zip(found, said):
                    one |= {**other, "errors": one["errors"] + other.get("errors", [])}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "outside.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    for one in found if options.doctor else ():
        report(one)
    failed = sum(bool(one["errors"]) for one in found)
    confirmed = sum(bool(one.get("confirmed")) for one in found)
    print(f"{len(found) - failed} of {len(found)} programs are right; the doctor confirmed a remedy of {confirmed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
