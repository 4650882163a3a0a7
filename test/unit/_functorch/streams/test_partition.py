"""Partitions of joint graphs with streams: sums of gradients, exits, saved memory."""

from unittest import mock

import torch
import torch._dynamo.variables.streams
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch.fx.traceback import annotate, preserve_node_meta
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._functorch.streams.facts import fact_of, Leave
from torch_overlay._functorch.streams.fx import is_stream_op, node_stream
from torch_overlay._functorch.streams.tokens import CALLER, state


aten, streams = torch.ops.aten, torch.ops.streams
SIDE, OTHER = 1, 2


class on:
    """A block on a side stream, which waits for the caller's and is waited for."""

    def __init__(self, stream):
        self.stream, self.block = stream, annotate({"stream": stream})

    def __enter__(self):
        streams.wait_stream.default(self.stream, 0)
        self.block.__enter__()

    def __exit__(self, *error):
        self.block.__exit__(*error)
        streams.wait_stream.default(0, self.stream)


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


class TestPlacedBackwards(TestCase):
    """Programs on the host, where numbers of streams are marks of nodes."""

    def parts(self, f, *inputs):
        """The graphs of the forward and the backward. Checks the gradients."""
        found = []

        def compiler(gm, _):
            found.append(gm.graph)
            return make_boxed_func(gm.forward)

        run = aot_function(
            f,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
        )
        patch = config.patch(streams=True)
        with patch, preserve_node_meta():
            gradients = torch.autograd.grad(run(*inputs).sum(), inputs)
        with mock.patch.object(streams, "wait_stream"):
            wanted = torch.autograd.grad(f(*inputs).sum(), inputs)
        self.assertEqual(gradients, wanted)
        forward, backward = found
        self.assertFalse(any(map(is_stream_op, (*forward.nodes, *backward.nodes))))
        return forward, backward

    def placed(self, graph, target):
        """The stream of each of the graph's calls of an operator."""
        found = graph.find_nodes(op="call_function", target=target)
        return [node_stream(node) for node in found]

    def test_sum_of_gradients(self):
        def f(x):
            with on(SIDE):
                y = x.sin()
            with on(OTHER):
                z = x.cos()
            return y * z

        _, backward = self.parts(f, *leaves(4))
        # The sum leaves the graph, to the caller's stream.
        self.assertEqual(self.placed(backward, aten.add.Tensor), [0])

    def test_sum_that_a_side_stream_reads(self):
        def f(x, u):
            with on(SIDE):
                y = x @ u
            return y @ y

        _, backward = self.parts(f, *leaves((4, 4), (4, 4)))
        self.assertEqual(self.placed(backward, aten.add.Tensor), [SIDE])

    def test_equal_operations_on_two_streams(self):
        def f(x, u, v):
            with on(SIDE):
                y = x.exp().sum() * u
            with on(OTHER):
                z = x.exp().sum() * v
            return y * z

        forward, backward = self.parts(f, *leaves((4, 4), (4, 4), (4, 4)))
        self.assertEqual(self.placed(forward, aten.exp.default), [SIDE, OTHER])
        # One of them is saved, and who reads it elsewhere waits for its stream.
        values = {fact_of(n).memory: n for n in backward.find_nodes(op="placeholder")}
        saved = values[OTHER]
        self.assertEqual(saved.meta["val"].shape, (4, 4))
        readers = {node_stream(node): fact_of(node).after for node in saved.users}
        self.assertEqual(readers, {SIDE: (CALLER, state(OTHER)), OTHER: (CALLER,)})
        matrices = [n for n in forward.output_node().all_input_nodes if n.op != "placeholder"]
        self.assertEqual([n.meta["val"].dim() for n in matrices], [2, 0, 2])

    def test_memory_of_saved_values(self):
        def f(x, u):
            with on(SIDE):
                y = x @ u
            return y @ y

        _, backward = self.parts(f, *leaves((4, 4), (4, 4)))
        inputs = backward.find_nodes(op="placeholder")
        facts = [(fact_of(n).memory, fact_of(n).is_computed) for n in inputs]
        self.assertEqual(facts, [(SIDE, True), (None, False), (None, False), (None, False)])

    def test_exit_of_a_backward(self):
        """Autograd orders streams that a gradient passed through."""

        def f(x):
            with on(SIDE):
                y = x.sin()
            return y.cos()

        _, backward = self.parts(f, *leaves(4))
        left = (Leave(SIDE, (CALLER,)), Leave(0, (state(SIDE),)))
        for value in backward.find_nodes(op="placeholder"):
            self.assertEqual(fact_of(value).leave, left)
