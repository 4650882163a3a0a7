"""The gate of benchmarks: it stays silent where nothing has changed, and finds what was made worse on purpose.

Counts are measured here, of real programs, and the changes are made to what is counted: to generated code, to a
program, to the overlay's own functions.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import counts
import gate
import instructions
import models
import offload
import records
import relaunch
import relaunch_counts
import shapes
import stream_counts
import streams
from records import Figures, Record

import form
from torch_overlay._inductor.relaunch.memory import packing
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable


ABOUT = {"device": "a-device", "hardware": "a device", "commit": "1234567"}
PROGRAM, GRAPHED = "copy_to_input, default", "copy_to_input, reduce-overhead"
RELAUNCHED = "scratch_is_freed"


def one(record: Figures, kind: str = "exact") -> dict[str, float]:
    return {name: value for name, (value,) in record[kind].items()}


class GateTestCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(gate, "BASELINE", self.folder / "baseline"))

    def run_gate(self, *argv: str) -> tuple[int, str, str]:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = gate.main(argv)
        return status, out.getvalue(), errors.getvalue()

    def write(self, rows: dict[str, Figures], bench: str = "bench", **about: Any) -> str:
        path = self.folder / "new.jsonl"
        records.write(path, {**ABOUT, **about}, {bench: rows})
        return str(path)

    def accept(self, rows: dict[str, Figures], **about: Any) -> None:
        self.assertEqual(self.run_gate("accept", self.write(rows, **about))[0], 0)

    def check(self, rows: dict[str, Figures], **about: Any) -> tuple[int, str]:
        status, out, errors = self.run_gate("check", self.write(rows, **about))
        self.assertEqual(errors, "")
        return status, out


class TestVerdicts(GateTestCase):
    def test_row_by_row_with_both_values(self) -> None:
        self.accept({"a": {"count": {"events": [3], "waits": [2], "copies": [1]}}})
        status, out = self.check({"a": {"count": {"events": [4], "waits": [1], "copies": [1]}}})
        self.assertEqual(status, 1)
        rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
        self.assertIn(["regressed", "bench: a", "events", "count", "3", "4", "+33.3%"], rows)
        self.assertIn(["improved", "bench: a", "waits", "count", "2", "1", "-50.0%"], rows)
        self.assertIn("3 figures: 1 regressed, 1 improved, 0 changed, 0 noisy, 0 skipped, 1 same", out)

    def test_lost_graph_is_a_change_and_no_gain(self) -> None:
        self.accept({"a": {"exact": {"graphs": [1], "graph nodes": [3], "refusals": [0], "kernels": [3]}}})
        status, out = self.check({"a": {"exact": {"graphs": [0], "graph nodes": [0], "refusals": [1], "kernels": [3]}}})
        self.assertEqual(status, 1)
        rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
        self.assertIn(["changed", "bench: a", "graph nodes", "exact", "3", "0", "-100.0%"], rows)
        self.assertIn("4 figures: 0 regressed, 0 improved, 3 changed, 0 noisy, 0 skipped, 1 same", out)
        self.assertIn("Look whether each change is meant.", out)

    def test_noise_that_could_hide_a_change_is_told_and_is_no_alarm(self) -> None:
        noisy = [0.5, 0.8, 0.6, 0.9, 0.7, 1.0]
        self.accept({"a": {"device time": {"ratio": noisy}}})
        status, out = self.check({"a": {"device time": {"ratio": [s * 1.02 for s in noisy]}}})
        self.assertEqual((status, out.splitlines()[1].split()[0]), (0, "noisy"))

    def test_two_samples_of_a_time_say_nothing(self) -> None:
        self.accept({"a": {"wall time": {"ratio": [1.0, 1.0]}}})
        status, out = self.check({"a": {"wall time": {"ratio": [2.0, 2.0]}}})
        self.assertEqual((status, out.splitlines()[1].split()[0]), (0, "noisy"))

    def test_change_that_does_not_matter(self) -> None:
        steady = [1.0, 1.001, 0.999, 1.0, 1.0005, 0.9995]
        self.accept({"a": {"device time": {"ratio": steady}, "count": {"nodes": [1000]}}})
        changed = {"device time": {"ratio": [s * 1.015 for s in steady]}, "count": {"nodes": [1009]}}
        self.assertEqual(self.check({"a": changed})[0], 0)

    def test_instruction(self) -> None:
        self.accept({"relaunch": {"instructions": {"a call": [10000.0]}}})
        self.assertEqual(self.check({"relaunch": {"instructions": {"a call": [10090.0]}}})[0], 0)
        self.assertEqual(self.check({"relaunch": {"instructions": {"a call": [10110.0]}}})[0], 1)

    def test_other_compiler_is_said_and_not_compared(self) -> None:
        rows: dict[str, Figures] = {"a": {"instructions": {"a call": [1000.0]}}}
        self.accept(rows, depends={"compiler": "gcc 12"})
        rows["a"]["instructions"]["a call"] = [2000.0]
        self.assertEqual(self.check(rows, depends={"compiler": "gcc 12"})[0], 1)
        status, out = self.check(rows, depends={"compiler": "clang 15"})
        self.assertEqual(status, 0)
        self.assertRegex(out, "skipped .* with clang 15; the baseline with gcc 12")

    def test_some_rows_leave_the_others(self) -> None:
        rows: dict[str, Figures] = {name: {"exact": {"events": [3]}} for name in "abc"}
        self.accept(rows)
        status, out, _ = self.run_gate("check", self.write({"b": rows["b"]}), "--some")
        self.assertEqual(status, 0)
        self.assertIn("2 rows of the baseline were not measured", out)
        self.run_gate("accept", self.write({"b": {"exact": {"events": [2]}}}), "--some")
        self.assertEqual(self.check({**rows, "b": {"exact": {"events": [2]}}})[0], 0)

    def test_rows_that_are_gone_are_dropped(self) -> None:
        rows: dict[str, Figures] = {name: {"exact": {"events": [3]}} for name in "ab"}
        self.accept(rows)
        self.accept({"a": rows["a"]})
        self.assertEqual(self.check({"a": rows["a"]})[0], 0)


class TestBadInput(GateTestCase):
    def assert_told(self, expected: str, *argv: str) -> None:
        status, out, errors = self.run_gate(*argv)
        self.assertEqual((status, out), (2, ""))
        self.assertEqual(len(errors.splitlines()), 1, errors)
        self.assertRegex(errors, f"^gate: {expected}")

    def test_no_such_file(self) -> None:
        self.assert_told("/nowhere.jsonl: can't be read: No such file or directory", "check", "/nowhere.jsonl")

    def test_no_baseline(self) -> None:
        path = self.write({"a": {"exact": {"events": [3]}}})
        self.assert_told(".*/baseline/a-device.jsonl: no baseline for this device: accept one", "check", path)

    def test_row_that_depends_on_another_machine(self) -> None:
        rows: dict[str, Figures] = {"a": {"instructions": {"a call": [1000.0]}}}
        self.accept(rows, depends={"compiler": "gcc 12"})
        path = self.write(rows, depends={"compiler": "gcc 13"})
        expected = "bench: row a was measured with gcc 13; the baseline with gcc 12: .* pass --other-machine"
        self.assert_told(expected, "accept", path)
        self.assertEqual(self.check(rows, depends={"compiler": "gcc 12"})[1].count("1 same"), 1)
        self.assertEqual(self.run_gate("accept", self.write(rows, depends={}), "--other-machine")[0], 0)

    def test_changes_that_no_commit_has(self) -> None:
        path = self.write({"a": {"exact": {"events": [3]}}}, commit="1234567-dirty")
        expected = "bench: row a was measured at 1234567-dirty, with changes no commit has: commit and measure again"
        self.assert_told(expected, "accept", path)
        self.assertEqual(self.run_gate("accept", path, "--dirty")[0], 0)
        self.assertEqual(self.run_gate("check", path)[0], 0)

    def test_baseline_that_cannot_be_written(self) -> None:
        (self.folder / "baseline").touch()
        path = self.write({"a": {"exact": {"events": [3]}}})
        self.assert_told(".*/baseline/a-device.jsonl: can't be written: File exists", "accept", path)

    def test_reader_that_has_gone(self) -> None:
        rows: dict[str, Figures] = {str(i): {"exact": {"events": [3]}} for i in range(5000)}
        self.accept(rows)
        path = self.write({name: {"exact": {"events": [4]}} for name in rows})
        call = f"import sys, pathlib, gate; gate.BASELINE = pathlib.Path({str(gate.BASELINE)!r}); sys.exit(gate.main())"
        command = [sys.executable, "-c", call, "check", path]
        process = subprocess.Popen(
            command, cwd=Path(gate.__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        self.assertEqual((process.stderr.read(), process.wait()), ("", 1))
        process.stderr.close()

    def test_missing_rows_and_figures(self) -> None:
        both: dict[str, Figures] = {name: {"exact": {"events": [3]}} for name in "ab"}
        self.accept(both)
        path = self.write({"a": both["a"]})
        self.assert_told(r"bench: row b was not measured \(of 1\): measure it, or pass --some", "check", path)
        path = self.write({**both, "c": both["a"]})
        self.assert_told(r"bench: row c is not in the baseline \(of 1\): accept it", "check", path)
        path = self.write({**both, "b": {"exact": {"waits": [3]}}})
        self.assert_told(r"bench: events \(exact\) of row b was not measured", "check", path)
        path = self.write({**both, "b": {"exact": {"events": [3], "waits": [3]}}})
        self.assert_told(r"bench: waits \(exact\) of row b is not in the baseline: accept it", "check", path)

    def test_two_devices(self) -> None:
        one, other = self.folder / "one.jsonl", self.folder / "other.jsonl"
        records.write(one, {"device": "x"}, {"bench": {"a": {"exact": {"events": [3]}}}})
        records.write(other, {"device": "y"}, {"bench": {"b": {"exact": {"events": [3]}}}})
        self.assert_told(".*: measured on x, y: compare one device at a time", "check", str(one), str(other))
        self.assert_told("bench: row a is in two of the files", "check", str(one), str(one))

    def test_lines_that_are_none(self) -> None:
        head = json.dumps({"bench": "bench", "about": ABOUT})
        row = json.dumps({"row": "a", "figures": {"exact": {"events": [3]}}})
        for lines, expected in [
            ([], "no rows"),
            (["{"], "1: not a JSON line"),
            ([head, "[]"], "2: neither a row"),
            ([row], "1: no line before this row says on which device"),
            (["[" * 100_000], "1: not a JSON line"),
            (["1" * 10_000], "1: not a JSON line"),
            *(
                ([json.dumps({"bench": "bench", "about": {"device": device}}), row], "2: the device .* is no name")
                for device in (["cpu"], 7, "../cpu", "NVIDIA H100")
            ),
            (
                [json.dumps({"bench": "bench", "about": {**ABOUT, "depends": ["gcc"]}}), row],
                "2: what the figures depend",
            ),
            ([head, row.replace("[3]", f"[{10**400}]")], "2: events of row a has no list"),
            ([head, row, row], "3: a second row a of bench"),
            ([head, '{"row": "a"}'], "2: row a has no figures"),
            (
                [head, '{"row": "a", "figures": {"luck": {"events": [3]}}}'],
                "2: row a has figures of the unknown kind luck",
            ),
            ([head, '{"row": "a", "figures": {"exact": [3]}}'], "2: row a has no named figures of the kind exact"),
            ([head, '{"row": "a", "figures": {"exact": {"events": 3}}}'], "2: events of row a has no list of samples"),
            ([head, '{"row": "a", "figures": {"exact": {"events": [NaN]}}}'], "2: events of row a has no list"),
            ([head, '{"row": "a", "figures": {"exact": {"events": ["3"]}}}'], "2: events of row a has no list"),
        ]:
            with self.subTest(expected):
                path = self.folder / "bad.jsonl"
                path.write_text("\n".join(lines))
                self.assert_told(f".*bad.jsonl: ?{expected}.*; measure again$", "check", str(path))


class TestBenchmarks(GateTestCase):
    """Figures of each benchmark, from what its processes said."""

    def assert_found(self, rows: dict[str, Figures], worse: dict[str, Figures], expected: set[str]) -> None:
        """The worse run regresses in the expected figures, and the same run in none."""
        self.accept(rows)
        self.assertEqual(self.check(rows)[0], 0)
        status, out = self.check(worse)
        found = {re.split(r"  +", line)[2] for line in out.splitlines() if line.startswith("regressed")}
        self.assertEqual((status, found), (1, expected), out)

    def test_streams(self) -> None:
        def run(factor: float, name: str) -> dict[str, Figures]:
            (row,) = (r for r in streams.ROWS if r.name == name)
            answers = streams.Answers(name)
            for i in range(6):
                ours = {"one": 1000 + i, "two": factor * (1050 + i), "seconds": factor * (10 + i / 100)}
                stock = {"one": 1000 + i, "two": 2000 + i, "seconds": 10 + i / 100}
                for side, result in (("overlay", ours), ("stock", stock)):
                    answers.add({"side": side, "result": result})
            return {name: streams.figures(row, answers)}

        for name, what in (("two chains", "two 2 ms chains"), ("compile time", "compile time of GPT-2")):
            self.accept(run(1.0, name))
            status, out = self.check(run(1.2, name))
            self.assertEqual(status, 1)
            self.assertRegex(out, rf"regressed +bench: {name} +{what}.* wall time .* \+20.0%")

    def test_models(self) -> None:
        def run(factor: float, covered: float) -> dict[str, Figures]:
            def turns(us: float) -> list[dict[str, Any]]:
                keys = ("gpu us", "host us", "queued us")
                return [{**dict.fromkeys(keys, us + i / 10), "reserved MiB": 64.0} for i in range(6)]

            warm = {side: {"seen": "a", "some": [1.0]} for side in ("off", "trees", "relaunch")}
            warm["relaunch"]["covered"] = covered
            times = {"off": turns(200), "trees": turns(100), "relaunch": turns(80 * factor)}
            return {"row": models.figures(models._result("row", warm, times))}

        slower = {f"queued / {side}" for side in ("off", "trees")}
        self.assert_found(run(1.0, 1.0), run(1.05, 0.9), {*slower, "kernels outside of graphs, %"})

    def test_shapes(self) -> None:
        def run(factor: float, captures: int) -> dict[str, Figures]:
            off = {"row": "row", "side": "off", "second": [100.0, 200.0]}
            rounds = [[factor * (50 + i / 10), factor * (90 + i / 10)] for i in range(4)]
            mine = {"row": "row", "side": "relaunch", "rounds": rounds, "captures": captures, "nodes": 8}
            return {"row": shapes.figures("row", [off, mine, off, mine])}

        self.assert_found(run(1.0, 2), run(1.2, 3), {"later / off", "captures"})

    def test_offload(self) -> None:
        def run(factor: float, gib: float) -> dict[str, Figures]:
            times = [100 + i / 10 for i in range(6)]
            found = {"off measured ms": times, "on measured ms": [factor * t for t in times], "on peak GiB": gib}
            return {"row": offload.figures({**found, "tensors": 12, "again": 3, "refused": []})}

        self.assert_found(run(1.01, 20.0), run(1.06, 20.5), {"on / off", "on peak GiB"})

    def test_benchmark_that_measured_nothing_writes_no_row(self) -> None:
        self.assertEqual(records.text([records.Record("bench", "a", ABOUT, relaunch.Row("a").figures())]), "")


# ---- what is made worse on purpose


@contextlib.contextmanager
def generated(change: Callable[[str], str]) -> Iterator[None]:
    """Change the text of generated modules, where Inductor hands it out."""
    from torch._inductor.graph import GraphLowering

    codegen = GraphLowering.codegen

    def changed(graph: Any) -> Any:
        result = codegen(graph)
        text = change(result[0].value)
        assert text != result[0].value, "nothing was changed"
        result[0].value = text
        return result

    with mock.patch.object(GraphLowering, "codegen", changed):
        yield


def after(pattern: str, line: str) -> Callable[[str], str]:
    """Add a line after each one that the pattern is in; "{}" in it stands for that line."""
    return lambda text: re.sub(
        rf"(?m)^( *)(?=\S)(.*{pattern}.*)$", lambda m: f"{m[0]}\n{m[1]}{line.format(m[2])}", text
    )


COPY = r"arg1_1\.copy_"
GENERATED = {  # what is added to the generated code -> the figures that get larger
    "event": (after(r"ev1\.record", "{}"), {"events"}),
    "wait": (after(r"ev1\.record", "ev1.wait(stream1_raw)"), {"waits"}),
    "kernel": (after(r"extern_kernels\.mm", "{}"), {"kernels"}),
    "copy": (after(COPY, "{}"), {"copies"}),
    "allocation": (after(COPY, "more = empty_strided_cuda((1,), (1,), torch.float32)"), {"allocations"}),
    "bytes": (lambda text: text.replace("((16, 16), (16, 1),", "((16, 16), (32, 1),"), {"allocated", "peak"}),
    "wait of the host": (after(COPY, "stream1.synchronize()"), {"host waits"}),
    "record_stream": (after(r"extern_kernels\.mm", "buf2.record_stream(stream1)"), {"record_stream"}),
    "Python call a kernel": (after(r"(?:extern_kernels\.mm|copy_)\(", "len(())"), {"Python calls"}),
    "switch of the stream": (after(r"set_stream\(", "{}"), {"Python calls"}),
}


class TestInjectedCounts(unittest.TestCase):
    """Every change is found in the counts of the program, as the gate compares them."""

    def larger(self, old: Figures, new: Figures) -> set[str]:
        """The names of the figures that the gate tells, and that got larger."""
        before, now = (records.Record("bench", "row", ABOUT, figures) for figures in (old, new))
        return {f.name for f in gate.compare(before, now) if f.verdict == "changed" and f.new > f.old}

    def test_generated_code(self) -> None:
        old = stream_counts.figures(PROGRAM)
        self.assertEqual(self.larger(old, stream_counts.figures(PROGRAM)), set())
        for name, (change, expected) in GENERATED.items():
            with self.subTest(name):
                with generated(change):
                    new = stream_counts.figures(PROGRAM)
                self.assertLessEqual(expected, self.larger(old, new))

    def test_kernel_of_a_graph(self) -> None:
        old = stream_counts.figures(GRAPHED)
        with generated(after(r"extern_kernels\.mm", "{}")):
            new = stream_counts.figures(GRAPHED)
        self.assertLessEqual({"kernels", "graph nodes"}, self.larger(old, new))

    def test_relaunches(self) -> None:
        old = relaunch_counts.figures(RELAUNCHED)
        self.assertEqual(self.larger(old, relaunch_counts.figures(RELAUNCHED)), set())
        for name, change, expected in self.changes():
            with self.subTest(name), change:
                self.assertLessEqual(expected, self.larger(old, relaunch_counts.figures(RELAUNCHED)))

    def changes(self) -> Iterator[tuple[str, Any, set[str]]]:
        """Name, what makes it worse, and the figures that get larger."""
        from relaunch_programs import Kit
        from stand_ins import relaunch_device

        compiled = Kit.compile

        def longer(kit: Any, fn: Callable[..., Any], **kwargs: Any) -> Any:
            return compiled(kit, lambda *args: fn(*args).sin(), **kwargs)

        refuses = mock.Mock(side_effect=Unprovable("capture", "refused on purpose"))
        yield "node", mock.patch.object(Kit, "compile", longer), {"nodes", "pointer slots"}
        yield (
            "bytes of the plan",
            mock.patch.object(packing, "aligned", lambda size: -(-size >> 20) << 20),
            {"scratch"},
        )
        yield "refusal", mock.patch.object(relaunch_device, "prove", refuses), {"refusals"}


class TestInstructions(unittest.TestCase):
    """The process that counts instructions, with a script in the place of valgrind."""

    def fails(self, valgrind: str, **environment: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "valgrind")
            script.write_text(f"#!/bin/sh\n{valgrind}\n")
            script.chmod(0o755)
            environment["PATH"] = f"{folder}:{os.environ['PATH']}"
            with mock.patch.dict(os.environ, environment), self.assertRaises(RuntimeError) as raised:
                instructions.measure()
        return str(raised.exception)

    def test_variables_of_the_caller_are_kept_from_the_process(self) -> None:
        names = ("TORCH_OVERLAY_CUDAGRAPHS", "PYTHONMALLOC", "PYTHONHASHSEED", "GLIBC_TUNABLES", "LD_PRELOAD", "MINE")
        said = self.fails(
            f"env | grep -E '^({'|'.join(names)})=' | sort | tr '\\n' ' ' >&2", **dict.fromkeys(names, "7")
        )
        self.assertTrue(said.endswith("status 0: MINE=7 PYTHONHASHSEED=0"), said)

    def test_valgrind_that_takes_too_long(self) -> None:
        with mock.patch.object(instructions, "LIMIT", 0.2):
            said = self.fails("exec sleep 60")
        self.assertEqual(said, "valgrind took longer than 0.2 s: measure on a machine that is less busy")

    def test_build_of_python_is_named_without_folders(self) -> None:
        options = "'--prefix=/home/me' '--enable-shared' 'CFLAGS=-O1 -g'"
        asked = mock.patch("subprocess.run", return_value=mock.Mock(stdout="gcc 12"))
        with mock.patch("sysconfig.get_config_var", return_value=options), asked:
            found = instructions.depends()
        self.assertEqual(found["options of its build"], "--enable-shared CFLAGS=-O1 -g")
        self.assertEqual(found["python"].split()[1], sys.version.split()[0])

    def test_counts_that_the_gate_would_skip_are_not_made(self) -> None:
        here = instructions.depends()
        for processor in (here["processor"], "another"):
            baseline = [Record("instructions", "region", {"depends": {**here, "processor": processor}}, {})]
            with (
                mock.patch.object(records, "read", return_value=baseline),
                mock.patch.object(instructions, "missing", return_value=""),
                mock.patch.object(instructions, "measure", return_value={}) as measure,
                contextlib.redirect_stdout(io.StringIO()) as said,
            ):
                self.assertEqual(instructions.main(["--comparable"]), 0)
            self.assertEqual(measure.called, processor != "another")
        self.assertIn(f"not counted: with {here['processor']}; the baseline with another", said.getvalue())

    def test_compiler_with_arguments(self) -> None:
        with mock.patch("triton.runtime.build._find_compiler", return_value="ccache gcc"):
            said = instructions.missing()
        self.assertIn("the compiler 'ccache gcc' can't be run (No such file or directory): CC names one program", said)


class TestCounts(GateTestCase):
    NAMES = tuple(f"program {i}" for i in range(400))

    def run_counts(self, *argv: str) -> tuple[int, str]:
        programs = mock.Mock(names=lambda: list(self.NAMES))
        patched = mock.patch.dict(counts.CORPORA, {"relaunch programs": programs})
        with patched, contextlib.redirect_stdout(io.StringIO()) as out:
            status = counts.main(["--corpora", "relaunch programs", *argv])
        return status, out.getvalue()

    def accept_names(self, *names: str) -> None:
        path = self.folder / "names.jsonl"
        records.write(
            path, {**ABOUT, "device": "cpu"}, {"relaunch programs": {n: {"exact": {"x": [1]}} for n in names}}
        )
        self.assertEqual(self.run_gate("accept", str(path))[0], 0)

    def test_programs_that_are_new_or_gone_are_told_without_compiling(self) -> None:
        self.accept_names(*self.NAMES)
        self.assertEqual(self.run_counts("--names"), (0, "the baseline has a row for each program\n"))
        self.accept_names(*self.NAMES[1:], "old")
        status, out = self.run_counts("--names")
        expected = [
            "relaunch programs: program 0 is not in the baseline: accept it",
            "relaunch programs: old of the baseline is gone: accept it",
        ]
        self.assertEqual((status, out.splitlines()), (1, expected))

    def test_new_program_leaves_the_others_in_the_sample(self) -> None:
        taken = counts.sample(self.NAMES, 5)
        self.assertTrue(40 < len(taken) < 120, len(taken))
        self.assertEqual([n for n in counts.sample(("a new one", *self.NAMES), 5) if n != "a new one"], taken)
        self.assertEqual(counts.sample(self.NAMES, 1), list(self.NAMES))

    def test_arguments_that_are_told_before_anything_is_counted(self) -> None:
        self.folder.joinpath("file").touch()
        for *argv, expected in (
            ("--jobs", "0", "--jobs: '0' is not a positive whole number"),
            ("--sample", "-1", "--sample: '-1' is not a positive whole number"),
            ("--sample", "1.5", "--sample: '1.5' is not a positive whole number"),
            ("--jsonl", str(self.folder), "can't be written (Is a directory): name a file"),
            ("--jsonl", f"{self.folder}/file/new.jsonl", "can't be written (File exists): name a file"),
            ("--names", "cpu.jsonl: can't be read: No such file"),
        ):
            with self.subTest(argv), mock.patch.object(counts, "measure", side_effect=AssertionError):
                with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit) as left:
                    self.run_counts(*argv)
                self.assertEqual(left.exception.code, 2)
                self.assertIn(expected, said.getvalue().splitlines()[-1])

    def test_file_that_can_be_written_is_not_left_behind(self) -> None:
        path = self.folder / "new" / "counts.jsonl"
        self.assertEqual(records.output(str(path)), path)
        self.assertFalse(path.exists())


SLOWER_RUNNER = """
import sys
from pathlib import Path
import instructions
from torch_overlay._inductor.relaunch.runner import Runner
call = Runner.__call__
Runner.__call__ = lambda runner, inputs: call(runner, inputs)
instructions.run(Path(sys.argv[2]))
"""


@form.slow
class TestInjectedInstructions(GateTestCase):
    def setUp(self) -> None:
        super().setUp()
        if what := instructions.missing():
            self.skipTest(what)

    def test_one_more_python_call_a_relaunch(self) -> None:
        def rows(script: str) -> dict[str, Figures]:
            return {name: {"instructions": {"a call": [n]}} for name, n in instructions.measure(script).items()}

        slower = self.folder / "slower.py"
        slower.write_text(f"import sys\nsys.path[:0] = {[str(form.ROOT / 'tools' / 'bench')]}\n{SLOWER_RUNNER}")
        self.accept(rows(instructions.__file__))
        status, out = self.check(rows(str(slower)))
        found = [re.split(r"  +", line)[:2] for line in out.splitlines() if "regressed  " in line]
        self.assertEqual((status, found), (1, [["regressed", "bench: relaunch"]]), out)
