# Owner(s): ["module: inductor"]

import json
import weakref
from collections import Counter
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_relaunch import coverage as module, refusals
from torch._inductor.cudagraph_relaunch.causes import CAUSES
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.coverage import CompiledCode, coverage
from torch._inductor.cudagraph_relaunch.partitions import Partitions, SplitOff
from torch._inductor.cudagraph_relaunch.staged import Graph
from torch.testing._internal.common_utils import run_tests, TestCase


CODE = Code("forward of 0/0", 0, source="model.py:3")
MIB = 1 << 20


class Runner:
    """The runner of a region that has a graph of three nodes."""

    def __init__(self, launched=0, sizes="", one_by_one=0, **outside):
        self.code, self.by_graph, self.sizes = CODE, launched, sizes
        self.one_by_one = one_by_one
        self.outside = Counter({k.replace("_", "-"): n for k, n in outside.items()})
        self.refusals = {}

    def launched(self):
        return self.by_graph

    def graphs(self):
        return [Graph(1, 3, 2 * MIB, self.one_by_one)] if self.by_graph else []

    def describe_sizes(self):
        return self.sizes


class CoverageTestCase(TestCase):
    def setUp(self):
        super().setUp()
        counters.clear()
        self.enterContext(mock.patch.object(module, "live", weakref.WeakSet()))
        self.enterContext(mock.patch.object(module, "_made", 0))
        self.enterContext(mock.patch.object(module, "_forgotten", 0))
        self.enterContext(mock.patch.object(refusals, "_refused", []))
        self.kept = []

    def compiled(self, *runners, kernels=(4,), split_off=(), **kwargs):
        graphs = tuple((count, "", ()) for count in kernels)
        made = CompiledCode(CODE, Partitions(graphs, tuple(split_off)), **kwargs)
        for number, runner in enumerate(runners):
            made.add(runner, number)
        self.kept += [made, *runners]
        return made


class TestCoverage(CoverageTestCase):
    def test_nothing(self):
        found = coverage()
        self.assertEqual((found.share, found.host_launches), (1.0, 0))
        self.assertEqual(str(found), "no compiled code asked for CUDA graphs")

    def test_region(self):
        self.compiled(Runner(3, warm_up=1))
        found = coverage()
        (function,) = found.functions
        (region,), (outside,) = function.regions, function.outside
        self.assertEqual((region.calls, region.graph_calls), (4, 3))
        self.assertEqual((region.graphs, region.nodes, region.scratch_mib), (1, 3, 2.0))
        self.assertEqual((found.kernels_in_graphs, found.kernels_outside), (12, 4))
        self.assertEqual(found.host_launches, 3 * 1 + 4)
        self.assertEqual(found.share, 0.75)
        self.assertEqual(
            (outside.code, outside.calls, outside.kernels), ("warm-up", 1, 4)
        )
        self.assertEqual(outside.message, CAUSES["warm-up"].title)
        self.assertEqual(
            (function.name, function.line), ("forward of 0/0 #1", "model.py:3")
        )

    def test_kernels_that_were_launched_one_by_one(self):
        self.compiled(Runner(3, one_by_one=5))
        self.assertEqual(coverage().host_launches, 8)

    def test_reason_of_a_refusal(self):
        runner = Runner(operator=2)
        said = "mylib::op waits", "mylib::op", "model.py:7"
        runner.refusals["operator"] = refusals.Refused(CODE, "operator", *said)
        self.compiled(runner)
        (outside,) = coverage().functions[0].outside
        self.assertEqual((outside.message, outside.operator, outside.line), said)
        self.assertEqual(outside.remedy, CAUSES["operator"].remedy)

    def test_what_is_split_off(self):
        row = SplitOff("split-unsafe", "it is unsafe", "mylib::op", "model.py:5", 1)
        again = row._replace(kernels=2)
        runners = Runner(3, warm_up=1), Runner(4)
        self.compiled(*runners, kernels=(4, 6), split_off=(row, again))
        found = coverage()
        (function,) = found.functions
        self.assertEqual([region.kernels for region in function.regions], [4, 6])
        causes = {each.code: (each.calls, each.kernels) for each in function.outside}
        self.assertEqual(causes, {"warm-up": (1, 4), "split-unsafe": (4, 4 * 3)})
        self.assertEqual(found.kernels_in_graphs, 3 * 4 + 4 * 6)

    def test_code_without_a_graph(self):
        made = self.compiled(kernels=(4, 6))
        run = made.without_graph(lambda inputs: sum(inputs), "inductor", "it says so")
        self.assertEqual([run([1, 2]), run([3])], [3, 3])
        (function,) = coverage().functions
        (outside,) = function.outside
        self.assertEqual((function.calls, function.regions), (2, ()))
        self.assertEqual((outside.code, outside.message), ("inductor", "it says so"))
        self.assertEqual(outside.kernels, 2 * 10)
        self.assertIn("no region has a graph", str(coverage()))

    def test_code_that_is_all_split_off(self):
        """What it consists of is listed, and nothing twice."""
        row = SplitOff("split-host", "CPU ops", "", "model.py:5", 1)
        run = self.compiled(kernels=(), split_off=(row,)).without_graph(
            len, "split", "all"
        )
        run([1])
        (outside,) = coverage().functions[0].outside
        self.assertEqual((outside.code, outside.kernels), ("split-host", 1))

    def test_code_that_is_gone(self):
        self.compiled(Runner(3))
        runner = self.kept.pop()
        self.assertEqual(coverage().kernels_in_graphs, 12)
        del runner
        self.assertEqual(coverage().functions[0].regions, ())
        self.kept.clear()
        self.assertEqual(coverage().functions, ())

    def test_reset(self):
        self.compiled(Runner(3))
        refused = refusals.Refused(CODE, "cpp-wrapper", "it is on")
        refusals._refused.append(refused)
        (listed,) = coverage().refused
        self.assertEqual((listed.code, listed.calls), ("cpp-wrapper", 0))
        torch._dynamo.reset()
        self.assertEqual((coverage().functions, coverage().refused), ((), ()))

    def test_rewrites(self):
        copies = mock.Mock(copies=2)
        rewrites = [("resident", "model.py:4"), ("index", "")]
        self.compiled(Runner(3), rewrites=rewrites, residents=copies)
        (function,) = coverage().functions
        self.assertEqual((function.rewrites, function.copies), (tuple(rewrites), 2))
        said = "forward of 0/0 #1, copied to the device 2 times in 3 calls"
        self.assertIn(
            f"[rewritten] {said}\n    resident at model.py:4", str(coverage())
        )


