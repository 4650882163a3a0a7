"""Cases in parallel processes: one that crashes or hangs costs its own case and no more.

Shared by the GPU checks and the fuzzer. The parent (`run_all`) keeps a few worker processes and hands each one case
after the other, a JSON line on its stdin; the worker (`serve`) answers each with a JSON line. A worker that doesn't
answer in time is killed, one that dies is replaced, and one that has lost its CUDA context ends by itself. A case is
any frozen dataclass of plain values with the properties `row` and `column`, its place in the table.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import queue
import selectors
import shutil
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, IO, Protocol, TYPE_CHECKING


sys.path.append(str(Path(__file__).resolve().parent / "bench"))

import streams  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


GOOD = ("ok", "skipped")
START = 90.0  # seconds that a fresh worker may need to import torch and start CUDA, beside all others


@dataclasses.dataclass
class Result:
    case: Any
    status: str  # ok, skipped, FAILED, ERROR, CRASHED, TIMEOUT
    reason: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.status in GOOD


# ---- in a worker


def serve(handle: Callable[[dict[str, Any]], tuple[str, str]]) -> None:
    """Answer cases until stdin ends. `handle` returns status and reason; CRASHED ends the process."""
    # Programs and compilers print; the answers have the real stdout for themselves.
    with os.fdopen(os.dup(1), "w") as reply:
        os.dup2(2, 1)
        for line in sys.stdin:
            start = time.monotonic()
            status, reason = handle(json.loads(line))
            print(json.dumps([status, reason, time.monotonic() - start]), file=reply, flush=True)
            if status == "CRASHED":
                return


def attempt(check: Callable[[], object], mismatch: type[Exception]) -> tuple[str, str]:
    """A case's outcome: FAILED where the check raises `mismatch`, ERROR where it raises anything else."""
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, mismatch):
            return "FAILED", str(error)
        return "ERROR", f"{type(error).__name__}: {error}".strip()
    return "ok", ""


def settle(status: str, reason: str) -> tuple[str, str]:
    """A case's outcome once the device is done with it: where the context is lost, the next needs a new process."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as e:
        return "CRASHED", reason or str(e)
    return status, reason


# ---- in the parent


def environment() -> dict[str, str]:
    """Of a worker: its programs are compiled in its own process, and each of them anew."""
    return {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "PYTHONUNBUFFERED": "1",
    }


class Worker:
    """One process at a time, started when it is needed. What it prints goes to the log."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path, timeout: float) -> None:
        self.command, self.environment, self.timeout = command, environment, timeout
        self.log = open(log, "a")  # noqa: SIM115
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            env=self.environment,
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

    def close(self) -> None:
        self.stop()
        self.log.close()

    def end(self, timeout: float = 60.0) -> str:
        """Let the process end by itself. Says what was wrong with that, or nothing."""
        if self.process is None:
            return ""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            return f"process did not exit in {timeout:.0f} s"
        self.process = None
        return f"process exited with status {code}" if code else ""

    def run(self, case: Any) -> Result:
        fresh = self.process is None
        process = self.process = self.process or self.start()
        assert process.stdin is not None and process.stdout is not None
        print(f"== {case}", file=self.log, flush=True)
        start = time.monotonic()
        try:
            print(json.dumps(dataclasses.asdict(case)), file=process.stdin, flush=True)
            line = self.read(process.stdout, self.timeout + (START if fresh else 0))
        except OSError:
            line = ""
        if line is None:
            self.stop()
            return Result(case, "TIMEOUT", f"no answer in {self.timeout:.0f} s", time.monotonic() - start)
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


class Runner(Protocol):
    """A `Worker`, or an object like one."""

    def run(self, case: Any) -> Result: ...

    def close(self) -> None: ...


