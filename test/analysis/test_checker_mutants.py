"""The checker is checked: mutants of programs, which it has to flag if they are wrong, and only then.

Small random programs are judged by trying out every order of what they do (`brute_force`, which `test_checker` asks
about programs whose answer anybody can tell); mutants of compiled programs by what is known of plans (Note [Right and
wrong by construction]). `tools/mutants` does the same for all programs and as many small ones as one wants.
"""

import dataclasses

import corpus
import mutants
import plan_contract
from mutants import Tally
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stream_programs import by_name, PROGRAMS


SOME = [(p.name, mode or "default") for p in PROGRAMS[::4] for mode in p.modes[:1]]


@instantiate_parametrized_tests
class TestSmallPrograms(TestCase):
    @parametrize("block", range(5))
    def test_checker_agrees_with_all_orders(self, block: int) -> None:
        tally = Tally()
        for seed in range(100 * block, 100 * block + 100):
            mutants.count_small(seed, tally)
        self.assertEqual(tally.mistakes, [])
        wrong = sum(count for (_, is_wrong, _), count in tally.counts.items() if is_wrong)
        self.assertGreater(wrong, 100, tally.table())
        self.assertGreater(tally.decided - wrong, 100, tally.table())


@form.overlay_only
class TestTool(TestCase):
    def test_it_finds_its_modules(self) -> None:
        """Outside of pytest, which has the paths of pyproject.toml."""
        tool = form.ROOT / "tools" / "run_mutants.py"
        code = f"import runpy, sys; sys.path[:] = [{str(tool.parent)!r}, *(p for p in sys.path if 'lib/' in p)]\n"
        done = form.fork_python(f"{code}runpy.run_path({str(tool)!r}, run_name='__main__')", "--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--small", done.stdout)


@instantiate_parametrized_tests
class TestCompiledPrograms(TestCase):
    @parametrize("name,mode", form.sampled(SOME, 25))
    def test_mutants(self, name: str, mode: str) -> None:
        with plan_contract.requests() as requests:
            report = corpus.check_program(by_name(name), None if mode == "default" else mode)
        self.assertEqual(plan_contract.mistakes(requests)[1], [])
        self.assertEqual(corpus.findings(report), [], str(report))
        tally = Tally()
        mutants.count_compiled(report, f"{name}, {mode}", tally)
        self.assertEqual(tally.mistakes, [], "\n".join([*tally.mistakes, str(report)]))

    @form.slow
    def test_enough_of_them(self) -> None:
        """Each kind of mutant is there, and the eight experts alone have dozens of waits."""
        tally = Tally()
        for name in ("eight_experts", "sixteen_blocks", "prefetch_loop", "mutation_on_returned_stream"):
            mutants.count_compiled(corpus.check_program(by_name(name)), name, tally)
        self.assertEqual(tally.mistakes, [])
        kinds = {kind for kind, _, _ in tally.counts}
        self.assertEqual(kinds, {"delete wait", "delete record", "drop boundary effect", "early free", "swap"})
        self.assertGreater(tally.decided, 150, tally.table())


class TestPlans(TestCase):
    def test_needless_and_missing_waits_are_seen(self) -> None:
        """What says that plans are minimal sees one that isn't, and one that orders too little."""
        with plan_contract.requests() as requests:
            corpus.check_program(by_name("running_statistics"))
        (request,) = requests
        plan = request.plan
        self.assertEqual(plan_contract.mistakes(requests), (4, []))
        ((_, less), *_) = plan_contract.smaller(plan)
        _, wrong = plan_contract.mistakes([dataclasses.replace(request, plan=less)])
        self.assertRegex(wrong[0], "^not ordered: ")
        more = dataclasses.replace(plan.events[-1], index=9, after=0, stream=1, waits=((2, 0),))
        more = dataclasses.replace(plan, events=(*plan.events, more))
        _, wrong = plan_contract.mistakes([dataclasses.replace(request, plan=more)])
        self.assertTrue(any(what.startswith("needless: ev9") for what in wrong), wrong)
