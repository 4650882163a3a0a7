"""What runs outside of graphs has the cause, the operator and the line that the program's comments name.

Here the causes that show when the code is compiled; `outside_programs/run.py` runs all programs on a GPU.
"""

import tempfile
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from outside_programs import by_name, PROGRAMS, run
from outside_programs._program import causes_of
from torch_overlay._dynamo import registry
from torch_overlay._inductor.relaunch import coverage
from torch_overlay._inductor.relaunch.causes import _refused
from torch_overlay.testing import observe, simulated_gpu


COMPILED = [p.name for p in PROGRAMS if p.compiled_at_once]
RUN = ("warm-up", "templates")  # codes that only calls show


@instantiate_parametrized_tests
class TestCompiled(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.object(registry, "_has_streams", False))  # another test's programs had streams
        _refused.clear()

    @parametrize("name", form.sampled(COMPILED, 5))
    def test_causes(self, name: str) -> None:
        program = by_name(name)
        with simulated_gpu(), program.options(), observe() as seen:
            fn = torch.compile(program.body, mode="reduce-overhead", dynamic=program.dynamic)
            fn(*program.arguments(0))
            causes = causes_of(coverage.coverage(), seen)
        wanted = [w for w in program.expected() if w[0] not in RUN]
        self.assertEqual([d for d in program.differences(causes | {w for w in program.expected() if w[0] in RUN})], [])
        self.assertTrue(wanted or not causes)

    @parametrize("name", form.sampled([n for n in COMPILED if by_name(n).fixed], 5))
    def test_fixed_form_is_whole(self, name: str) -> None:
        program = by_name(name)
        with simulated_gpu(), program.options(), observe() as seen:
            fn = torch.compile(program.fixed, mode="reduce-overhead", dynamic=program.dynamic)
            fn(*program.arguments(0))
            self.assertEqual((causes_of(coverage.coverage(), seen), coverage.coverage().share), (set(), 1.0))

    def test_there_are_enough(self) -> None:
        self.assertGreaterEqual(len(PROGRAMS), 60)
        self.assertEqual(len({p.name for p in PROGRAMS}), len(PROGRAMS))


@form.needs_gpu
@instantiate_parametrized_tests
class TestOnGpu(TestCase):
    @parametrize("name", [p.name for p in PROGRAMS])
    def test_program(self, name: str) -> None:
        with tempfile.TemporaryDirectory() as cache:
            self.assertEqual(run.run(name, 300, cache)["errors"], [])
