"""CUDA graph relaunch on every program of the corpus, and that the corpus would notice if it were wrong.

`TestPrograms` needs no GPU: it runs each program in eager twice and traced once, so that the program itself is known
to be right. `TestChecker` gives the checker graphs that are wrong on purpose, each in a way that real ones have been.
`TestGpu` runs each program on a GPU; `tools/relaunch_check.py` does the same in parallel.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

import form
from relaunch_programs import _check, _needs, by_name, Kit, Program, PROGRAMS
from relaunch_programs._check import Mismatch, Settings
from torch_overlay._inductor.relaunch import coverage
from torch_overlay.testing import observe, simulated_gpu


NAMES = [p.name for p in PROGRAMS]
IN_ONE_PROCESS = [p.name for p in PROGRAMS if p.ranks == 1]
IN_SEVERAL = [p.name for p in PROGRAMS if p.ranks > 1 and p.name != "collectives"]


@instantiate_parametrized_tests
class TestPrograms(TestCase):
    @parametrize(
        "name", form.sampled(IN_ONE_PROCESS, 15) + form.sampled(["collectives", *IN_SEVERAL], len(IN_SEVERAL) + 1)
    )
    def test_without_graphs(self, name: str) -> None:
        program = by_name(name)
        if program.gpu_only:
            self.skipTest("needs a GPU")
        _check.check(program, Settings("cpu"))

    def test_names_are_unique(self) -> None:
        self.assertEqual(len(set(NAMES)), len(NAMES))

    def test_every_program_says_what_goes_wrong(self) -> None:
        self.assertEqual([p.name for p in PROGRAMS if len(p.hazard) < 12], [])


# ---- what a policy alone can't do


def seams_of(program: Program) -> set[_needs.Need]:
    """Run the program on a simulated GPU, and return the seams that make a difference to its graphs."""
    made: list[coverage.CompiledCode] = []

    class Kept(coverage.CompiledCode):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with simulated_gpu() as gpu, observe() as seen, mock.patch.object(coverage, "CompiledCode", Kept):
        program.body(Kit("graphs", "cuda"))
        codes = [graph["relaunch"] for graph in gpu.cudagraphs]
    split = {row.code for record in made for row in record.partitions.split_off}
    is_used = {
        _needs.COLLECTIVE: "split-collective" in split,
        _needs.BRANCH: "split-control-flow" in split or any("choose(" in text for text in seen.wrappers),
        _needs.NUMBER: any(code.numbers for code in codes),
        _needs.STREAM: bool(seen.plans),
        _needs.SEEDS: any("efficient_attention_backward" in text for text in seen.wrappers),
    }
    return {need for need, used in is_used.items() if used}


@instantiate_parametrized_tests
class TestNeeds(TestCase):
    """The programs that `tools/relaunch_check.py --variants policy` lists."""

    @parametrize("name", form.sampled(sorted(_needs.NEEDS), 3))
    def test_program_needs_its_seam(self, name: str) -> None:
        program = by_name(name)
        with contextlib.ExitStack() as stack:
            if program.ranks > 1:
                dist.init_process_group("fake", rank=0, world_size=program.ranks, store=FakeStore())
                stack.callback(dist.destroy_process_group)
            self.assertIn(_needs.NEEDS[name], seams_of(program))

    @form.overlay_only
    def test_seams_are_in_the_table(self) -> None:
        from torch_overlay.seam_table import SEAMS

        self.assertEqual({need.seam for need in _needs.NEEDS.values()} - {seam.target for seam in SEAMS}, set())

    def test_seams_are_told_apart(self) -> None:
        self.assertEqual(seams_of(by_name("outputs_stay")), set())


# ---- graphs that are wrong on purpose


class Wrong:
    """A compiled function that, from its third call on, does what a wrong graph does."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.call(*args, **kwargs) if self.calls > 2 else self.first(*args, **kwargs)

    def first(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


class OverwrittenOutputs(Wrong):
    outputs: Any = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        new = self.fn(*args, **kwargs)
        if self.outputs is None:
            self.outputs = new
        for old, leaf in zip(pytree.tree_leaves(self.outputs), pytree.tree_leaves(new)):
            old.data.copy_(leaf.detach())
        return self.outputs


class StaleInputs(Wrong):
    """Reads an input at the address where the capture saw it."""

    args: Any = None

    def first(self, *args: Any, **kwargs: Any) -> Any:
        self.args = args
        return self.fn(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*self.args, **kwargs)


class StaleParameters(Wrong):
    """Reads parameters where they were at the capture."""

    def first(self, *args: Any, **kwargs: Any) -> Any:
        self.state = {n: t.detach().clone() for n, t in self.fn.state_dict().items()}
        return self.fn(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.fn, self.state, args, kwargs)


class LostMutation(Wrong):
    """Writes a copy of the input, not the input."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs)


class RepeatedNumbers(Wrong):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        return self.fn(*args, **kwargs)


class SwallowedException(Wrong):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.fn(*args, **kwargs)
        except Exception:
            return None


class CopiedAliases(Wrong):
    """Outputs that alias something come back as tensors of their own."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.fn(*args, **kwargs))


class LeftOutput(Wrong):
    """One element less than the region has is written."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.fn(*args, **kwargs)
        first = next(t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))
        first.data.view(-1)[-1] = float("nan")
        return outputs


WRONG = [
    ("outputs_stay", OverwrittenOutputs),
    ("function_of_itself", OverwrittenOutputs),
    ("history", OverwrittenOutputs),
    ("output_twice", LeftOutput),
    ("not_contiguous", StaleInputs),
    ("decode_loop", StaleInputs),
    ("fifty_sizes", LeftOutput),
    ("data_swap", StaleParameters),
    ("functional_call", StaleInputs),
    ("one_of_many_moves", StaleParameters),
    ("mutated_input", LostMutation),
    ("mutated_part_of_a_base", LostMutation),
    ("alternating_caches", LostMutation),
    ("batch_norm", StaleParameters),
    ("dropout", RepeatedNumbers),
    ("eager_between", RepeatedNumbers),
    ("exception_between_regions", SwallowedException),
    ("outputs_alias_each_other", CopiedAliases),
    ("output_is_input", CopiedAliases),
    ("mutated_and_returned", CopiedAliases),
]


@instantiate_parametrized_tests
class TestChecker(TestCase):
    @parametrize("name,wrong", WRONG)
    def test_wrong_graphs_are_noticed(self, name: str, wrong: type[Wrong]) -> None:
        program = by_name(name)
        want = _check.run(program, "eager", "cpu")
        with mock.patch.object(Kit, "compile", lambda k, fn, **kwargs: wrong(fn)):
            got = _check.run(program, "graphs", "cpu")
        with self.assertRaisesRegex(Mismatch, "expected"):
            _check._compare("wrong", want, got, program.loose)

    def test_launches_and_refusals_are_counted(self) -> None:
        def check(**counts: int) -> None:
            start = _check.counted()
            torch._dynamo.utils.counters["torch_overlay"].update({f"cudagraph_{k}": n for k, n in counts.items()})
            _check._check_counters(by_name("outputs_stay"), start)

        check(relaunches=12, captures=1)
        with self.assertRaisesRegex(Mismatch, "5 graph launches, expected at least 6"):
            check(relaunches=5, captures=1)
        with self.assertRaisesRegex(Mismatch, "1 refusals"):
            check(relaunches=12, captures=1, refusals=1)

    def test_program_that_dynamo_takes_nothing_of_fails(self) -> None:
        def body(k: Kit) -> None:
            k.see("input", k.compile(lambda x: x)(k.randn(4)))

        untaken = Program("untaken", "nothing is compiled", body)
        with self.assertRaisesRegex(Mismatch, "Dynamo made no graph of it"):
            _check.check(untaken, Settings("cpu"))

    def test_growth_names_what_is_left(self) -> None:
        before = {"bytes allocated": 1024, "graphs": 1, "execs": 2}
        after = {"bytes allocated": 1536, "graphs": 3, "execs": 2, "pool objects": 1}
        self.assertEqual(_check.growth(before, after), {"graphs": 2, "pool objects": 1})

    def test_options_reach_every_thread_by_the_environment(self) -> None:
        verified = {"TORCH_OVERLAY_CUDAGRAPHS": "relaunch", "TORCH_OVERLAY_CUDAGRAPH_VERIFY": "1"}
        self.assertEqual(Settings("cuda", verify=True).environment(), verified)
        self.assertNotIn("TORCH_OVERLAY_DISABLE", Settings("cuda").environment())
        self.assertEqual(Settings("cuda", policy=True).environment()["TORCH_OVERLAY_DISABLE"], "1")

    @form.slow
    def test_failure_of_a_rank_is_told(self) -> None:
        def body(k: Kit) -> None:
            raise AssertionError

        missing = Program("no_such_program", "no program of that name exists", body, ranks=2)
        with self.assertRaisesRegex(Mismatch, r"rank \d ended with status 1: StopIteration"):
            _check.check(missing, Settings("cpu"))


@form.needs_gpu
@instantiate_parametrized_tests
class TestGpu(TestCase):
    """As tools/relaunch_check.py, one program after the other."""

    def check(self, name: str, verify: bool) -> None:
        program = by_name(name)
        if program.ranks > torch.cuda.device_count():
            self.skipTest(f"needs {program.ranks} GPUs")
        if program.exclusive and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
            self.skipTest("needs the device for itself: run it with -n 0")
        if not (program.alone or program.exclusive):
            _check.check(program, Settings("cuda", verify=verify))
            return
        variant = "verify" if verify else "relaunch"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(form.ROOT / "tools/relaunch_check.py"), "--out", folder, "--jobs", "1"]
            done = subprocess.run([*command, "--only", name, "--variants", variant], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:])

    @parametrize("name", NAMES)
    def test_relaunch(self, name: str) -> None:
        self.check(name, verify=False)

    @parametrize("name", NAMES)
    def test_relaunch_with_verify(self, name: str) -> None:
        self.check(name, verify=True)
