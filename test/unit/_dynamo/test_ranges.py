"""Ranges of NVTX and of the profiler in a traced program."""

import contextlib
from unittest import mock

import torch
import torch._dynamo.config
import torch._dynamo.test_case
from torch._dynamo.exc import Unsupported

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream
from torch_overlay import config


class TestRangeTracing(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.side = torch.ones(2), stream(8)
        self.graphs = []  # of each, the operations and their streams
        self.enterContext(accelerator(lambda device=None: stream(7)))
        self.enterContext(config.patch(streams=True, nvtx=True))

    def compile(self, function, fullgraph=True):
        def backend(gm, inputs):
            found = []
            for node in list(gm.graph.nodes):
                target = str(node.target)
                if "range_" in target:
                    name = target.split(".")[1].removeprefix("range_")
                    found.append((name, *node.args))
                    gm.graph.erase_node(node)
                elif node.op == "call_function" and isinstance(node.meta.get("example_value"), torch.Tensor):
                    found.append(node.name)
            self.graphs.append(found)
            gm.graph.eliminate_dead_code()
            gm.recompile()
            return gm

        return torch.compile(function, backend=backend, fullgraph=fullgraph)

    def traced(self, function, *args, fullgraph=True):
        """Return the operations of the function's graphs, and its ranges."""
        self.compile(function, fullgraph)(self.x, self.side, *args)
        found, self.graphs = self.graphs, []
        return found[0] if len(found) == 1 else found

    def test_block(self):
        def f(x, side):
            with torch.cuda.stream(side), torch.cuda.nvtx.range("part {}", 1):
                x = x + 1
            return x * 2

        opened, closed = ("push", "nvtx", "part 1", None), ("pop", "nvtx")
        self.assertEqual(self.traced(f), [opened, "add", closed, "mul"])

    def test_calls(self):
        def f(x, side):
            with side:
                torch.cuda.nvtx.range_push("a")
                x = x + 1
                torch.cuda.nvtx.mark("here")
                torch.cuda.nvtx.range_pop()
            return x * 2

        found = self.traced(f)
        self.assertEqual(found[0], ("push", "nvtx", "a", None))
        self.assertEqual(found[1:], ["add", ("mark", "here"), ("pop", "nvtx"), "mul"])

    def test_decorated_function(self):
        @torch.cuda.nvtx.range("branch")
        def branch(x):
            return x + 1

        def f(x, side):
            with side:
                return branch(x)

        opened, closed = ("push", "nvtx", "branch", None), ("pop", "nvtx")
        self.assertEqual(self.traced(f), [opened, "add", closed])

    def test_record_function(self):
        def f(x, side):
            with side, torch.profiler.record_function("a"):
                x = x + 1
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.profiler.record_function("b"))
                return x * 2

        kind = "record_function"
        first = [("push", kind, "a", None), "add", ("pop", kind)]
        second = [("push", kind, "b", None), "mul", ("pop", kind)]
        self.assertEqual(self.traced(f), first + second)

    def test_record_function_of_the_other_option(self):
        def f(x, side):
            with side, torch.profiler.record_function("a"):
                return x + 1

        with torch._dynamo.config.patch(capture_profiler_record_function=True):
            found = self.traced(f)
        kind = "record_function"
        self.assertEqual(found, [("push", kind, "a", None), "add", ("pop", kind)])

    def test_ranges_that_nobody_wants(self):
        def f(x, side):
            with side, torch.cuda.nvtx.range("a"):
                torch.cuda.nvtx.mark("here")
                with torch.profiler.record_function("b"):
                    return x + 1

        for nvtx in (False, None):
            with config.patch(nvtx=nvtx):
                self.assertEqual(self.traced(f), ["add"])
        with torch.profiler.profile(), config.patch(nvtx=None):
            self.assertEqual(len(self.traced(f)), 6)

    def test_range_across_a_graph_break(self):
        @torch._dynamo.disable
        def break_graph():
            pass

        def f(x, side):
            torch.cuda.nvtx.range_push("a")
            with side:
                x = x + 1
            break_graph()
            with side:
                x = x * 2
            torch.cuda.nvtx.range_pop()
            return x

        with config.patch(nvtx=False):
            first, second = self.traced(f, fullgraph=False)
        self.assertEqual(first, [("push", "nvtx", "a", None), "add"])
        self.assertEqual(second, ["mul", ("pop", "nvtx")])

    def test_frame_without_streams_breaks_the_graph(self):
        def f(x, side):
            x = x + 1
            torch.cuda.nvtx.mark("here")
            return x * 2

        mark = torch.cuda.nvtx._nvtx
        with mock.patch.object(mark, "markA", create=True):
            found = self.traced(f, fullgraph=False)
        self.assertEqual(found, [["add"], ["mul"]])

    def test_name_that_only_the_run_knows(self):
        def f(x, side):
            with side, torch.cuda.nvtx.range(x):
                return x + 1

        with self.assertRaisesRegex(Unsupported, f"{config.__name__}.nvtx = False"):
            self.traced(f)