class Progress:
    """A line that is written over on a terminal; elsewhere a line for every twentieth of the way."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done, self.failed, self.start = total, what, 0, 0, time.monotonic()

    def step(self, failure: str = "") -> None:
        """One more is done. A failure has a line of its own, which stays."""
        self.done += 1
        self.failed += bool(failure)
        spent = time.monotonic() - self.start
        line = f"{self.done}/{self.total} {self.what}, {spent:.0f} s, {self.failed} failed"
        if sys.stderr.isatty():
            left = f", about {spent / self.done * (self.total - self.done):.0f} s left"
            text = f"{line}{left}"[: shutil.get_terminal_size().columns - 1]
            over = "\x1b[A\x1b[K" if self.done > 1 else ""
            print(over + "\n".join(filter(None, (failure, text))), file=sys.stderr, flush=True)
            return
        is_twentieth = self.done * 20 // self.total != (self.done - 1) * 20 // self.total
        for text in filter(None, (failure, line if is_twentieth else "")):
            print(text, file=sys.stderr, flush=True)


def run_all(
    cases: Sequence[Any], worker: Callable[[int], Runner], jobs: int, limit: float, lines: Path | None = None
) -> list[Result]:
    """Every case, `jobs` at a time; after `limit` seconds no case is started. Each result is added to the file `lines`.

    Raises ValueError if there is nobody to run them.
    """
    if jobs < 1:
        raise ValueError(f"{len(cases)} cases for {jobs} processes: --jobs is at least 1")
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    results: list[Result] = []
    lock, progress = threading.Lock(), Progress(len(cases), "cases")
    deadline = time.monotonic() + limit

    def loop(number: int) -> None:
        mine = worker(number)
        try:
            while time.monotonic() < deadline:
                try:
                    case = todo.get_nowait()
                except queue.Empty:
                    return
                result = mine.run(case)
                with lock:
                    results.append(result)
                    if lines is not None:
                        write_result(lines, result)
                    progress.step("" if result.good else failure(result))
        finally:
            mine.close()

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(min(jobs, len(cases)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = {r.case for r in results}
    return results + [Result(c, "skipped", "out of time") for c in cases if c not in done]


def run_and_report(
    out: Path,
    parts: Iterable[tuple[Sequence[Any], int]],
    worker: Callable[[int], Runner],
    limit: float,
    notes: Callable[[Sequence[Result]], list[str]] = lambda results: [],
) -> int:
    """Run parts of the cases one after another, each with its number of processes. Results go to the folder `out`, the
    table of failures and the notes on them to stdout. Returns the exit status."""
    start, results = time.monotonic(), list[Result]()
    lines = out / "results.jsonl"
    lines.write_text(json.dumps(streams.describe()) + "\n")
    for cases, jobs in parts:
        least = 30.0 if results else 0.0  # seconds for a further part
        results += run_all(cases, worker, jobs, max(least, limit - (time.monotonic() - start)), lines)
    whole, short = table(results)
    last = f"{len(results)} cases in {time.monotonic() - start:.0f} s: {counted(results)}"
    found = [*notes(results), short, last]
    (out / "summary.txt").write_text("\n".join([whole, *found]) + "\n")
    print("\n".join(["", *found]))
    return 0 if all(r.good for r in results) else 1


def write_result(file: Path, result: Result) -> None:
    with open(file, "a") as stream:
        print(json.dumps(dataclasses.asdict(result)), file=stream)


def table(results: Sequence[Result]) -> tuple[str, str]:
    """The whole table, and the rows with a failure followed by their reasons."""
    columns = sorted({r.case.column for r in results})
    rows: dict[str, dict[str, str]] = {}
    for r in results:
        rows.setdefault(r.case.row, {})[r.case.column] = r.status
    bad = [r for r in results if not r.good]

    def lines(shown: Iterable[str]) -> list[str]:
        cells = [[row, *(rows[row].get(column, "") for column in columns)] for row in sorted(shown)]
        return streams.aligned([["program", *columns], *cells])

    short = lines({r.case.row for r in bad}) if bad else []
    return "\n".join(lines(rows)), "\n".join([*short, *map(failure, bad)])


def failure(result: Result) -> str:
    return f"{result.status} {result.case.row} {result.case.column}: {' '.join(result.reason.split())[:200]}"


def counted(results: Iterable[Result]) -> str:
    counts = collections.Counter(r.status for r in results)
    return ", ".join(f"{n} {s}" for s, n in sorted(counts.items()))
