"""Regions with conditions: one graph, in which the device takes the branch that the predicate picks.

The stand-in for a device takes it, too, and what the other branch would write stays as it is. Each test calls a region
for both outcomes, with other inputs at each call, and the capture sees one outcome alone.
"""

import functools
import os
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config

import form
from stand_ins import relaunch_driver
from stand_ins.relaunch_case import define, region, RelaunchTestCase
from stand_ins.relaunch_device import Kernel
from stand_ins.relaunch_host import host_as_gpu
from torch_overlay import config
from torch_overlay._inductor.relaunch import causes, conditions, split_off
from torch_overlay._inductor.relaunch.capture import branches
from torch_overlay._inductor.relaunch.capture.branches import choose
from torch_overlay._inductor.relaunch.memory import arrange
from torch_overlay._inductor.relaunch.policy import RelaunchPolicy
from torch_overlay._inductor.relaunch.steps import Steps
from torch_overlay.testing import simulated_gpu


OUTCOMES = True, False, False, True, True, False, True


def branch(name, parameters, *lines):
    return region(parameters, *lines).replace("region", name)


def choice(*branches, inputs="x, w", operands="y, w", after="torch.add(z, w, out=new(4, 4))"):
    """A region that computes `y`, chooses `z` by `p`, and uses it; and the two branches, of a false predicate first."""
    false, true = (branch(name, *text) for name, text in zip(("false_graph", "true_graph"), branches))
    return f"{false}\n{true}\n" + region(
        f"p, {inputs}",
        "y = torch.mul(x, w, out=new(4, 4))",
        f"given = [p, {operands}]",
        "del p, y",
        "made = choose(given, false_graph, true_graph)",
        "z = made[0]",
        f"result = {after}",
        "return (*made, result)",
    )


SINE = (
    "a, b",
    "buf0 = torch.mul(a, b, out=new(4, 4))",
    "del a",
    "buf1 = torch.sin(buf0, out=new(4, 4))",
    "return (buf1,)",
)
COSINE = "a, b", "buf0 = torch.cos(a, out=new(4, 4))", "return (buf0,)"


def chosen(branches):
    """The results of a `choice` whose branches make `branches(outcome, y, w)` of their operands."""

    def expected(outcome, x, w):
        z = branches(outcome, x * w, w)
        return z, z + w

    return expected


sine_or_cosine = chosen(lambda outcome, y, w: (y * w).sin() if outcome else y.cos())


class Case(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(branches, "MOST_WAITS", 0))
        # Failures here are kept for no other process.
        self.enterContext(inductor_config.patch(force_disable_caches=True))
        self.enterContext(mock.patch.object(split_off, "_failed", {}))
        self.enterContext(mock.patch.object(arrange, "SMALL", 0))  # scratch allocations share memory

    def region(self, source, **options):
        return self.runner(source, choose=choose, **options)

    def call(self, run, *outcomes, expected=sine_or_cosine):
        for outcome in outcomes:
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            self.assertEqual(run([torch.tensor(outcome), x, w]), expected(outcome, x, w))

    def check(self, run, expected, graphs=1):
        """Compare the results for all outcomes, at the end: nothing may be written over them."""
        got, want = [], []
        for outcome in OUTCOMES:
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            want.append(expected(outcome, x.clone(), w.clone()))
            got.append(run([torch.tensor(outcome), x, w]))
        self.assertEqual(list(map(list, got)), list(map(list, want)))
        self.assertEqual([r.code for r in causes.refused()], [])
        self.assertEqual(len(self.device.executables), graphs)
        if graphs == 1:
            self.assertEqual(self.device.executables[0].taken, list(OUTCOMES[1:]))


