"""`_inductor.relaunch.region_graphs`: when a region gets one graph for all sizes."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._inductor.relaunch import causes, region_graphs
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan
from torch_overlay._inductor.relaunch.capture.make_graph import capturing
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.relaunch.governor import Governor
from torch_overlay._inductor.relaunch.launch.relaunch import Misaligned
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay._inductor.relaunch.region_graphs import AnySizeGraph
from torch_overlay._inductor.relaunch.states import CallKeys, State, States
from torch_overlay.csrc import DriverError


CODE = CodeFacts("a region", 0, saved_outputs=frozenset([0]), is_backward=True)
NOT_SET = DriverError("cuGraphExecKernelNodeSetParams", 1, "not supported")


def call(*numbers):
    """The inputs of a call: a tensor, and numbers after it."""
    return [torch.zeros(max(numbers)), *numbers]


class Region:
    """A region, of which calls are noted. `clones` are the copies that it makes."""

    code, model = CODE, None

    def __init__(self):
        self.device = SimpleNamespace(guard=contextlib.nullcontext)
        self.clones, self.launched, self.error, self.governor = [], [], None, Governor()

    def align(self, inputs):
        for k, _, clone in self.clones:
            inputs[k] = clone
        return self.clones

    def launch(self, relaunch, inputs, originals, clones):
        self.launched.append((relaunch, list(inputs), list(originals)))
        inputs.clear()
        if self.error is not None:
            raise self.error
        return ("launched",)


class Runner:
    """The runner of a region with two numbers in its key."""

    plan = AllocationPlan()

    def __init__(self):
        self.region, self.keys, self.states = Region(), CallKeys(CODE), States(64, 8)
        self.keys.keyed = 1, 2
        self.any_size, self.region_graphs = AnySizeGraph(), self

    def add(self, key, made, nodes):
        state = State()
        state.relaunch, state.nodes = made, nodes
        self.states.add(key, state)
        return state

    def run(self, *numbers):
        self.inputs = call(*numbers)
        return self.any_size.run(self, numbers, self.inputs)

    def add_own(self, *numbers, relaunch=None):
        """A size that has been observed, and may have a graph of its own."""
        self.any_size.note(self, call(*numbers))
        self.states.of(numbers).relaunch = relaunch


class AnySizeTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.replace(capture, "is_region", lambda v: isinstance(v, torch.Tensor))
        self.make = self.replace(region_graphs, "make_graph_for_any_size")
        self.arrangement, self.sized = mock.Mock(), object()
        launcher = SimpleNamespace(nodes=5)
        self.made = self.arrangement, (launcher,), self.sized
        self.make.side_effect = lambda work, seen: self.made
        self.relaunch = self.replace(region_graphs, "Relaunch")
        stage = SimpleNamespace(totals=[0])
        self.relaunch.side_effect = lambda *args: SimpleNamespace(args=args, launcher=launcher, stages=[stage])
        self.runner = Runner()

    def replace(self, owner, name, value=mock.DEFAULT):
        return self.enterContext(mock.patch.object(owner, name, value))

    def keys(self):
        return [key for key in self.runner.states if key[0] is region_graphs.ANY]


class TestSeen(AnySizeTestCase):
    def seen(self):
        return [tuple(seen.numbers.values()) for seen in self.runner.any_size.seen]

    def note(self, *inputs):
        self.runner.any_size.note(self.runner, inputs)

    def test_first_sizes(self):
        for size in (4, 4, 5, 6, 5, 7, 8):
            self.note(*call(size, 9))
        self.assertEqual(self.seen(), [(4, 9), (5, 9), (6, 9), (7, 9)])
        self.assertEqual(self.runner.any_size.seen[0].views[0].size, (9,))

    def test_calls_that_show_too_little(self):
        self.note(torch.zeros(0), 0, 4)
        self.note(torch.zeros(4), 4, 2.5)
        self.note(torch.zeros(4), 4, True)
        for name in ("scalars", "seeds"):
            with mock.patch.object(self.runner.keys, name, frozenset([2])):
                self.note(*call(4, 4))
        self.assertEqual(self.seen(), [])

    def test_operators_of_calls(self):
        graph = self.runner.any_size
        graph.note_run(0, True)
        graph.note_run(2, False)  # copies of inputs
        self.assertFalse(graph.calls_operators)
        graph.note_run(1, True)
        graph.note_run(0, True)
        self.assertTrue(graph.calls_operators)


class TestRun(AnySizeTestCase):
    def test_first_size_has_no_graph(self):
        self.assertIsNone(self.runner.run(4, 9))
        self.runner.add_own(4, 9)
        self.assertIsNone(self.runner.run(4, 9))
        self.make.assert_not_called()

    def test_second_size(self):
        self.runner.add_own(4, 9)
        self.assertEqual(self.runner.run(5, 9), ("launched",))
        (work, seen), _ = self.make.call_args
        self.assertEqual((work.numbers, seen.numbers), ({1: 5}, {1: 4}))
        self.assertEqual((work.code.saved_outputs, work.code.is_backward), (frozenset(), False))
        self.assertEqual(self.keys(), [(region_graphs.ANY, (9,))])
        self.assertEqual(self.runner.states[self.keys()[0]].nodes, 5)

    def test_further_sizes(self):
        self.runner.add_own(4, 9)
        for size in (5, 6, 4):
            self.assertEqual(self.runner.run(size, 9), ("launched",))
        self.make.assert_called_once()
        self.assertEqual(len({id(made) for made, *_ in self.runner.region.launched}), 1)
        self.runner.states.of("another")
        self.runner.run(7, 9)
        self.assertEqual(list(self.runner.states)[-1:], self.keys())

    def test_number_that_is_in_no_key(self):
        self.runner.keys.keyed, self.runner.keys.free = (1,), (2,)
        self.runner.add_own(4, 9)
        self.runner.run(5, 9)
        (work, seen), _ = self.make.call_args
        self.assertEqual((work.numbers, seen.numbers), ({2: 9, 1: 5}, {2: 10, 1: 4}))

    def test_another_number_varies(self):
        self.runner.add_own(4, 9)
        self.runner.run(5, 9)
        self.assertEqual(self.runner.run(6, 8), ("launched",))
        self.assertEqual(self.make.call_args.args[0].numbers, {1: 6, 2: 8})
        self.assertEqual(self.keys(), [(region_graphs.ANY, ())])
        self.runner.run(7, 7)
        self.assertEqual(self.make.call_count, 2)

    def test_size_with_a_graph_of_its_own(self):
        self.runner.add_own(4, 9)
        self.runner.add_own(5, 9, relaunch="its own")
        self.assertIsNone(self.runner.run(5, 9))
        self.assertEqual(self.runner.run(6, 9), ("launched",))
        self.assertIsNone(self.runner.run(5, 9))

    def test_alignments(self):
        self.runner.region.code = CodeFacts("a region", 0, static_inputs=(0,))
        self.runner.add_own(4, 9)
        inputs = [torch.zeros(16)[1:], 5, 9]  # 4 bytes after the tensor's memory
        self.runner.any_size.run(self.runner, (5, 9), inputs)
        self.assertEqual(self.make.call_args.args[0].alignments, [4, 16, 16])

    def test_input_that_is_not_aligned(self):
        self.runner.add_own(4, 9)
        self.runner.run(5, 9)
        self.assertEqual(self.runner.region.launched[-1][2], [])
        self.runner.region.clones = [(0, None, "clone")]
        self.runner.run(6, 9)
        _, inputs, originals = self.runner.region.launched[-1]
        self.assertEqual(inputs, ["clone", 6, 9])
        self.assertEqual((type(originals[0]), originals[1:]), (torch.Tensor, [6, 9]))


class TestNoGraph(AnySizeTestCase):
    def test_no_time_for_a_capture(self):
        self.runner.add_own(4, 9)
        self.assertTrue(capturing.acquire(blocking=False))
        try:
            self.assertIsNone(self.runner.run(5, 9))
        finally:
            capturing.release()
        most = self.runner.states.most_captures
        with mock.patch.object(self.runner.states, "captures", most):
            self.assertIsNone(self.runner.run(5, 9))
        self.make.assert_not_called()
        self.assertEqual(self.runner.run(5, 9), ("launched",))

    def test_tries(self):
        self.runner.add_own(4, 9)
        errors = [NumberEscaped(frozenset([1]), "a grid"), Unprovable("edges", "no"), KeyError(7)]
        self.make.side_effect = errors
        with self.assertLogs(causes.log, "INFO") as logs:
            for size in range(5, 9):
                self.assertIsNone(self.runner.run(size, 9))
                self.assertTrue(capturing.acquire(blocking=False))
                capturing.release()
        self.assertEqual((self.make.call_count, len(logs.output)), (3, 3))
        self.assertIn("no graph for any size: KeyError: 7", logs.output[-1])
        self.runner.add_own(5, 9)
        said = self.runner.any_size.describe(self.runner)
        self.assertEqual(said, "each size has a graph of its own: KeyError: 7")

    def test_obstacles(self):
        self.runner.add_own(4, 9)
        self.runner.add_own(5, 9)
        graph = self.runner.any_size
        self.assertEqual(graph.describe(self.runner), "")
        floats = States(64, 8)
        floats.update({(4, 0.5): State(), (5, 1): State()})
        for owner, name, value, why in (
            (graph, "calls_operators", True, "it calls operators"),
            (graph, "frees_inputs", True, "it frees inputs while it runs"),
            (self.runner, "plan", AllocationPlan(random=True), "it draws random numbers"),
            (self.runner, "plan", AllocationPlan(opaque=True), "it returns memory"),
            (self.runner, "plan", AllocationPlan(watch=True), "it returns memory"),
            (self.runner.keys, "seeds", frozenset([1]), "tensors in host memory"),
            (self.runner.states.sizes, "bound", 0, f"{config.__name__}.cudagraph_executables is 0"),
            (self.runner, "states", floats, "no integer"),
        ):
            with mock.patch.object(owner, name, value):
                self.assertIsNone(self.runner.run(6, 9))
                self.assertIn(why, graph.describe(self.runner))
        self.make.assert_not_called()
        self.runner.run(6, 9)
        self.assertEqual(graph.describe(self.runner), "one graph serves any size")

    def test_number_that_the_graph_is_not_for(self):
        self.runner.add_own(4, 9)
        self.runner.run(5, 9)
        self.runner.region.error = Misaligned()
        self.runner.region.clones = [(0, None, "clone")]
        self.assertIsNone(self.runner.run(6, 9))
        self.assertEqual(type(self.runner.inputs[0]), torch.Tensor)  # for another run
        self.assertEqual(self.runner.inputs[1:], [6, 9])
        self.runner.region.error = None
        self.assertEqual(self.runner.run(7, 9), ("launched",))
        self.make.assert_called_once()

    def test_node_that_the_driver_can_not_set(self):
        self.runner.add_own(4, 9)
        self.runner.region.error, self.runner.region.clones = (NOT_SET, [(0, None, "clone")])
        self.assertIsNone(self.runner.run(5, 9))
        self.assertEqual(self.keys(), [])
        self.assertEqual(self.runner.inputs[1:], [5, 9])
        self.assertIn("NodeSetParams", self.runner.any_size.why_not)
        self.runner.region.error = None
        self.assertIsNone(self.runner.run(6, 9))
        self.make.assert_called_once()

    def test_other_errors_of_a_launch(self):
        self.runner.add_own(4, 9)
        self.runner.region.error = RuntimeError("an illegal access")
        with self.assertRaisesRegex(RuntimeError, "an illegal access"):
            self.runner.run(5, 9)
        self.assertEqual(len(self.keys()), 1)
        self.runner.states[self.keys()[0]].relaunch.stages[0].totals[0] = 1
        self.runner.region.error = NOT_SET  # after a launch it is no matter of the graph
        with self.assertRaisesRegex(RuntimeError, "NodeSetParams"):
            self.runner.run(5, 9)

    def test_region_that_is_forgotten_meanwhile(self):
        self.runner.add_own(4, 9)
        graph = self.runner.any_size

        def forgotten(work, seen):
            self.runner.any_size = AnySizeGraph()
            return self.made

        self.make.side_effect = forgotten
        self.assertIsNone(graph.run(self.runner, (5, 9), call(5, 9)))
        self.assertEqual(self.keys(), [])
