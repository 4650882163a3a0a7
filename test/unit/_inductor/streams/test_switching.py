"""`_inductor.streams.switching`: memory that is reused, and the streams that lines run on."""

from types import SimpleNamespace

import torch
from torch._inductor import config
from torch._inductor.codegen import wrapper as upstream
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import device, Program, written
from torch_overlay._dynamo.ops import range_mark, range_pop, range_push
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.notes import WrapperNotes
from torch_overlay._inductor.streams.codegen import write_range
from torch_overlay._inductor.streams.plan import Plan
from torch_overlay._inductor.streams.region_names import RegionNames
from torch_overlay._inductor.streams.switching import (
    BeginRegion,
    EndRegion,
    needs,
    OnStream,
    PlacedKernelCall,
    RANGE_CALLS,
    share_memory,
    StreamLine,
    switch_streams,
    SwitchLine,
)


aten = torch.ops.aten
OTHER_DEVICE = 1_000_001  # the caller's stream of device 1


class Emitter:
    multi_stream = "multi_stream"

    def __init__(self, memory=(), idle_streams=()):
        self.plan = Plan((), memory=dict(memory))
        self.idle_streams = list(idle_streams)

    def write_prologue(self, code):
        code.writeline("enter()")

    def write_epilogue(self, code):
        code.writeline("leave()")

    kernel_call, restores_streams = RegionNames.kernel_call, True
    switch = RegionNames.switch

    def stream(self, stream):
        return f"stream{stream}"

    def raw_stream(self, stream):
        return f"stream{stream}_raw"

    def if_multi_stream(self, text):
        return f"if multi_stream: {text}" if self.idle_streams else text


class Launch(upstream.KernelCallLine):
    """A launch of a kernel, which is written as the stream that it is on."""

    def __init__(self, triton=True, device="cuda:0"):
        self.wrapper = SimpleNamespace()
        self.triton, self.device = triton, torch.device(device)

    def codegen(self, code):
        stream = WrapperNotes.of(self.wrapper).raw_stream
        code.writeline(f"kernel.run(stream={stream})")


class LinesTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.emitter = Emitter()

    def begin(self, *products):
        """Schedule a product on each of the streams, of the sizes and devices."""
        program, results = Program(), []
        for stream, size, where in products:
            x = program.input(size, size, device=where)
            results.append(program.call(aten.mm.default, x, x, stream=stream))
            results[-1] = program.call(aten.mm.default, results[-1], x, stream=stream)
        self.scheduler = self.enterContext(program.scheduled(*results))
        self.wrapper = V.graph.wrapper_code

    def line(self, kind, name):
        self.scheduler.current_node = self.scheduler.name_to_fused_node[name.replace("buf", "op")]
        return kind(self.wrapper, V.graph.get_buffer(name))

    def allocate(self, name):
        return self.line(upstream.AllocateLine, name)

    def on(self, stream, device=0):
        return OnStream(self.emitter, stream, device)

    def region(self, *lines):
        return [BeginRegion(self.emitter), *lines, EndRegion(self.emitter)]

    def switched(self, *lines):
        with device():
            return written(switch_streams(self.region(*lines)))


