"""The relaunch check and the relaunch benchmark, as far as they go without a GPU."""

import contextlib
import gc
import io
import json
import subprocess
import sys
import tempfile
import unittest
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import relaunch
import relaunch_process
import relaunch_rows
import torch

import form
import relaunch_check


TOOLS = form.ROOT / "tools"


def measurement(row: str, side: str, **result: Any) -> dict[str, Any]:
    return {"row": row, "side": side, "result": {key.replace("_", " "): value for key, value in result.items()}}


def rows_of(*measurements: dict[str, Any]) -> dict[str, relaunch.Row]:
    rows: dict[str, relaunch.Row] = {}
    for m in measurements:
        rows.setdefault(m["row"], relaunch.Row(m["row"])).add(m)
    return rows


class TestCheck(unittest.TestCase):
    def run_check(self, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(TOOLS / "relaunch_check.py"), "--out", folder, "--device", "cpu", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            lines = [json.loads(line) for line in Path(folder, "results.jsonl").read_text().splitlines()]
        return done, lines[1:]

    @form.slow
    def test_programs_run_in_processes_and_alone(self) -> None:
        done, lines = self.run_check("--jobs", "2", "--only", "outputs_stay,exit_with_*,exit_beside_*,float8_product")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        statuses = {line["case"]["program"]: line["status"] for line in lines}
        self.assertEqual(statuses.pop("float8_product"), "skipped")
        self.assertEqual(set(statuses.values()), {"ok"})
        self.assertEqual(len(statuses), 3)
        self.assertIn("4 cases", done.stdout.splitlines()[-1])

    def test_what_is_alive_is_asked_of_the_overlay(self) -> None:
        """By names, since programs also run where nothing has loaded the modules: a name that is gone says nothing."""
        from relaunch_programs._check import ALIVE, overlay_says, REFUSALS
        from torch_overlay._inductor.relaunch import causes, runners  # noqa: F401

        self.assertIn("templates", overlay_says(*ALIVE, {}))
        self.assertIsInstance(overlay_says(*REFUSALS, None), list)

    def test_programs_alone_have_their_environment(self) -> None:
        from relaunch_programs import by_name

        args = relaunch_check.parse(["--out", "/nowhere", "--device", "cpu"])
        with tempfile.TemporaryDirectory() as folder:
            args.out = Path(folder)
            worker = relaunch_check.Worker(0, args)
            pool = relaunch_check.worker_pool
            with mock.patch.object(pool.Worker, "run", lambda worker, case: pool.Result(case, "ok")):
                worker.run(relaunch_check.Case("expandable_segments", "verify"))
            worker.close()
        for name, value in by_name("expandable_segments").env.items():
            self.assertEqual(worker.environment[name], value)
        self.assertEqual(worker.environment["TORCH_OVERLAY_CUDAGRAPH_VERIFY"], "1")

    def test_exclusive_programs_come_last(self) -> None:
        several, single = relaunch_check.choose([], ["relaunch", "verify"])
        self.assertEqual([c.program for c in single], ["functions_come_and_go"] * 2)
        self.assertNotIn("functions_come_and_go", {c.program for c in several})

    def test_complaints_at_exit_are_failures(self) -> None:
        for text in (
            "Exception ignored in: <x>",
            "terminate called after throwing",
            "Traceback (most recent call last)",
        ):
            self.assertTrue(relaunch_check.COMPLAINT.search(f"fine\n{text}\n"), text)
        self.assertIsNone(relaunch_check.COMPLAINT.search("a warning\nand another\n"))

    def test_unknown_variant_is_refused(self) -> None:
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
            relaunch_check.parse(["--out", "x", "--variants", "relaunch,fast"])
        self.assertIn("no fast: choose from relaunch, verify, policy, trees, off", said.getvalue())


class TestBench(unittest.TestCase):
    def test_cells_are_medians_and_noise_is_the_largest_spread(self) -> None:
        (row,) = rows_of(
            measurement("mlp", "off", gpu_us=100.0),
            measurement("mlp", "off", gpu_us=104.0),
            measurement("mlp", "relaunch", gpu_us=50.0),
            measurement("mlp", "relaunch", gpu_us=51.0),
        ).values()
        self.assertEqual(row.figure("off", "gpu us"), 102.0)
        self.assertAlmostEqual(row.noise("gpu us"), 0.04)
        self.assertAlmostEqual(row.ratio("gpu us", "relaunch", "off") or 0, 50.5 / 102)
        self.assertIsNone(row.ratio("gpu us", "relaunch", "off", "trees"))

    def seen(self, *measurements: dict[str, Any]) -> dict[str, tuple[float, float | None, bool]]:
        return {f.what: (f.limit, f.value, f.ok) for f in relaunch.limits(rows_of(*measurements))}

    def test_limits_are_met_or_missed(self) -> None:
        found = self.seen(
            measurement("mlp", "off", gpu_us=100.0, capture_s=0.0),
            measurement("mlp", "trees", gpu_us=200.0, warm_up_s=0.3, capture_s=0.1),
            measurement("mlp", "relaunch", gpu_us=90.0, warm_up_s=0.3, capture_s=0.2, capture_MiB=20.0),
        )
        self.assertEqual(
            found,
            {
                "mlp: GPU time / trees": (0.60, 0.45, True),
                "mlp: GPU time / no graph": (0.85, 0.9, False),
                "mlp: time of warm-up and capture / trees": (1.5, 1.25, True),
                "mlp: MiB that a capture takes beyond its graph": (16.0, 20.0, False),
            },
        )

    def test_capture_is_not_judged_without_a_warm_up(self) -> None:
        found = self.seen(
            measurement("mlp", "trees", capture_s=0.2), measurement("mlp", "relaunch", warm_up_s=0.1, capture_s=0.1)
        )
        self.assertEqual(found["mlp: time of warm-up and capture / trees"], (1.5, None, False))

    def test_host_time_is_judged_against_the_bare_launch(self) -> None:
        found = self.seen(measurement("llama", "relaunch", layer_us=16.0, bare_layer_us=3.5))
        self.assertEqual(found["llama: host µs in the graph layer beyond a bare launch"], (12.0, 12.5, False))

    def test_a_figure_that_is_missing_is_missed(self) -> None:
        found = self.seen(measurement("experts", "relaunch", gpu_us=80.0))
        self.assertEqual(found["experts: GPU time / graph of the eager program by hand"], (1.10, None, False))
        self.assertEqual(found["experts: GPU time, queued / graph of the eager program by hand"], (1.10, None, False))

    def test_noise_loosens_only_the_comparison_with_the_better_choice(self) -> None:
        found = self.seen(
            measurement("bert", "off", gpu_us=100.0),
            measurement("bert", "trees", gpu_us=120.0),
            measurement("bert", "trees", gpu_us=126.0),
            measurement("bert", "relaunch", gpu_us=104.0),
        )
        limit, value, ok = found["bert: GPU time / the better of trees and no graph"]
        self.assertAlmostEqual(limit, 1.05)
        self.assertEqual((value, ok), (1.04, True))

    def test_measurements_are_read_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "measurements.jsonl")
            about = {"hardware": "a GPU", "commit": "c"}
            lines = [
                measurement("decode", "relaunch", gpu_us=10.0, note="a note"),
                {"row": "decode", "side": "trees", "error": "boom\nboom"},
            ]
            file.write_text("".join(json.dumps({**line, "about": about}) + "\n" for line in lines))
            code = f"import runpy, sys; sys.path.insert(0, {str(TOOLS / 'bench')!r})\n"
            code += f"runpy.run_path({str(TOOLS / 'bench/relaunch.py')!r}, run_name='__main__')"
            done = form.fork_python(code, "--read", str(file), "--out", folder)
            (line,) = Path(folder, "relaunch.jsonl").read_text().splitlines()
        self.assertIn("a GPU, torch None, commit c", done.stdout)
        self.assertRegex(done.stdout, r"decode step, KV cache in place, 12 layers +relaunch +10\.0 +-")
        self.assertIn("decode, trees: boom boom", done.stdout)
        self.assertIn("decode: a note", done.stdout)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(json.loads(line)["sides"]["relaunch"]["median"]["gpu us"], 10.0)

    @form.slow
    @form.overlay_only
    def test_a_process_waits_until_it_is_asked_and_tells_that_it_failed(self) -> None:
        process = relaunch.start("regions", "off")
        process.tell("ready")
        self.assertEqual(process.answer(200.0), {})
        answer = process.ask_and_stop("measure", 200.0)
        if "error" in answer:  # without a GPU
            self.assertRegex(answer["error"], "NVIDIA|CUDA")
            self.assertEqual(process.answer(0.0), answer)
        else:
            self.assertGreater(answer["result"]["gpu us"], 0)
        self.assertIsNotNone(process.process.returncode)

    def test_layer_and_bare_launches_take_turns(self) -> None:
        from torch_overlay._inductor.relaunch import runner

        calls: list[str] = []
        relaunched = mock.Mock()
        relaunched.replay = lambda: calls.append("bare")

        class Runner:
            states = {(): mock.Mock(relaunch=relaunched)}

            def __call__(self, inputs: list[int]) -> int:
                calls.append("layer")
                return inputs[0]

        region, layer, seen = Runner(), [0.0], []
        with mock.patch.object(runner, "Runner", Runner), mock.patch.object(torch.cuda, "synchronize"):
            found = relaunch_process.layer_and_bare(lambda: seen.append(region([5])), layer, rounds=2)
            self.assertEqual(len(found or ()), 2)
            self.assertEqual(calls, ["layer", *["bare"] * 12, *["layer"] * 24, *["bare"] * 12])
            self.assertEqual(set(seen), {5})
            Runner.states = {(): mock.Mock(relaunch=None)}
            self.assertIsNone(relaunch_process.layer_and_bare(lambda: region([5]), layer))
            self.assertEqual(region([6]), 6)


