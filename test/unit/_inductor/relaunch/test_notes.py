"""`_inductor.relaunch.notes`: what code says about itself, and what splits it."""

import pickle
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._inductor.notes import GraphNotes
from torch_overlay._inductor.relaunch import notes
from torch_overlay._inductor.relaunch.notes import (
    CompiledNotes,
    first_saved,
    free_numbers,
    give_back_graphs,
    graph_partitions,
    is_unsafe,
    Partitions,
    SplitOff,
)
from torch_overlay._inductor.relaunch.rewrites.graph import Resident, Rewrite, Rewrites


def trace(line):
    return f'  File "/model.py", line {line}, in f\n    y = g(x)\n'


def fx_node(target, line=0):
    graph = torch.fx.Graph()
    node = graph.call_function(target)
    if line:
        node.meta["stack_trace"] = trace(line)
    return node


class Node:
    """A node of a schedule, with its IR node: of a kernel, or of an operator."""

    def __init__(self, line, target=None):
        origin = fx_node(target or torch.ops.aten.sin.default, line)
        self.node = mock.Mock(spec=["get_origins"])
        self.node.get_origins.return_value = {origin}
        if target is not None:
            self.node = mock.Mock(spec=["fx_node"], fx_node=origin)

    def get_nodes(self):
        return [self]


def nothing():
    """A node for memory that no kernel fills."""
    return mock.Mock(spec=NopKernelSchedulerNode)


def one_of_several():
    return SimpleNamespace(node=mock.Mock(spec=ir.MultiOutput))


class TestPartitions(TestCase):
    def setUp(self):
        super().setUp()
        self.failed = {}
        self.enterContext(mock.patch.object(notes.split_off, "failed", lambda: self.failed))
        library = self.enterContext(torch.library._scoped_library("parts", "DEF"))
        library.define("op(Tensor x) -> Tensor")
        self.op = torch.ops.parts.op.default

    def note(self, *parts, reason=None):
        """The notes of a graph. A part in a list is split off."""
        graph = SimpleNamespace()
        scheduler = SimpleNamespace(should_partition=lambda node: reason)
        symbols = [SimpleNamespace(name="s0")]
        signatures = [SimpleNamespace(skip_cudagraph=type(part) is list, symbol_inputs=symbols) for part in parts]
        notes.note_partitions(graph, scheduler, parts, signatures)
        return graph_partitions(graph)

    def test_parts_with_graphs(self):
        noted = self.note((nothing(), Node(3), Node(4), one_of_several()), (Node(0),))
        self.assertEqual(noted.split_off, ())
        (one, two) = noted.graphs
        self.assertEqual((one[0], one[2], two), (2, ("s0",), (1, "", ("s0",))))
        self.assertIn("/model.py:3", one[1])

    def test_reason_of_inductors(self):
        reason = "unbacked binding"
        noted = self.note((Node(3),), [Node(7), nothing()], reason=reason)
        (row,) = noted.split_off
        self.assertEqual((row.code, row.message, row.operator), ("split-data-dependent", reason, ""))
        self.assertIn("/model.py:7", row.line)
        self.assertEqual(row.kernels, 1)

    def test_reasons_by_operator(self):
        unsafe = "CUDAGraph-unsafe custom ops"
        switch, op = torch.ops.higher_order.switch, self.op
        wait = torch.ops._c10d_functional.wait_tensor.default
        self.failed = {"aten::sin.default": "waits for the device"}
        for target, code, reason in (
            (op, "split-unsafe", "CUDAGraph-unsafe custom ops (parts.op.default)"),
            (torch.ops.aten.sin.default, "split-failed", "aten::sin.default waits for"),
            (wait, "split-collective", "a collective: _c10d_functional::wait_tensor"),
            (switch, "split-control-flow", "control flow: switch"),
        ):
            (row,) = self.note([Node(7, target)], reason=unsafe).split_off
            self.assertEqual(row.code, code)
            self.assertTrue(row.message.startswith(reason), row.message)

    def test_part_of_few_kernels(self):
        (row,) = self.note([Node(3)]).split_off
        self.assertEqual(row.code, "split-small")
        self.assertIn("cudagraph_min_partition_size", row.message)

    def test_graph_without_partitions(self):
        self.assertEqual(graph_partitions(SimpleNamespace(scheduler=None)), Partitions())
        scheduler = SimpleNamespace(nodes=[Node(3), nothing()])
        ((kernels, line, symbols),) = graph_partitions(SimpleNamespace(scheduler=scheduler)).graphs
        self.assertEqual((kernels, symbols), (1, ()))
        self.assertIn("/model.py:3", line)

    def test_pickle(self):
        rows = (SplitOff.of("split-unsafe", "why", operator="op", line="line", kernels=1),)
        rewrites = Rewrites((Rewrite("resident", "line"),), (Resident(1, 0, (2,)),))
        noted = CompiledNotes((0,), Partitions(((2, "line", ("s0",)),), rows), ((), (-1,)), rewrites, (None, 1))
        noted.put(compiled := SimpleNamespace())
        self.assertEqual(CompiledNotes.find(compiled), noted)
        self.assertNotIn(b"relaunch", pickle.dumps(compiled))
        self.assertEqual(CompiledNotes.of(SimpleNamespace()), CompiledNotes())

    def test_what_is_unsafe(self):
        wait = torch.ops._c10d_functional.wait_tensor.default
        self.assertTrue(is_unsafe(fx_node(wait)))
        self.assertTrue(is_unsafe(fx_node(torch.ops.higher_order.while_loop)))
        graph = mock.Mock(user_visible_output_strides={})
        self.enterContext(V.set_graph_handler(graph))
        self.assertFalse(is_unsafe(fx_node(self.op)))
        self.failed = {"parts::op.default": "waits"}
        self.assertTrue(is_unsafe(fx_node(self.op)))
        self.assertFalse(is_unsafe(fx_node(torch.ops.aten.sin.default)))

    def test_control_flow_takes_no_graph_from_the_rest(self):
        flow, other = "control flow operator: torch.cond.", "mutated inputs"
        for is_cut, is_inside, reason, expected in (
            (True, False, flow, None),
            (False, False, flow, flow),
            (False, True, flow, None),
            (True, False, other, other),
            (False, True, other, other),
            (True, False, None, None),
        ):
            graph = SimpleNamespace(disable_cudagraphs_reason=reason, current_node=None)
            chosen = mock.patch.object(notes.conditions, "is_chosen_by_device", lambda node, inside=is_inside: inside)
            with inductor_config.patch(graph_partition=is_cut), chosen:
                give_back_graphs(graph)
            self.assertEqual(graph.disable_cudagraphs_reason, expected)


