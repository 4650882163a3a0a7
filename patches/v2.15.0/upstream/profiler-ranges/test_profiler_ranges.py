# Owner(s): ["module: inductor"]

import threading
from unittest import mock

import torch
from torch._inductor import profiler_ranges
from torch._inductor.profiler_ranges import pop, push, within
from torch.profiler import profile
from torch.testing._internal.common_utils import run_tests, TestCase


class TestProfilerRanges(TestCase):
    def setUp(self):
        super().setUp()
        self.log, self.depth = [], 0
        for name, take in (("range_push", self.opened), ("range_pop", self.closed)):
            patch = mock.patch.object(torch.cuda.nvtx, name, take)
            patch.start()
            self.addCleanup(patch.stop)

    def opened(self, name):
        self.log.append((self.depth, name))
        self.depth += 1

    def closed(self):
        self.depth -= 1

    def parents(self, function):
        """The ranges that torch.profiler shows, each with the one around it."""
        with profile() as found:
            function()
        names = {name for _, name in self.log}
        return {
            event.name: event.cpu_parent.name if event.cpu_parent else None
            for event in found.events()
            if event.name in names
        }

    def test_calls_nest(self):
        inner = within("a graph", lambda x: x + 1)
        outer = within("a call", lambda x, y: inner(x) * y)
        results = []
        found = self.parents(lambda: results.append(outer(2, 5)))
        self.assertEqual(results, [15])
        self.assertEqual(self.log, [(0, "a call"), (1, "a graph")])
        self.assertEqual(found, {"a call": None, "a graph": "a call"})
        self.assertEqual(self.depth, 0)

    def test_function_without_a_name(self):
        self.assertIs(within("", len), len)

    def test_ranges_of_generated_code(self):
        def generated():
            push("side stream 1: model.py:4")
            pop()
            push("side stream 1: model.py:7")
            pop()

        found = self.parents(generated)
        self.assertEqual(list(found.values()), [None, None])
        self.assertEqual([depth for depth, _ in self.log], [0, 0])

    def test_function_that_raises(self):
        def fails():
            push("inner")
            raise ZeroDivisionError

        def run():
            push("around")
            with self.assertRaises(ZeroDivisionError):
                within("outer", fails)()
            self.assertEqual(self.depth, 1)
            push("after")
            pop()
            pop()

        found = self.parents(run)
        self.assertEqual(self.depth, 0)
        expected = {"around": None, "outer": "around", "inner": "outer"}
        self.assertEqual(found, {**expected, "after": "around"})

    def test_open_ranges_are_those_of_the_thread(self):
        push("here")
        counts = []

        def other():
            counts.append(len(profiler_ranges._open.ranges))
            within("there", lambda: None)()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        self.assertEqual(counts, [0])
        self.assertEqual(self.depth, 1)
        pop()


if __name__ == "__main__":
    run_tests()