class TestDifference(CoverageTestCase):
    def test_since(self):
        used, unused = Runner(3, warm_up=1), Runner(5)
        self.compiled(used, residents=(copies := mock.Mock(copies=2)))
        self.compiled(unused)
        counters["graph_break"]["a print"] = 2
        before = coverage()
        used.by_graph, used.outside["busy"], copies.copies = 7, 2, 3
        self.compiled(Runner(1))
        counters["graph_break"]["a print"] = 3
        found = coverage().since(before)
        self.assertEqual([f.name[-2:] for f in found.functions], ["#1", "#3"])
        (one, other) = found.functions
        self.assertEqual((one.calls, one.copies, one.regions[0].graph_calls), (6, 1, 4))
        self.assertEqual([(o.code, o.calls) for o in one.outside], [("busy", 2)])
        self.assertEqual((other.calls, found.graph_breaks), (1, (("a print", 1),)))
        self.assertEqual(coverage().since(coverage()).functions, ())


class TestText(CoverageTestCase):
    def test_table(self):
        self.compiled(Runner(3, sizes="one graph serves any size", warm_up=1))
        counters["graph_break"]["a call\n\nof print"] = 2
        lines = str(coverage()).splitlines()
        self.assertEqual(
            lines[0],
            "75.0 % of 16 kernel launches are in CUDA graphs, 7 launches by the host; "
            "causes of launches outside: 1",
        )
        self.assertEqual(lines[2].split()[:4], ["function", "region", "calls", "by"])
        cells = ["model.py:3", "4", "3", "4", "1", "1", "3", "2.0"]
        self.assertEqual(lines[3].split()[-8:], cells)
        text = "\n".join(lines)
        title = CAUSES["warm-up"].title
        self.assertIn(f"[warm-up] {title} (calls: 1, launches: 4)", text)
        self.assertIn("[sizes] model.py:3\n    one graph serves any size", text)
        self.assertIn("[graph-break] 2 x a call", text)

    def test_most_launches_first(self):
        self.compiled(Runner(3, warm_up=1, busy=5, number=2))
        lines = [line for line in str(coverage()).splitlines() if line[:1] == "["]
        causes = [line.partition("]")[0] for line in lines]
        self.assertEqual(causes, ["[busy", "[number", "[warm-up"])

    def test_json(self):
        self.compiled(Runner(3, warm_up=1))
        found = json.loads(coverage().to_json())
        self.assertEqual((found["share"], found["kernels_in_graphs"]), (0.75, 12))
        self.assertEqual(found["functions"][0]["regions"][0]["graph_calls"], 3)

    def test_log_at_exit(self):
        with self.assertNoLogs(module.log, "INFO"):
            module._log_at_exit()
        self.compiled(Runner(3))
        with self.assertLogs(module.log, "INFO") as logs:
            module._log_at_exit()
        self.assertIn("100.0 % of 12 kernel launches", logs.output[0])


if __name__ == "__main__":
    run_tests()
