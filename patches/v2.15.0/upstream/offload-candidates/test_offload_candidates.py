# Owner(s): ["module: aotdispatch"]

import operator
from unittest import mock

import torch
from torch._functorch._activation_offloading import candidates, kernel_times
from torch._functorch._activation_offloading.candidates import Pair
from torch._functorch._activation_offloading.checkpoint_policies import (
    is_slab,
    MUST,
    note_offload_policies,
    note_upstream_marks,
    OFFLOAD,
    PREFER,
)
from torch._functorch._activation_offloading.cost_model import Link, Recompute
from torch._functorch._activation_offloading.device_rates import Rates
from torch._functorch._activation_offloading.ops import IN_USE
from torch._functorch._streams.fx import place_on
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import CheckpointPolicy


aten = torch.ops.aten
RATES = Rates(Link(1.0, 1.0), 1e3, 1e9, False)
NBYTES = 8 * 8 * 4


class PairCase(TestCase):
    def setUp(self):
        super().setUp()
        self.mode = FakeTensorMode(static_shapes=True)
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        with self.mode:
            self.x.meta["val"] = torch.empty(8, 8)
        for patch in (
            mock.patch.object(candidates, "DEVICE_TYPE", "cpu"),
            mock.patch.object(Rates, "flops_of", lambda *args: RATES.flops),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def call(self, target, *args, stream=0):
        node = self.graph.call_function(target, args)
        values = torch.fx.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        place_on(node, stream)
        return node

    def mm(self, x=None, **kwargs):
        x = self.x if x is None else x
        return self.call(aten.mm.default, x, x, **kwargs)

    def pair(self, saved, results=(), unread=()):
        """A backward that reads each saved value once, in this order."""
        self.graph.output((*results, *saved))
        backward = Graph()
        inputs = [backward.placeholder(node.name) for node in saved]
        made = []
        for node, value in zip(saved, inputs):
            value.meta["val"] = node.meta["val"]
            if node not in unread:
                made.append(backward.call_function(aten.sum.default, (value,)))
                made[-1].meta["val"] = aten.sum.default(node.meta["val"])
        backward.output(tuple(made))
        graphs = [GraphModule({}, graph) for graph in (self.graph, backward)]
        self.graph = graphs[0].graph
        return Pair(*graphs, len(results))


class TestSaved(PairCase):
    def why(self, node, **kwargs):
        kwargs.setdefault("saved", [node])
        return self.pair(**kwargs).refused.get(node, "")

    def test_value_that_nobody_else_holds(self):
        made = self.mm()
        pair = self.pair([made, self.x])
        self.assertEqual((pair.refused, list(pair.saved)), ({}, [made]))
        self.assertEqual(pair.device, torch.device("cpu"))

    def test_views_count_once(self):
        made = self.mm()
        views = [
            self.call(aten.t.default, made),
            self.call(aten.view.default, made, [-1]),
        ]
        pair = self.pair([views[0], made, views[1]])
        self.assertEqual(list(pair.saved), [made])
        self.assertEqual(pair.saved[made].members, [views[0], made, views[1]])

    def test_result(self):
        made = self.mm()
        view = self.call(aten.t.default, made)
        self.assertIn("the caller gets it", self.why(made, results=[view]))

    def test_value_that_is_written(self):
        made = self.mm()
        self.call(aten.add_.Tensor, self.call(aten.t.default, made), 1)
        self.assertIn("written in place", self.why(made))

    def test_part_of_other_memory(self):
        split = self.call(aten.unsafe_split.Tensor, self.mm(), 4)
        part = self.call(operator.getitem, split, 0)
        self.assertIn("part of other memory", self.why(part))

    def test_dynamic_size(self):
        self.mode = FakeTensorMode(
            shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()
        )
        self.x.meta["val"] = self.mode.from_tensor(torch.empty(8, 8))
        self.assertIn("dynamic", self.why(self.mm()))

    def test_value_that_is_no_plain_tensor(self):
        made = self.mm()
        made.meta["val"] = torch.nn.Parameter(torch.empty(8, 8))
        self.assertIn("not a plain tensor", self.why(made))

    def test_side_stream(self):
        self.assertIn("side stream", self.why(self.mm(stream=1)))
        self.setUp()
        made = self.mm()
        view = self.call(aten.t.default, made, stream=1)
        self.assertIn("side stream", self.why(made, saved=[view]))

    def test_value_that_the_backward_does_not_read(self):
        made = self.mm()
        self.assertIn("doesn't read", self.why(made, unread=[made]))

    def test_other_devices(self):
        host, first, second, third = (self.mm() for _ in range(4))
        for node, device in ((first, 1), (second, 0), (third, 1)):
            data = torch.empty(8, 8, device="meta")
            node.meta["val"] = FakeTensor(self.mode, data, torch.device("cuda", device))
        with mock.patch.object(candidates, "DEVICE_TYPE", "cuda"):
            pair = self.pair([host, first, second, third], [third])
        self.assertEqual(list(pair.saved), [first, second, third])
        self.assertEqual(pair.device, torch.device("cuda:1"))
        self.assertIn("on another device", pair.refused[second])
        self.assertNotIn(first, pair.refused)


class TestCandidates(PairCase):
    def test_small_values_stay_unless_somebody_asks(self):
        first, second = self.mm(), self.mm()
        second.meta[OFFLOAD] = PREFER
        pair = self.pair([first, second])
        found = [(c.name, c.nbytes, c.must) for c in pair.candidates(NBYTES, RATES)]
        self.assertEqual(
            found, [(first.name, NBYTES, False), (second.name, NBYTES, True)]
        )
        found = pair.candidates(NBYTES + 1, RATES)
        self.assertEqual([c.name for c in found], [second.name])

    def test_refused_values_are_none(self):
        made = self.mm()
        made.meta[OFFLOAD] = MUST
        self.assertEqual(self.pair([made], [made]).candidates(0, RATES), [])

    def again(self, node, *others):
        found = self.pair([*others, node]).candidates(0, RATES)
        return next(c.again for c in found if c.name == node.name)

    def test_value_that_is_computed_from_what_is_saved(self):
        made = self.mm()
        middle = self.call(aten.relu.default, self.call(aten.t.default, made))
        node = self.call(aten.add.Tensor, middle, self.x)
        found = self.again(node, made, self.x)
        us = 3 * NBYTES / 1e3 + candidates.LAUNCH_US  # it writes one and reads two
        self.assertEqual(found, Recompute(us, frozenset([made.name])))

    def test_value_that_is_not_cheap(self):
        made = self.mm()
        self.assertIsNone(self.again(made, self.x))

    def test_value_of_something_that_is_not_saved(self):
        node = self.call(aten.relu.default, self.mm())
        self.assertIsNone(self.again(node, self.x))

    def test_value_of_an_input_that_is_not_saved(self):
        self.assertIsNone(self.again(self.call(aten.relu.default, self.x)))

    def test_value_of_a_side_stream(self):
        side = self.call(aten.relu.default, self.x, stream=1)
        node = self.call(aten.relu.default, side)
        self.assertIsNone(self.again(node, self.x))

    def test_value_that_takes_many_operations(self):
        for more, is_cheap in ((0, True), (1, False)):
            self.setUp()
            chain = self.x
            for _ in range(candidates.MOST_RECOMPUTED - 1 + more):
                chain = self.call(aten.relu.default, chain)
            other = self.call(aten.sin.default, self.x)
            node = self.call(aten.add.Tensor, chain, other)
            self.assertEqual(self.again(node, self.x) is not None, is_cheap)

    def test_recipe_is_in_order(self):
        first = self.call(aten.relu.default, self.x)
        second = self.call(aten.sin.default, self.x)
        node = self.call(aten.add.Tensor, second, first)
        pair = self.pair([self.x, node])
        recipe = pair.recipe(node)
        self.assertEqual({*recipe}, {first, second, node})
        self.assertIs(recipe[-1], node)

    def test_value_that_somebody_asks_for_is_not_computed_again(self):
        node = self.call(aten.relu.default, self.x)
        node.meta[OFFLOAD] = MUST
        self.assertIsNone(self.again(node, self.x))


class TestModel(PairCase):
    def test_steps_of_both_graphs(self):
        made = self.mm()
        view = self.call(aten.t.default, made)
        result = self.call(aten.sum.default, made)
        pair = self.pair([view, self.x], [result])
        found = pair.candidates(0, RATES)
        model = pair.model(found, RATES, at_once=True)
        forward = [(s.name, dict(s.makes), set(s.reads)) for s in model.forward]
        made, result = made.name, result.name
        self.assertEqual(
            forward,
            [(made, {made: NBYTES}, {"x"}), (result, {result: 4}, {made})],
        )
        gradients = pair.backward.graph.find_nodes(
            op="call_function", target=aten.sum.default
        )
        names = [node.name for node in gradients]
        backward = [(s.name, set(s.reads)) for s in model.backward]
        self.assertEqual(backward, list(zip(names, [{made}, {"x"}])))
        self.assertEqual(model.saved, {made: NBYTES})
        self.assertEqual(model.results, {result, *names})
        self.assertEqual((model.candidates, model.at_once), (found, True))

    def test_library_kernels_are_measured_where_the_rates_are(self):
        asked = []

        def measure(nodes, device):
            asked.append(device)
            return {kernel_times.name_of(made): 77.0}

        made = self.mm()
        pair = self.pair([made])
        with mock.patch.object(kernel_times, "measure", measure):
            pair.model([], RATES, False)
            self.assertEqual(asked, [])
            measured = Rates(RATES.link, RATES.bytes, RATES.flops, True)
            (step,) = pair.model([], measured, False).forward
        self.assertEqual((asked, step.us), ([0], 77.0))


class TestPolicies(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def relu(self, **meta):
        node = self.graph.call_function(aten.relu.default, (self.x,))
        node.meta |= meta
        return node

    def test_policies_save_and_mark(self):
        given = [*CheckpointPolicy]
        nodes = [self.relu(recompute=policy) for policy in given] + [self.relu()]
        note_offload_policies(self.graph)
        must, prefer = (
            CheckpointPolicy.MUST_CPU_OFFLOAD,
            CheckpointPolicy.PREFER_CPU_OFFLOAD,
        )
        save = {
            must: (CheckpointPolicy.MUST_SAVE, MUST),
            prefer: (CheckpointPolicy.PREFER_SAVE, PREFER),
        }
        for policy, node in zip([*given, None], nodes):
            found = node.meta.get("recompute"), node.meta.get(OFFLOAD)
            self.assertEqual(found, save.get(policy, (policy, None)))

    def test_marks_of_a_pass(self):
        nodes = [self.relu(should_offload=v) for v in (True, False)] + [self.relu()]
        note_upstream_marks(self.graph)
        self.assertEqual([n.meta.get(OFFLOAD) for n in nodes], [MUST, None, None])

    def test_slab_among_the_inputs_of_a_backward(self):
        slab = self.graph.placeholder("slab")
        self.relu()
        self.graph.call_function(IN_USE, (slab,))
        self.assertEqual([is_slab(n) for n in (self.x, slab)], [False, True])


if __name__ == "__main__":
    run_tests()
