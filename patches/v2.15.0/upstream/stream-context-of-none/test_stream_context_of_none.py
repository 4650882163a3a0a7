# Owner(s): ["module: dynamo"]

import torch
from torch._dynamo.test_case import run_tests, TestCase
from torch._dynamo.testing import EagerAndRecordGraphs


class TestStreamContextOfNone(TestCase):
    def streams_of(self, function, *args):
        """Compile and call without graph breaks; return the number of each operation's
        stream."""
        torch._dynamo.reset()
        backend = EagerAndRecordGraphs()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        self.assertEqual(compiled(*args), args[0] * 2 + 1)
        (graph,) = [gm.graph for gm in backend.graphs]
        return [
            node.meta.get("custom", {}).get("stream")
            for node in graph.nodes
            if node.op == "call_function"
            and isinstance(node.meta["example_value"], torch.Tensor)
        ]

    def test_constant(self):
        def f(x):
            with torch.cuda.stream(None):
                y = x * 2
            return y + 1

        self.assertEqual(self.streams_of(f, torch.ones(3)), [None, None])

    def test_argument_that_may_be_a_stream(self):
        def f(x, side):
            with torch.cuda.stream(side):
                y = x * 2
            return y + 1

        x = torch.ones(3)
        self.assertEqual(self.streams_of(f, x, None), [None, None])
        side = torch.Stream(stream_id=7, device_index=0, device_type=1)
        inside, outside = self.streams_of(f, x, side)
        self.assertIsNotNone(inside)
        self.assertIsNone(outside)

    def test_inside_of_a_stream(self):
        def f(x, side):
            with torch.cuda.stream(side):
                with torch.cuda.stream(None):
                    y = x * 2
                return y + 1

        side = torch.Stream(stream_id=7, device_index=0, device_type=1)
        inside, outside = self.streams_of(f, torch.ones(3), side)
        self.assertIsNotNone(inside)
        self.assertEqual(inside, outside)


if __name__ == "__main__":
    run_tests()
