# Owner(s): ["module: inductor"]

import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_relaunch import (
    launcher as launchers,
    live,
    refusals,
    region_graphs as module,
    relaunch,
)
from torch._inductor.cudagraph_relaunch.blame import NoGraph
from torch._inductor.cudagraph_relaunch.call_keys import CallKeys
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.compiled_region import CompiledRegion
from torch._inductor.cudagraph_relaunch.culprit import Culprit
from torch._inductor.cudagraph_relaunch.make_graph import capturing
from torch._inductor.cudagraph_relaunch.on_reset import listen
from torch._inductor.cudagraph_relaunch.region_graphs import FAILURES, RegionGraphs
from torch._inductor.cudagraph_relaunch.states import States
from torch._inductor.cudagraph_relaunch.traced import Escaped
from torch._inductor.cudagraph_relaunch.verify import Verified
from torch.testing._internal.common_utils import run_tests, TestCase


OPERATOR = Culprit("mylib::op.default", "model.py:7", "waits for the device")


class Graph:
    """What launches a graph of five nodes."""

    attempt = None
    forgets = False

    def __init__(self, shared=None):
        self.patcher, self.names = SimpleNamespace(given_up=None), []
        self.launcher = SimpleNamespace(nodes=5, shared=shared, patcher=self.patcher)
        self.layout, self.call = SimpleNamespace(scratch_size=0), None
        self.totals = [0, 0]

    def show(self, within):
        self.names.append(within.args[0])

    def forget(self):
        self.forgets = True


class GraphsTestCase(TestCase):
    def setUp(self):
        super().setUp()
        counters.clear()
        self.enterContext(mock.patch.object(refusals, "_refused", []))
        self.failed = {}
        for name, value in (
            ("failed", lambda: self.failed),
            ("remember", self.failed.__setitem__),
        ):
            self.enterContext(mock.patch.object(module.split_off, name, value))
        self.again = self.enterContext(
            mock.patch.object(module.split_off, "compile_again", return_value=False)
        )
        self.make = self.enterContext(mock.patch.object(module, "make_or_blame"))
        self.make.side_effect = lambda work: Graph()
        self.graphs = self.new()

    def new(self):
        code = Code("a region", 0, compile_id="0/0")
        self.states = States(2, 8)
        region = CompiledRegion(lambda inputs: "plain", code, "the device")
        return RegionGraphs(region, self.states, CallKeys(code))

    def tearDown(self):
        self.assertFalse(capturing.locked())
        super().tearDown()

    def capture(self, key=(), inputs=()):
        state = self.states.of(key)
        return self.graphs.make(key, state, list(inputs)), state

    def said(self):
        return [(each.reason, each.message) for each in refusals.refused()]


class TestMake(GraphsTestCase):
    def test_graph(self):
        self.graphs.keys.free = (1,)
        state = self.states.of((5,))
        state.alignments[0], self.states.warm_ups = 64, 3
        made, state = self.capture((5,), ["x", 0.5])
        self.assertTrue(made)
        (work,) = self.make.call_args.args
        self.assertEqual((work.numbers, work.device), ({1: 0.5}, "the device"))
        self.assertEqual((work.alignments[0], work.is_shared), (64, False))
        self.assertEqual((self.states.captures, self.states.warm_ups), (1, 0))
        found = counters["inductor"]
        names = "cudagraph_captures", "cudagraph_nodes"
        self.assertEqual([found[name] for name in names], [1, 5])
        self.assertIsInstance(state.relaunch, Graph)
        self.assertTrue(state.relaunch.forgets)

    def test_region_without_a_key(self):
        with mock.patch.object(Graph, "attempt", len):
            self.capture((5,))
            self.assertIsNone(self.states.attempt)
            self.capture()
            self.assertIs(self.states.attempt, len)

    def test_another_thread_captures(self):
        with capturing:
            self.assertFalse(self.capture()[0])
        self.make.assert_not_called()
        self.assertEqual(self.states.captures, 0)

    def test_sizes_that_share_an_executable(self):
        executables = self.states.sizes.executables

        def add(work):
            executables.append(SimpleNamespace(launchers=[SimpleNamespace(shared="e")]))
            self.states.sizes.instantiated += 1
            return Graph("e")

        with mock.patch.object(self.states, "is_shared", return_value=True):
            self.make.side_effect = add
            self.assertEqual(self.capture(1)[1].shared, "e")
            self.make.side_effect = lambda work: Graph("e")
            self.capture(2)
            self.assertEqual(self.states.captures, 1)
            self.make.side_effect = lambda work: executables.clear() or Graph()
            (_, state) = self.capture(3)
        self.assertEqual([s.relaunch is None for s in self.states.values()], [1, 1, 0])
        self.assertIsNotNone(state.relaunch)

    def test_options(self):
        options = {"triton.cudagraph_verify": True, "triton.nvtx": True}
        with inductor_config.patch(options):
            self.graphs = self.new()
        _, state = self.capture()
        self.assertIsInstance(state.relaunch, Verified)
        self.assertEqual(state.relaunch.relaunch.names, ["a region, graph of 5 nodes"])
        self.assertFalse(state.relaunch.relaunch.forgets)

    def test_bound(self):
        for key in range(self.states.most_captures):
            self.assertEqual(self.said(), [])
            self.capture(key)
        ((reason, message),) = self.said()
        self.assertEqual(reason, "templates")
        self.assertIn("8 captures for different sizes and numbers", message)
        self.assertIn("torch._inductor.config.triton.cudagraph_templates", message)

    def test_graph_for_other_keys(self):
        self.states.of(5)
        state = self.graphs.add("any", made := Graph(), 7)
        self.assertEqual(list(self.states), ["any"])
        self.assertIs(state.relaunch, made)
        self.assertEqual(counters["inductor"]["cudagraph_nodes"], 7)

    def test_nothing_keeps_a_region(self):
        self.capture()
        gone = weakref.ref(self.graphs)
        gc.disable()
        try:
            self.graphs = None
            self.assertIsNone(gone())
        finally:
            gc.enable()


