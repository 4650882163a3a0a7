# Owner(s): ["module: dynamo"]

import torch
from torch._dynamo.test_case import run_tests, TestCase
from torch._dynamo.testing import EagerAndRecordGraphs


def stream(stream_id):
    return torch.Stream(stream_id=stream_id, device_index=0, device_type=1)


class TestStreamBlocks(TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.side, self.other = torch.ones(3), stream(7), stream(9)

    def streams_of(self, function):
        """Compile and call without graph breaks; return a letter for each operation's
        stream, in the order in which streams are used first; "-" is no stream."""
        backend = EagerAndRecordGraphs()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        compiled(self.x, self.side, self.other)
        (graph,) = [gm.graph for gm in backend.graphs]
        found = [
            node.meta.get("custom", {}).get("stream")
            for node in graph.nodes
            if isinstance(node.meta.get("example_value"), torch.Tensor)
            and node.op == "call_function"
        ]
        letters = dict(zip(dict.fromkeys(i for i in found if i is not None), "abc"))
        return "".join(letters.get(index, "-") for index in found)

    def test_block_inside_of_its_own(self):
        def f(x, side, other):
            with side:
                with side:
                    x = x + 1
                x = x * 2
            return x - 3

        self.assertEqual(self.streams_of(f), "aa-")

    def test_block_of_another_stream_between(self):
        def f(x, side, other):
            with side:
                with other:
                    with side:
                        x = x + 1
                    x = x * 2
                x = x - 3
            return x / 4

        self.assertEqual(self.streams_of(f), "aba-")

    def test_one_block_after_the_other(self):
        def f(x, side, other):
            with side:
                x = x + 1
            x = x * 2
            with side:
                x = x - 3
            return x / 4

        self.assertEqual(self.streams_of(f), "a-a-")

    def test_error_inside_of_blocks_leaves_no_stream_behind(self):
        def fails(x, side, other):
            with side, side:
                return torch.ops.aten.nothing(x)

        with self.assertRaises(Exception):  # noqa: B017
            self.streams_of(fails)
        self.assertEqual(self.streams_of(lambda x, side, other: x + 1), "-")

    def test_block_gives_its_stream(self):
        def f(x, side, other):
            with side as entered, other:
                x = x + 1
                with entered:
                    x = x * 2
            return x, entered is side

        self.assertEqual(self.streams_of(f), "ab")
        _, is_side = torch.compile(f, backend="eager", fullgraph=True)(
            self.x, self.side, self.other
        )
        self.assertTrue(is_side)


if __name__ == "__main__":
    run_tests()
