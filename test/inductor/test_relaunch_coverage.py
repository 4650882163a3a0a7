"""What runs in CUDA graphs is counted, and what does not is listed with its cause."""

import json
import logging

import torch
from torch._dynamo.test_case import TestCase

import form
import torch_overlay
from stand_ins.relaunch_case import host, region, RelaunchTestCase
from torch_overlay import config
from torch_overlay._inductor.relaunch import coverage
from torch_overlay._inductor.relaunch.causes import Cause
from torch_overlay._inductor.relaunch.notes import Partitions, SplitOff
from torch_overlay.testing import simulated_gpu


ADD = region("x, *rest", "buf0 = torch.mul(x, 2, out=new(4, 32))", "return (buf0,)")


class TestCounts(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        coverage.forget()
        self.addCleanup(coverage.forget)

    def compiled(self, kernels=3, split=()):
        run = self.runner(ADD)
        made = coverage.CompiledCode(run.code, Partitions(((kernels, ""),), tuple(split)))
        made.add(run, 0)
        return run

    def calls(self, run, times, *rest, rows=4):
        for _ in range(times):
            x = torch.randn(4, 32)
            self.assertEqual(run([x, *rest])[0], x * 2)

    def test_first_call_is_outside_and_the_others_are_in(self):
        run = self.compiled(
            split=[SplitOff.of("split-failed", "a::b waits", operator="a::b", line="f.py:3: b(x)", kernels=1)]
        )
        self.calls(run, 10)
        seen = coverage.coverage()
        self.assertEqual((seen.kernels_in_graphs, seen.kernels_outside, seen.host_launches), (27, 13, 22))
        ((region,), outside) = seen.functions[0].regions, seen.functions[0].outside
        self.assertEqual((region.calls, region.graph_calls, region.launches, region.graphs), (10, 9, 1, 1))
        self.assertEqual([(o.code, o.calls, o.kernels) for o in outside], [("warm-up", 1, 3), ("split-failed", 10, 10)])
        self.assertEqual(outside[1].line, "f.py:3: b(x)")
        text = str(seen)
        self.assertIn("67.5 % of 40 kernel launches of compiled code are in CUDA graphs, 22 launches by the host", text)
        self.assertIn("[split-failed] a::b waits (calls: 10, launches: 10)\n    at f.py:3: b(x)", text)
        read = json.loads(seen.to_json())
        self.assertEqual((read["share"], read["functions"][0]["outside"][1]["operator"]), (0.675, "a::b"))

    def test_since(self):
        run = self.compiled()
        self.calls(run, 4)
        before = coverage.coverage()
        self.assertEqual(coverage.coverage().since(before).functions, ())
        self.calls(run, 5)
        seen = coverage.coverage().since(before)
        self.assertEqual((seen.share, seen.kernels_in_graphs, seen.functions[0].outside), (1.0, 15, ()))

    def test_cause_of_two_regions_since(self):
        """Only one of them had it again; its launches count."""
        first, second = self.compiled(), self.runner(ADD)
        first.compiled.add(second, 1)
        self.calls(first, 2, 6)
        self.calls(second, 1)
        before = coverage.coverage()
        self.calls(first, 1, 7)
        (outside,) = coverage.coverage().since(before).functions[0].outside
        self.assertEqual((outside.code, outside.calls, outside.kernels), ("warm-up", 1, 3))

    def test_number_that_changes_at_each_call_is_no_secret(self):
        with config.patch(cudagraph_templates=2):
            run = self.compiled()
        for n in range(20):
            self.calls(run, 1, n)
        ((function,), total) = coverage.coverage().functions, coverage.coverage().kernels_outside
        causes = [(o.code, o.calls) for o in function.outside]
        self.assertEqual((total, causes), (60, [("warm-up", 20)]))
        self.assertIn("pass the number as a tensor", function.outside[0].remedy)

    def test_number_that_comes_again_after_many_that_did_not(self):
        with config.patch(cudagraph_templates=2):
            run = self.compiled()
        for n in range(20):
            self.calls(run, 1, n)
        self.assertEqual(len(run.states), 8, "four for each graph that is kept")
        self.calls(run, 3, 100)
        self.assertEqual((run.states.captures, len(run.states)), (1, 8))

    def test_graphs_that_were_dropped_are_counted(self):
        with config.patch(cudagraph_templates=1):
            run = self.compiled()
        for n in (1, 2, 1, 2):
            self.calls(run, 3, n)
        self.assertEqual(run.launched() + sum(run.outside.values()), 12)
        self.assertEqual(run.launched(), 8)
        run.forget()
        self.assertEqual(run.launched() + sum(run.outside.values()), 12)

    def test_graphs_that_were_replaced_are_counted(self):
        run = self.runner(ADD)
        for offset in (0, 0, 0, 4, 4, 0):  # in elements: at the fourth call, an input is aligned to 16 bytes alone
            x = torch.ones(4 * 32 + offset)[offset:].view(4, 32)
            self.assertEqual(run([x])[0], x + x)
        self.assertEqual((self.counted("captures"), run.launched()), (2, 5))
        run.forget()
        self.assertEqual(run.launched(), 5)

    def test_refusal_has_its_text_and_remedy(self):
        run = self.compiled()
        self.calls(run, 3, host([0.0] * 100))
        (outside,) = coverage.coverage().functions[0].outside
        self.assertEqual((outside.code, outside.calls, outside.remedy), ("host-tensor", 3, "move it to the device"))
        self.assertIn("a tensor of 100 values in host memory", outside.message)

    def test_verified_graphs_are_counted(self):
        run = self.runner(ADD, verify=True)
        coverage.CompiledCode(run.code, Partitions(((1, ""),))).add(run, 0)
        self.calls(run, 5)
        self.assertEqual((run.launched(), dict(run.outside)), (4, {"warm-up": 1}))

    def test_how_sizes_are_captured(self):
        run = self.compiled()
        for n in (3, 5, 3):
            self.calls(run, 1, n)
        (region,) = coverage.coverage().functions[0].regions
        self.assertEqual(region.sizes, "")
        run.region.steps.why_not = "it uses a tensor that no step made"
        (region,) = coverage.coverage().functions[0].regions
        self.assertEqual(region.sizes, "a size without a graph runs as it is: it uses a tensor that no step made")
        self.assertIn(f"[sizes] {region.name}\n    {region.sizes}", str(coverage.coverage()))

    def test_code_that_is_gone_is_not_counted(self):
        run = self.compiled()
        self.calls(run, 3)
        del run
        self.assertEqual(coverage.coverage().functions, ())
        self.assertEqual(str(coverage.coverage()), "no compiled code asked for CUDA graphs")

    def test_code_without_a_graph_is_counted(self):
        run = self.runner(ADD)
        made = coverage.CompiledCode(run.code, Partitions(((4, ""),)))
        model = made.without_graph(run.region.model, Cause.of("inductor", "it says so"))
        for _ in range(3):
            model([torch.randn(4, 32)])
        seen = coverage.coverage()
        self.assertEqual((seen.kernels_outside, seen.host_launches, seen.share), (12, 12, 0.0))
        self.assertIn("[inductor] it says so (calls: 3, launches: 12)", str(seen))


class TestShown(TestCase):
    @form.overlay_only
    def test_status_has_one_line(self):
        with simulated_gpu(), config.patch(cudagraphs="relaunch"):
            torch.compile(torch.sin, mode="reduce-overhead")(torch.randn(4, device="cuda"))
            self.assertEqual(torch_overlay.coverage(), coverage.coverage())
            self.assertIn("CUDA graphs: 100.0 % of 1 kernel launches", str(torch_overlay.status()))
        self.assertEqual(torch_overlay.status().coverage, "")

    def test_graph_breaks_are_listed(self):
        def f(x):
            y = x.sin()
            torch._dynamo.graph_break()
            return y.cos()

        torch._dynamo.utils.counters.clear()
        with simulated_gpu(), config.patch(cudagraphs="relaunch"):
            torch.compile(f, mode="reduce-overhead")(torch.randn(4, device="cuda"))
            seen = coverage.coverage()
        self.assertEqual(len(seen.functions), 2)
        ((reason, count),) = seen.graph_breaks
        self.assertEqual(count, 1)
        self.assertIn("[graph-break] 1 x", str(seen))

    def test_memory_and_notes_of_offload_are_no_launches(self):
        def chain(x):
            for _ in range(6):
                x = ((x @ x).tanh() * 1.01).sin()
            return x

        torch._dynamo.reset()
        with simulated_gpu(), config.patch(cudagraphs="relaunch", activation_offload={"budget_gb": 0.09}):
            x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
            with self.assertLogs("torch_overlay", logging.INFO) as logs:
                torch.compile(chain, mode="reduce-overhead")(x).sum().backward()
            functions = coverage.coverage().functions
        self.assertIn("to the host", "".join(logs.output))
        self.assertEqual([function.outside for function in functions], [(), ()])

    @form.slow
    @form.overlay_only
    def test_log_at_exit(self):
        code = (
            "import torch, torch_overlay\n"
            "from torch_overlay.testing import simulated_gpu\n"
            "gpu = simulated_gpu(); gpu.__enter__()\n"
            "f = torch.compile(torch.sin, mode='reduce-overhead')\n"
            "f(torch.randn(4, device='cuda'))\n"
            "from torch_overlay._inductor.relaunch import coverage; coverage._log_at_exit()\n"
        )
        result = form.run_python(code, env={"TORCH_LOGS": "torch_overlay"})
        self.assertIn("100.0 % of 1 kernel launches of compiled code are in CUDA graphs", result.stderr)
        self.assertFalse(logging.getLogger(coverage.__name__).isEnabledFor(logging.DEBUG))
