"""Updates of parts in place, where several streams use the tensor."""

import torch
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import Program
from torch_overlay import config
from torch_overlay._functorch.streams.fx import node_stream


aten = torch.ops.aten


@config.patch(streams=True)
class ScattersTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.call = self.program.call
        self.device = "cuda:0"

    def input(self, rows=8):
        return self.program.input(rows, 4, device=self.device)

    def put(self, base, rows, stream=0):
        """A new value of `base` with other values in its first or last rows."""
        part = self.call(aten.relu.default, self.input(4), stream=stream)
        first = {"first": 0, "last": 4}[rows]
        return self.call(aten.slice_scatter.default, base, part, 0, first, first + 4, stream=stream)

    def run_pass(self, *results):
        self.program.output(*results)
        gm = GraphModule(torch.nn.Module(), self.program.graph)
        self.graph = gm.graph
        updater = FakeTensorUpdater(gm)
        with V.set_fake_mode(self.program.mode):
            GraphTransformObserver(gm, "reinplace").apply_graph_pass(
                lambda graph: reinplace_inplaceable_ops(updater, graph)
            )
        gm.graph.lint()

    def assert_decided(self, *, in_place=(), anew=()):
        """The streams of scatters that are updates in place, and of the others."""
        writes = self.graph.find_nodes(op="call_function", target=aten.copy_.default)
        parts = [n for n in writes if n.args[0].target is aten.slice.Tensor]
        scatters = self.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)
        self.assertEqual(list(map(node_stream, parts)), list(in_place))
        self.assertEqual(list(map(node_stream, scatters)), list(anew))


class TestTensorOfTheGraph(ScattersTestCase):
    def setUp(self):
        super().setUp()
        self.make_base()

    def make_base(self):
        self.base = self.call(aten.sin.default, self.input())

    def put_both(self, first, last):
        """The first and the last rows, on these streams."""
        self.run_pass(self.put(self.put(self.base, "first", first), "last", last))

    def test_parts_on_two_streams(self):
        self.put_both(1, 2)
        self.assert_decided(in_place=[1, 2])
        self.assertEqual(self.graph.output_node().args[0], (self.base,))

    def test_parts_on_one_stream(self):
        for stream in (0, 1):
            self.setUp()
            self.put_both(stream, stream)
            self.assert_decided(anew=[stream] * 2)

    def test_value_that_another_stream_reads(self):
        made = self.put(self.base, "first", 1)
        view = self.call(aten.slice.Tensor, made, 0, 0, 2, stream=1)
        self.run_pass(made, self.call(aten.cos.default, view, stream=2))
        self.assert_decided(in_place=[1])

    def test_value_that_is_read_later(self):
        """What is not safe stays as it is."""
        made = self.put(self.base, "first", 1)
        last = self.put(made, "last", 2)
        old = self.call(aten.cos.default, self.base, stream=2)
        self.run_pass(last, old)
        self.assert_decided(in_place=[2], anew=[1])

    def test_tensor_of_the_host(self):
        self.device = "cpu"
        self.make_base()
        self.put_both(1, 2)
        self.assert_decided(anew=[1, 2])

    def test_part_that_is_put_back(self):
        for hazard, first, decided in (
            ("into its own place", 0, {"anew": [1]}),
            ("elsewhere", 4, {"in_place": [1], "anew": [2]}),
        ):
            with self.subTest(hazard):
                self.setUp()
                made = self.put(self.base, "first", 1)
                part = self.call(aten.slice.Tensor, made, 0, 0, 4, stream=2)
                self.run_pass(self.call(aten.slice_scatter.default, made, part, 0, first, first + 4, stream=2))
                self.assert_decided(**decided)

    @config.patch(streams=False)
    def test_without_the_option(self):
        self.put_both(1, 2)
        self.assert_decided(anew=[0, 0])


class TestInput(ScattersTestCase):
    def update(self, side):
        """Two parts of an input, on the current stream."""
        x = self.input()
        other = self.call(aten.cos.default, self.input(), stream=side)
        last = self.put(self.put(x, "first"), "last")
        self.call(aten.copy_.default, x, last)
        self.run_pass(other)

    def test_in_a_graph_with_streams(self):
        self.update(side=1)
        self.assert_decided(in_place=[0, 0])

    def test_in_a_graph_without_streams(self):
        self.update(side=0)
        self.assert_decided(anew=[0, 0])
