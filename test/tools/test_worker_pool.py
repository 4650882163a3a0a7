"""Cases in parallel processes: what a case does to its process costs that case, and no other."""

import dataclasses
import json
import os
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path

import form
import worker_pool
from worker_pool import Result, Worker


# What a case is called is what its worker does.
WORKER = """
import os, sys, time
sys.path.insert(0, {tools!r})
import worker_pool

def handle(case):
    print("a word on stdout")
    do = case["do"].split()[0]
    if do == "crash":
        os._exit(3)
    if do == "hang":
        time.sleep(600)
    if do == "bad exit":
        pass
    if do == "fail":
        return "FAILED", "as it should"
    if do == "lost":
        return "CRASHED", "no context"
    return "ok", str(os.getpid())

worker_pool.serve(handle)
if {exit}:
    os._exit({exit})
"""


@dataclasses.dataclass(frozen=True)
class Case:
    do: str
    column: str = "column"

    @property
    def row(self) -> str:
        return self.do


class TestWorkerPool(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        old, worker_pool.START = worker_pool.START, 2.0
        self.addCleanup(setattr, worker_pool, "START", old)

    def worker(self, number: int = 0, exit: int = 0) -> Worker:
        script = self.folder / f"worker{exit}.py"
        script.write_text(textwrap.dedent(WORKER).format(tools=str(form.ROOT / "tools"), exit=exit))
        made = Worker([sys.executable, str(script)], dict(os.environ), self.folder / f"log-{number}", timeout=3.0)
        self.addCleanup(made.close)
        return made

    def run_all(self, *do: str, jobs: int = 2, limit: float = 60.0) -> dict[str, Result]:
        results = worker_pool.run_all([Case(d) for d in do], self.worker, jobs, limit)
        return {r.case.do: r for r in results}

    def test_a_crash_costs_one_case(self) -> None:
        results = self.run_all("ok 1", "crash", "ok 2", "lost", "ok 3", "fail", jobs=1)
        self.assertEqual(
            {do: (r.status, r.reason) for do, r in results.items() if not r.good},
            {
                "crash": ("CRASHED", "worker ended with status 3"),
                "lost": ("CRASHED", "no context"),
                "fail": ("FAILED", "as it should"),
            },
        )
        processes = [results[f"ok {i}"].reason for i in (1, 2, 3)]
        self.assertEqual(len(set(processes)), 3)

    def test_a_hang_is_killed_in_time(self) -> None:
        start = time.monotonic()
        results = self.run_all("hang", "ok", jobs=1)
        self.assertLess(time.monotonic() - start, 20)
        self.assertEqual((results["hang"].status, results["hang"].reason), ("TIMEOUT", "no answer in 3 s"))
        self.assertEqual(results["ok"].status, "ok")

    def test_one_process_takes_several_cases(self) -> None:
        results = self.run_all("ok 1", "ok 2", jobs=1)
        self.assertEqual(results["ok 1"].reason, results["ok 2"].reason)

    def test_cases_after_the_limit_are_told(self) -> None:
        results = self.run_all("ok", limit=-1.0)
        self.assertEqual((results["ok"].status, results["ok"].reason), ("skipped", "out of time"))

    def test_the_exit_of_a_process_is_looked_at(self) -> None:
        good, bad = self.worker(), self.worker(exit=5)
        for worker in (good, bad):
            self.assertEqual(worker.run(Case("ok")).status, "ok")
        self.assertEqual((good.end(), bad.end()), ("", "process exited with status 5"))

    def test_what_a_worker_prints_is_in_its_log(self) -> None:
        self.run_all("ok", jobs=1)
        self.assertIn("a word on stdout", (self.folder / "log-0").read_text())

    def test_table_of_failures_gives_reasons(self) -> None:
        results = [
            Result(Case("a", "x"), "ok"),
            Result(Case("a", "y"), "FAILED", "so\nso"),
            Result(Case("b", "x"), "ok"),
        ]
        whole, short = worker_pool.table(results)
        self.assertEqual(whole.splitlines(), ["program  x   y", "a        ok  FAILED", "b        ok"])
        self.assertEqual(short.splitlines()[1:], ["a        ok  FAILED", "FAILED a y: so so"])
        self.assertEqual(worker_pool.counted(results), "1 FAILED, 2 ok")

    def test_results_are_json_lines(self) -> None:
        file = self.folder / "results.jsonl"
        worker_pool.write_result(file, Result(Case("a"), "ok", "", 1.5))
        self.assertEqual(json.loads(file.read_text())["case"], {"do": "a", "column": "column"})
