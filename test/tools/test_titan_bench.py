"""The benchmark of training at scale: what it makes of arguments and answers."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import gate
import records
import titan
import titan_config
import titan_process
import titan_results
import torch
from titan_config import Row

from printed import printed


ROW = Row("70B", 4, 4096)
DEPTHS = {"70B": 80}


def rank(ms: float = 100.0, mib: float = 1000.0, **more: Any) -> dict[str, Any]:
    """An answer of a rank of a side with graphs."""
    memory = {key: mib * (i + 1) for i, key in enumerate(titan_results.MEMORY)}
    counts = {"captures": 8, "nodes": 400, "refusals": 0, "reasons": []}
    kept = {"losses": [12.0, 11.5, 11.25], "norms": [1.0, 2.0, 3.0]}
    return {
        "ms": ms,
        "host ms": ms / 2,
        "first ms": [9000.0, ms],
        "each ms": [ms] * 3,
        **memory,
        **counts,
        **kept,
        **more,
    }


def side(*ranks: dict[str, Any]) -> dict[str, Any]:
    """A side whose turns have one rank each."""
    return titan_results.side_of([titan_results.merged([each]) for each in ranks])


class TestTurns(unittest.TestCase):
    def test_figures_are_those_of_the_rank_that_has_most(self) -> None:
        other = rank(90.0, 2000.0, **{"first ms": [1.0, 500.0]}, reasons=["no graph"], refusals=1)
        turn = titan_results.merged([rank(), other])
        self.assertEqual((turn["ms"], turn["reserved MiB"], turn["refusals"]), (100.0, 2000.0, 1))
        self.assertEqual((turn["first ms"], turn["reasons"]), ([9000.0, 500.0], ["no graph"]))

    def test_first_error_of_a_rank_is_the_error(self) -> None:
        later, first = {"error": "closed by a peer", "at": 2.0}, {"error": "out of memory", "at": 1.0}
        self.assertEqual(titan_results.merged([rank(), later, first]), {"error": "out of memory"})

    def test_medians_of_turns_and_first_steps_of_the_last(self) -> None:
        found = side(rank(100.0), rank(110.0, **{"first ms": [2000.0, 110.0]}))
        self.assertEqual((found["ms"], found["first ms"], len(found["turns"])), (105.0, [2000.0, 110.0], 2))
        self.assertAlmostEqual(found["noise"], 0.1)


class TestLosses(unittest.TestCase):
    def test_equal(self) -> None:
        sides = {"none": side(rank(), rank()), "relaunch": side(rank(50.0), rank(50.0))}
        self.assertEqual(titan_results.compare(sides), ({"none": "equal", "relaunch": "equal"}, []))
        self.assertTrue(titan_results.passed({ROW: sides}))

    def test_loss_of_one_turn_that_differs_by_a_bit(self) -> None:
        other = rank(losses=[12.0, 11.5, 11.250000000000002])
        sides = {"none": side(rank(), rank()), "relaunch": side(rank(), other)}
        words, problems = titan_results.compare(sides)
        self.assertEqual(words["relaunch"], "differs")
        expected = "relaunch differs from none, which repeats itself: loss 3 of 3 is 11.250000000000002, not 11.25"
        self.assertEqual(problems, [expected])
        self.assertFalse(titan_results.passed({ROW: sides}))
        self.assertIn(f"70B 4 layers 1 x 4096: {expected}; --det", titan_results.table({ROW: sides}, DEPTHS))
        self.assertNotIn("--det", titan_results.table({dataclasses.replace(ROW, deterministic=True): sides}, DEPTHS))

    def test_gradients_that_differ_where_losses_are_equal(self) -> None:
        sides = {"none": side(rank(), rank()), "titan": side(rank(norms=[1.0, 2.5, 3.0]))}
        self.assertIn("gradient's norm 2 of 3 is 2.5, not 2.0", titan_results.compare(sides)[1][0])

    def test_nothing_is_wrong_where_the_side_without_graphs_does_not_repeat_itself(self) -> None:
        other = rank(losses=[12.0, 11.5, 11.0])
        sides = {"none": side(rank(), other), "relaunch": side(other, rank())}
        words, problems = titan_results.compare(sides)
        self.assertEqual((words, problems), ({"none": "doesn't repeat", "relaunch": "-"}, []))


class TestTable(unittest.TestCase):
    def test_row(self) -> None:
        text = titan_results.table({ROW: {"none": side(rank(), rank())}}, DEPTHS)
        expected = r"70B 4 layers 1 x 4096 +none +100.0 +0.0% +81920 +50.0 +1000 +2000 +3000 +9000 100 +8 +400 +0 +"
        self.assertRegex(text, expected + "12.00000 .. 11.25000 equal")

    def test_side_that_failed_is_a_row_and_the_others_are_compared(self) -> None:
        sides = {"none": side(rank()), "trees": {"error": "overwritten by a subsequent run", "turns": []}}
        text = titan_results.table({ROW: {**sides, "titan": side(rank())}}, DEPTHS)
        self.assertRegex(text, r"70B 4 layers 1 x 4096 +trees .*overwritten by a subsequent run")
        self.assertRegex(text, r"titan .*equal")
        self.assertFalse(titan_results.passed({ROW: sides}))

    def test_memory_of_a_layer_and_of_all(self) -> None:
        more = dataclasses.replace(ROW, layers=8)
        measured = {ROW: {"none": side(rank(mib=1000))}, more: {"none": side(rank(mib=1400)), "titan": side(rank())}}
        header, *lines = titan_results.per_layer(measured, DEPTHS)
        self.assertEqual(header[-3:], ["reserved", "peak", "device"])
        # 100 MiB for each of 80 layers, and 600 beside them; peak and device are twice and three times that.
        self.assertEqual(lines, [["70B 80 layers 1 x 4096", "none", "100, 8600", "200, 17200", "300, 25800"]])
        self.assertIn("100, 8600", titan_results.table(measured, DEPTHS))

    def test_lines_go_through_rows_that_differ_in_layers_alone(self) -> None:
        other = dataclasses.replace(ROW, layers=8, seq=512)
        found = {"none": side(rank())}
        self.assertEqual(titan_results.per_layer({ROW: found, other: found}, DEPTHS), [])
        self.assertEqual(titan_results.per_layer({ROW: found, dataclasses.replace(ROW, layers=8): {}}, DEPTHS), [])

    def test_tokens_are_those_of_all_gpus_that_have_a_batch_of_their_own(self) -> None:
        self.assertEqual(dataclasses.replace(ROW, gpus=8, tp=2, batch=3).tokens, 4 * 3 * 4096)

    def test_json_line_of_each_side(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lines")
            sides = {"none": side(rank(), rank()), "trees": {"error": "refused", "turns": []}}
            for _ in range(2):
                titan.record(path, {"hardware": "2 x H100"}, ROW, sides)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([line["side"] for line in lines], ["none", "trees"] * 2)
        self.assertEqual((lines[0]["hardware"], lines[0]["layers"], lines[0]["equal"]), ("2 x H100", 4, "equal"))
        self.assertEqual(lines[1]["error"], "refused")


class TestFigures(unittest.TestCase):
    """The lines for the gate of benchmarks, which reads them."""

    def check(self, folder: str, *runs: dict[str, dict[str, Any]]) -> tuple[int, str]:
        """Accept the first run, and check the last."""
        path = Path(folder, "new.jsonl")
        with mock.patch.object(gate, "BASELINE", Path(folder, "baseline")):
            for what, sides in zip(("accept", "check"), runs, strict=True):
                about = {"hardware": "2 x H100", "commit": "1234567"}
                records.write(path, about, {"titan": {titan.gate_row(ROW): titan_results.figures(sides)}})
                found = printed(gate.main, [what, str(path)])
        return found[:2]

    def test_slower_steps_more_memory_and_lost_graphs(self) -> None:
        def run(ms: float, mib: float, refusals: int) -> dict[str, dict[str, Any]]:
            turn = rank(ms, mib, refusals=refusals)
            return {"none": side(rank(), rank()), "relaunch": side(turn, turn)}

        with tempfile.TemporaryDirectory() as folder:
            status, out = self.check(folder, run(90.0, 1000.0, 0), run(90.0, 1000.0, 0))
            self.assertEqual((status, out.count("\n")), (0, 1))
            status, out = self.check(folder, run(90.0, 1000.0, 0), run(108.0, 1020.0, 2))
        found = {line.split("  ")[2].strip() for line in out.splitlines() if line.startswith("regressed")}
        memory = {f"relaunch {key}" for key in titan_results.MEMORY}
        self.assertEqual((status, found), (1, {"relaunch / none", "relaunch refusals", *memory}), out)

    def test_run_writes_lines_for_the_gate(self) -> None:
        about = {"hardware": "NVIDIA H100, 580.1\nNVIDIA H100, 580.1", "torch, cuda, triton": "", "commit": "1234567"}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for target, name, value in (
                (titan, "turn", lambda *_: titan_results.merged([rank()])),
                (titan, "_check_install", lambda _: None),
                (titan, "depth", lambda _: 80),
                (titan.streams, "describe", lambda: about),
                (titan.importlib.metadata, "version", lambda _: "1.0"),
                (torch.cuda, "device_count", lambda: 2),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            path = Path(folder, "gate.jsonl")
            status, *_ = printed(titan.main, ["--width", "70B", "--sides", "none,relaunch", "--gate", str(path)])
            (record,) = records.read(path)
        self.assertEqual((status, record.bench, record.about["device"]), (0, "titan", "2-x-nvidia-h100"))
        self.assertEqual(record.row, "70B 4 layers 1 x 4096, 2 of the GPUs, flex")
        self.assertEqual(record.figures["wall time"], {"relaunch / none": [1.0] * gate.FEWEST})


class TestArguments(unittest.TestCase):
    def rows(self, *arguments: str, gpus: int = 2, install: str | None = None) -> tuple[list[Row], list[str]]:
        parser = titan._parser()
        args = parser.parse_args(arguments)
        with (
            mock.patch("torch.cuda.device_count", return_value=gpus),
            mock.patch.object(titan, "_check_install", return_value=install),
            mock.patch.object(titan, "depth", return_value=80),
        ):
            return titan.rows_of(args, parser), args.sides

    def complaint(self, *arguments: str, **more: Any) -> str:
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit) as left:
            self.rows(*arguments, **more)
        self.assertEqual(left.exception.code, 2)
        return said.getvalue().splitlines()[-1]

    def test_rows(self) -> None:
        rows, sides = self.rows("--width", "70B", "--layers", "4,8", "--seq", "512,4096", gpus=8)
        self.assertEqual([(row.layers, row.seq) for row in rows], [(4, 512), (8, 512), (4, 4096), (8, 4096)])
        self.assertEqual((rows[0].gpus, rows[0].attention), (8, "flex"))
        self.assertEqual(sides, ["none", "relaunch", "titan", "trees"])
        self.assertEqual(self.rows("--width", "debug,8B")[0][0].layers, 80)
        self.assertEqual(self.rows("--width", "8B")[0][0].layers, 16)
        self.assertEqual(len(self.rows("--layers", "8,4,8", "--sides", "none,none")[0]), 2)

    def test_without_a_gpu(self) -> None:
        (row,), sides = self.rows("--width", "debug", "--device", "cpu", gpus=0)
        self.assertEqual((row.gpus, row.attention, sides), (2, "sdpa", ["none"]))

    def test_each_wrong_argument_says_what_to_do(self) -> None:
        for arguments, expected in {
            ("--width", "7B"): "no 7B: choose from debug, 8B, 70B",
            ("--sides", "none,graph"): "no graph: choose from none, relaunch, titan, trees",
            ("--layers", "4,x"): "'4,x' is not a list of positive numbers, like 4,8",
            ("--layers", "0"): "'0' is not a list of positive numbers",
            ("--tp", "1,2"): "'1,2' is not a positive whole number",
            ("--limit", "0"): "'0' is not a positive, finite number of seconds",
            ("--limit", "inf"): "'inf' is not a positive, finite number of seconds",
            ("--limit", "nan"): "'nan' is not a positive, finite number of seconds",
            ("--jsonl", "/"): "'/' can't be written (Is a directory)",
            ("--layers", "81"): "--layers 81: 70B has 80",
            ("--seq", "100"): "--seq 100 is no multiple of 8",
            ("--seq", "8", "--tp", "2"): "--seq 8 is no multiple of 16",
            ("--gpus", "4"): "--gpus 4: there are 2",
            ("--tp", "4"): "--tp 4 doesn't divide the 2 processes",
            ("--device", "cpu", "--sides", "none,trees"): "--sides trees: CUDA graphs need a GPU",
            ("--device", "cpu", "--gate", os.devnull): "--gate: only what a GPU does is compared",
            ("--device", "cpu", "--attention", "flex"): "--attention flex: torch compiles it for training on a GPU",
        }.items():
            with self.subTest(arguments):
                self.assertIn(expected, self.complaint(*arguments))
        self.assertIn("no GPU is there: --device cpu", self.complaint(gpus=0))

    def test_torchtitan_that_is_missing_or_another(self) -> None:
        with mock.patch("importlib.metadata.version", side_effect=titan.importlib.metadata.PackageNotFoundError):
            missing = titan._check_install("cpu")
        self.assertEqual(missing, f"torchtitan is not installed: {titan.INSTALL}")
        with mock.patch("importlib.metadata.version", return_value="0.2.0"):
            other = titan._check_install("cpu")
        self.assertIn("torchtitan 0.2.0 is installed, and this is written for torchtitan==", other or "")
        self.assertEqual(self.complaint(install=missing).partition("error: ")[2], missing)


class TestProcessGroup(unittest.TestCase):
    """`turn` with a program in torchrun's place; the last of its arguments is the folder of the answers."""

    def turn(self, program: str, limit: float = 60.0) -> dict[str, Any]:
        start = subprocess.Popen

        def popen(command: list[str], **options: Any) -> Any:
            text = "import json, os, pathlib, sys, time\n" + textwrap.dedent(program)
            return start([sys.executable, "-c", text, command[-1]], **options)

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(titan.subprocess, "Popen", popen):
            return titan.turn(ROW, "none", limit, Path(folder, "log"))

    def test_answers_of_all_ranks(self) -> None:
        self.assertEqual(
            self.turn(f"""
            for number, answer in enumerate({[rank(), rank(110.0)]}):
                pathlib.Path(sys.argv[1], f"rank{{number}}.json").write_text(json.dumps(answer))
            """)["ms"],
            110.0,
        )

    def test_error_of_a_rank(self) -> None:
        program = """pathlib.Path(sys.argv[1], "rank1.json").write_text('{"error": "out of memory", "at": 1}')"""
        self.assertEqual(self.turn(program), {"error": "out of memory"})

    def test_group_that_ends_without_an_answer(self) -> None:
        found = self.turn("print('first'); print('it broke'); sys.exit(3)")
        self.assertEqual(found, {"error": "the process group ended with status 3: it broke"})

    def test_group_that_takes_too_long_is_stopped(self) -> None:
        found = self.turn("time.sleep(60)", limit=0.5)
        self.assertEqual(found, {"error": "the process group took longer than 0.5 s"})

    def test_sides_without_the_overlay_are_stock(self) -> None:
        show = "print(sorted(k for k in os.environ if k.startswith('TORCH_OVERLAY'))); sys.exit(1)"
        with mock.patch.dict(os.environ, {"TORCH_OVERLAY_CUDAGRAPHS": "relaunch"}):
            self.assertIn("['TORCH_OVERLAY_DISABLE']", self.turn(show)["error"])


class TestCaptures(unittest.TestCase):
    def test_graphs_and_nodes_are_counted_without_the_empty_ones(self) -> None:
        counts = {1: 0, 2: 30, 3: 12}
        with (
            mock.patch("torch.cuda.graphs.register_graph_capture_end_hook") as register,
            mock.patch("torch_overlay._inductor.relaunch.graph.driver.Driver") as driver,
        ):
            driver.return_value.nodes = lambda graph: range(counts[graph])
            seen = titan_process.watch_captures()
            for number in counts:
                register.call_args.args[0](mock.Mock(raw_cuda_graph=lambda number=number: number))
        self.assertEqual(seen, {"captures": 2, "nodes": 42})


class TestStandIns(unittest.TestCase):
    def test_module_that_is_not_installed_can_be_imported_and_refuses_to_work(self) -> None:
        name = "no_such_data_sets"
        with mock.patch.dict(titan_config.UNUSED, {name: ("load",)}, clear=True):
            with titan_config._stand_ins():
                module = importlib.import_module(name)
            with self.assertRaisesRegex(RuntimeError, f"torchtitan calls {name}, which this benchmark leaves out"):
                module.load("data")
        self.assertNotIn(name, sys.modules)
