"""`_functorch.streams.backward`: the order that the autograd engine gives to gradients."""

import operator

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.autograd_nodes import note
from torch_overlay._functorch.streams.backward import engine_streams, order_after_gradients
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.tokens import state


aten = torch.ops.aten


class JointCase(TestCase):
    """A joint graph: an input, operations with numbers, and their backward."""

    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.input("primals_1", PlainAOTInput(0))
        self.number = 0

    def input(self, name, desc):
        node = self.graph.placeholder(name)
        node.meta["desc"] = desc
        return node

    def forward(self, *args, stream=0, target=aten.relu.default):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        self.number += 1
        node.meta["seq_nr"] = self.number
        return node

    def view(self, base, stream=0):
        return self.forward(base, stream=stream, target=aten.t.default)

    def tangent(self, index=0):
        desc = TangentAOTInput(PlainAOTOutput(index))
        return self.input(f"tangents_{index + 1}", desc)

    def backward(self, *args, of=None, target=aten.relu.default, is_sum=False):
        """A kernel of the backward of an operation, or of a sum of gradients."""
        node = self.graph.call_function(target, args)
        node.meta["partitioner_tag"] = "is_backward"
        node.meta["is_gradient_acc"] = is_sum
        if of is not None:
            node.meta["seq_nr"] = of.meta["seq_nr"]
        return node

    def finish(self, results, gradients):
        """`gradients` has each with its input."""
        values = [*results, *(value for value, _ in gradients)]
        desc = [PlainAOTOutput(i) for i in range(len(results))]
        desc += [GradAOTOutput(given.meta["desc"]) for _, given in gradients]
        self.graph.output(values).meta["desc"] = desc
        note(self.graph, {})

    def streams(self, *leaves):
        found = engine_streams(self.graph, leaves)
        return {node.name: stream for node, stream in found.items()}

    def order(self, *leaves):
        order_after_gradients(self.graph, engine_streams(self.graph, leaves))
        return {node.name: fact_of(node).promised_to for node in self.graph.nodes if fact_of(node).promised_to}


class TestEngineStreams(JointCase):
    def test_operations_between_inputs_and_outputs(self):
        first = self.forward(self.x, stream=1)
        second = self.forward(first, stream=2)
        unused = self.forward(first, stream=3)
        other = self.forward(self.input("primals_2", PlainAOTInput(1)), stream=4)
        end = self.forward(second, other)
        gradient = self.backward(self.tangent(), of=first)
        self.finish([end, unused], [(gradient, self.x)])
        self.assertEqual(self.streams(), {first.name: 1, second.name: 2, end.name: 0, gradient.name: 0})

    def test_results_without_a_gradient(self):
        first = self.forward(self.x, stream=1)
        self.finish([first], [(self.x, self.x)])
        self.assertEqual(self.streams(), {})

    def test_inputs_without_a_gradient(self):
        first = self.forward(self.x, stream=1)
        self.tangent()
        self.finish([first], [(None, self.x)])
        self.assertEqual(self.streams(self.x), {})

    def test_leaves(self):
        y = self.input("primals_2", PlainAOTInput(1))
        first = self.forward(self.x, y, stream=1)
        gradient = self.backward(self.tangent(), of=first)
        self.finish([first], [(gradient, self.x)])
        found = {first.name: 1, self.x.name: 1, gradient.name: 0}
        self.assertEqual(self.streams(self.x, y), found)

    def test_operations_of_the_backward(self):
        first = self.forward(self.x, stream=1)
        gradient = self.backward(self.tangent(), of=first)
        place_on(gradient, 2)
        self.finish([first], [(gradient, self.x)])
        self.assertEqual(self.streams(), {first.name: 1, gradient.name: 2})


class TestOrder(JointCase):
    def test_operation_that_launches_nothing(self):
        """A view on a side stream, between operations on the caller's."""
        first = self.forward(self.x)
        view = self.view(first, stream=1)
        last = self.forward(view)
        gradient = self.backward(self.tangent(), of=last)
        end = self.backward(self.backward(gradient, target=aten.t.default), of=first)
        self.finish([last], [(end, self.x)])
        self.assertEqual(self.order(), {gradient.name: (state(1),)})

    def test_operation_that_launches(self):
        first = self.forward(self.x)
        side = self.forward(first, stream=1)
        last = self.forward(side)
        gradient = self.backward(self.tangent(), of=last)
        own = self.backward(gradient, of=side)
        self.finish([last], [(self.backward(own, of=first), self.x)])
        self.assertEqual(self.order(), {})

    def test_operations_on_the_callers_stream(self):
        view = self.view(self.forward(self.x))
        last = self.forward(view)
        gradient = self.backward(self.tangent(), of=last)
        self.finish([last], [(gradient, self.x)])
        self.assertEqual(self.order(), {})

    def test_views_one_after_the_other(self):
        views = [self.view(self.forward(self.x), stream=1)]
        views.append(self.view(views[0], stream=2))
        last = self.forward(views[1])
        gradient = self.backward(self.tangent(), of=last)
        self.finish([last], [(gradient, self.x)])
        self.assertEqual(self.order(), {gradient.name: (state(1), state(2))})

    def test_gradients_that_are_added(self):
        view = self.view(self.forward(self.x), stream=1)
        ends = [self.forward(view), self.forward(view)]
        parts = [self.backward(self.tangent(i), of=end) for i, end in enumerate(ends)]
        total = self.backward(*parts, target=aten.add.Tensor, is_sum=True)
        again = self.backward(total, total, target=aten.add.Tensor, is_sum=True)
        self.finish(ends, [(again, self.x)])
        found = self.order()
        names = {node.name for node in (*parts, total, again)}
        self.assertEqual(found, dict.fromkeys(names, (state(1),)))

    def test_leaf_that_is_read_first_on_a_side_stream(self):
        self.view(self.x, stream=1)
        first = self.forward(self.x)
        gradient = self.backward(self.tangent(), of=first)
        self.finish([first], [(gradient, self.x)])
        self.assertEqual(self.order(self.x), {gradient.name: (state(1),)})

    def test_kernels_of_later_nodes_of_an_operation(self):
        """An operation may make several nodes; their numbers follow its own."""
        view = self.view(self.forward(self.x), stream=1)
        last = self.forward(view)
        gradient = self.backward(self.tangent(), of=last)
        second = self.backward(gradient)
        second.meta["seq_nr"] = last.meta["seq_nr"] + 1
        self.finish([last], [(second, self.x)])
        names = {gradient.name, second.name}
        self.assertEqual(self.order(), dict.fromkeys(names, (state(1),)))

    def test_selections_and_views_launch_nothing(self):
        first = self.forward(self.x)
        side = self.view(first, stream=1)
        last = self.forward(side)
        gradient = self.backward(self.tangent(), of=last)
        part = self.backward(gradient, 0, of=side, target=operator.getitem)
        view = self.backward(part, of=side, target=aten.t.default)
        self.finish([last], [(view, self.x)])
        self.assertEqual(self.order(), {gradient.name: (state(1),)})
