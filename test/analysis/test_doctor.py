"""The doctor: causes with their lines, remedies that are tried, what comes first, and bad input."""

import contextlib
import dataclasses
import html.parser
import io
import json
import sys
import tempfile
import textwrap
import time
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import form
import torch_overlay
from printed import printed
from torch_overlay._cli import commands, doctor
from torch_overlay._inductor.relaunch import coverage
from torch_overlay.analysis.doctor import diagnose, Diagnosis, eager, Finding, Trial, Work
from torch_overlay.analysis.doctor.diagnose import _Job, as_text, by_cost, guards_us, logged, SavedArguments, switches
from torch_overlay.analysis.doctor.diagnosis import spans_of, StepTimeline, VARY
from torch_overlay.analysis.doctor.eager import EagerLaunches
from torch_overlay.testing import simulated_gpu


MODEL = """
    import torch

    def forward(x, w):
        y = (x @ w).sin()
        y = torch.cond(y.sum() > 0, lambda a: a * 2, torch.rand_like, (y,))
        return (y @ w).cos()

    def example_inputs():
        return torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")

    def chosen(x, w):
        y = (x @ w).sin()
        y = torch.where(y.sum() > 0, y * 2, y - 1)
        return (y @ w).cos()

    def whole(x, w):
        return (x @ w).sin()

    def broken(x, w):
        raise KeyError("no such key")

    if __name__ == "__main__":
        torch.compile(forward, mode="reduce-overhead")(*example_inputs())
"""


SCRIPT = """
    import sys

    import torch

    torch._dynamo.config.capture_dynamic_output_shape_ops = True

    @torch.compile(mode="reduce-overhead")
    def f(x):
        return x.sin().nonzero().sum() + x.cos().sum()

    f(torch.randn(8, device="cuda"))
    print("argument", sys.argv[1])
"""


PRINTS = """
    import atexit
    import subprocess

    import torch

    print("loaded")

    def f(x):
        return x.sin() * x.sum().item()

    def example_inputs():
        return torch.randn(8, device="cuda")

    if __name__ == "__main__":
        atexit.register(print, "the end")
        torch.compile(f, mode="reduce-overhead")(example_inputs())
        subprocess.run(["printf", r"\\377"])
        print("no newline", end="")
"""


ONE_WAIT = Work(waits=1.0, launches=2.0, graph_breaks=1)


class CommandTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.model = self.script(MODEL, name="model.py")

    def script(self, *parts: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text("".join(map(textwrap.dedent, parts)))
        return str(path)

    def run_command(self, *arguments: str) -> tuple[int, str, str]:
        return printed(commands.main, ["doctor", "--simulate", *arguments])


TRAINS = """
    import sys

    import torch

    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(1, device="cuda")  # before there is compiled code

    @torch.compile(mode="reduce-overhead")
    def loss_of(x):
        return model(x).square().mean()

    for step in range(4):
        loss = loss_of(torch.ones(4, 8).pin_memory().to("cuda", non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
    torch.cuda.synchronize()
    if sys.argv[1:]:
        raise {"interrupt": KeyboardInterrupt(), "exit": SystemExit(3), "fail": KeyError("no such key")}[sys.argv[1]]
"""


STEP = """
    import torch

    double = torch.compile(lambda x: x.sin() * 2, mode="reduce-overhead")
    plain = torch.compile(lambda x: x.sin() * 2)

    def step(x):
        double(x)

    def without_graphs(x):
        plain(x)
        return x.detach()

    def unused(x):
        x.sin()

    def waits(x):
        return x.sin() * x.sum().item()

    def sevens(x):
        return torch.full_like(x, 7.0)

    def right(x):
        return torch.where(x > 0, x.sin(), x.cos()) * x.sum()

    def example_inputs():
        return torch.randn(3, device="cuda")
"""


DRAWS = """
    import random

    import torch

    def f(x):
        return x.sin()

    def example_inputs():
        print(random.random(), torch.rand(1))
        return torch.randn(3, device="cuda")
"""


LENGTHS = """
    import torch

    @torch.compile(mode="reduce-overhead")
    def f(x):
        return (x @ x.t()).sin().sum()

    for n in (8, 16, 24, 32):
        f(torch.ones(n, 4, device="cuda"))
"""


@form.overlay_only
class TestWhatIsSeen(CommandTests):
    """No verdict of the doctor speaks of what it did not see."""

    def found(self, *arguments: str) -> dict[str, Any]:
        status, out, err = self.run_command("--no-tries", "--json", *arguments)
        self.assertEqual(status, 0, err)
        return json.loads(out)

    def test_eager_work_of_a_training_script_is_named_by_line(self) -> None:
        found = self.found(self.script(TRAINS))
        eager = {each["line"].rpartition(":")[2]: each for each in found["coverage"]["eager"]}
        self.assertEqual({line: (e["code"], e["kernels"]) for line, e in eager.items()}, {
            "15": ("eager", 3),  # the first copy is made before anything is compiled
            "16": ("eager-backward", 4),
            "17": ("eager-optimizer", 8),
        })  # fmt: skip
        waits = [each for each in found["findings"] if each["code"] == "host-wait"]
        self.assertEqual([(e["line"].rpartition(":")[2], e["waits"]) for e in waits], [("19", 4.0), ("20", 1.0)])
        compiled = found["coverage"]["kernels_in_graphs"]
        self.assertEqual(found["share"], compiled / (compiled + 15))
        self.assertRegex(found["first"], r"First: \[eager-optimizer\] at .*script.py:17: compile its step")

    def test_sizes_say_what_they_cost(self) -> None:
        found = self.found(self.script(LENGTHS))
        codes = {each["code"]: each for each in found["findings"]}
        self.assertRegex(codes["recompiled"]["message"], r"f was compiled 2 times, in .* s: .*size mismatch at index 0")
        self.assertEqual(codes["warm-up"]["launches"], 4.0)  # the third and the fourth length: two kernels each
        self.assertLess(found["share"], 1.0)
        self.assertIn("pad to a few sizes", found["first"])

    def test_function_that_calls_compiled_code_runs_as_it_is(self) -> None:
        path = self.script(STEP)
        found = self.found(f"{path}:step")
        self.assertEqual((found["share"], found["coverage"]["kernels_in_graphs"]), (1.0, 1))
        status, _, err = self.run_command(f"{path}:unused")
        self.assertEqual(status, 2)
        self.assertIn("unused leaves nothing to compile", err)
        status, _, err = self.run_command(f"{path}:without_graphs")
        self.assertEqual(status, 2)
        self.assertIn("asks for CUDA graphs. First: torch.compile", err)

    def test_same_function_is_timed_without_graphs(self) -> None:
        """With graphs off, no code asks for them: a step was compiled as a whole, or said to leave nothing."""
        double = torch.compile(lambda x: x.sin() * 2, mode="reduce-overhead")

        def step(x: torch.Tensor) -> torch.Tensor:
            return double(x).cos()

        for fn, as_it_is in ((step, True), (lambda x: x.sin(), False)):
            with simulated_gpu():
                job = _Job((torch.randn(3, device="cuda"),), False, 4, True, SavedArguments(()))
                self.assertEqual(len(job.measure(fn).coverage.functions), 1)
                with torch_overlay.config.patch(cudagraphs="off"):
                    self.assertEqual(job.measure(fn, detail=False).coverage.functions, ())
            self.assertEqual(job.runs[id(fn)] is fn, as_it_is)

    @form.slow
    def test_remedy_without_a_gpu_is_not_compared(self) -> None:
        path = self.script(STEP)
        for remedy, helps in (("sevens", True), ("right", True), ("waits", False)):
            _, out, err = self.run_command("--no-tries", "--json", f"{path}:waits", "--remedy", remedy)
            trial = json.loads(out)["trials"][-1]
            self.assertEqual(trial["results"], "not compared (simulated)")
            self.assertEqual(trial["before"]["graph_breaks"], 1)
            self.assertEqual(trial["after"]["waits"], 0.0 if helps else 1.0)
            self.assertEqual(f"First: {remedy}: " in out, helps, out)
            self.assertIn(f"doctor: trying {remedy} (1 of 1)\n", err)

    def test_script_that_ends_early_keeps_its_report(self) -> None:
        path = self.script(TRAINS)
        for how, status, said in (
            ("interrupt", 130, "The program was interrupted: this is what it had run until then."),
            ("exit", 2, "The program exited with status 3: this is what it had run until then."),
            ("fail", 2, "First: the program failed: "),
        ):
            found, out, err = self.run_command(path, how)
            self.assertEqual((found, err), (status, ""))
            self.assertIn(said, out)
            self.assertIn("[eager-optimizer]", out)

    def test_share_that_is_asked_for(self) -> None:
        path = self.script(TRAINS)
        for share, status in (("0.9", 1), ("90", 1), ("90%", 1), ("0.1", 0), ("0", 0)):
            found, out, err = self.run_command("--no-tries", "--fail-under", share, path)
            self.assertEqual(found, status)
            self.assertIn("First: ", out)
            self.assertEqual("of launches are in CUDA graphs, under" in err, bool(status))
        self.assertEqual(self.run_command("--fail-under", "120", path)[0], 2)

    def test_page_says_that_it_was_simulated(self) -> None:
        page = self.folder / "page.html"
        self.run_command(f"{self.model}:whole", "--out", str(page))
        self.assertIn("<p>No GPU: compiled for a simulated one", page.read_text())

    def test_function_of_the_package_knows_that_it_is_simulated(self) -> None:
        with simulated_gpu():
            found = torch_overlay.doctor(lambda x: x.sin() * x.sum().item(), torch.randn(8, device="cuda"))
        self.assertEqual((found.simulated, found.ms, found.work.waits), (True, None, 1.0))
        self.assertEqual([trial.results for trial in found.trials], ["not compared (simulated)"])

    def test_all_that_the_program_prints_is_apart_from_json(self) -> None:
        script = self.script(PRINTS)
        done = form.fork_command("doctor", "--simulate", "--no-tries", "--json", script)
        self.assertEqual(json.loads(done.stdout)["target"], script)
        for words in ("loaded", "no newline\n", "the end"):
            self.assertIn(words, done.stderr)

    def test_each_process_draws_the_same_inputs(self) -> None:
        path = self.script(DRAWS)
        printed = {self.run_command(f"{path}:f", "--no-tries")[1].splitlines()[0] for _ in range(2)}
        self.assertEqual(len(printed), 1, printed)


@form.overlay_only
class TestCommand(CommandTests):
    def test_cause_line_remedy_and_what_is_first(self) -> None:
        page = self.folder / "page.html"
        status, out, _ = self.run_command(f"{self.model}:forward", "--out", str(page))
        self.assertEqual(status, 0)
        line = "y = torch.cond(y.sum() > 0, lambda a: a * 2, torch.rand_like, (y,))"
        cost = "1 launches a step, 1 waits of the host a step"
        why = "cond, for a branch draws random numbers (prims.inductor_seeds.default)"
        said = f"1. [split-control-flow] control flow: {why}: {cost}\n   {self.model}:6\n   - {line}"
        self.assertIn(said, out)
        self.assertIn("No GPU: compiled for a simulated one.", out)
        self.assertTrue(
            out.strip().splitlines()[-1].startswith(f"First: [split-control-flow] at {self.model}:6: torch.where")
        )
        text = page.read_text()
        html.parser.HTMLParser().feed(text)
        self.assertIn("<code>split-control-flow</code>", text)
        self.assertIn("lambda a: a * 2", text)
        self.assertNotIn("http", text)

    def test_nothing_to_do(self) -> None:
        status, out, _ = self.run_command(f"{self.model}:whole", "--json")
        found = json.loads(out)
        self.assertEqual((status, found["share"], found["findings"]), (0, 1.0, []))
        self.assertEqual(found["first"], "First: nothing: all that can be in graphs is.")

    def test_page_that_cannot_be_written_loses_nothing(self) -> None:
        page = self.folder / "new" / "page.html"
        for where, status, message in (
            (page, 0, f"^wrote {page}\n$"),
            (Path(self.model, "page.html"), 2, "doctor: --out .* could not be written: .*model.py'\n$"),
        ):
            got, out, err = self.run_command(f"{self.model}:whole", "--json", "--out", str(where))
            self.assertEqual((got, json.loads(out)["share"]), (status, 1.0), err)
            self.assertRegex(err, message)
        self.assertIn("<html", page.read_text())

    @form.slow
    def test_own_remedy_is_tried_on_the_same_inputs(self) -> None:
        status, out, _ = self.run_command(f"{self.model}:forward", "--remedy", "chosen")
        self.assertEqual(status, 0)
        counts = "waits of the host 1 -> 0, launches by the host 3 -> 1"
        said = f"chosen: 80.0 % -> 100.0 % of launches in graphs, {counts}, results not compared (simulated)"
        self.assertIn(f"Tried:\n   {said}", out)
        self.assertTrue(out.rstrip().splitlines()[-1].startswith("First: chosen: "), out)
        _, out, _ = self.run_command(f"{self.model}:forward", "--remedy", "broken")
        self.assertIn("broken: fails: doctor: ", out)
        self.assertIn("KeyError: 'no such key'", out)

    @form.slow
    def test_switches_are_tried_on_a_script_in_another_process(self) -> None:
        script = self.script(SCRIPT)
        restored = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False)  # the script sets it
        with restored, torch._inductor.config.patch(graph_partition=False):
            status, out, err = self.run_command(script, "7")
        self.assertEqual(status, 0, err)
        self.assertIn("argument 7", out)
        change = "torch._inductor.config.graph_partition = True"
        self.assertRegex(out, f"(?m)^   {change}: 0.0 % -> .* % of launches in graphs, .*results not compared")
        self.assertTrue(out.rstrip().splitlines()[-1].startswith(f"First: {change}"), out)
        with restored:
            _, out, _ = self.run_command("--no-tries", script, "7")
        self.assertNotIn("Tried:", out)

    def test_script_may_use_its_output_as_a_file(self) -> None:
        script = self.script(
            "import sys\nsys.stdout.reconfigure(line_buffering=True)\nsys.stdout.buffer.write(b'bytes ')\n"
            "print(sys.stdout.encoding, sys.stdout.fileno())\n",
            MODEL,
        )
        with tempfile.TemporaryFile("w+", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            self.assertEqual(commands.main(["doctor", "--simulate", script]), 0)
            out.seek(0)
            self.assertTrue(out.read().startswith(f"bytes utf-8 {out.fileno()}\n"))

    def test_script_has_options_of_its_own(self) -> None:
        script = self.script("import sys\nprint(sys.argv[1:])\n", MODEL)
        given = ["--step", "3", "--json", "--out", "x", "--simulate"]
        status, out, err = self.run_command("--no-tries", script, *given)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(out.splitlines()[0], str(given))
        self.assertIn("[split-control-flow]", out)

    def test_program_that_exits_is_an_error(self) -> None:
        exits = self.script("import sys\ndef f(): pass\nsys.exit(0)\n", name="exits.py")
        leaves = self.script("import sys\ndef f(): sys.exit()\n", name="leaves.py")
        for script in (exits, leaves):
            for command in (["check"], ["explain"], ["timeline"], ["doctor", "--simulate"]):
                status, _, err = printed(commands.main, [*command, f"{script}:f"])
                self.assertEqual(status, 2)
                self.assertRegex(err, r"(exits|leaves)\.py exited with (0|None)")

    def test_program_sees_its_own_arguments_and_may_change_its_path(self) -> None:
        own = str(self.folder / "script.py")
        self.script(f"import sys\nassert sys.argv == [{own!r}]\ndel sys.path[0]\n", MODEL)
        before = list(sys.path), sys.argv
        status, _, err = self.run_command(f"{own}:whole")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual((sys.path, sys.argv), before)

    @form.slow
    def test_output_beside_the_results_is_not_compared(self) -> None:
        """What a function prints, and what child processes and handlers at the exit of a script print."""
        script = self.script(PRINTS)
        for target in (f"{script}:f", script):
            status, out, err = self.run_command(target)
            self.assertEqual(status, 0, err)
            self.assertRegex(out, "(?m)^   torch._dynamo.config.capture_scalar_outputs = True: .* results not compared")

    def test_bad_input_is_one_line(self) -> None:
        nothing = self.script("import torch\n", name="nothing.py")
        for arguments, message in (
            ([f"{self.folder}/none.py"], "no file"),
            ([f"{self.model}:none"], "has no function none"),
            ([f"{self.model}:"], "names no function"),
            ([f"{self.model}:whole", "--remedy", "none"], "has no function none"),
            ([f"{self.model}:broken"], "model.py:21: KeyError: 'no such key'"),
            ([f"{self.model}:whole", "--calls", "3"], "--calls must be at least 4, got 3"),
            ([f"{self.model}:whole", "more"], "no option or argument more ("),
            (["--remedy", "whole", self.model], "a script has none"),
            ([f"{self.model}:whole", "--backward"], "ValueError: backward: no output requires a gradient"),
            ([nothing], 'asks for CUDA graphs. First: torch.compile(..., mode="reduce-overhead")'),
        ):
            status, out, err = self.run_command(*arguments)
            self.assertEqual((status, out, len(err.strip().splitlines())), (2, "", 1), err)
            self.assertIn(message, err)


class TestTries(unittest.TestCase):
    def test_switch_that_helps_comes_first(self) -> None:
        whole = torch._inductor.config.patch(graph_partition=False)
        with simulated_gpu(), whole, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            found = diagnose(lambda x: x.sin().nonzero().sum() + x.cos().sum(), torch.randn(8, device="cuda"))
        self.assertEqual((found.share, [each.code for each in found.findings]), (0.0, ["inductor"]))
        (trial,) = found.trials
        self.assertEqual(trial.change, "torch._inductor.config.graph_partition = True")
        self.assertGreater(trial.after.share, 0.4)
        self.assertTrue(found.first().startswith("First: torch._inductor.config.graph_partition = True: 0.0 % -> "))

    def test_options_are_as_before(self) -> None:
        finding = Finding("inductor", "", "", "incompatible op aten.nonzero.default", "")
        with torch._inductor.config.patch(graph_partition=False):
            ((code, options),) = switches([finding, finding])
            self.assertEqual((code, as_text(options)), ("inductor", "torch._inductor.config.graph_partition = True"))
            self.assertFalse(torch._inductor.config.graph_partition)

    def test_switch_that_is_set_is_no_remedy(self) -> None:
        finding = Finding("split-devices", "", "", "cross-device ops", "")
        self.assertEqual(switches([finding]), [])
        with torch_overlay.config.patch(cudagraph_rewrites=False):
            ((_, options),) = switches([finding, dataclasses.replace(finding, code="split-host")])
        self.assertEqual(as_text(options), "torch_overlay.config.cudagraph_rewrites = True")

    def test_trial_that_fails_or_differs_does_not_help(self) -> None:
        less = Work(waits=0.0, launches=9.0)
        for changes, helps in (
            ({}, True),
            ({"results": "DIFFER"}, False),
            ({"results": "not compared (simulated)"}, True),
            ({"error": "RuntimeError: no"}, False),
            ({"ms_after": 0.99}, False),
            ({"ms_before": None, "ms_after": None, "after": less}, True),
            ({"ms_before": None, "ms_after": None}, False),
        ):
            facts = {"ms_before": 1.0, "ms_after": 0.5, "after": ONE_WAIT, "error": "", **changes}
            self.assertEqual(Trial("c", "x = 1", ONE_WAIT, **facts).helps, helps, changes)

    def test_time_of_guards(self) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(100)])
        first = torch.compile(model, backend=lambda gm, inputs: lambda *given: given[:1])
        x = torch.zeros(2)
        self.enterContext(mock.patch("torch.cuda.synchronize"))

        def step() -> None:
            first(x)

        step()
        start = time.perf_counter()
        for _ in range(100):
            step()
        ms = 10 * (time.perf_counter() - start)
        self.assertGreater(guards_us(step, ms) or 0, 300 * ms)  # for the graph runs nothing
        self.assertIsNone(guards_us(step, 60.0))
        with torch.compiler.set_stance("eager_on_recompile"):
            self.assertIsNone(guards_us(step, ms))
        torch._dynamo.reset()
        self.assertIsNone(guards_us(step, ms), "it would have to be compiled")

    def test_guards_are_named_where_they_take_long(self) -> None:
        for share, said in ((None, False), (0.04, False), (0.06, True)):
            found = Diagnosis("t", "gpu", False, 1.0, 0.5, None, (), guards_us=share and 500 * share)
            for text in (str(found), found.to_html()):
                self.assertEqual("guards: 30.0 us of a step" in text and "skip_guard_eval_unsafe" in text, said)
            self.assertEqual(json.loads(found.to_json())["guards_us"], share and 500 * share)

    def test_last_line_ends_in_one_full_stop(self) -> None:
        finding = Finding("code", "", "", "what", "Change this. Then that.")
        found = Diagnosis("t", "gpu", False, 0.5, None, None, (finding,))
        self.assertEqual(found.first(), "First: [code]: Change this. Then that.")

    def test_remedy_that_was_tried_in_vain_is_not_named(self) -> None:
        one = Finding("one", "", "", "what", "f.g.config.x = 1 does it")
        other = Finding("other", "", "", "what", "take f out of the region")
        for trial, first in (
            (Trial("one", "f.g.config.x = 1", ONE_WAIT, ONE_WAIT), "[other]: take f out of the region"),
            (Trial("one", "f.g.config.x = 1", ONE_WAIT, Work(), 2.0, 2.5), "[other]: take f out of the region"),
            (Trial("one", "f", ONE_WAIT, ONE_WAIT), "[one]: f.g.config.x = 1 does it"),
        ):
            found = Diagnosis("t", "gpu", False, 0.5, None, None, (one, other), (trial,))
            self.assertEqual(found.first(), f"First: {first}.")
        found = dataclasses.replace(found, findings=(one,), trials=(Trial("one", "f.g.config.x = 1", Work(), Work()),))
        self.assertEqual(found.first(), "First: nothing: no remedy that was tried helps.")

    def test_few_steps_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "at least 4, got 3"):
            diagnose(torch.sin, torch.randn(2), steps=3)

    def test_order_is_by_cost(self) -> None:
        cheap = Finding("split-host", "", "", "", "", launches=9)
        dear = Finding("split-failed", "", "", "", "do it", launches=1, host_us=50.0, device_us=3.0)
        self.assertEqual(by_cost([cheap, dear]), [dear, cheap])
        found = Diagnosis("t", "gpu", False, 0.5, 2.0, 1.0, (dear, cheap))
        self.assertIn("1 launches a step, 50.0 us of the host, 3.0 us of the device", str(found))
        self.assertIn("2.000 ms a step, 1.000 ms without graphs", str(found))
        with mock.patch.object(Diagnosis, "first", return_value="First: x."):
            self.assertTrue(str(found).endswith("First: x."))