class TestNoGraph(GraphsTestCase):
    def fail(self, *args, **kwargs):
        self.make.side_effect = NoGraph(*args, **kwargs)
        made, state = self.capture()
        self.assertFalse(made)
        return state

    def test_number_that_has_to_be_in_the_key(self):
        self.make.side_effect = Escaped(frozenset([1]), "a decision")
        with self.assertRaises(Escaped):
            self.capture()
        self.assertEqual(self.states.captures, 0)

    def test_refusal(self):
        state = self.fail("foreign", "it points elsewhere", None)
        self.assertEqual(state.refused, "foreign")
        self.assertEqual(self.said(), [("foreign", "it points elsewhere")])
        self.assertEqual(list(self.graphs.refusals), ["foreign"])

    def test_error_that_may_pass(self):
        for _ in range(FAILURES - 1):
            args = "capture", "ValueError: no", None, "op", "model.py:7"
            state = self.fail(*args, is_final=False)
            self.assertEqual((state.refused, self.said()), ("", []))
        state = self.fail(*args, is_final=False)
        self.assertEqual(state.refused, "capture")
        (refused,) = refusals.refused()
        self.assertEqual((refused.operator, refused.line), ("op", "model.py:7"))

    def test_frame_that_is_compiled_again(self):
        self.again.return_value = True
        with self.assertLogs(refusals.log, "WARNING") as logs:
            state = self.fail("capture", "no", OPERATOR, is_final=False)
        self.again.assert_called_once_with("0/0")
        self.assertEqual(self.failed, {OPERATOR.operator: OPERATOR.did})
        self.assertEqual((state.refused, self.said()), ("operator", []))
        self.assertIn("mylib::op.default waits for the device", logs.output[0])
        self.assertIn("(model.py:7); from the next call on", logs.output[0])
        self.assertEqual(self.graphs.refusals["operator"].line, "model.py:7")

    def test_frame_that_can_not_be_compiled_again(self):
        state = self.fail("capture", "no", OPERATOR)
        self.assertEqual(state.refused, "operator")
        said = "mylib::op.default waits for the device"
        self.assertEqual(self.said(), [("operator", said)])

    def test_code_that_was_compiled_without_the_operator(self):
        self.failed[OPERATOR.operator] = "waits"
        self.graphs = self.new()
        self.fail("capture", "no", OPERATOR)
        self.again.assert_not_called()
        self.assertEqual([reason for reason, _ in self.said()], ["operator"])

    def test_graph_that_is_given_up(self):
        with mock.patch.object(Graph, "attempt", len):
            _, state = self.capture()
        state.relaunch.totals[0] = 3
        give_up = state.relaunch.patcher.given_up
        give_up("the driver refuses")
        self.assertEqual((state.refused, state.relaunch), ("host-memory", None))
        self.assertEqual((self.states.launched(), self.states.attempt), (3, None))
        self.assertEqual(self.said(), [("host-memory", "the driver refuses")])
        state.refused = ""
        self.graphs = None  # and with it who refuses
        give_up("the driver refuses")
        self.assertEqual(state.refused, "host-memory")

    def test_graph_for_better_aligned_inputs_stays(self):
        _, state = self.capture()
        made = state.relaunch
        self.fail("foreign", "it points elsewhere", None)
        self.assertEqual((state.refused, state.relaunch), ("foreign", made))

    def test_lock_is_not_waited_for_in_a_launch(self):
        _, state = self.capture()
        with mock.patch.object(self.states, "lock") as lock:
            lock.acquire.return_value = False
            self.assertFalse(state.relaunch.patcher.given_up("no"))
            lock.acquire.assert_called_once_with(False)
        self.assertIsNotNone(state.relaunch)

    def test_without_a_state(self):
        self.graphs.refuse(None, "templates", "no more")
        self.assertEqual(self.said(), [("templates", "no more")])


class TestLive(TestCase):
    def test_reset(self):
        forgotten = []

        class Runner:
            states = (1,)

            def forget(self):
                forgotten.append(self)

        with mock.patch.object(live, "runners", weakref.WeakSet()):
            live.runners.add(runner := Runner())
            self.assertEqual(live.counts()["runners"], 1)
            listen()
            torch._dynamo.reset()
            self.assertEqual(forgotten, [runner])
            runner.states = ()
            self.assertEqual(live.counts()["runners"], 0)

    def test_counts(self):
        graphs = [mock.Mock(totals=[n, 2 * n]) for n in (0, 3, 4)]
        graphs[2].launcher = mock.Mock(spec=launchers.ByNode)  # without an executable
        for made in graphs:
            made.launcher.nodes = 5
        shared = [mock.Mock(graph=graph) for graph in ("one", "one", "two")]
        with (
            mock.patch.object(relaunch, "live", graphs),
            mock.patch.object(launchers, "live_launchers", shared),
        ):
            found = {"nodes": 15, "nodes_patched": 14, "relaunches": 7}
            self.assertEqual(live.stats(), found)
            self.assertEqual(live.bare_replays(), [graphs[1].launcher.replay])
            self.assertEqual(
                (live.counts()["templates"], live.counts()["execs"]), (3, 2)
            )


if __name__ == "__main__":
    run_tests()
