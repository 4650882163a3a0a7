# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
import torch._dynamo.variables.streams  # has the operators of torch.ops.streams
import torch._functorch.config
from functorch.compile import aot_function, make_boxed_func
from torch._functorch._aot_autograd import graph_compile
from torch.fx.traceback import annotate, preserve_node_meta
from torch.testing._internal.common_utils import run_tests, TestCase


streams = torch.ops.streams
SIDE = 1


class TestDonatedBuffers(TestCase):
    """Programs on the host, where numbers of streams are marks of nodes."""

    def donated(self, f, *inputs):
        """The saved values that the backward may write over, and all, by name."""
        found = []
        collect = graph_compile.collect_bw_donated_buffer_idxs

        def collected(forward, backward, metadata):
            donated = collect(forward, backward, metadata)
            names = [n.name for n in backward.graph.find_nodes(op="placeholder")]
            saved = [name for name in names if "tangents" not in name]
            found.append(([names[i] for i in donated], saved))
            return donated

        def compiler(gm, _):
            return make_boxed_func(gm.forward)

        patch = torch._functorch.config.patch(
            stream_placement=True, donated_buffer=True
        )
        with (
            patch,
            preserve_node_meta(),
            mock.patch.object(
                graph_compile, "collect_bw_donated_buffer_idxs", collected
            ),
        ):
            aot_function(f, fw_compiler=compiler)(*inputs)
        (result,) = found
        return result

    def test_program_without_streams(self):
        def f(x):
            return x.exp().sin()

        donated, saved = self.donated(f, torch.ones(4, requires_grad=True))
        self.assertEqual((donated, saved), (["exp", "detach"], ["exp", "detach"]))

    def test_memory_of_a_side_stream(self):
        def f(x):
            streams.wait_stream.default(SIDE, 0)
            with annotate({"stream": SIDE}):
                y = x.exp()
            streams.wait_stream.default(0, SIDE)
            return (y + 1).sin()

        donated, saved = self.donated(f, torch.ones(4, requires_grad=True))
        self.assertEqual((donated, saved), (["add"], ["detach", "add"]))

    def reads(self, joined):
        """Donated buffers of a program in which a side stream reads a saved value."""

        def f(x):
            y = x + 1
            streams.wait_stream.default(SIDE, 0)
            with annotate({"stream": SIDE}):
                z = y.detach().cos()
            if joined:
                streams.wait_stream.default(0, SIDE)
            return y.sin(), z

        donated, saved = self.donated(f, torch.ones(4, requires_grad=True))
        self.assertEqual(saved, ["add"])
        return donated

    def test_side_stream_that_still_reads(self):
        self.assertEqual(self.reads(joined=False), [])

    def test_side_stream_that_is_waited_for(self):
        self.assertEqual(self.reads(joined=True), ["add"])

    def test_value_that_is_saved_twice(self):
        def f(x):
            y = x.exp()
            streams.wait_stream.default(SIDE, 0)
            with annotate({"stream": SIDE}):
                z = (x + 1).sin()
            streams.wait_stream.default(0, SIDE)
            return y.sin() + z

        donated, saved = self.donated(f, torch.ones(4, requires_grad=True))
        self.assertEqual((donated, saved), ([], ["exp", "detach", "add"]))


if __name__ == "__main__":
    run_tests()
