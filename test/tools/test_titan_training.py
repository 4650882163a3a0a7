"""The benchmark of training at scale with torchtitan: its models and their configuration, and a training.

In processes of their own: torchtitan changes functions of torch when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import titan
import titan_config
from profiler_traces import Event, ranges, read, work_of

import form


BENCH = form.ROOT / "tools" / "bench"
BLOCK = """if True:
    import json, sys
    import titan_config, torch
    import torch_overlay
    from torch_overlay.testing import compile_only, simulated_gpu
    titan_config.import_torchtitan()
    made = titan_config.config(titan_config.Row(sys.argv[1], 1, 256, gpus=1), False, 46, "/nowhere")
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan sets them where it compiles blocks
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    with simulated_gpu():
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = made.model_spec.model.build()
        made.activation_checkpoint.build(dump_folder="/nowhere").apply(model)
        x = torch.randn(1, 256, made.model_spec.model.dim, device="cuda", requires_grad=True)
        positions = torch.arange(256, device="cuda")[None]
        masks = model.get_attention_masks(positions=positions)
        seen = compile_only(model.layers["0"], x, masks, positions, mode="reduce-overhead", backward=True)
    print(json.dumps([text.count("def partition_") for text in seen.wrappers]))
"""
TRACE = """if True:
    import os, sys
    import titan_config, torch
    import torch_overlay
    device, trace = sys.argv[1:]
    titan_config.import_torchtitan(device)
    from titan_process import Training
    from torch.distributed.elastic.utils.distributed import get_free_port
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(get_free_port())
    row = titan_config.Row("debug", 2, 64, gpus=1, device=device, attention="sdpa")
    training = Training(row, "relaunch", os.path.dirname(trace))
    for _ in range(4):
        training.step(keep_loss=False)
    with torch.profiler.profile() as profiler:
        training.step(keep_loss=False)
        training.synchronize()
    profiler.export_chrome_trace(trace)
    sys.stdout.flush()
    os._exit(0)
"""
needs_torchtitan = unittest.skipUnless(importlib.util.find_spec("torchtitan"), f"needs torchtitan: {titan.INSTALL}")


@needs_torchtitan
@form.overlay_only
class TestTorchtitan(unittest.TestCase):
    def run_python(self, *arguments: str) -> str:
        paths = [str(BENCH), str(form.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_trainers_and_models_of_all_widths(self) -> None:
        text = self.run_python(
            "-c",
            """if True:
            import json, titan_config, torch
            titan_config.import_torchtitan("cpu")
            for width, (_, _, few) in titan_config.WIDTHS.items():
                for whole in (False, True):
                    row = titan_config.Row(width, 2, 512, tp=2, gpus=4, attention="sdpa" if whole else "flex")
                    made = titan_config.config(row, whole, 46, "/nowhere")
                with torch.device("meta"):
                    model = made.model_spec.model.build()
                found = [titan_config.depth(width), few, len(model.layers), made.parallelism.tensor_parallel_degree]
                found += [made.training.disable_cuda_graphs, made.compile.enable]
                found.append(type(made.activation_checkpoint).__qualname__)
                print(json.dumps([width, *found]), next(iter(model.layers.values())).attention.inner_attention)
            """,
        )
        lines = text.splitlines()
        for width, line in zip(titan_config.WIDTHS, lines, strict=True):
            depth = {"debug": 6, "8B": 32, "70B": 80, "qwen3-moe": 8, "deepseek-v3": 6}[width]
            few = titan_config.WIDTHS[width][2]
            self.assertEqual(
                json.loads(line[: line.index("]") + 1]), [width, depth, few, 2, 2, False, True, "SelectiveAC.Config"]
            )
            self.assertIn("ScaledDotProductAttention", line)

    def test_random_tokens_are_those_of_the_seed_and_the_rank(self) -> None:
        self.run_python(
            "-c",
            """if True:
            import titan_config, torch
            titan_config.import_torchtitan("cpu")
            tokens = titan_config._components().RandomTokens
            def batch(rank):
                made = tokens.Config(vocabulary=100).build(dp_rank=rank, seq_len=16, local_batch_size=2, tokenizer=None)
                given, labels = next(iter(made))
                assert given["input"].shape == labels.shape == given["positions"].shape == (2, 16)
                assert torch.equal(given["input"][:, 1:], labels[:, :-1]) and given["input"].max() < 100
                assert given["positions"].tolist() == [list(range(16))] * 2
                return given["input"]
            assert torch.equal(batch(0), batch(0)) and not torch.equal(batch(0), batch(1))
            """,
        )

    @form.slow
    def test_each_block_is_one_graph(self) -> None:
        """Forward and backward of a block, compiled for a simulated GPU as it is on the side of relaunch."""
        for width in ("8B", "qwen3-moe", "deepseek-v3"):
            with self.subTest(width):
                text = self.run_python("-c", BLOCK, width)
                self.assertEqual(json.loads(text.splitlines()[-1]), [1, 1])

    @form.slow
    def test_training_of_two_processes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder, "lines")
            arguments = ["--width", "debug", "--layers", "1", "--seq", "64", "--steps", "1", "--device", "cpu"]
            said = self.run_python(str(BENCH / "titan.py"), *arguments, "--jsonl", str(lines))
            record = json.loads(lines.read_text())
        self.assertRegex(said, r"debug 1 layers 1 x 64 +none .* equal")
        self.assertEqual((record["gpus"], record["equal"], len(record["turns"])), (2, "equal", 2))
        # Tokens at random out of 2048: the loss is about ln 2048.
        self.assertTrue(all(7 < loss < 9 for loss in record["losses"]), record["losses"])
        self.assertEqual(len(set(record["losses"])), len(record["losses"]))

    def trace(self, device: str) -> list[Event]:
        """Events of a training step whose calls have names."""
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCH_OVERLAY_NVTX="on"):
            trace = Path(folder, "trace.json")
            self.run_python("-c", TRACE, device, str(trace))
            return read(trace)

    @form.slow
    def test_names_in_the_trace_of_a_step(self) -> None:
        names = [each["name"].partition(" of ")[0] for each in ranges(self.trace("cpu"))]
        loss = ["forward", "backward"] * titan.CHUNKS
        self.assertEqual(names, [*["forward"] * 2, *loss, *["backward"] * 2])  # of two blocks

    @form.needs_gpu
    def test_kernels_of_each_launch_in_the_trace_of_a_step(self) -> None:
        events = self.trace("cuda")
        launches = [each for each in ranges(events) if ", graph of " in each["name"]]
        self.assertEqual({each["name"].partition(" of ")[0] for each in launches}, {"forward", "backward"})
        for launch in launches:
            self.assertTrue(work_of(events, launch), launch)

    @form.needs_gpu
    def test_sides_on_a_gpu(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder, "lines")
            arguments = ["--width", "debug", "--layers", "2", "--seq", "256", "--gpus", "1", "--steps", "2"]
            arguments += ["--sides", "none,relaunch,titan", "--deterministic", "--jsonl", str(lines)]
            self.run_python(str(BENCH / "titan.py"), *arguments)
            none, relaunch, whole = map(json.loads, lines.read_text().splitlines())
        self.assertEqual([none["equal"], relaunch["equal"], whole["equal"]], ["equal"] * 3)
        # Blocks that share their compiled code may share a graph, too.
        self.assertEqual([none["captures"], relaunch["captures"] >= 2, whole["captures"]], [0, True, 1])
        self.assertGreater(whole["nodes"], relaunch["nodes"])
