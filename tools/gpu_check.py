#!/usr/bin/env python3
"""The GPU correctness tier in one command: every program of `test/stream_programs`, compiled, against ordered eager.

    python tools/gpu_check.py --out DIR [--jobs 12] [--calls 50] [--only 'prefetch*'] [--stock]

Worker processes take one case after the other, so one that crashes or hangs costs its own case and no more. A case is
a program, a mode of torch.compile and a variant: `outside` (delays around the call), `inside` (operators that sleep
between the program's own, too) and `folded` (small branches folded into the current stream, which is the default
outside these tests). The table comes last, failures only; DIR gets the whole table (summary.txt), a JSON line per
case (results.jsonl), and what the workers printed (worker-*.log). The exit status is 1 if a case failed. With --stock
the same programs run on PyTorch without the overlay.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, IO, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Sequence


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]

VARIANTS = {"outside": (False, False), "inside": (True, False), "folded": (False, True)}  # name -> (sleeps, fold)


@dataclasses.dataclass(frozen=True)
class Case:
    program: str
    mode: str
    variant: str

    @property
    def column(self) -> str:
        return f"{self.mode}/{self.variant}"


@dataclasses.dataclass
class Result:
    case: Case
    status: str  # ok, FAILED, ERROR, CRASHED, TIMEOUT, skipped
    reason: str = ""
    seconds: float = 0.0


# ---- a worker


def work(reply: IO[str], calls: int) -> None:
    """Read cases from stdin, one JSON line each, and answer each with one."""
    import torch

    import form  # pyrefly: ignore[missing-import]
    from stream_programs import by_name, gpu  # pyrefly: ignore[missing-import]

    stock = os.environ.get("TORCH_OVERLAY_DISABLE") == "1"
    config = None if stock else form.overlay.config
    for line in sys.stdin:
        case = Case(**json.loads(line))
        start = time.monotonic()
        status, reason = "ok", ""
        program = by_name(case.program)
        sleeps, fold = VARIANTS[case.variant]
        try:
            if program.devices > gpu.devices():
                status, reason = "skipped", f"needs {program.devices} GPUs"
            else:
                mode = None if case.mode == "default" else case.mode
                if config is None or fold:
                    gpu.check(program, mode, sleeps=sleeps, calls=calls)
                else:
                    with config.patch(fold_branches_below_us=0.0):
                        gpu.check(program, mode, sleeps=sleeps, calls=calls)
        except gpu.Mismatch as e:
            status, reason = "FAILED", str(e)
        except Exception as e:
            traceback.print_exc()
            status, reason = "ERROR", f"{type(e).__name__}: {e}".strip()
        try:
            torch.cuda.synchronize()
        except Exception as e:  # the context is lost: the next case needs a new process
            status, reason = "CRASHED", reason or str(e)
        print(json.dumps([status, reason, time.monotonic() - start]), file=reply, flush=True)
        if status == "CRASHED":
            return


# ---- the parent


class Worker:
    def __init__(self, number: int, args: argparse.Namespace) -> None:
        self.args, self.log = args, open(args.out / f"worker-{number}.log", "a")  # noqa: SIM115
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
            "PYTHONUNBUFFERED": "1",
        }
        if self.args.stock:
            environment["TORCH_OVERLAY_DISABLE"] = "1"
        command = [sys.executable, __file__, "--worker", "--calls", str(self.args.calls), "--out", str(self.args.out)]
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, case: Case) -> Result:
        fresh = self.process is None
        process = self.process = self.process or self.start()
        assert process.stdin is not None and process.stdout is not None
        print(f"== {case}", file=self.log, flush=True)
        start = time.monotonic()
        try:
            print(json.dumps(dataclasses.asdict(case)), file=process.stdin, flush=True)
            # A fresh worker imports torch and starts CUDA first, beside all others.
            line = self.read(process.stdout, self.args.timeout + (90 if fresh else 0))
        except (BrokenPipeError, OSError):
            line = ""
        if line is None:
            self.stop()
            return Result(case, "TIMEOUT", f"no answer in {self.args.timeout} s", time.monotonic() - start)
        if not line:
            code = process.wait()
            self.process = None
            return Result(case, "CRASHED", f"worker ended with status {code}", time.monotonic() - start)
        status, reason, seconds = json.loads(line)
        if status == "CRASHED":
            self.stop()
        return Result(case, status, reason, seconds)

    @staticmethod
    def read(stream: IO[str], timeout: float) -> str | None:
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            return stream.readline() if selector.select(timeout) else None


def run_all(cases: Sequence[Case], args: argparse.Namespace) -> list[Result]:
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    results: list[Result] = []
    lock = threading.Lock()
    deadline = time.monotonic() + args.limit

    def loop(number: int) -> None:
        worker = Worker(number, args)
        try:
            while time.monotonic() < deadline:
                try:
                    case = todo.get_nowait()
                except queue.Empty:
                    return
                result = worker.run(case)
                with lock:
                    results.append(result)
                    write_result(args.out, result)
                    if result.status not in ("ok", "skipped"):
                        print(f"{result.status} {case.program} {case.column}: {result.reason[:200]}", flush=True)
                    elif len(results) % 50 == 0:
                        print(f"{len(results)} of {len(cases)} cases", flush=True)
        finally:
            worker.stop()

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = {r.case for r in results}
    return results + [Result(c, "skipped", "out of time") for c in cases if c not in done]


def write_result(out: Path, result: Result) -> None:
    with open(out / "results.jsonl", "a") as file:
        print(json.dumps(dataclasses.asdict(result)), file=file)


def describe() -> dict[str, Any]:
    import torch

    def ask(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            return "unknown"

    return {
        "torch": torch.__version__,
        "gpu": ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "commit": ask("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "command": sys.argv,
    }


def table(results: Sequence[Result]) -> tuple[str, str]:
    """The whole table, and the rows with a failure followed by their reasons."""
    columns = sorted({r.case.column for r in results})
    rows: dict[str, dict[str, str]] = {}
    for r in results:
        rows.setdefault(r.case.program, {})[r.case.column] = r.status
    width = max(map(len, rows), default=0)
    widths = [max(len(c), 7) for c in columns]
    head = " ".join(["program".ljust(width), *(c.ljust(w) for c, w in zip(columns, widths))])

    def line(name: str) -> str:
        return " ".join(
            [name.ljust(width), *(rows[name].get(c, "").ljust(w) for c, w in zip(columns, widths))]
        ).rstrip()

    bad = [r for r in results if r.status not in ("ok", "skipped")]
    whole = "\n".join([head, *map(line, sorted(rows))])
    short = [head, *map(line, sorted({r.case.program for r in bad}))] if bad else []
    short += [f"{r.status} {r.case.program} {r.case.column}: {' '.join(r.reason.split())[:160]}" for r in bad]
    return whole, "\n".join(short)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the details")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="worker processes")
    parser.add_argument("--calls", type=int, default=50, help="calls of each compiled program")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one case")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no case is started")
    parser.add_argument("--only", action="append", default=[], help="pattern of program names; may be repeated")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of outside, inside, folded")
    parser.add_argument("--modes", default="default,reduce-overhead", help="of default, reduce-overhead")
    parser.add_argument("--stock", action="store_true", help="without the overlay")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        # Programs and compilers print; the answers have the real stdout for themselves.
        with os.fdopen(os.dup(1), "w") as reply:
            os.dup2(2, 1)
            work(reply, args.calls)
        return 0
    from stream_programs import gpu, PROGRAMS  # pyrefly: ignore[missing-import]

    if not gpu.devices():
        print("gpu_check: no GPU here, nothing to run")
        return 2
    cases = [
        Case(p.name, mode or "default", variant)
        for p in PROGRAMS
        if not args.only or any(fnmatch.fnmatch(p.name, pattern) for pattern in args.only)
        for mode in p.modes
        if (mode or "default") in args.modes.split(",")
        for variant in args.variants.split(",")
        if mode is None or variant != "folded"
    ]
    start = time.monotonic()
    (args.out / "results.jsonl").write_text(json.dumps(describe()) + "\n")
    results = run_all(cases, args)
    whole, short = table(results)
    counts: dict[str, int] = {}
    for r in results:
        counts[r.status] = counts.get(r.status, 0) + 1
    last = f"{len(results)} cases in {time.monotonic() - start:.0f} s: " + ", ".join(
        f"{n} {s}" for s, n in sorted(counts.items())
    )
    (args.out / "summary.txt").write_text(f"{whole}\n{short}\n{last}\n")
    print(f"\n{short}\n{last}")
    return 0 if set(counts) <= {"ok", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