class TestRows(unittest.TestCase):
    """Rows on the host, in eager."""

    def setUp(self) -> None:
        patch = mock.patch.object(relaunch_rows, "DEVICE", "cpu")
        patch.start()
        self.addCleanup(patch.stop)

    def work(self, row: str, compile: Any = lambda fn: fn) -> relaunch_rows.Work:
        return relaunch_rows.ROWS[row][1](compile)

    def test_resnet50_is_resnet50(self) -> None:
        model = relaunch_rows.plain_resnet50()
        self.assertEqual(sum(p.numel() for p in model.parameters()), 25_557_032)
        self.assertEqual(model.eval()(torch.zeros(1, 3, 64, 64)).shape, (1, 1000))

    def test_decode_writes_its_caches_at_the_position(self) -> None:
        model = relaunch_rows.Decoder(layers=1, width=32, heads=2, length=8, batch=1)
        tokens = torch.tensor([[5]])
        model(tokens, torch.tensor([3]))
        self.assertEqual(model.keys0.abs().sum((0, 1, 3)).nonzero().flatten().tolist(), [3])

    @form.slow
    def test_regions_are_compiled_each_for_itself(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        work = self.work("regions", lambda fn: torch.compile(fn, backend="eager"))
        with torch.no_grad():
            work.step()
            work.step()
        self.assertEqual(torch._dynamo.utils.counters["stats"]["unique_graphs"], 32)
        torch._dynamo.reset()

    def test_graph_made_by_hand_keeps_what_it_runs_on(self) -> None:
        """Its kernels are unloaded with the compiled code, and that goes with the model."""
        model = torch.nn.Linear(4, 4)
        alive, replays = weakref.ref(model), mock.Mock()
        work = relaunch_rows.Work(lambda x, model=model: model(x), [(torch.ones(4),)])
        with mock.patch("stream_rows._graph", side_effect=lambda once: (once(), replays)[1]):
            work.replay()
        del model
        gc.collect()
        self.assertIsNotNone(alive())
        work.step()
        replays.replay.assert_called_once_with()
        del work
        gc.collect()
        self.assertIsNone(alive())

    def test_training_step_moves_the_parameters(self) -> None:
        model = torch.nn.Linear(4, 1)
        before = model.weight.clone()
        work = relaunch_rows.training(model, lambda fn: fn, [(torch.ones(2, 4),)], lambda x: model(x).square().mean())
        work.step()
        self.assertFalse(torch.equal(before, model.weight))
        self.assertIsNone(model.weight.grad)
