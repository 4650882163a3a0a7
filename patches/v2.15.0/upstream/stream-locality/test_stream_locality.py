# Owner(s): ["module: inductor"]

import torch
from torch._functorch._streams.facts import note_fact
from torch._functorch._streams.fx import place_on
from torch._functorch._streams.tokens import caller_event
from torch._inductor import config
from torch._inductor.fx_passes.post_grad import reorder_for_locality
from torch.fx import Graph
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten


class TestLocality(TestCase):
    def reordered(self, stream=0, before=None):
        """A branch stands before the work that it is to run beside, and is joined."""
        graph = Graph()
        x = graph.placeholder("x")
        branch = graph.call_function(aten.sin.default, (x,), name="branch")
        beside = graph.call_function(aten.cos.default, (x,), name="beside")
        beside = graph.call_function(aten.mm.default, (beside, x), name="more")
        joined = graph.call_function(aten.add.Tensor, (beside, branch), name="joined")
        graph.output((joined,))
        place_on(branch, stream)
        note_fact(branch, before=before)
        reorder_for_locality(graph)
        return [n.name for n in graph.nodes if n.op == "call_function"]

    MOVED = ["beside", "more", "branch", "joined"]
    AS_IT_WAS = ["branch", "beside", "more", "joined"]

    @config.patch({"triton.streams": True})
    def test_branch_on_a_side_stream(self):
        self.assertEqual(self.reordered(stream=1), self.AS_IT_WAS)

    @config.patch({"triton.streams": True})
    def test_order_with_the_caller(self):
        self.assertEqual(self.reordered(before=(caller_event(5),)), self.AS_IT_WAS)

    @config.patch({"triton.streams": True})
    def test_graph_without_streams(self):
        self.assertEqual(self.reordered(), self.MOVED)

    def test_without_the_option(self):
        self.assertEqual(self.reordered(stream=1), self.MOVED)


if __name__ == "__main__":
    run_tests()
