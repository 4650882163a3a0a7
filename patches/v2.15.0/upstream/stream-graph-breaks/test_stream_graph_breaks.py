# Owner(s): ["module: dynamo"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._dynamo.test_case import run_tests, TestCase
from torch._dynamo.testing import EagerAndRecordGraphs


def stream(stream_id):
    return torch.Stream(stream_id=stream_id, device_index=0, device_type=1)


class TestStreamGraphBreaks(TestCase):
    def setUp(self):
        super().setUp()
        self.entered = []  # ids of the streams that are current now
        self.seen = []  # the same, at each graph break
        for name, fake in (
            ("__enter__", lambda ctx: self.entered.append(ctx.stream.stream_id)),
            ("__exit__", lambda ctx, *exc: self.entered.pop() and None),
        ):
            patch = mock.patch.object(torch.cuda.StreamContext, name, fake)
            patch.start()
            self.addCleanup(patch.stop)

        @torch._dynamo.disable
        def break_graph(value=None):
            self.seen.append(list(self.entered))
            return value

        self.break_graph = break_graph
        self.x, self.side, self.other = torch.ones(3), stream(7), stream(9)

    def streams_of(self, function, *args):
        """Compile and call; return a letter for each operation's stream, in the order
        in which a graph uses streams; "-" is no stream, and "|" is between graphs."""
        backend = EagerAndRecordGraphs()
        compiled = torch.compile(function, backend=backend)
        self.result = compiled(self.x, *args)
        self.assertEqual(self.entered, [])
        texts = []
        for gm in backend.graphs:
            found = [
                node.meta.get("custom", {}).get("stream")
                for node in gm.graph.nodes
                if isinstance(node.meta.get("example_value"), torch.Tensor)
                and node.op == "call_function"
            ]
            used = dict.fromkeys(index for index in found if index is not None)
            letters = dict(zip(used, "abc"))
            texts.append("".join(letters.get(index, "-") for index in found))
        return "|".join(texts)

    def test_break_inside_of_a_context(self):
        def f(x, side):
            with torch.cuda.stream(side):
                x = x + 1
                self.break_graph()
                x = x * 2
            return x - 3

        self.assertEqual(self.streams_of(f, self.side), "a|a-")
        self.assertEqual(self.seen, [[7]])
        self.assertEqual(self.result, self.x)

    def test_break_inside_of_a_block_of_the_stream(self):
        def f(x, side):
            with side:
                x = x + 1
                self.break_graph()
                x = x * 2
            return x - 3

        self.assertEqual(self.streams_of(f, self.side), "a|a-")
        self.assertEqual(self.seen, [[7]])

    def test_break_inside_of_two(self):
        def f(x, side, other):
            with torch.cuda.stream(side):
                x = x + 1
                with torch.cuda.stream(other):
                    x = x * 2
                    self.break_graph()
                    x = x - 3
                self.break_graph()
                x = x / 4
            return x

        found = self.streams_of(f, self.side, self.other)
        self.assertEqual(found, "ab|a|a")
        self.assertEqual(self.seen, [[7, 9], [7]])

    def test_context_that_is_made_before_and_entered_after(self):
        def f(x, side):
            context = torch.cuda.stream(side)
            x = x + 1
            self.break_graph()
            with context:
                x = x * 2
            return x - 3

        self.assertEqual(self.streams_of(f, self.side), "-|a-")
        self.assertEqual(self.seen, [[]])

    def test_stream_in_a_local_variable_is_a_value(self):
        def f(x, module):
            mine = module.side
            x = x + 1
            self.break_graph()
            with torch.cuda.stream(mine):
                x = x * 2
            return x, mine

        found = self.streams_of(f, SimpleNamespace(side=self.side))
        self.assertEqual(found, "-|a")
        self.assertIs(self.result[1], self.side)

    def test_stream_on_the_stack_is_a_value(self):
        def f(x, module):
            x = x + 1
            pair = (module.side, self.break_graph(4))
            return x * 2, pair

        found = self.streams_of(f, SimpleNamespace(side=self.side))
        self.assertEqual(found, "-|-")
        self.assertEqual(self.result[1], (self.side, 4))
        self.assertIs(self.result[1][0], self.side)


if __name__ == "__main__":
    run_tests()