class TestSwitches(LinesTestCase):
    def test_launches_take_handles(self):
        found = self.switched(
            self.on(1),
            Launch(),
            "del x",
            "# comment",
            "assert x",
            "",
            Launch(triton=False, device="cpu"),
            self.on(2),
            Launch(triton=False),
            self.on(None, None),
            Launch(),
            "on_the_host()",
        )
        self.assertExpectedInline(
            found,
            """\
enter()
kernel.run(stream=stream1_raw)
del x
# comment
assert x

kernel.run(stream=None)
kernel.run(stream=stream2_raw)
kernel.run(stream=None)
on_the_host()
leave()""",
        )

    def test_library_kernels(self):
        found = self.switched("mm(a)", self.on(1), "mm(b)", "mm(c)", self.on(0), "mm(d)", StreamLine("r()"))
        self.assertExpectedInline(
            found,
            """\
enter()
try:
    mm(a)
    restore_stream(stream1)
    mm(b)
    mm(c)
    restore_stream(stream0)
    mm(d)
finally:
    restore_stream(stream0)
r()
leave()""",
        )

    def test_allocations(self):
        """Of memory of the stream, of another stream's, and of the host."""
        self.begin((1, 4, "cuda:0"), (0, 4, "cuda:0"), (0, 4, "cpu"))
        self.emitter = Emitter({"buf0": 1, "buf2": 2})
        lines = [self.allocate(name) for name in ("buf0", "buf2", "buf3", "buf4")]
        found = [needs(line, 5, self.emitter) for line in lines]
        self.assertEqual(found, [1, 2, 5, None])
        found = self.switched(self.on(1), *lines[:2]).splitlines()
        self.assertEqual(found[2].strip(), "restore_stream(stream1)")
        self.assertIn("buf0 = empty_strided_cuda((4, 4)", found[3])
        self.assertEqual(found[4].strip(), "restore_stream(stream2)")

    def test_device_of_an_allocation(self):
        """It may come before anything else has said which device is meant."""
        self.begin((1, 4, "cuda:1"))
        self.emitter = Emitter({"buf0": 3})
        found = self.switched(self.allocate("buf0"), self.on(3, 1), "mm(a)")
        self.assertIn(f"finally:\n    restore_stream(stream{OTHER_DEVICE})", found)
        self.assertEqual(found.count("(stream3)"), 1)

    def test_guards_of_devices(self):
        """Inside of one, a switch of the stream may also set the device."""
        guard = upstream.EnterDeviceContextManagerLine(0, {})
        guard.codegen = lambda code: code.writeline("guard")
        end = upstream.ExitDeviceContextManagerLine()
        end.codegen = lambda code: code.writeline("end")
        found = self.switched(self.on(1), guard, "mm(a)", end, self.on(2), "mm(b)")
        lines = [line.strip() for line in found.splitlines()]
        wanted = ["guard", "set_stream(stream1)", "mm(a)", "end"]
        self.assertEqual(lines[2:6], wanted)
        self.assertEqual(lines[6], "restore_stream(stream2)")

    def test_several_devices(self):
        lines = self.on(1, 0), "mm(a)", self.on(2, 1), "mm(b)", self.on(1, 0), "mm(c)"
        found = [line.strip() for line in self.switched(*lines).splitlines()]
        self.assertEqual(found.count("restore_stream(stream1)"), 1)
        wanted = ["finally:", f"restore_stream(stream{OTHER_DEVICE})"]
        self.assertEqual(found[-4:], [*wanted, "restore_stream(stream0)", "leave()"])

    def test_region_in_a_region(self):
        outer = self.emitter
        self.emitter = Emitter()
        inner = self.region(self.on(3), "mm(b)")
        self.emitter = outer
        found = self.switched(self.on(1), *inner, "mm(c)").splitlines()
        switch = found.index("    restore_stream(stream1)")
        self.assertEqual(found[switch + 1], "    enter()")
        self.assertEqual(found.count("    restore_stream(stream1)"), 1)
        self.assertIn("        restore_stream(stream3)", found)

    def test_calls_that_keep_to_one_stream(self):
        self.emitter = Emitter(idle_streams=[1])
        found = self.switched(self.on(1), "mm(a)").splitlines()
        self.assertIn("    if multi_stream: restore_stream(stream1)", found)
        self.assertIn("    if multi_stream: restore_stream(stream0)", found)

    def test_lines_outside_of_regions(self):
        lines = ["mm(a)", Launch()]
        self.assertEqual(list(map(id, switch_streams(lines))), list(map(id, lines)))