class TestConditions(Case):
    def test_device_takes_the_branch_that_the_predicate_picks(self):
        self.check(self.region(choice(COSINE, SINE)), sine_or_cosine)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, len(OUTCOMES) - 1))

    def test_branches_write_their_results_to_one_memory(self):
        self.check(self.region(choice(COSINE, SINE)), sine_or_cosine)
        names = [node.name for node in self.device.arrangements[-1].template.nodes]
        self.assertFalse([name for name in names if "copy" in name], names)

    def test_result_that_is_not_the_branchs_own_is_copied(self):
        """An operand, a view, and one memory twice: writing to it would write to something else."""
        source = choice(
            ("a, b", "c = torch.cos(a, out=new(4, 4))", "return (c, c)"),
            ("a, b", "c = torch.cat([b, a], out=new(8, 4))", "return (b, c[4:])"),
        )  # fmt: skip

        def expected(outcome, x, w):
            y = x * w
            first, second = (w, y) if outcome else (y.cos(), y.cos())
            return first, second, first + w

        self.check(self.region(source), expected)

    def test_results_of_one_branch_alone_are_copied(self):
        source = choice(COSINE, ("a, b", "return (a,)"))
        self.check(self.region(source), chosen(lambda outcome, y, w: y if outcome else y.cos()))

    def test_results_of_other_strides_are_copied(self):
        source = choice(COSINE, ("a, b", "return (torch.sin(a, out=new(4, 4)).t(),)"))
        expected = chosen(lambda outcome, y, w: y.sin().t() if outcome else y.cos())
        self.call(self.region(source), *OUTCOMES[:1] * 2, *OUTCOMES, expected=expected)

    def test_memory_that_is_used_afterwards_is_not_a_result(self):
        """The other branch would write to it."""
        after = "torch.add(z, y, out=new(4, 4))"
        source = choice(COSINE, ("a, b", "return (a,)"), after=after).replace("del p, y", "del p")

        def expected(outcome, x, w):
            y = x * w
            z = y if outcome else y.cos()
            return z, z + y

        self.check(self.region(source), expected)

    def test_one_memory_is_not_two_results(self):
        twice = [(text[0], *text[1:-1], "return (buf0, buf0)") for text in (COSINE, ("a, b", *COSINE[1:]))]
        run = self.region(choice(*twice))
        for outcome in OUTCOMES:
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            got = run([torch.tensor(outcome), x, w])
        self.assertEqual(got[0], (x * w).cos())
        self.assertEqual(got[1], got[0])
        self.assertNotEqual(got[1].data_ptr(), got[0].data_ptr())

    def test_temporaries_of_both_branches_share_memory(self):
        chain = [f"t{i + 1} = torch.add(t{i}, b, out=new(64, 4, 4)); del t{i}" for i in range(6)]
        large = (
            "a, b",
            "t0 = torch.add(a.expand(64, 4, 4), b, out=new(64, 4, 4))",
            *chain,
            "return (torch.sum(t6, 0, out=new(4, 4)),)",
        )
        source = choice(large, (*large[:-1], "return (torch.amax(t6, 0, out=new(4, 4)),)"))

        def reduced(outcome, y, w):
            t = (y + 7 * w).expand(64, 4, 4)
            return t.amax(0) if outcome else t.sum(0)

        self.check(self.region(source), chosen(reduced))
        scratch = self.device.arrangements[-1].layout.scratch_size
        self.assertLess(scratch, 3 * 64 * 64 + 2048, "as much as one branch needs")

    def test_operand_lives_until_the_second_branch_has_read_it(self):
        """The first branch frees it early, and allocates afterwards."""
        source = choice(
            ("a, b", "c = torch.neg(b, out=new(4, 4))", "d = torch.add(a, c, out=new(4, 4))", "return (d,)"),
            ("a, b", "c = torch.neg(a, out=new(4, 4))", "del a", "d = torch.exp(c, out=new(4, 4))", "del c",
             "e = torch.sin(d, out=new(4, 4))", "return (e,)"),
        )  # fmt: skip
        self.check(self.region(source), chosen(lambda outcome, y, w: (-y).exp().sin() if outcome else y - w))

    def test_condition_in_a_branch(self):
        inner = "\n".join([branch("inner_false", *COSINE), branch("inner_true", *SINE)])
        outer = (
            "a, b", "q = torch.gt(a.sum().view(1), 0, out=new(1, dtype=torch.bool))", "given = [q, a, b]", "del a, q",
            "made = choose(given, inner_false, inner_true)", "return made",
        )  # fmt: skip
        taken = set()

        def nested(outcome, y, w):
            if not outcome:
                return y - w
            taken.add(is_positive := bool(y.sum() > 0))
            return (y * w).sin() if is_positive else y.cos()

        expected, plain = chosen(nested), ("a, b", "return (torch.sub(a, b, out=new(4, 4)),)")
        for name, texts in (("true", (plain, outer)), ("false", (outer, plain))):
            with self.subTest(name):
                self.device.executables.clear()
                run = self.region(f"{inner}\n{choice(*texts)}")
                got, want = [], []
                for i in range(24):
                    x, w, outcome = torch.randn(4, 4), torch.randn(4, 4), bool(i % 3)
                    want.append(expected(outcome, x.clone(), w.clone()))
                    got.append(run([torch.tensor(outcome == (name == "true")), x, w]))
                self.assertEqual(got, want)
                self.assertEqual(len(self.device.executables), 1)
        self.assertEqual(taken, {True, False})

    def test_branch_that_writes_to_an_operand(self):
        source = choice(
            COSINE,
            ("a, b", "b.add_(a)", "return (torch.neg(a, out=new(4, 4)),)"),
            after="torch.mul(z, w, out=new(4, 4))",
        )
        run = self.region(source, mutated=[2])
        for outcome in OUTCOMES:
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            y = x * w
            wanted = w + y if outcome else w.clone()
            z = -y if outcome else y.cos()
            self.assertEqual(run([torch.tensor(outcome), x, w]), (z, z * wanted))
            self.assertEqual(w, wanted)

    def test_no_results(self):
        source = region("p, x", "given = [p, x]", "choose(given, false_graph, true_graph)", "return (x,)")
        false, true = branch("false_graph", "x", "return ()"), branch("true_graph", "x", "x.add_(1)", "return ()")
        run = self.region(f"{false}\n{true}\n{source}", mutated=[1])
        for outcome in OUTCOMES:
            x = torch.randn(4, 4)
            want = x + 1 if outcome else x.clone()
            self.assertEqual(run([torch.tensor(outcome), x])[0], want)

    def test_two_conditions_one_after_the_other(self):
        source = choice(COSINE, SINE).replace(
            "return (*made, result)",
            "given = [q, result, z]; made = choose(given, false_graph, true_graph)\n    return (*made,)",
        )
        source = source.replace("p, x, w = args", "p, x, w, q = args")
        run = self.region(source)
        for i in range(12):
            x, w, p, q = torch.randn(4, 4), torch.randn(4, 4), torch.tensor(i % 2 == 0), torch.tensor(i % 3 == 0)
            z, result = sine_or_cosine(bool(p), x, w)
            self.assertEqual(run([p, x, w, q])[0], (result * z).sin() if q else result.cos())

    def test_nodes_of_a_branch_stay_in_order_with_those_around_it(self):
        """Kernels before and after it, and in it, are independent; they run side by side among themselves alone."""
        many = [f"t{i} = torch.{f}(a, out=new(4, 4))" for i, f in enumerate(("sin", "cos", "exp"))]
        wide = "a, b", *many, "return (torch.add(t0, torch.add(t1, t2, out=new(4, 4)), out=new(4, 4)),)"
        source = choice(wide, wide).replace(
            "given =", "s = torch.sin(w, out=new(4, 4)); c = torch.cos(w, out=new(4, 4))\n    given ="
        )
        source = source.replace("return (*made, result)", "return (*made, result, torch.add(s, c, out=new(4, 4)))")

        def expected(outcome, x, w):
            y = x * w
            z = y.sin() + (y.cos() + y.exp())
            return z, z + w, w.sin() + w.cos()

        self.check(self.region(source), expected)
        self.assertEqual(self.device.relaxed, 1)
        (conditional,) = self.device.arrangements[-1].template.conditionals
        part = {node: branch for branch, nodes in enumerate(conditional.branches) for node in nodes}
        before = {node: {u for u, v in self.device.edges if v == node} for node in range(len(part) + 6)}
        for nodes in conditional.branches:
            first = [node for node in nodes if not any(part.get(u) == part[node] for u in before[node])]
            self.assertEqual(len(first), 3, "independent kernels of a branch run side by side")

    def test_graph_is_not_cut_in_a_branch(self):
        self.cut_into_stages()
        heavy = [f"t{i} = torch.mul(a.expand(64, 4, 4), {i + 1}., out=new(64, 4, 4)); del t{i}" for i in range(4)]
        wide = "a, b", *heavy, "return (torch.cos(a, out=new(4, 4)),)"
        source = choice(wide, SINE)
        saved = [f"s{i}" for i in range(6)]
        source = source.replace("p, x, w = args", f"p, x, w, {', '.join(saved)} = args")
        more = [f"g{i} = torch.mul(s{i}, z, out=new(4, 4)); del s{i}" for i in range(6)]
        source = source.replace(
            "return (*made, result)", "\n    ".join([*more, "return (*made, result, g0, g1, g2, g3, g4, g5)"])
        )
        run = self.region(source, is_backward=True)
        for outcome in OUTCOMES:
            x, w, *rest = (torch.randn(4, 4) for _ in range(8))
            z, result = sine_or_cosine(outcome, x, w)
            want = [z, result, *(s * z for s in rest)]
            given = [torch.tensor(outcome), x, w, *rest]
            del x, w, rest
            self.assertEqual(list(run(given)), want)
        stages = self.device.arrangements[-1].stages
        self.assertGreater(len(stages), 1)
        held = [stage for stage in stages if stage.template.conditionals]
        self.assertEqual(len(held), 1)
        (conditional,) = held[0].template.conditionals
        nodes = {conditional.setter}.union(*conditional.branches)
        self.assertLessEqual(nodes, {node.index for node in held[0].template.nodes})

    def test_number_in_a_branch(self):
        source = choice(
            COSINE,
            ("a, b, n", "buf = new(4, 4)", "scale.run(a, n, buf, stream=0)", "return (buf,)"),
            operands="y, w, n",
        )
        source = source.replace("p, x, w = args", "p, x, w, n = args").replace("a, b = args", "a, b, n = args")

        def scaled(x, n, out):
            torch.mul(x, n, out=out)

        run = self.region(source, numbers=[3], scale=Kernel(self.device, scaled, "x, n, out", "OlO"))
        for i, outcome in enumerate(OUTCOMES):
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            z = x * w * (i + 2) if outcome else (x * w).cos()
            self.assertEqual(run([torch.tensor(outcome), x, w, i + 2])[0], z)
        self.assertEqual(self.counted("captures"), 1)

    def test_outputs_of_the_observed_branch_are_known_in_a_capture(self):
        """A run takes one branch, a capture both: numbers of allocations in a branch are its own."""
        run = self.region(choice(COSINE, SINE))
        self.call(run, False, False)
        (state,) = run.states.values()
        self.assertEqual(state.plan.allocations, {("false_graph", 1), 1}, "of a branch, and after it")

    def test_code_with_a_condition_is_not_run_as_steps(self):
        steps = Steps(self.region(choice(COSINE, SINE)).region.model, self.device)
        self.call(steps.run, True, True)
        self.assertIn("a tensor chooses a branch", steps.why_not)