class TestResults(unittest.TestCase):
    """Two functions that compute the same have equal results. Nothing is simulated: the functions run on the host."""

    def setUp(self) -> None:
        self.enterContext(mock.patch("torch.cuda.synchronize"))
        self.enterContext(mock.patch("torch.cuda.get_device_name", return_value="none"))
        self.enterContext(mock.patch.object(sys.modules[diagnose.__module__], "TIMED", 1))
        self.enterContext(mock.patch.object(eager, "noted_waits", lambda: contextlib.nullcontext({})))
        self.addCleanup(torch._dynamo.reset)

    def results(self, fn: Callable[..., Any], remedy: Callable[..., Any], *args: Any, backend: str = "eager") -> str:
        first, second = torch.compile(fn, backend=backend), torch.compile(remedy, backend=backend)
        return diagnose(first, *args, steps=4, tries=False, remedy=second).trials[-1].results

    def test_arguments_that_are_written_to(self) -> None:
        def step(x: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
            with torch.no_grad():
                model.bias.add_(x[0])
            return x.add_(1) * model.bias

        x, model = torch.zeros(3), torch.nn.Linear(2, 2)
        before = model.bias.detach().clone()
        self.assertEqual(self.results(step, lambda x, model: step(x, model), x[1:], model), "equal")
        self.assertEqual((x.tolist(), model.bias.tolist()), ([0.0] * 3, before.tolist()))
        self.assertEqual(self.results(step, lambda x, model: step(x, model) + 1, x[1:], model), "DIFFER")

    def test_random_numbers_of_eager_and_of_compiled_code(self) -> None:
        drop = torch.compiler.disable(lambda x: torch.nn.functional.dropout(x, 0.5))

        def step(x: torch.Tensor) -> torch.Tensor:
            return drop(x) + torch.nn.functional.dropout(x, 0.5)

        def whole(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x, 0.5) + torch.nn.functional.dropout(x, 0.5)

        with torch._inductor.config.patch(fallback_by_default=True):  # compiles no C++
            self.assertEqual(self.results(step, whole, torch.ones(64), backend="inductor"), "equal")

    def test_number_that_becomes_a_tensor(self) -> None:
        self.assertEqual(self.results(lambda x: x.sum().item(), lambda x: x.sum(), torch.ones(3)), "equal")
        self.assertEqual(self.results(lambda x: x.sum().item(), lambda x: x.sum() + 1, torch.ones(3)), "DIFFER")

    def test_program_that_differs_from_run_to_run_is_not_compared(self) -> None:
        state = torch.zeros(1)
        self.assertEqual(self.results(lambda x: state.add_(x), lambda x: state.add_(x), torch.ones(1)), VARY)
        differs, equal = (Trial("", "", ONE_WAIT, ONE_WAIT, results=results) for results in ("DIFFER", "equal"))
        for again, said in ((differs, VARY), (equal, "DIFFER")):
            with (
                mock.patch.object(doctor, "_tried", side_effect=[differs, again]),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                (trial,) = doctor.tried(Diagnosis("t", "gpu", False, 0.5, None, None, ()), "", [], True, "f")
            self.assertEqual(trial.results, said)


class TestWaits(unittest.TestCase):
    def setUp(self) -> None:
        def set_mode(mode: int) -> None:
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

        self.enterContext(mock.patch.object(torch._C, "_cuda_set_sync_debug_mode", set_mode, create=True))
        self.enterContext(mock.patch("torch.cuda._lazy_call", lambda call: call()))

    def wait(self, name: str = __name__, path: str = __file__) -> None:
        """Wait, as a function of the module with this name and file."""
        code = compile("def wait(): warn(text)", path, "exec")
        scope = {"__name__": name, "warn": warnings.warn, "text": f"test {eager.TEXT}"}
        exec(code, scope)
        scope["wait"]()

    def test_mode_says_nothing(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with eager.noted_waits():
                pass
        self.assertEqual(said, [])

    def test_waits_of_captures_and_before_compiled_code_are_not_the_programs(self) -> None:
        with eager.noted_waits() as noted:
            self.wait()
            with mock.patch.object(coverage, "live", {object()}):
                self.wait()
                self.wait(f"{eager.CAPTURES}recording", sys.modules[coverage.__name__].__file__ or "")
                self.wait("torch._inductor.runtime.benchmarking", f"{eager.TUNES}benchmarking.py")
                with mock.patch.object(eager, "_is_compiling", lambda: True):
                    self.wait()
        self.assertEqual(noted.total(), 1, noted)


class _Event:
    """One of Kineto's, as `spans_of` reads it."""

    def __init__(self, name: str, on_device: bool, start: int, duration: int, correlation: int, lane: int = 7) -> None:
        types = torch.autograd.DeviceType
        self.values = {
            "name": name,
            "device_type": types.CUDA if on_device else types.CPU,
            "start_ns": start,
            "duration_ns": duration,
            "correlation_id": correlation,
            "device_resource_id": lane,
            "is_user_annotation": False,
        }

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self.values[name]


class TestTimeline(unittest.TestCase):
    EVENTS = (
        _Event("cudaGraphLaunch", False, 1000, 4000, 1),
        _Event("cudaLaunchKernel", False, 6000, 2000, 2),
        _Event("cudaStreamSynchronize", False, 8000, 9000, 3),
        _Event("aten::mm", False, 500, 9000, 0),
        _Event("first <kernel>", True, 5000, 3000, 1),
        _Event("second", True, 8000, 2500, 1, lane=9),
        _Event("outside", True, 11000, 1500, 2),
    )

    def test_what_a_graph_launched_is_in_it(self) -> None:
        timeline = StepTimeline(tuple(spans_of(self.EVENTS)))
        self.assertEqual(
            [(s.name, s.lane, s.start_us, s.in_graph) for s in timeline.spans],
            [
                ("cudaGraphLaunch", "host", 0.0, True),
                ("cudaLaunchKernel", "host", 5.0, False),
                ("first <kernel>", "stream 7", 4.0, True),
                ("second", "stream 9", 7.0, True),
                ("outside", "stream 7", 10.0, False),
            ],
        )
        self.assertEqual((timeline.device_us(True), timeline.device_us(False)), (5.5, 1.5))
        found = Diagnosis("t", "gpu", False, 0.5, 2.0, 1.0, (), timeline=timeline)
        self.assertIn("device time of a step: 5.5 us in graphs, 1.5 us outside", str(found))
        self.assertEqual(json.loads(found.to_json())["device_us_outside"], 1.5)
        page = found.to_html()
        html.parser.HTMLParser().feed(page)
        self.assertEqual((page.count("<rect "), page.count('class="in"')), (5, 3))
        self.assertIn("first &lt;kernel&gt;: 3.0 us at 4.0 us", page)

    def test_lines_of_eager_code_share_the_time_of_an_operator(self) -> None:
        seen = EagerLaunches()
        seen.launches["eager", "a.py:1"].update({"aten::add": 2})
        seen.launches["eager", "a.py:2"].update({"aten::add": 1, "aten::mul": 1, "aten::unknown": 1})
        times = StepTimeline(operators={"aten::add": (30.0, 3.0), "aten::mul": (5.0, 1.0)}).of(seen)
        self.assertEqual((times["eager", "a.py:1"], times["eager", "a.py:2"]), ((20.0, 2.0), (15.0, 2.0)))

    def test_profiler_that_sees_no_device_is_no_measurement(self) -> None:
        found = Diagnosis("t", "gpu", False, 0.5, 2.0, 1.0, (), work=Work(launches=3.0))
        self.assertIn("its times are not known", str(found))
        self.assertNotIn("device time of a step", str(found))

    def test_nothing_timed(self) -> None:
        found = Diagnosis("t", "gpu", True, 0.5, None, None, ())
        self.assertNotIn("device_us", found.to_json())
        self.assertNotIn("<svg", found.to_html())

    def test_diagnosis_is_in_the_structured_log(self) -> None:
        found = Diagnosis("t", "gpu", True, 0.5, None, None, ())
        with mock.patch("torch._logging.trace_structured") as trace:
            self.assertIs(logged(found), found)
        self.assertEqual(trace.call_args.kwargs["metadata_fn"]()["name"], "torch_overlay_doctor")
        self.assertEqual(json.loads(trace.call_args.kwargs["payload_fn"]()), json.loads(found.to_json()))


@form.needs_gpu
class TestOnGpu(unittest.TestCase):
    def test_waits_and_times(self) -> None:
        @torch.compiler.disable
        def look(y: torch.Tensor) -> None:
            y[0].item()

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            look(y)
            return y.cos()

        found = diagnose(f, torch.randn(1024, device="cuda"))
        self.assertIn("graph-break", [each.code for each in found.findings])
        (wait,) = [each for each in found.findings if each.code == "host-wait"]
        self.assertEqual(wait.text(), "y[0].item()")
        self.assertGreater(found.ms or 0, 0)
        self.assertGreater(found.ms_without_graphs or 0, 0)