class TestSharedMemory(LinesTestCase):
    def shared(self, first=4, second=4, idle=(1,), peak=0):
        """Free a buffer of stream 1, then allocate one of stream 0."""
        self.begin((1, first, "cuda:0"), (0, second, "cuda:0"))
        self.wrapper.estimate_peak = SimpleNamespace(
            overall_peak_memory=100,
            peak_between=lambda free, allocate: peak,
            update_peak_between=lambda free, allocate: None,
        )
        self.emitter = Emitter({"buf0": 1, "buf2": 0}, idle)
        lines = [self.line(upstream.FreeIfNotReusedLine, "buf0"), self.allocate("buf2")]
        self.scheduler.get_buf_stream = {"buf0": 1, "buf2": 0}.get
        lines[1].scheduler_node_index += 5  # other nodes are in between
        found = share_memory(self.region(*lines))[1:-1]
        self.assertEqual([needs(line, 7, self.emitter) for line in found], [None, 0])
        return written(found)

    def test_calls_that_keep_to_one_stream(self):
        found = self.shared().splitlines()
        self.assertEqual(found[0], "if multi_stream: del buf0")
        self.assertIn("if multi_stream: buf2 = empty_strided_cuda((4, 4)", found[1])
        self.assertEqual(found[2], "else: buf2 = buf0; del buf0  # reuse")

    def test_other_regions_and_buffers(self):
        for options in ({"idle": ()}, {"second": 8}, {"peak": 100}):
            found = self.shared(**options)
            self.assertNotIn("multi_stream", found)
            self.assertTrue(found.startswith("del buf0\nbuf2 = empty_strided_cuda"))

    @config.patch(allow_buffer_reuse=False)
    def test_reuse_that_is_off(self):
        self.assertNotIn("multi_stream", self.shared())


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
        with device():
            shown = switch_streams(["first()", begin, *lines, end, "last()"])
        for line in shown:
            if isinstance(line, SwitchLine):
                continue
            if isinstance(line, StreamLine):
                line = line.text.replace("profiler_ranges.", "")
                line = line.replace("push('", "push ").replace("')", "").replace("()", "")
            elif isinstance(line, (Launch, PlacedKernelCall)):
                line = "launch"
            elif isinstance(line, Branch):
                line = "branch"
            found += [line] if isinstance(line, str) else []
        self.assertEqual((found[0], found[-1]), ("first()", "last()"))
        return found[1:-1]

    def test_blocks(self):
        on, launch = self.on, Launch()
        for hazard, lines, wanted in (
            ("block", [on(1, "a"), "del x", launch, "mm()", on(0), "mm()"], "del x; push a; launch; mm(); pop; mm()"),
            ("two", [on(1, "a"), launch, on(2, "b"), launch], "push a; launch; pop; push b; launch; pop"),
            ("two nodes of a stream", [on(1, "a"), launch, on(1, "b"), launch], "push a; launch; launch; pop"),
            ("stream without work", [on(1, "a"), "del x"], "del x"),
            ("stream without a name", [on(0), launch], "launch"),
            ("Python's", [on(1, "a"), "mm()", "if x:", "mm()"], "push a; mm(); pop; if x:; push a; mm(); pop"),
            ("branch", [on(1, "a"), launch, Branch(), launch], "push a; launch; pop; branch; push a; launch; pop"),
        ):
            with self.subTest(hazard):
                self.assertEqual(self.shown(*lines), wanted.split("; "))

    def test_ranges_of_the_program(self):
        written = []
        wrapper = SimpleNamespace(writeline=written.append, imports=IndentedBuffer())
        for overload, *args in (
            (range_push, "nvtx", "r", None),
            (range_pop, "nvtx"),
            (range_push, "record_function", "r", None),
            (range_pop, "record_function"),
            (range_mark, "m"),
        ):
            node = SimpleNamespace(op_overload=overload, constant_args=args)
            self.assertTrue(write_range(wrapper, node))
        for line in written:
            self.assertTrue(line.startswith(RANGE_CALLS), line)
            found = self.shown(self.on(1, "a"), Launch(), line, Launch())
            wanted = ["push a", "launch", "pop", line, "push a", "launch", "pop"]
            self.assertEqual(found, wanted)

    def test_calls_that_keep_to_one_stream(self):
        self.emitter = Emitter(idle_streams=[1])
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
        lines = switch_streams([BeginRegion(self.emitter), self.on(1, "it's"), Launch(), EndRegion(None)])
        texts = [line.text for line in lines if isinstance(line, StreamLine)]
        with torch.profiler.profile() as profile:
            for text in texts:
                exec(text, {"profiler_ranges": profiler_ranges})
        self.assertIn("it's", {event.name for event in profile.events()})
