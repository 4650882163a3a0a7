# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
from torch._functorch._activation_offloading import candidates, decision, log, runtime
from torch._functorch._activation_offloading.checkpoint_policies import MUST, OFFLOAD
from torch._functorch._activation_offloading.cost_model import Link
from torch._functorch._activation_offloading.decision import free_bytes, offload
from torch._functorch._activation_offloading.device_rates import Rates
from torch._functorch._activation_offloading.log import Copies
from torch._functorch._activation_offloading.ops import BUDGET, LOAD, SLAB, STORE
from torch._functorch._activation_offloading.settings import parse, Settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten
NBYTES = 64 * 64 * 4
FAST = Rates(Link(1e6, 1e6, 0.0), 1e3, 1e9, False)
LAYERS = 6
PEAK = (LAYERS + 1) * NBYTES  # all that is saved, and a gradient
NAMES = ["mm_default", *(f"mm_default_{i}" for i in range(1, LAYERS))]


class DecisionCase(TestCase):
    def setUp(self):
        super().setUp()
        self.reports = []
        self.addCleanup(log.subscribe(self.reports.append))
        for patch in (
            mock.patch.object(candidates, "DEVICE_TYPE", "cpu"),
            mock.patch.object(decision, "rates", lambda index: FAST),
            mock.patch.object(Rates, "flops_of", lambda *args: FAST.flops),
            mock.patch.object(runtime.host_memory, "available_bytes", lambda: 1 << 40),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.chain()

    def chain(self):
        """Each layer is saved, and read in the reverse order by the backward."""
        forward, backward = Graph(), Graph()
        with FakeTensorMode():
            val = torch.empty(64, 64)
        x = value = forward.placeholder("x")
        value.meta["val"] = val
        self.made = []
        for _ in range(LAYERS):
            value = forward.call_function(aten.mm.default, (value, x))
            value.meta["val"] = val
            self.made.append(value)
        forward.output(tuple(self.made))
        inputs = [backward.placeholder(node.name) for node in self.made]
        gradient = backward.placeholder("tangents_1")
        for node in (*inputs, gradient):
            node.meta["val"] = val
        for saved in reversed(inputs):
            gradient = backward.call_function(aten.mm.default, (gradient, saved))
            gradient.meta["val"] = val
        backward.output((gradient,))
        self.graphs = [GraphModule({}, graph) for graph in (forward, backward)]
        self.made = [n for n in self.graphs[0].graph.nodes if n.op == "call_function"]

    def offload(self, budget=None, strict=True, min_bytes=0, wanted=True, count=0):
        settings = Settings(budget, strict, min_bytes) if wanted else None
        offload(*self.graphs, count, settings, False)

    def copies(self):
        forward, backward = (gm.graph for gm in self.graphs)
        stores = forward.find_nodes(op="call_function", target=STORE)
        loads = backward.find_nodes(op="call_function", target=LOAD)
        self.assertEqual(len(stores), len(loads))
        self.assertEqual(len(self.reports), 1 if stores else 0)
        return [store.args[1].name for store in stores]


class TestBudgets(DecisionCase):
    def test_budget_that_fits_changes_nothing(self):
        self.offload(PEAK)
        self.assertEqual(self.copies(), [])

    def test_as_much_goes_as_the_budget_needs(self):
        self.offload(PEAK - 1)
        self.assertEqual(len(self.copies()), 1)
        (report,) = self.reports
        self.assertEqual(report.budget, PEAK - 1)
        self.assertLessEqual(report.choice.peak, PEAK - 1)
        self.assertEqual(report.choice.peak_before, PEAK)
        self.assertEqual(report.slab_bytes, NBYTES)
        (store,) = self.graphs[0].graph.find_nodes(op="call_function", target=STORE)
        self.assertEqual(store.meta["custom"][BUDGET], PEAK - 1)

    def test_budget_that_can_not_be_met(self):
        with self.assertRaisesRegex(runtime.OffloadError, "is too small") as caught:
            self.offload(NBYTES)
        self.assertEqual(self.copies(), [])
        text = str(caught.exception)
        least = float(text.partition("Set budget_gb to ")[2].split()[0])
        self.chain()
        self.offload(parse({"budget_gb": least}, "the option").budget)
        self.assertGreater(len(self.copies()), 1)

    def test_error_says_what_stays(self):
        with self.assertRaisesRegex(
            runtime.OffloadError, r"Not offloaded: 1 saved tensors \(the caller gets it"
        ):
            graph = self.graphs[0].graph
            graph.output_node().args = ((self.made[0], *self.made),)
            self.offload(NBYTES, count=1)

    def test_budget_that_is_not_strict(self):
        with self.assertLogs(decision.__name__, "WARNING") as logs:
            self.offload(NBYTES, strict=False)
        self.assertIn("goes on without offload", logs.output[0])
        self.assertEqual(self.copies(), [])

    def test_small_tensors_stay(self):
        with self.assertRaises(runtime.OffloadError):
            self.offload(PEAK - 1, min_bytes=NBYTES + 1)

    def test_strict_slabs_are_pinned(self):
        for strict in (True, False):
            self.chain()
            self.offload(PEAK - 1, strict=strict)
            (slab,) = self.graphs[0].graph.find_nodes(op="call_function", target=SLAB)
            self.assertEqual(slab.args[2], strict)

    def test_nothing_is_saved(self):
        self.graphs[0].graph.output_node().args = ((),)
        with mock.patch.object(decision, "rates", side_effect=AssertionError):
            self.offload(1)
        self.assertEqual(self.copies(), [])


class TestAuto(DecisionCase):
    def auto(self, free):
        def found(device, reserve):
            self.assertEqual((device, reserve), (torch.device("cpu"), NBYTES))
            return free

        with mock.patch.object(decision, "free_bytes", found):
            self.offload(strict=False)

    def test_what_is_free_is_the_budget(self):
        self.auto(PEAK)
        self.assertEqual(self.copies(), [])
        self.auto(PEAK - 1)
        self.assertEqual(len(self.copies()), 1)

    def test_as_much_as_can_be_where_that_is_not_enough(self):
        with self.assertLogs(decision.__name__, "WARNING") as logs:
            self.auto(1)
        self.assertIn("As much as can be is offloaded", logs.output[0])
        self.assertGreater(len(self.copies()), 1)
        (report,) = self.reports
        self.assertEqual(report.choice.peak, report.choice.least)

    def test_free_bytes(self):
        fraction = 1.0
        with mock.patch.multiple(
            torch.cuda,
            mem_get_info=lambda device: (1000, 10_000),
            get_per_process_memory_fraction=lambda device: fraction,
            memory_reserved=lambda device: 700,
            memory_allocated=lambda device: 200,
        ):
            self.assertEqual(free_bytes(None, 0), 1350)  # 0.9 of 1000 + 500
            self.assertEqual(free_bytes(None, 100), 1150)
            self.assertEqual(free_bytes(None, 10_000), 0)
            fraction = 0.12
            self.assertEqual(free_bytes(None, 0), 900)  # 0.9 of 1200 - 200


class TestPolicies(DecisionCase):
    def test_nothing_is_asked_for(self):
        self.offload(wanted=False)
        self.assertEqual(self.copies(), [])

    def test_values_that_a_policy_names(self):
        for node in self.made[1:3]:
            node.meta[OFFLOAD] = MUST
        self.offload(wanted=False)
        self.assertEqual(self.copies(), NAMES[1:3])
        (slab,) = self.graphs[0].graph.find_nodes(op="call_function", target=SLAB)
        self.assertEqual(slab.args, (2 * NBYTES, 0, True))

    def test_value_that_can_not_go(self):
        self.made[1].meta[OFFLOAD] = MUST
        graph = self.graphs[0].graph
        graph.output_node().args = ((self.made[1], *self.made),)
        with self.assertLogs(decision.__name__, "WARNING") as logs:
            self.offload(wanted=False, count=1)
        self.assertIn(f"{NAMES[1]} stays on the device", logs.output[0])
        self.assertEqual(self.copies(), [])

    def test_policy_goes_with_a_budget(self):
        self.made[0].meta[OFFLOAD] = MUST
        self.offload(PEAK)
        self.assertEqual(self.copies(), NAMES[:1])


class TestHostMemory(DecisionCase):
    def full(self):
        return mock.patch.object(runtime.host_memory, "available_bytes", lambda: 1)

    def test_host_without_room(self):
        with self.full(), self.assertRaisesRegex(runtime.OffloadError, "would fit"):
            self.offload(PEAK - 1)
        with self.full(), self.assertLogs(decision.__name__, "WARNING") as logs:
            self.offload(PEAK - 1, strict=False)
        self.assertIn("goes on without offload", logs.output[0])
        self.made[0].meta[OFFLOAD] = MUST
        with self.full(), self.assertRaisesRegex(runtime.OffloadError, "would fit"):
            self.offload(wanted=False)
        self.assertEqual(self.copies(), [])


class TestReports(DecisionCase):
    def test_summary(self):
        self.made[0].meta["stack_trace"] = "here"
        self.made[0].meta[OFFLOAD] = MUST
        with self.assertLogs(log.__name__, "INFO") as logs:
            self.offload(PEAK)
        (report,) = self.reports
        (row,) = report.rows
        self.assertEqual(
            (row.name, row.nbytes, row.stack_trace), (NAMES[0], NBYTES, "here")
        )
        text = report.summary()
        self.assertIn(text, logs.output[0])
        self.assertTrue(text.startswith("1 saved tensors, 0.0 MB, wait on the host; "))
        self.assertIn("Link (estimated): 1000.0 GB/s to the host", text)

    def test_subscriptions_end(self):
        others = []
        end = log.subscribe(others.append)
        log.publish(first := Copies(False, 4, ()))
        end()
        log.publish(second := Copies(True, 4, ()))
        self.assertEqual(others, [first])
        self.assertEqual(self.reports, [first, second])

    def test_copies_of_a_schedule(self):
        copies = Copies(False, 9, (("a", 2, 5), ("b", 3, 9)))
        found = [copies.text(name) for name in "abc"]
        self.assertEqual(found, ["2 / 5 of 9", "3 / end of 9", ""])


if __name__ == "__main__":
    run_tests()
