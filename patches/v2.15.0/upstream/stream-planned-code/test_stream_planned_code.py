# Owner(s): ["module: inductor"]

import textwrap

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo._streams import range_ops, registry
from torch._functorch._streams.facts import note_fact
from torch._functorch._streams.tokens import CALLER
from torch._inductor import config
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import compiled_graph, Program


aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
PLANNED = {"triton.streams": True, "triton.fold_branches_below_us": 0.0}


class CodeTestCase(TestCase):
    def setUp(self):
        super().setUp()
        for forget in (numbering.reset_user_object_tracking, registry.reset):
            forget()
            self.addCleanup(forget)
        self.program = Program()
        self.x = self.program.input(64, 64)

    def call(self, target, *args, stream=0, **fact):
        node = self.program.call(target, *args, stream=stream)
        tokens = (CALLER,) if stream else ()
        note_fact(node, **{"after": tokens, "before": tokens, **fact})
        return node

    def product(self, *args, **where):
        return self.call(aten.mm.default, *(args or [self.x] * 2), **where)

    def fork_and_join(self):
        side = self.call(aten.sin.default, self.product(stream=1), stream=1)
        return self.call(aten.add.Tensor, side, self.product())

    def generate(self, *results, **options):
        """The module that is generated for the graph, with a plan of its streams."""
        self.program.output(*results)
        scheduled = options.pop("scheduled", {})
        with config.patch({**PLANNED, **options}):
            return self.program.generated(**scheduled)

    def body(self, text, function="call"):
        """The lines of a function, without comments, checks and those of devices."""
        lines = iter(textwrap.dedent(text).splitlines())
        while not (line := next(lines)).lstrip().startswith(f"def {function}("):
            pass
        indent = len(line) - len(line.lstrip()) + 4
        found = []
        for line in lines:
            text = line.strip()
            if not text.startswith(("#", "assert_", "args.clear", "torch.cuda.set_")):
                found.append(line[indent:])
            if text.startswith("return"):
                return "\n".join(found)


class TestRegion(CodeTestCase):
    def test_fork_and_join(self):
        text = self.generate(self.fork_and_join())
        self.assertExpectedInline(
            self.body(text),
            """\
x0, = args
frame0, ev1, stream1_raw, stream0_raw, stream1, stream0, = _region0.enter()
try:
    with torch.cuda._DeviceGuard(0):
        set_stream(stream1)
        buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(x0, x0, out=buf0)
        buf1 = buf0; del buf0  # reuse
        triton_poi_fused_0.run(buf1, 4096, stream=stream1_raw)
        ev1.record(stream1_raw)
        set_stream(stream0)
        buf2 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(x0, x0, out=buf2)
        ev1.wait(stream0_raw)
        del x0
        buf3 = buf2; del buf2  # reuse
        triton_poi_fused_1.run(buf3, buf1, 4096, stream=stream0_raw)
finally:
    restore_stream(stream0)
frame0.leave()
return (buf3, )""",
        )
        entry = "entry=(('record', 'ev0', 'stream0'), ('wait', 'ev0', 'stream1')),"
        self.assertIn(entry, text)

    def test_option_is_off(self):
        text = self.generate(self.fork_and_join(), **{"triton.streams": False})
        self.assertNotIn("_region0", text)
        self.assertIn("stream1 = _get_stream_by_index(1)", text)
        self.assertIn("with stream1:", text)

    def test_program_without_streams(self):
        texts = []
        for planned in (False, True):
            self.setUp()
            results = self.call(aten.sin.default, self.product())
            texts.append(self.generate(results, **{"triton.streams": planned}))
        self.assertEqual(*texts)

    def test_memory_that_two_streams_use(self):
        """It isn't written in place, nor freed to a stream that didn't wait."""
        side = self.product(stream=1)
        other = self.call(aten.sin.default, side)
        last = self.product(self.product(other, self.x), self.x, stream=1)
        found = self.body(self.generate(last)).splitlines()
        lines = [line.strip() for line in found]
        self.assertNotIn("buf1 = buf0; del buf0  # reuse", lines)
        freed = [i for i, line in enumerate(lines) if line.startswith("del buf0")]
        reuse = [i for i, line in enumerate(lines) if "= buf0; del buf0" in line]
        waits = [
            i for i, line in enumerate(lines) if line.endswith(".wait(stream1_raw)")
        ]
        self.assertGreater(min(freed + reuse), max(waits))

    def test_pools_of_memory_planning(self):
        text = self.generate(self.fork_and_join(), memory_planning=True)
        self.assertNotIn("pool1 =", text)
        self.assertIn("buf3 = buf2; del buf2", text)
        self.setUp()
        made = self.call(aten.sin.default, self.product())
        text = self.generate(self.product(made, made), memory_planning=True)
        self.assertIn("pool1 =", text)

    def test_copy_to_the_host(self):
        """The host waits where it reads the copy."""
        made = self.product()
        copy = self.call(prims.device_put.default, made, torch.device("cpu"), True)
        other = self.product(made, made, stream=1)
        text = self.body(self.generate(self.call(aten.sin.default, copy), other))
        self.assertExpectedInline(
            text,
            """\
x0, = args
frame0, ev0, stream0_raw, ev1, stream1_raw, ev2, stream1, stream0, = _region0.enter()
try:
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(x0, x0, out=buf0)
        del x0
        ev0.record(stream0_raw)
    buf1 = empty_strided_cpu_pinned((64, 64), (64, 1), torch.float32)
    buf1.copy_(buf0, True)
    ev1.record(stream0_raw)
    ev0.wait(stream1_raw)
    with torch.cuda._DeviceGuard(0):
        set_stream(stream1)
        buf2 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(buf0, buf0, out=buf2)
        ev2.record(stream1_raw)
        ev1.synchronize()
    buf3 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    cpp_fused_0(buf1, buf3)
    del buf1
finally:
    restore_stream(stream0)
frame0.leave()
return (buf3, buf2, )""",
        )

    def test_operations_that_somebody_sees(self):
        made = self.fork_and_join()
        self.call(streams.record_event.default, 5, 1)
        self.call(range_ops.range_mark, "here")
        text = self.body(self.generate(made))
        self.assertIn("event5.record(stream1)\n", text)
        self.assertIn("torch.cuda.nvtx.mark('here')\n", text)
        self.assertNotIn("torch.ops.", text)

    def test_input_that_is_not_aligned(self):
        made = self.product(self.x, self.program.input(64, 64), stream=1)
        self.call(aten.copy_.default, self.x, made, stream=1)
        options = {"scheduled": {"inputs_to_check": [0, 1]}}
        text = self.body(self.generate(made, **options))
        self.assertIn("x0 = aligned(x0_orig, stream1)", text)
        self.assertIn("if x0 is not x0_orig: write_back(x0_orig, x0, stream1)", text)
        self.assertIn("x1 = copy_if_misaligned(x1_orig)", text)

    def test_names_in_profiles(self):
        text = self.generate(self.fork_and_join(), **{"triton.nvtx": True})
        self.assertIn("profiler_ranges.push('side stream 1')", self.body(text))

    def test_other_wrappers(self):
        message = "only the Python wrapper can generate them by a plan"
        with self.assertRaisesRegex(RuntimeError, message):
            self.generate(self.fork_and_join(), scheduled={"cpp_wrapper": True})


