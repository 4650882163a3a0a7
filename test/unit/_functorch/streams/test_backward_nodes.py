"""`_functorch.streams.backward`: which nodes are the backward's, and first copies of inputs."""

import operator

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.streams.backward import mark_backward
from torch_overlay._functorch.streams.epilogue import follow_mutations, place_first_copies
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import BACKWARD, node_stream, place_on
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, state


aten, streams = torch.ops.aten, torch.ops.streams


class GraphCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("primals_1")

    def call(self, target, *args, stream=0, tag=None, **meta):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        if tag is not None:
            node.meta["partitioner_tag"] = tag
        node.meta |= meta
        return node

    def relu(self, *args, **kwargs):
        return self.call(aten.relu.default, *args, **kwargs)


class TestBackward(GraphCase):
    def marked(self, results=(), desc=()):
        self.graph.output(results).meta["desc"] = desc
        mark_backward(self.graph)
        return [node for node in self.graph.nodes if node.meta.get(BACKWARD)]

    def test_tags(self):
        first = self.relu(self.x, tag="is_forward")
        self.relu(first)
        backward = self.relu(first, tag="is_backward")
        self.assertEqual(self.marked(), [backward])

    def test_nodes_after_the_first_gradient(self):
        """As in the body of a backward that the user wrote."""
        tangent = self.graph.placeholder("tangents_1")
        self.relu(self.x)
        first = self.relu(tangent)
        second = self.relu(self.x)
        third = self.relu(self.x, tag="must_be_in_forward")
        self.assertEqual(self.marked(), [first, second])
        self.assertNotIn(BACKWARD, third.meta)

    def test_mark_of_another_pass(self):
        marked = self.relu(self.x, **{BACKWARD: True})
        after = self.relu(self.x)
        self.assertEqual(self.marked(), [marked, after])

    def test_copy_that_writes_an_input_back(self):
        new = self.relu(self.x)
        self.call(aten.copy_.default, self.x, new, tag="must_be_in_backward")
        view = self.call(aten.t.default, new)
        self.assertEqual(self.marked([view], [PlainAOTOutput(0)]), [])

    def test_views_that_the_forward_returns(self):
        """They may stand after the backward has begun."""
        made = self.relu(self.x)
        gradient = self.relu(made, tag="is_backward")
        inner = self.call(aten.t.default, made, tag="is_backward")
        view = self.call(aten.t.default, inner, tag="is_backward")
        other = self.call(aten.t.default, gradient, tag="is_backward")
        desc = [PlainAOTOutput(0), GradAOTOutput(PlainAOTInput(0))]
        self.assertEqual(self.marked([view, other], desc), [gradient, other])


class TestFirstCopies(GraphCase):
    def setUp(self):
        super().setUp()
        self.copy = self.call(aten.clone.default, self.x)

    def order(self):
        self.graph.output(())
        place_first_copies(self.graph)
        self.graph.lint()
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def test_copy_stands_before_its_first_reader(self):
        wait = self.call(streams.wait_stream.default, 1, 0)
        reader = self.relu(self.copy, stream=1)
        later = self.relu(self.copy, stream=2)
        self.assertEqual(self.order(), [wait, self.copy, reader, later])
        self.assertEqual(node_stream(self.copy), 1)

    def test_views_launch_nothing(self):
        wait = self.call(streams.wait_stream.default, 2, 0)
        view = self.call(aten.t.default, self.copy, stream=1)
        reader = self.relu(view, stream=2)
        later = self.relu(self.copy, stream=3)
        self.assertEqual(self.order(), [wait, self.copy, view, reader, later])
        self.assertEqual(node_stream(self.copy), 2)

    def test_operations_of_the_stream_program_do_not_read(self):
        record = self.call(streams.record_stream.default, self.copy, 1, stream=2)
        self.call(aten.t.default, self.copy, stream=1)
        self.order()
        self.assertEqual(node_stream(self.copy), 0)
        self.assertEqual(self.copy.next, record)

    def test_copies_of_the_user(self):
        self.copy.meta["source_fn_stack"] = [("clone", torch.clone)]
        relu = self.relu(self.x, stream=2)
        of_relu = self.call(aten.clone.default, relu)
        readers = [self.relu(n, stream=1) for n in (self.copy, of_relu)]
        self.assertEqual(self.order(), [self.copy, relu, of_relu, *readers])
        self.assertEqual([node_stream(n) for n in (self.copy, of_relu)], [0, 0])


class TestWriteBacks(GraphCase):
    AFTER, BEFORE = (state(2),), (CALLER, caller_event(5))

    def follow(self, value, target=None):
        copy = self.call(aten.copy_.default, target or self.x, value, stream=3)
        note_fact(copy, after=(state(7),), promised_to=(state(8),))
        follow_mutations(self.graph)
        fact = fact_of(copy)
        return node_stream(copy), fact.after, fact.promised_to

    def update(self):
        node = self.relu(self.x, stream=1)
        note_fact(node, after=self.AFTER, promised_to=self.BEFORE, order=4)
        return node

    def test_copy_is_ordered_as_its_value(self):
        self.assertEqual(self.follow(self.update()), (1, self.AFTER, self.BEFORE))

    def test_value_below_aliases_and_selections(self):
        part = self.call(operator.getitem, self.update(), 0, stream=2)
        alias = self.call(aten.alias.default, part)
        self.assertEqual(self.follow(alias), (1, self.AFTER, self.BEFORE))

    def test_value_that_is_an_input(self):
        other = self.graph.placeholder("primals_2")
        self.assertEqual(self.follow(other), (3, (state(7),), (state(8),)))

    def test_copy_into_no_input(self):
        value = self.update()
        self.assertEqual(self.follow(value, self.relu(self.x)), (3, (state(7),), (state(8),)))
