# Owner(s): ["module: dynamo"]

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import flatten_graph_inputs
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch._streams.fx import node_stream
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import run_tests, TestCase


aten = torch.ops.aten
SIDE = 1


class TestListInputs(TestCase):
    def traced(self, *streams):
        """Streams of the operations that AOTAutograd traces of a graph which takes a
        list, and its result."""
        graph = Graph()
        inputs = graph.placeholder("inputs")
        value = graph.call_function(lambda values: values[0], (inputs,))
        for stream in streams:
            value = graph.call_function(torch.sin, (value,))
            if stream:
                value.meta["custom"] = {"stream": stream}
        graph.output((value,))
        found = []

        def compiler(gm, _):
            nodes = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
            found.extend(map(node_stream, nodes))
            return make_boxed_func(gm.forward)

        def compiled(gm, inputs):
            return aot_module_simplified(gm, inputs, fw_compiler=compiler)

        x = torch.randn(4)
        run = flatten_graph_inputs(GraphModule({}, graph), [[x]], compiled)
        (result,) = run([x])
        for _ in streams:
            x = x.sin()
        self.assertEqual(result, x)
        return found

    def test_streams_of_operations(self):
        self.assertEqual(self.traced(0, SIDE, SIDE, 0), [0, SIDE, SIDE, 0])

    def test_graph_without_streams(self):
        self.assertEqual(self.traced(0, 0), [0, 0])


if __name__ == "__main__":
    run_tests()