class TestPartitions(CodeTestCase):
    def test_order_around_a_partition(self):
        made = self.fork_and_join()
        self.call(streams.record_event.default, 5, 1)
        options = {"triton.cudagraphs": True, "graph_partition": True}
        text = self.generate(made, **options)
        self.assertExpectedInline(
            self.body(text),
            """\
x0, = args
frame_outer, = _outer.enter()
with torch.cuda._DeviceGuard(0):
    frame0, event5, stream1, = _region0.enter()
    event5.record(stream1)
    frame0.leave()
    partition0_args = [x0,]
    del x0
    (buf3,) = self.partitions[0](partition0_args)
    del partition0_args
frame_outer.leave()
return (buf3, )""",
        )
        self.assertExpectedInline(
            self.body(text, "partition_0"),
            """\
x0, = args
frame1, ev1_1, stream1_1_raw, stream0_1_raw, stream1_1, stream0_1, = _region1.enter()
try:
    restore_stream(stream1_1)
    buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
    extern_kernels.mm(x0, x0, out=buf0)
    buf1 = buf0; del buf0  # reuse
    triton_poi_fused_0.run(buf1, 4096, stream=stream1_1_raw)
    ev1_1.record(stream1_1_raw)
    restore_stream(stream0_1)
    buf2 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
    extern_kernels.mm(x0, x0, out=buf2)
    ev1_1.wait(stream0_1_raw)
    del x0
    buf3 = buf2; del buf2  # reuse
    triton_poi_fused_1.run(buf3, buf1, 4096, stream=stream0_1_raw)
finally:
    restore_stream(stream0_1)
frame1.leave()
return (buf3, )""",
        )


class TestCompiledGraph(CodeTestCase):
    def test_inputs_that_are_left_to_the_runtime(self):
        self.program.output(self.product())
        with self.program.scheduled():
            V.graph._region_aligned_inputs = frozenset([0])
            compiled = compiled_graph(inputs_to_check=(0, 2))
        self.assertEqual(list(compiled.inputs_to_check), [2])


if __name__ == "__main__":
    run_tests()