class TestNeverRun(Case):
    def setUp(self):
        super().setUp()
        branches.MOST_WAITS = 4  # until the patch ends

    def test_capture_waits_for_the_other_branch(self):
        run = self.region(choice(COSINE, SINE))
        for outcome, captures in ((True, 0), (True, 0), (True, 0), (False, 0), (True, 1), (False, 1)):
            self.call(run, outcome)
            self.assertEqual(self.counted("captures"), captures)

    def test_it_does_not_wait_for_ever(self):
        run = self.region(choice(COSINE, SINE))
        for i in range(7):
            self.call(run, True)
            self.assertEqual(self.counted("captures"), int(i > 4))

    def test_untuned_kernels_keep_their_first_configuration(self):
        run = self.region(choice(COSINE, (*SINE[:-1], "tuned, untuned = tuned_kernel, kernel", SINE[-1])))
        namespace = run.region.model.__globals__
        namespace["kernel"] = namespace["tuned_kernel"] = made = SimpleNamespace(launchers=["first", "second"])
        self.call(run, *6 * [False])
        self.assertEqual(made.launchers, ["first"])
        self.assertEqual(self.counted("captures"), 1)


class TestSplitOff(Case):
    """Where the device can't choose, the condition is split off when the frame is compiled again."""

    def test_driver_without_conditional_nodes(self):
        self.device.without_conditionals = True
        run = self.region(choice(COSINE, SINE))
        with mock.patch.object(split_off, "compile_again", return_value=True) as again:
            self.call(run, *OUTCOMES)
        again.assert_called_once()
        self.assertIn("a graph can't choose between branches", split_off.failed()["cond"])
        self.assertEqual(self.counted("captures"), 0)

    def test_capture_that_fails(self):
        self.device.fail_captures = 100
        run = self.region(choice(COSINE, SINE))
        with mock.patch.object(split_off, "compile_again", return_value=True):
            self.call(run, *OUTCOMES)
        self.assertIn("the driver has the flu", split_off.failed()["cond"])

    def test_driver_that_refuses_a_node_of_a_branch(self):
        run = self.region(choice(COSINE, SINE))
        with mock.patch.object(split_off, "compile_again", return_value=True) as again:
            for i, outcome in enumerate(OUTCOMES):
                if i == 1:  # the first launch
                    relaunch_driver.driver().fail("cuGraphExecKernelNodeSetParams", 1, skip=2)
                self.call(run, outcome)
        again.assert_called_once()
        self.assertIn("cuGraphExecKernelNodeSetParams", split_off.failed()["cond"])
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 0))

    def test_later_processes_try_again(self):
        self.device.without_conditionals = True
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
            with inductor_config.patch(force_disable_caches=False):
                run = self.region(choice(COSINE, SINE))
                self.call(run, *OUTCOMES[:2])
                self.assertEqual(list(split_off.failed()), ["cond"])
            self.assertEqual(os.listdir(folder), [])


