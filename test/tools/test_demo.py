"""`python -m torch_overlay demo`: what it shows of a compilation, and what it makes of measurements, good and bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest import mock

import torch

import form
from printed import printed


if not form.PATCHED:
    from torch_overlay._cli import commands, demo
    from torch_overlay._cli.demo import Events
    from torch_overlay._cli.screen import Screen
    from torch_overlay._inductor.streams.plan import HOST, Op
    from torch_overlay._inductor.streams.planner import plan_streams
    from torch_overlay.table import titled
    from torch_overlay.testing import simulated_gpu


def run_demo(*arguments: str, folder: str, **env: str) -> subprocess.CompletedProcess[str]:
    return form.fork_command("demo", "--out", folder, *arguments, env={"CUDA_VISIBLE_DEVICES": "", **env})


@form.overlay_only
class TestCommand(unittest.TestCase):
    @form.slow
    def test_without_a_gpu_it_compiles_says_so_in_one_line_and_draws_a_call(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = run_demo("moe_experts", folder=folder)
            self.assertEqual(result.returncode, 0, result.stderr[-3000:])
            self.assertEqual(sum("no GPU here" in line for line in result.stdout.splitlines()), 1)
            for text in ("moe_experts", "5 on each of streams 1 to 8", "16 records, 16 waits", "events generated"):
                self.assertIn(text, result.stdout)
            self.assertEqual(sorted(os.listdir(folder)), ["moe_experts.json", "moe_experts.svg", "moe_experts.txt"])
            boxes = [e.text for e in ET.parse(Path(folder, "moe_experts.svg")).iter() if e.tag.endswith("}text")]
            self.assertIn("34 gelu", boxes)
            self.assertIn("waits before", Path(folder, "moe_experts.txt").read_text())

    def test_unknown_program_is_refused_by_name(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = run_demo("no_such_program", folder=folder)
        self.assertEqual(result.returncode, 2)
        self.assertIn("no_such_program.py does not exist", result.stderr)

    @form.needs_gpu
    def test_on_a_gpu_the_programs_are_equal_to_ordered_eager(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PYTHONPATH": str(form.ROOT)}
            command = [sys.executable, "-m", "torch_overlay", "demo", "--out", folder]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr[-3000:])

    def test_missing_package_of_one_program_leaves_the_others(self) -> None:
        def compile_program(name: str, out: Path) -> demo.Compilation:
            if name == "transformer_side_branch":
                raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
            return demo.Compilation(name, (), (), Events(0, 0), Events(0, 0), None)

        with mock.patch.object(demo, "compile_program", compile_program):
            status, output, _ = printed(commands.main, ["demo", "--compile-only"])
        self.assertEqual(status, 1)
        self.assertIn("transformer_side_branch needs the package transformers", output)
        self.assertIn("prefetch_loop", output)


@form.overlay_only
class TestCompilation(unittest.TestCase):
    def test_events_written_are_counted_in_the_log_of_one_eager_call(self) -> None:
        log = ["set stream 3", "record event 1 on stream 0", "stream 3 waits for event 1", "synchronize event 1"]
        self.assertEqual(demo.events_written(log), Events(1, 1))

    def test_events_generated_include_those_that_the_caller_sees(self) -> None:
        plan = plan_streams([Op("op0", 1, writes=frozenset("a")), Op("record_event", 1), Op("op1", 0, frozenset("a"))])
        self.assertEqual(demo.events_generated([plan]), Events(2, 1))

    def test_streams_with_as_many_operations_share_a_line(self) -> None:
        streams = [HOST, 0, 0, 1, 2, 4, 7, 7]
        plan = plan_streams([Op(f"op{i}", stream) for i, stream in enumerate(streams)])
        expected = "1 on the host\n2 on the current stream\n1 on each of streams 1, 2, 4\n2 on stream 7"
        self.assertEqual(demo.placement([plan]), expected)


def measured(**changes: object) -> dict[str, object]:
    return {"eager": [30.0], "compiled": [10.0], "difference": 1e-3, "equal": True, "overlap": "40%", **changes}


@form.overlay_only
class TestMeasurements(unittest.TestCase):
    def show(self, overlay: list[dict], stock: list[dict]) -> tuple[bool, str]:
        forms = {"overlay": demo.merge(overlay), "stock": demo.merge(stock)}
        return printed(lambda: demo.show_measurements(Screen(), {"experts": forms}))[:2]

    def test_medians_are_taken_over_both_rounds(self) -> None:
        rounds = [measured(compiled=[1.0, 2.0, 3.0]), measured(compiled=[10.0, 11.0])]
        self.assertEqual(demo.merge(rounds)["compiled"], 3.0)

    def test_worst_difference_of_all_rounds_counts(self) -> None:
        merged = demo.merge([measured(difference=0.5, equal=False), measured()])
        self.assertEqual((merged["difference"], merged["equal"]), (0.5, False))

    def test_speed_is_shown_against_stock(self) -> None:
        good, text = self.show([measured()], [measured(compiled=[25.0])])
        self.assertTrue(good)
        self.assertIn("2.50 ×", text)

    def test_wrong_result_is_said_and_fails(self) -> None:
        good, text = self.show([measured(equal=False, difference=0.7)], [measured()])
        self.assertFalse(good)
        self.assertIn("NO, 0.7", text)

    def test_stock_that_does_not_compile_is_shown_with_its_error(self) -> None:
        good, text = self.show([measured()], [{"error": "Unsupported: default_stream"}])
        self.assertTrue(good)
        self.assertIn("fails, see below", text)
        self.assertIn("experts, stock: Unsupported: default_stream", text)

    def test_process_that_dies_keeps_earlier_results_and_names_its_status(self) -> None:
        def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
            Path(command[3]).write_text(json.dumps({"first": measured()}))
            return subprocess.CompletedProcess(command, -6, stderr="noise\nillegal memory access\n")

        with mock.patch.object(subprocess, "run", run):
            found = demo.measure_apart("stock", ["first", "second"])
        self.assertEqual(found["first"], measured())
        self.assertEqual(found["second"]["error"], "the process ended with status -6: illegal memory access")


@form.overlay_only
class TestOnGpu(unittest.TestCase):
    """What runs in the processes that measure, as far as it needs no GPU."""

    def test_difference_is_relative_to_the_largest_value(self) -> None:
        expected, found = torch.tensor([1.0, -100.0]), torch.tensor([2.0, -100.0])
        self.assertAlmostEqual(demo.difference([expected], [found]), 0.01)

    def test_not_a_number_is_never_equal(self) -> None:
        found = torch.tensor([1.0, float("nan")])
        self.assertEqual(demo.difference([torch.ones(2)], [found]), float("inf"))

    def test_oracle_runs_everything_on_the_current_stream(self) -> None:
        with simulated_gpu() as gpu:
            function, args = demo.load("moe_experts")
            start = len(gpu.device_log)
            with demo.ordered():
                function(*args)
            self.assertEqual([line for line in gpu.device_log[start:] if line.startswith(("set", "enter"))], [])
            function(*args)
            self.assertNotEqual([line for line in gpu.device_log[start:] if line.startswith(("set", "enter"))], [])

    def test_program_that_fails_is_reported_and_the_next_one_runs(self) -> None:
        programs = {"bad": mock.Mock(side_effect=RuntimeError("broken\nat length")), "good": mock.Mock()}
        programs["good"].return_value = {"difference": 0.0}
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(demo, "measure", lambda name: programs[name]()),
        ):
            demo.main(result := Path(folder, "result.json"), ["bad", "good"])
            found = json.loads(result.read_text())
        self.assertEqual(found, {"bad": {"error": "RuntimeError: broken"}, "good": {"difference": 0.0}})


@form.overlay_only
class TestScreen(unittest.TestCase):
    def test_table_without_rich_is_aligned_text(self) -> None:
        text = titled("Title", ["a", "bb"], [["1", "2\n3"], ["long", "4"]])
        self.assertEqual(text, "Title\na     bb\n1     2\n      3\nlong  4")
