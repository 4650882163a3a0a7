# Owner(s): ["module: aotdispatch"]

import torch
import torch._dynamo.variables.streams  # has the operators of torch.ops.streams
import torch._functorch.config
from functorch.compile import aot_function, make_boxed_func
from torch._functorch._aot_autograd.streams import get_stream_or_current_stream
from torch._functorch._streams.facts import fact_of
from torch._functorch._streams.fx import is_stream_op, node_stream
from torch._functorch._streams.tokens import CALLER, state
from torch.fx.traceback import annotate, preserve_node_meta
from torch.testing._internal.common_utils import run_tests, TestCase


streams = torch.ops.streams
SIDE = 1


def forked(x):
    """A block on a side stream, between two waits. Its operations run on the host."""
    streams.wait_stream.default(SIDE, 0)
    with annotate({"stream": SIDE}):
        y = (x * 2).sin()
    streams.wait_stream.default(0, SIDE)
    return y.cos()


class TestPlacedGraphs(TestCase):
    def graphs(self, f, *inputs, placement=True):
        """The graphs of the forward and, if an input needs gradients, the backward."""
        found = []

        def compiler(gm, _):
            found.append(gm.graph)
            # What still has waits isn't run: they ask for streams of a device.
            run = gm.forward if placement else lambda *inputs: inputs
            return make_boxed_func(run)

        patch = torch._functorch.config.patch(stream_placement=placement)
        with patch, preserve_node_meta():
            self.result = aot_function(f, fw_compiler=compiler, bw_compiler=compiler)(
                *inputs
            )
            if self.result.requires_grad:
                self.result.sum().backward()
        return found

    def order(self, graph):
        """The stream of each operation, what it is after, and what is after it."""
        return {
            n.name: (node_stream(n), fact_of(n).after, fact_of(n).before)
            for n in graph.nodes
            if n.op == "call_function"
        }

    def test_waits_leave_a_forward(self):
        x = torch.randn(4)
        (graph,) = self.graphs(forked, x)
        side = (SIDE, (CALLER,), (CALLER,))
        last = (0, (state(SIDE),), ())
        self.assertEqual(self.order(graph), {"mul": side, "sin": side, "cos": last})
        self.assertEqual(self.result, (x * 2).sin().cos())

    def test_joint_graph(self):
        x = torch.randn(4, requires_grad=True)
        forward, backward = self.graphs(forked, x)
        self.assertFalse(any(map(is_stream_op, (*forward.nodes, *backward.nodes))))
        self.assertEqual(
            [node_stream(n) for n in forward.nodes if n.op == "call_function"],
            [SIDE, SIDE, 0],
        )
        # Gradients of what ran on the side stream are computed there, after the
        # caller's stream at the entry and before it at the exit.
        order = self.order(backward)
        last = list(order)[-1]
        self.assertEqual(order[last], (SIDE, (CALLER,), (CALLER,)))
        self.assertIn((0, (), ()), order.values())
        grad, x.grad = x.grad, None
        (x * 2).sin().cos().sum().backward()
        self.assertEqual(grad, x.grad)

    def test_without_the_option(self):
        (graph,) = self.graphs(forked, torch.randn(4), placement=False)
        waits = torch.ops.higher_order.control_deps
        self.assertTrue(graph.find_nodes(op="call_function", target=waits))
        self.assertFalse(any(fact_of(node).is_placed for node in graph.nodes))

    def test_graph_without_streams(self):
        (graph,) = self.graphs(lambda x: x.sin(), torch.randn(4))
        self.assertFalse(any("custom" in node.meta for node in graph.nodes))

    def test_node_without_a_stream_is_the_callers(self):
        node = torch.fx.Graph().call_function(torch.ops.aten.sin.default)
        with torch._functorch.config.patch(stream_placement=True):
            self.assertEqual(get_stream_or_current_stream(node), 0)
            node.meta["custom"] = {"stream": SIDE}
            self.assertEqual(get_stream_or_current_stream(node), SIDE)


if __name__ == "__main__":
    run_tests()