class TestNotes(TestCase):
    def traced(self, fn, *args):
        gm = make_fx(fn, tracing_mode="symbolic")(*args)
        return gm, [node.name for node in gm.graph.find_nodes(op="placeholder")]

    def test_numbers_that_no_size_depends_on(self):
        def fn(x, n, m, k):
            return x * n + m, x.new_zeros(k), x[: x.size(0)]

        gm, _ = self.traced(fn, torch.ones(5), 7, 11, 13)
        self.assertEqual(free_numbers(gm, Partitions()), ((1, 2),))

    def test_numbers_of_partitions(self):
        gm, _ = self.traced(lambda x, n, m: x * n + m, torch.ones(5), 7, 11)
        values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        size, n, m = (str(v) for v in (values[0].size(0), *values[1:]))
        parts = ((1, "", (size, n)), (1, "", (m,)), (1, "", ()))
        self.assertEqual(free_numbers(gm, Partitions(parts)), ((1, 2), (-1,), (-1,), ()))

    def test_notes(self):
        gm, _ = self.traced(lambda x, n: (x * n, x), torch.ones(5), 7)
        (output,) = gm.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = [0]
        given = SimpleNamespace(
            graph_input_names=["x", "n"], graph_inputs_original={"x": mock.Mock(spec=ir.DonatedBuffer)}
        )
        graph, compiled = SimpleNamespace(scheduler=None, **vars(given)), SimpleNamespace()
        self.assertIsNone(CompiledNotes.find(compiled))
        self.assertEqual(notes.numbers_of(compiled, None), ())
        GraphNotes.of(graph).partitions = Partitions(((1, "", ()),))
        notes.note(compiled, graph, gm)
        compiled = pickle.loads(pickle.dumps(compiled))
        self.assertEqual(CompiledNotes.of(compiled).partitions, GraphNotes.of(graph).partitions)
        found = [notes.numbers_of(compiled, k) for k in (None, 0, 1)]
        self.assertEqual(found, [(1,), (), ()])
        self.assertEqual((first_saved(compiled), CompiledNotes.of(compiled).donated), (1, (0,)))

    def test_outputs_that_are_saved(self):
        for visible, expected in (((0, 2), 3), ((), None)):
            CompiledNotes(visible_outputs=visible).put(compiled := SimpleNamespace())
            self.assertEqual(first_saved(compiled), expected)
        self.assertIsNone(first_saved(SimpleNamespace()))
        context = SimpleNamespace(fw_metadata=SimpleNamespace(num_forward=4))
        with mock.patch.object(torch._guards.TracingContext, "try_get", return_value=context):
            self.assertEqual(first_saved(SimpleNamespace()), 4)
