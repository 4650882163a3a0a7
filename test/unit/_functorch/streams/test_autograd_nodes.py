"""`_functorch.streams.epilogue`: the streams of the backward's nodes and first readers."""

import contextlib
from unittest import mock

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.fx import Graph
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams import epilogue
from torch_overlay._functorch.streams.epilogue import first_reader, made_on, note_autograd_nodes, view_streams
from torch_overlay._functorch.streams.fx import place_on


aten = torch.ops.aten


class GraphCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x, self.y = self.inputs = [self.graph.placeholder(n) for n in "xy"]
        for index, node in enumerate(self.inputs):
            node.meta["desc"] = PlainAOTInput(index)

    def call(self, target, *args, stream=0):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        return node

    def view(self, base, stream=0):
        return self.call(aten.t.default, base, stream=stream)

    def noted(self, *results, known=()):
        self.graph.output(results)
        note_autograd_nodes(self.graph, dict(known))
        return view_streams(self.graph)


class TestViews(GraphCase):
    def test_streams_that_lead_to_a_view(self):
        self.call(aten.relu.default, self.x, stream=3)
        first = self.view(self.x, 1)
        second = self.view(self.view(first, 1), 2)
        self.assertEqual(self.noted(first, second, self.x), [(3, 1), (3, 1, 2), ()])

    def test_views_on_the_callers_stream(self):
        self.call(aten.relu.default, self.x, stream=3)
        back = self.view(self.view(self.y, 1))
        self.assertEqual(self.noted(self.view(self.x), back), [(), (1, 1, 0)])

    def test_view_of_a_result(self):
        made = self.call(aten.relu.default, self.x, stream=3)
        self.assertEqual(self.noted(self.view(made, 2), made), [(0, 2), ()])

    def test_results_that_are_no_values(self):
        self.assertEqual(self.noted(None, 3, self.view(self.x, 1)), [(), (), (1, 1)])

    def test_placement_changes_nothing_that_is_noted(self):
        view = self.view(self.x, 1)
        noted = self.noted(view)
        place_on(view, 4)
        self.assertEqual(view_streams(self.graph), noted)

    def test_graph_that_was_not_noted(self):
        self.graph.output(self.x)
        self.assertEqual(tuple(view_streams(self.graph)), ())


class TestFirstReaders(GraphCase):
    def test_first_operation_that_reads_an_input(self):
        self.call(aten.mul.Tensor, self.x, self.x, stream=2)
        self.call(aten.relu.default, self.x, stream=1)
        self.noted()
        self.assertEqual([first_reader(node) for node in self.inputs], [2, 0])

    def test_readers_that_only_dynamo_knows(self):
        """Its graph has operations that AOTAutograd leaves out."""
        self.call(aten.mul.Tensor, self.x, self.y, stream=2)
        self.noted(known={0: 5})
        self.assertEqual([first_reader(node) for node in self.inputs], [5, 2])


class Log(TorchFunctionMode):
    """Notes the current stream of each view_as()."""

    def __init__(self, current, log):
        self.current, self.log = current, log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.view_as:
            self.log.append(("view", self.current[-1]))
        return func(*args, **(kwargs or {}))


class TestMadeOn(TestCase):
    def made(self, streams, base):
        current, log = ["caller"], []

        @contextlib.contextmanager
        def stream(which):
            current.append(current[-1] if which is None else which)
            yield
            current.pop()

        def edge(base):
            log.append(("leaf", current[-1]))
            return base

        def make(base):
            log.append(("result", current[-1]))
            return base.view(-1)

        leave = objects.enter("caller", "a", "b", "c")
        with (
            mock.patch.object(torch.cuda, "stream", stream),
            mock.patch.object(epilogue, "get_gradient_edge", edge),
            Log(current, log),
        ):
            made = made_on(streams, base, make)
        leave()
        self.assertEqual(current, ["caller"])
        return made, log

    def test_nodes_of_a_leaf(self):
        base = torch.ones(2, 3, requires_grad=True)
        made, log = self.made((3, 1, 2), base)
        self.assertEqual(log, [("leaf", "c"), ("view", "a"), ("result", "b")])
        made.sum().backward()
        self.assertEqual(base.grad, torch.ones(2, 3))

    def test_callers_stream_is_the_current_one(self):
        base = torch.ones(2, 3, requires_grad=True)
        _, log = self.made((0, 1, 0), base)
        self.assertEqual(log, [("leaf", "caller"), ("view", "a"), ("result", "caller")])

    def test_base_that_accumulates_nothing(self):
        leaf = torch.ones(2, 3, requires_grad=True)
        for base in (leaf * 2, torch.ones(2, 3)):
            made, log = self.made((3, 1), base)
            self.assertEqual(log, [("result", "a")])
            self.assertEqual(made.untyped_storage(), base.untyped_storage())
