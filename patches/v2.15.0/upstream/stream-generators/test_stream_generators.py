# Owner(s): ["module: dynamo"]

from unittest import mock

import torch
from torch._dynamo.test_case import run_tests, TestCase
from torch._dynamo.testing import EagerAndRecordGraphs


@torch._dynamo.disable
def break_graph():
    pass


def two(x):
    yield x + 1
    yield x * 2


class TestStreamGenerators(TestCase):
    def setUp(self):
        super().setUp()
        for name in ("__enter__", "__exit__"):
            patch = mock.patch.object(torch.cuda.StreamContext, name)
            patch.start()
            self.addCleanup(patch.stop)
        self.side = torch.Stream(stream_id=7, device_index=0, device_type=1)

    def streams_of(self, function):
        """Compile and call; return for each graph a letter for each operation, in any
        order: "s" if it is on the stream."""
        torch._dynamo.reset()
        backend = EagerAndRecordGraphs()
        result = torch.compile(function, backend=backend)(torch.ones(3), self.side)
        self.assertEqual(result, torch.full((3,), 5.0))
        texts = []
        for gm in backend.graphs:
            custom = [
                node.meta.get("custom", {})
                for node in gm.graph.nodes
                if isinstance(node.meta.get("example_value"), torch.Tensor)
                and node.op == "call_function"
            ]
            letters = ["s" if "stream" in one else "-" for one in custom]
            texts.append("".join(sorted(letters)))
        return texts

    def test_generator_that_crosses_a_break(self):
        def f(x, side):
            with torch.cuda.stream(side):
                rest = two(x)
                y = x / 1
                break_graph()
                a, b = rest
            return y + a + b

        self.assertEqual(self.streams_of(f), ["sss", "--"])

    def test_generator_that_was_begun(self):
        def f(x, side):
            with torch.cuda.stream(side):
                rest = two(x)
                a = next(rest)
                break_graph()
                (b,) = rest
            return x + a + b

        self.assertEqual(self.streams_of(f), ["ss", "--"])

    def test_generator_that_is_used_up(self):
        def f(x, side):
            with torch.cuda.stream(side):
                rest = two(x)
                a, b = rest
                break_graph()
            return x + a + b + len([*rest])

        self.assertEqual(self.streams_of(f), ["ss", "---"])

    def test_break_outside_of_blocks(self):
        def f(x, side):
            with torch.cuda.stream(side):
                y = x / 1
            rest = two(x)
            break_graph()
            a, b = rest
            return y + a + b

        self.assertEqual(self.streams_of(f), ["--s", "--"])


if __name__ == "__main__":
    run_tests()
