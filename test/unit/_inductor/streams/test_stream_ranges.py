"""`_inductor.streams.ranges`: profiles show blocks on side streams."""

from types import SimpleNamespace

import torch
from torch._inductor.codegen import wrapper as upstream
from torch._inductor.utils import IndentedBuffer
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo.range_ops import range_mark, range_pop, range_push
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.streams import ranges
from torch_overlay._inductor.streams.plan import Plan
from torch_overlay._inductor.streams.switching import add_stream_ranges, RANGE_CALLS
from torch_overlay._inductor.streams.wrapper_lines import BeginRegion, EndRegion, OnStream, StreamLine


class Emitter:
    def __init__(self, is_idle=False):
        self.plan, self.is_idle = Plan(()), is_idle

    def if_multi_stream(self, text):
        return f"if multi_stream: {text}" if self.is_idle else text


class Launch(upstream.KernelCallLine):
    def __init__(self):
        pass


class Branch(upstream.EnterSubgraphLine):
    def __init__(self):
        pass


class TestShownBlocks(TestCase):
    def setUp(self):
        super().setUp()
        self.emitter = Emitter()

    def on(self, stream, name=""):
        return OnStream(self.emitter, stream, 0, name)

    def shown(self, *lines):
        """The lines of a region: statements, `launch`, and `push NAME` and `pop`."""
        begin, end = BeginRegion(self.emitter), EndRegion(self.emitter)
        found = []
        for line in add_stream_ranges(["first()", begin, *lines, end, "last()"]):
            if isinstance(line, StreamLine):
                line = line.text.replace("profiler_ranges.", "")
                line = line.replace("push('", "push ").replace("')", "").replace("()", "")
            elif isinstance(line, Launch):
                line = "launch"
            elif isinstance(line, Branch):
                line = "branch"
            found += [line] if isinstance(line, str) else []
        self.assertEqual((found[0], found[-1]), ("first()", "last()"))
        return found[1:-1]

    def test_block(self):
        found = self.shown(self.on(1, "a"), "del x", Launch(), "mm()", self.on(0), "mm()")
        wanted = ["del x", "push a", "launch", "mm()", "pop", "mm()"]
        self.assertEqual(found, wanted)

    def test_blocks_one_after_the_other(self):
        found = self.shown(self.on(1, "a"), Launch(), self.on(2, "b"), Launch())
        wanted = ["push a", "launch", "pop", "push b", "launch", "pop"]
        self.assertEqual(found, wanted)

    def test_nodes_of_one_stream_are_one_block(self):
        """The first of them names it."""
        found = self.shown(self.on(1, "a"), Launch(), self.on(1, "b"), Launch())
        self.assertEqual(found, ["push a", "launch", "launch", "pop"])

    def test_stream_without_work(self):
        self.assertEqual(self.shown(self.on(1, "a"), "del x"), ["del x"])

    def test_stream_without_a_name(self):
        self.assertEqual(self.shown(self.on(0), Launch()), ["launch"])

    def test_blocks_of_python(self):
        found = self.shown(self.on(1, "a"), "mm()", "if x:", "mm()")
        wanted = ["push a", "mm()", "pop", "if x:", "push a", "mm()", "pop"]
        self.assertEqual(found, wanted)
        found = self.shown(self.on(1, "a"), Launch(), Branch(), Launch())
        wanted = ["push a", "launch", "pop", "branch", "push a", "launch", "pop"]
        self.assertEqual(found, wanted)

    def test_ranges_of_the_program(self):
        written = []
        wrapper = SimpleNamespace(writeline=written.append)
        root = SimpleNamespace(imports=IndentedBuffer())
        for overload, *args in (
            (range_push, "nvtx", "r", None),
            (range_pop, "nvtx"),
            (range_push, "record_function", "r", None),
            (range_pop, "record_function"),
            (range_mark, "m"),
        ):
            node = SimpleNamespace(op_overload=overload, constant_args=args)
            self.assertTrue(ranges.write(wrapper, root, node))
        for line in written:
            self.assertTrue(line.startswith(RANGE_CALLS), line)
            found = self.shown(self.on(1, "a"), Launch(), line, Launch())
            wanted = ["push a", "launch", "pop", line, "push a", "launch", "pop"]
            self.assertEqual(found, wanted)

    def test_calls_that_keep_to_one_stream(self):
        self.emitter = Emitter(is_idle=True)
        found = self.shown(self.on(1, "a"), Launch())
        wanted = ["if multi_stream: push a", "launch", "if multi_stream: pop"]
        self.assertEqual(found, wanted)

    def test_region_in_a_region(self):
        outer = [self.on(1, "a"), Launch()]
        begin, end = BeginRegion(self.emitter), EndRegion(self.emitter)
        found = self.shown(*outer, begin, self.on(2, "b"), Launch(), end, Launch())
        wanted = ["push a", "launch", "push b", "launch", "pop", "launch", "pop"]
        self.assertEqual(found, wanted)

    def test_names_of_the_runtime(self):
        lines = add_stream_ranges([BeginRegion(self.emitter), self.on(1, "it's"), Launch(), EndRegion(None)])
        texts = [line.text for line in lines if isinstance(line, StreamLine)]
        with torch.profiler.profile() as profile:
            for text in texts:
                exec(text, {"profiler_ranges": profiler_ranges})
        self.assertIn("it's", {event.name for event in profile.events()})