class TestWholePrograms(Case):
    """Conditions through Dynamo, AOTAutograd and Inductor, whose FX graph is captured."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.enterContext(inductor_config.patch(cudagraph_policy=RelaunchPolicy()))
        self.made = self.enterContext(host_as_gpu(self.device))

    def compiled(self, fn, **options):
        return torch.compile(fn, mode="reduce-overhead", fullgraph=True, **options)

    def test_inference(self):
        def fn(p, x, w):
            y = x @ w
            z, s = torch.cond(p, lambda y, w: (torch.relu(y @ w), y.sum()), lambda y, w: (y.cos(), y.amax()), (y, w))
            return (z @ w).sin(), s

        f = self.compiled(fn)
        for outcome in OUTCOMES:
            p, x, w = torch.tensor(outcome), torch.randn(8, 8), torch.randn(8, 8)
            with torch.no_grad():
                self.assertEqual(f(p, x, w), fn(p, x, w))
        self.assertEqual(self.counted("relaunches"), len(OUTCOMES) - 1)
        self.assertEqual(self.device.executables[-1].taken, list(OUTCOMES[1:]))

    def test_training(self):
        def fn(p, x, w):
            y = (x @ w).sin()
            z = torch.cond(p, lambda y, w: torch.relu(y @ w) @ w, lambda y, w: (y.cos() - 1) @ w, (y, w))
            return (z @ w).square().sum()

        f = self.compiled(fn)
        for outcome in OUTCOMES:
            found = []
            for call in (f, fn):
                torch.manual_seed(1)
                x, w = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
                call(torch.tensor(outcome), x, w).backward()
                found.append((x.grad, w.grad))
            self.assertEqual(*found)
        self.assertEqual([code.code.is_backward for code in self.made], [False, True])
        self.assertEqual([made.taken for made in self.device.executables], [list(OUTCOMES[1:])] * 2)

    def test_condition_of_each_layer(self):
        def fn(x, ws):
            for w in ws:
                x = torch.cond(x.sum() > 0, lambda x, w=w: x + torch.tanh(x @ w), lambda x: x - 1, (x,))
            return x

        f, ws = self.compiled(fn), [torch.randn(8, 8) for _ in range(6)]
        for _ in range(8):
            x = torch.randn(8, 8)
            with torch.no_grad():
                self.assertEqual(f(x, ws), fn(x, ws))
        taken = self.device.executables[-1].taken
        self.assertEqual(len(taken), 6 * 7)
        self.assertEqual({*taken}, {True, False})


class TestWhichAreInside(RelaunchTestCase):
    """A condition that the device can't choose by is split off, and the cause is said."""

    def why_split(self, fn, *extra, graphs=2, **options):
        with simulated_gpu() as gpu, config.patch(cudagraphs="relaunch"):
            torch._dynamo.reset()
            x = torch.randn(8, 8, device="cuda")
            with torch.no_grad():
                torch.compile(fn, mode="reduce-overhead", **options)(x, *(each() for each in extra))
            self.assertEqual(len(gpu.cudagraphs), graphs)
            from torch_overlay._inductor.relaunch import coverage

            return [each.message for function in coverage.coverage().functions for each in function.outside]

    @staticmethod
    def conditional(x, branch=torch.sin):
        return torch.cond(x.sum() > 0, branch, torch.cos, (x.sin(),)).exp()

    def test_causes(self):
        def deep(x):
            def nest(y, depth):
                if not depth:
                    return y.sin()
                return torch.cond(y.sum() > depth, lambda y: nest(y, depth - 1) + 1, torch.cos, (y,))

            return nest(x.sin(), 3).exp()

        with torch.library._scoped_library("inside", "FRAGMENT") as library:
            define(library, "twice(Tensor x) -> Tensor", lambda x: x * 2, device="CompositeExplicitAutograd")
            for branch, why in (
                (torch.rand_like, "a branch draws random numbers"),
                (lambda y: torch.ops.inside.twice(y), "a branch calls a custom operator"),
                (lambda y: y + y.cpu().sin().cuda(), "a branch has a tensor on the host"),
                (lambda y: y * y.sum().item(), "a branch has a number, or a size, that depends on data"),
                (lambda y: y[:4].clone(), "the results of its branches differ in size"),
                (None, "conditions are more than 2 deep"),
            ):
                scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
                with self.subTest(why), scalars:
                    (message,) = self.why_split(functools.partial(self.conditional, branch=branch) if branch else deep)
                    place = "" if branch else "a condition in a branch: "
                    self.assertIn(f"control flow: cond, for {place}", message)
                    self.assertIn(why, message)

    def test_inside(self):
        def fn(x, p):
            def nested(y):
                return torch.cond(y.sum() > 1, torch.sin, lambda y: y @ y, (y,)) + 1

            return torch.cond(p, nested, torch.cos, (x.sin(),)).exp()

        predicate = [lambda: torch.tensor(True, device="cuda")]
        self.assertEqual(self.why_split(fn, *predicate, graphs=1), [])
        self.assertEqual(self.why_split(fn, *predicate, graphs=1, dynamic=True), [])
        with inductor_config.patch(graph_partition=False):
            self.assertEqual(self.why_split(fn, *predicate, graphs=1), [])

    def test_predicate_on_the_host(self):
        def fn(x, p):
            return torch.cond(p, torch.sin, torch.cos, (x.sin(),)).exp()

        (message,) = self.why_split(fn, lambda: torch.tensor(True))
        self.assertIn("its predicate is no boolean on the device", message)

    def test_program_with_streams(self):
        def fn(x):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x.sin()
            z = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,))
            torch.cuda.current_stream().wait_stream(side)
            return (y + z).exp()

        messages = self.why_split(fn, graphs=2)
        self.assertIn("control flow: cond, for the program has streams of its own", messages)

    def test_part_of_few_kernels(self):
        with inductor_config.patch({"triton.cudagraph_min_partition_size": 100}):
            for message in self.why_split(self.conditional, graphs=0):
                self.assertIn("cudagraph_min_partition_size", message)

    @form.overlay_only
    def test_switch_for_comparisons(self):
        with mock.patch.object(conditions, "ARE_INSIDE", False), inductor_config.patch(force_disable_caches=True):
            self.assertEqual(len(self.why_split(self.conditional)), 1)
