"""User streams through Inductor: the program corpus, the hazards worth reading, the passes that could lose a placement.

Three tiers. `TestCorpus` compiles each program without a GPU, runs what was generated on a simulated device (`check`,
`check_wrapper`) and looks for whatever must not be in it. `TestHazards` and `TestPasses` show plans and wrappers as
goldens. `TestGpu` runs each program on a GPU under injected delays and compares it with ordered eager.

`# stream n` in a graph is a placement; streams have numbers per graph, and 0, the current stream of the caller, isn't
written.
"""

import re
from typing import Any
from unittest import mock

import corpus
import torch
import torch.nn.functional as F
from corpus import compile_program, mode_of
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stream_programs import by_name, gpu, Program, PROGRAMS
from stream_programs._program import fork, join
from torch_overlay import config
from torch_overlay._inductor.streams import runtime
from torch_overlay._inductor.streams.region_spec import RegionSpec
from torch_overlay._inductor.streams.runtime import aligned, EventFrame, EventRegion, write_back
from torch_overlay.analysis import check_wrapper
from torch_overlay.testing import compile_only, Compiled, observe, simulated_gpu


FORWARD = [p for p in PROGRAMS if not p.name.startswith("train_")]  # the others: test/functorch
NAMES = [p.name for p in FORWARD]
PAIRS = corpus.cases(FORWARD)
ON_GPU = corpus.cases(p for p in PROGRAMS if p in FORWARD or p.group.startswith("training"))
MISALIGNED = [(p.name, mode) for p in PROGRAMS if "misaligned" in p.name for mode in ("default", "reduce-overhead")]

# What a wrapper must not contain: context managers, operators of the dispatcher, upstream's way to find streams.
FORBIDDEN = ("with torch.cuda.stream", "with stream", "with default_stream", "_get_stream_by_index", "control_deps")
# What only the run knows.
ASKING = "query_event|query_stream|elapsed_time|stream_handle|stream_id|same_stream|is_capturing"
FORBIDDEN_OPERATORS = re.compile(rf"torch\.ops\.streams\.(?!synchronize_device|{ASKING})\w+")
HOST_WAIT = re.compile(r"\.synchronize\(\)|synchronize_device|\.item\(\)")


def compiled(name: str, mode: str | None = None, **kwargs: Any) -> Compiled:
    return compile_program(by_name(name), mode, **kwargs)[0]


def lines_of(seen: Compiled, pattern: str) -> str:
    """The lines of the calls in which the pattern is found."""
    return "".join(f"{line.strip()}\n" for line in seen.calls().splitlines() if re.search(pattern, line))


def complete(wrapper: str) -> bool:
    """False for the code of a subgraph, which is part of another wrapper."""
    return "async_compile = " in wrapper


@instantiate_parametrized_tests
class TestCorpus(TestCase):
    """Each program compiles, in one graph unless it breaks one on purpose, to a wrapper that orders what it must."""

    def check(self, name: str, mode: str | None, **kwargs: bool) -> None:
        self.look_at(by_name(name), mode, compiled(name, mode, **kwargs))

    def look_at(self, program: Program, mode: str | None, seen: Compiled) -> None:
        if program.fullgraph:
            self.assertEqual([str(b) for b in seen.graph_breaks], [])
        for text in (*seen.graphs, *seen.wrappers):
            for pattern in FORBIDDEN:
                self.assertNotIn(pattern, text)
        self.assertNotRegex("\n".join(seen.wrappers), FORBIDDEN_OPERATORS)
        for wrapper in seen.wrappers:
            compile(wrapper, "wrapper", "exec")
        if not program.host_reads and program.group != "compute":
            self.assertNotRegex(seen.calls(), HOST_WAIT)
        # A captured partition owns its inputs; elsewhere the caller still has them.
        self.check_races(program, seen, owned=mode is not None)

    def check_races(self, program: Program, seen: Compiled, owned: bool) -> None:
        # Of several frames none sees what the others ordered; of two devices the model knows one.
        if not program.fullgraph or program.frames or program.devices > 1:
            return
        for wrapper in filter(complete, seen.wrappers):
            report = check_wrapper(wrapper, joined=program.finish is None, owned=owned)
            self.assertTrue(report.ok, f"{report}\n{wrapper}")

    @parametrize("name,mode", form.sampled(PAIRS, 25))
    def test_compiles(self, name: str, mode: str) -> None:
        """No race, and no promise of eager lost, either."""
        report = corpus.check_program(by_name(name), mode_of(mode))
        self.assertEqual(corpus.findings(report), [], str(report))
        self.assertEqual(corpus.needless(by_name(name), report), [])
        self.look_at(by_name(name), mode_of(mode), report.compiled)

    def test_streams_inside_of_nested_regions_are_handed_over_under_reduce_overhead(self) -> None:
        """A captured partition forks them, so the caller's work on them is ordered around all partitions."""
        wrapper = compiled("stream_inside_nested_region", "reduce-overhead").wrappers[-1]
        self.assertIn("frame_outer, = _outer.enter()", wrapper)
        streams = "streams=(-2, 1),  # stream0_outer, stream1_outer"
        self.assertIn(f"_outer = region(\n    device=0,\n    {streams}\n", wrapper)

    def test_streams_of_two_devices_under_reduce_overhead(self) -> None:
        """The boundary around all partitions orders streams of both devices, and no partition changes the device."""
        for sleeps in (False, True):
            (wrapper,) = compiled("streams_of_two_devices", "reduce-overhead", sleeps=sleeps).wrappers
            compile(wrapper, "wrapper", "exec")
            self.assertNotIn("def partition_", wrapper)
            outer = re.search(r"^_outer = region\(\n((?:    .*\n)*)\)", wrapper, re.MULTILINE)
            assert outer is not None
            self.assertIn("device=None", outer[1])
            self.assertNotRegex(outer[1], "_entry|_exit")

    def test_streams_of_another_device_than_the_callers_under_reduce_overhead(self) -> None:
        """The forward is called on device 0 and runs on device 1; the engine calls its backward on device 1."""
        seen = compiled("train_on_second_device", "reduce-overhead")
        captured = {region.kind: "def partition_0(" in (region.wrapper or "") for region in seen.regions}
        self.assertEqual(captured, {"forward": False, "backward": True})

    @parametrize("name", form.sampled(NAMES, 25))
    def test_compiles_with_operators_between(self, name: str) -> None:
        self.check(name, None, sleeps=True)

    @parametrize("name", form.sampled(NAMES, 25))
    def test_compiles_with_small_branches_folded(self, name: str) -> None:
        self.check(name, None, fold=True)

    @parametrize(
        "name", ["concatenation_on_side_stream", "misaligned_input_of_two_streams", "parallel_transformer_block"]
    )
    def test_misaligned_inputs_are_realigned_in_order(self, name: str) -> None:
        """The copy is made on the reader's stream, and the original isn't freed before that copy has been made."""
        (wrapper,) = compiled(name).wrappers
        for owned in (False, True):
            check_wrapper(wrapper, owned=owned, misaligned=True).raise_if_any()

    @parametrize("name,mode", form.sampled(MISALIGNED, 5))
    def test_misaligned_inputs_keep_what_eager_promises(self, name: str, mode: str) -> None:
        """Aligned copies are made after the waits of their readers, and read memory that the caller recorded."""
        report = corpus.check_program(by_name(name), mode_of(mode))
        self.assertEqual(corpus.findings(report), [], str(report))


class TestHazards(TestCase):
    """What upstream got wrong, as plans and wrappers to read."""

    maxDiff = None

    def table(self, name: str, mode: str | None = None) -> str:
        plans = compiled(name, mode).plans
        self.assertEqual(len(plans), 1)
        return plans[0].table() + "\n"

    def lines(self, name: str, pattern: str) -> str:
        return lines_of(compiled(name), pattern)

    def test_fork_join_costs_two_events(self) -> None:
        self.assertExpectedInline(
            compiled("fork_join").calls(),
            """\
_region0 = region(
    device=0,
    streams=(-2, 1),  # stream0, stream1
    events=2,
    results=((2, 0), (0, 0), (0, 1), (2, 1), (1, 1), (1, 0)),  # ev0, stream0_raw, stream1_raw, ev1, stream1, stream0
    distinct=(0, 1),  # stream0, stream1
)
def call(self, args):
    arg0_1, = args
    args.clear()
    frame0, ev0, stream0_raw, stream1_raw, ev1, stream1, stream0, = _region0.enter()
    try:
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            arg0_1 = copy_if_misaligned(arg0_1)
            buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
            triton_poi_fused_add_0.run(arg0_1, buf0, 4096, stream=stream0_raw)
            del arg0_1
            ev0.record(stream0_raw)
            ev0.wait(stream1_raw)
            set_stream(stream1)
            buf1 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
            extern_kernels.mm(buf0, buf0, out=buf1)
            buf2 = buf1; del buf1  # reuse
            triton_poi_fused_relu_1.run(buf2, 4096, stream=stream1_raw)
            ev1.record(stream1_raw)
            ev1.wait(stream0_raw)
            buf3 = buf0; del buf0  # reuse
            triton_poi_fused_add_mul_2.run(buf3, buf2, 4096, stream=stream0_raw)
    finally:
        restore_stream(stream0)
    frame0.leave()
    return (buf3, )
""",
        )

    def test_second_consumer_of_an_event_waits_193409(self) -> None:
        """Upstream tied only the first consumer to its wait."""
        self.assertExpectedInline(
            self.table("two_consumers_of_one_event"),
            """\
   stream  operation  waits before  records after
           entry
0  0       op0                      ev0@0
1  2       op1        ev0@2         ev1@2
2  3       op2        ev0@3         ev2@3
3  0       op3        ev1@0 ev2@0
           exit
free buf0 (stream 0) after waits of 3
free buf1 (stream 2) after exit
free buf2 (stream 3) after exit
""",
        )

    def test_mutation_is_ordered_before_the_callers_next_read_197416(self) -> None:
        """Fails on stock: it doesn't compile there; before 2.15 the write-back raced with the caller."""
        self.assertExpectedInline(
            self.table("mutation_joined_by_wait_stream"),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0 ev1@1
0  0       op0        ev1@0
1  1       op1_op2    ev0@1         ev2@1
           exit       ev2@0
free arg0_1 (stream 0) after exit
""",
        )

    def test_mutation_is_covered_by_the_callers_event_177576(self) -> None:
        """Fails on stock: recording an event after a mutation is an error."""
        self.assertExpectedInline(
            self.lines("mutation_promised_by_escaping_event", r"entry=|again=|aligned\(|\.run|write_back|record"),
            """\
entry=((0, 0, 0), (3, 0, 1)),  # record ev0 stream0, wait ev0 stream1
records_again=((2, 1),),  # event2 stream1
arg0_1 = aligned(arg0_1_orig, stream1)
triton_poi_fused_add_copy__0.run(arg0_1, arg0_1, 4096, stream=stream1_raw)
if arg0_1 is not arg0_1_orig: write_back(arg0_1_orig, arg0_1, stream1)
event2.record(stream1)
triton_poi_fused_new_ones_1.run(buf0, 4, stream=stream0_raw)
""",
        )

    def test_kv_cache_then_forked_layer_195573(self) -> None:
        """Fails on stock: recording an event after a mutation is an error, private or not."""
        self.assertExpectedInline(
            self.table("kv_cache_then_forked_layer"),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0
0  0       op0                      ev1@0
1  3       op1        ev0@3         ev2@3
2  0       op2_op3    ev2@0
           exit       ev1@3
free buf1 (stream 3) after exit
""",
        )

    def test_write_after_read_across_streams(self) -> None:
        self.assertExpectedInline(
            self.table("input_read_then_mutated"),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0
0  1       op0        ev0@1
1  1       op1                      ev1@1
2  2       op2_op3    ev1@2         ev2@2
           exit       ev2@0
free arg0_1 (stream 0) after exit
""",
        )

    def test_wait_stream_keeps_its_place_185546(self) -> None:
        self.assertExpectedInline(
            self.table("wait_stream_is_not_first"),
            """\
   stream  operation  waits before  records after
           entry
0  0       op0_op1                  ev0@0
1  1       op2        ev0@1         ev1@1
2  0       op3        ev1@0
           exit
free buf2 (stream 1) after exit
""",
        )

    def test_the_callers_event_is_waited_for_again_where_streams_turn_out_to_be_one(self) -> None:
        """Streams that are one in a call are given new ones, which have waited for nothing yet."""
        (wrapper,) = compiled("events_as_arguments").wrappers
        waited = re.search(r"^    .*(event(\d+))\.wait\(stream\d+\)$", wrapper, re.MULTILINE)
        assert waited is not None
        self.assertIn(f"    waits_again=({waited[2]},),  # {waited[1]}\n", wrapper)

    def test_host_waits_before_it_reads_189096(self) -> None:
        self.assertExpectedInline(
            self.lines("event_synchronize_before_host_read", r"again=|\.run|copy_|record|synchronize|cpp_"),
            """\
entry=((0, 0, 0), (3, 0, 1)),  # record ev0 stream0, wait ev0 stream1
records_again=((2, 1),),  # event2 stream1
arg0_1 = copy_if_misaligned(arg0_1_orig)
triton_poi_fused__to_copy_mul_0.run(arg0_1, buf0, 4096, stream=stream1_raw)
buf1.copy_(buf0, True)
event2.record(stream1)
event2.synchronize()
cpp_fused_add_1(buf1, buf4)
""",
        )

    def test_host_waits_once_for_a_download_of_an_earlier_graph(self) -> None:
        """A second wait would be for all that the current stream has been given since the download."""
        (wrapper,) = compiled("download_behind_an_event_of_an_earlier_graph", "reduce-overhead").wrappers
        self.assertEqual(re.findall(r"\w+\.synchronize\(\)", wrapper), ["event1.synchronize()"])

    def test_two_records_in_a_row_189096(self) -> None:
        self.assertExpectedInline(
            self.table("records_in_a_row"),
            """\
   stream  operation     waits before  records after
           entry                       ev0@0
0  1       op0_op2       ev0@1
1  1       record_event
2  1       record_event
3  1       record_event
           exit
free buf1 (stream 0) after exit
free buf3 (stream 0) after exit
free buf4 (stream 0) after exit
""",
        )

    def test_events_are_recorded_once_unless_somebody_may_look_between(self) -> None:
        with simulated_gpu():
            side, done, other = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()

            def records(between: Any) -> int:
                def fn(x: torch.Tensor) -> Any:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        a = x @ x
                        done.record()
                        seen = between(a)
                        b = a @ x
                        done.record()
                    torch.cuda.current_stream().wait_event(done)
                    return a + b, seen

                torch._dynamo.reset()
                (wrapper,) = compile_only(fn, torch.empty(64, 64, device="cuda")).wrappers
                return len(re.findall(r"event\d+\.record\(", wrapper))

            self.assertEqual(records(lambda a: a), 1)
            self.assertEqual(records(lambda a: torch.cuda.current_stream().wait_event(done)), 1)
            self.assertEqual(records(lambda a: other.record()), 2)  # one of each event
            self.assertEqual(records(lambda a: done.synchronize()), 2)
            self.assertEqual(records(lambda a: done.query()), 2)
            self.assertEqual(records(lambda a: torch.ops.overlay_test.double(a)), 2)

    def test_diamond_reuses_no_memory_across_streams_178549(self) -> None:
        self.assertExpectedInline(
            self.lines("diamond", r" = empty|reuse|del buf|\.run|mm\("),
            """\
buf0 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
extern_kernels.mm(arg0_1, arg0_1, out=buf0)
buf1 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
triton_poi_fused_neg_0.run(buf0, buf1, 4096, stream=stream2_raw)
buf2 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
extern_kernels.mm(buf1, arg0_1, out=buf2)
del buf1
buf3 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
triton_poi_fused_relu_1.run(buf0, buf3, 4096, stream=stream1_raw)
buf4 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
extern_kernels.mm(buf3, arg0_1, out=buf4)
del buf3
buf5 = buf0; del buf0  # reuse
triton_poi_fused_add_mul_2.run(buf4, buf2, buf5, 4096, stream=stream0_raw)
""",
        )

    def test_producer_of_another_stream_is_not_inlined_177324(self) -> None:
        self.assertExpectedInline(
            self.table("producer_not_inlined"),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0
0  1       op0        ev0@1         ev1@1
1  0       op1        ev1@0         ev2@0
2  1       op2        ev2@1         ev3@1
3  0       op3        ev3@0
           exit
free buf1 (stream 0) after waits of 3
free buf2 (stream 1) after exit
""",
        )

    def test_updated_input_is_aligned_by_its_updates_and_recorded_as_the_callers(self) -> None:
        """A copy after the wait, one back to the caller's memory after the update; none where only a name is used."""
        self.assertExpectedInline(
            self.lines("misaligned_input_is_updated_behind_a_wait", r"record|wait|aligned\(|\.run|write_back"),
            """\
arg0_1.record_stream(stream0)
event1.wait(stream0)
arg0_1 = aligned(arg0_1_orig)
triton_poi_fused_add_copy__mul_0.run(arg0_1, buf1, arg0_1, 4096, stream=stream0_raw)
if arg0_1 is not arg0_1_orig: write_back(arg0_1_orig, arg0_1)
""",
        )

    def test_only_what_is_not_aligned_is_copied_and_written_back(self) -> None:
        memory = torch.zeros(17)
        shifted, whole = memory[1:], memory[:16]
        self.assertIs(aligned(whole), whole)
        copy = aligned(shifted)
        self.assertEqual(copy.data_ptr() % 16, 0)
        write_back(shifted, copy.fill_(3))
        self.assertEqual(memory, torch.tensor([0.0, *[3.0] * 16]))

    def test_each_stream_realigns_a_misaligned_input_187224(self) -> None:
        self.assertExpectedInline(
            self.lines("misaligned_input_of_two_streams", r"set_stream|arg0_1_orig|\.run|\.wait"),
            """\
set_stream(stream2)
arg0_1_orig = arg0_1
arg0_1 = copy_if_misaligned(arg0_1_orig)
triton_poi_fused_add_0.run(arg0_1, buf0, 4096, stream=stream2_raw)
ev0.wait(stream1_raw)
set_stream(stream1)
arg0_1 = copy_if_misaligned(arg0_1_orig)
triton_poi_fused_mul_1.run(arg0_1, buf1, 4096, stream=stream1_raw)
set_stream(stream0)
arg0_1 = copy_if_misaligned(arg0_1_orig)
triton_per_fused_sum_2.run(arg0_1, buf2, 64, 64, stream=stream0_raw)
ev1.wait(stream0_raw)
ev2.wait(stream0_raw)
del arg0_1_orig
triton_poi_fused_add_3.run(buf1, buf0, buf2, buf3, 4096, stream=stream0_raw)
""",
        )

    def test_pinned_copy_on_side_stream(self) -> None:
        """Fails on stock when it is called: `default_stream` is unbound."""
        self.assertExpectedInline(
            self.lines("pinned_to_device", r"set_stream|copy_|record|wait|\.run|mm\("),
            """\
entry=((0, 0, 0), (3, 0, 1)),  # record ev0 stream0, wait ev0 stream1
set_stream(stream1)
buf0.copy_(arg0_1, True)
ev1.record(stream1_raw)
set_stream(stream0)
arg1_1 = copy_if_misaligned(arg1_1)
triton_poi_fused_mul_0.run(arg1_1, buf1, 4096, stream=stream0_raw)
ev1.wait(stream0_raw)
extern_kernels.mm(buf0, buf1, out=buf2)
""",
        )

    def test_prefetch_gains_no_wait_for_the_current_stream(self) -> None:
        """The copies start at once: nothing makes their stream wait for the caller's."""
        table = self.table("prefetch_without_waiting")
        self.assertExpectedInline(
            table,
            """\
   stream  operation      waits before  records after
           entry
0  1       op0
1  1       op1                          ev0@1
2  host    record_stream
3  host    record_stream
4  0       op4            ev0@0
           exit
free buf1 (stream 1) after exit
""",
        )
        calls = compiled("prefetch_without_waiting").calls()
        self.assertNotRegex(calls, r"\.wait\(stream1")

    def test_event_returned_is_the_one_recorded_185594(self) -> None:
        self.assertExpectedInline(
            self.lines("event_returned", r"again=|objects=|\.run|mm\(|record|wait"),
            """\
records_again=((2, 1),),  # event2 stream1
triton_poi_fused_add_0.run(arg0_1, buf0, 4096, stream=stream0_raw)
ev0.record(stream0_raw)
ev0.wait(stream1_raw)
extern_kernels.mm(buf0, buf0, out=buf1)
triton_poi_fused_relu_1.run(buf1, buf2, 4096, stream=stream1_raw)
event2.record(stream1)
""",
        )

    def test_a_captured_stream_is_not_asked_whether_it_is_busy(self) -> None:
        code = compiled("eight_experts").calls()
        self.assertIn("record_busy", code)
        (wrapper,) = compiled("eight_experts", "reduce-overhead").wrappers
        self.assertIn("def partition_0(", wrapper)
        self.assertNotIn("record_busy", wrapper)

    def test_the_caller_waits_for_no_work_that_touches_nothing_of_its_own(self) -> None:
        """What the side stream did last is on its own memory; the caller's memory it read before."""
        plan = compiled("stream_joined_before_its_result_is_read").plans[0]
        ((event, _),) = plan.waits_before(len(plan.ops))
        self.assertEqual((event.stream, event.after), (1, 0), plan.table())

    def test_read_only_programs_do_not_mutate(self) -> None:
        """Fails on stock: values that pass a sync count as mutated inputs, and cudagraph trees refuse the graph."""
        for name in ("fork_join", "diamond", "eight_experts"):
            for graph in compiled(name, "reduce-overhead").cudagraphs:
                self.assertEqual(tuple(graph["mutated_input_idxs"]), (), name)
        # A graph may write to what the code before it has made, here the copy of the host's tensor.
        (graph,) = compiled("pinned_to_device", "reduce-overhead").cudagraphs
        self.assertEqual(len(graph["mutated_input_idxs"]), 1)

    def test_events_made_outside_under_reduce_overhead(self) -> None:
        """Fails on stock, silently: the callee gives its input away while the side stream reads it (p02)."""
        seen = compiled("events_made_outside", "reduce-overhead")
        self.assertExpectedInline(
            lines_of(seen, r"def |entry|_outer\.enter|partition0_args\)|mm\(|record|wait|leave"),
            """\
entry=((2, 1, 1), (4, 1, 0)),  # record_entry ev1_outer stream2_outer, wait_entry ev1_outer stream0_outer
entry=((0, 0, 0),),  # record ev0_1 stream0_1
def partition_0(args):
ev0.record(stream0_raw)
ev0.wait(stream2_raw)
extern_kernels.mm(buf0, buf0, out=buf2)
ev1.record(stream2_raw)
ev1.wait(stream0_raw)
frame0.leave()
def call(self, args):
frame_outer, = _outer.enter()
(buf4,) = self.partitions[0](partition0_args)
event1_1.record(stream0_1)
ev0_1.wait(stream2_1_raw)
event3_1.record(stream2_1)
frame1.leave()
frame_outer.leave()
""",
        )
        check_wrapper(seen.wrappers[0], owned=True).raise_if_any()

    def test_buffer_is_not_reused_while_another_stream_reads_it(self) -> None:
        """Fails on stock (S2): a value that passed a sync reports stream 0, so its block is written again too early."""
        for mode in (None, "reduce-overhead"):
            seen = compiled("last_reader_on_another_stream", mode)
            check_wrapper(seen.wrappers[0], owned=mode is not None).raise_if_any()
        self.assertExpectedInline(
            self.table("last_reader_on_another_stream"),
            """\
   stream  operation  waits before  records after
           entry
0  0       op0                      ev0@0
1  0       op1
2  1       op2        ev0@1         ev1@1
3  0       op3
4  0       op4
5  0       op5
6  0       op6        ev1@0
           exit
free buf0 (stream 0) after waits of 6
free buf2 (stream 1) after exit
""",
        )

    def test_record_stream_of_the_user_survives_where_no_graph_is_captured(self) -> None:
        """Under reduce-overhead a region runs as it is the first time, and whenever it gets no graph."""
        counts = []
        for mode in (None, "reduce-overhead"):
            text = compiled("record_stream_on_intermediate", mode).wrappers[0]
            counts.append(sorted(re.findall(r"(\w+)\.record_stream\((stream\d)(?!_outer)", text)))
        self.assertEqual(len(counts[0]), 3)
        self.assertEqual([stream for _, stream in counts[0]], [stream for _, stream in counts[1]])
        with config.patch(cudagraphs="trees"):
            text = compiled("record_stream_on_intermediate", "reduce-overhead").wrappers[0]
        self.assertEqual(re.findall(r"(\w+)\.record_stream\(", text), ["arg0_1"])  # the trees' pool is theirs

    def test_allocator_is_told_whose_memory_a_result_is_in_eager(self) -> None:
        """What an update in place makes is another stream's memory than in eager, and what a graph returns is always
        the current stream's."""

        def told(name: str, mode: str | None) -> list[str]:
            return re.findall(r"\w+\.record_stream\((stream\d)", compiled(name, mode).wrappers[0])

        self.assertEqual(told("result_updated_elsewhere", None), ["stream0"])
        self.assertEqual(told("result_filled_elsewhere", None), ["stream0", "stream0"])
        self.assertEqual(told("result_updated_on_another_side_stream", None), ["stream1"])
        self.assertEqual(told("result_of_its_reader", None), [])
        self.assertEqual(told("result_of_its_reader", "reduce-overhead"), ["stream1"])
        self.assertEqual(told("fork_join", None), [])
        if torch.utils._triton.has_triton_package():
            self.assertEqual(told("user_kernel_fills_memory_of_the_callers_stream", None), ["stream0"])
            self.assertEqual(told("user_kernel_fills_memory_of_a_side_stream", None), ["stream1"])

    def test_ranges_stand_among_the_launches(self) -> None:
        def launches(mode: str | None) -> list[str]:
            (wrapper,) = compiled("ranges_kept", mode).wrappers
            body = re.sub(r"#.*", "", wrapper[wrapper.index("def call(self, args)") :].split("runner =")[0])
            return re.findall(r"nvtx.*|\w+_range\(.*|kernels\.\w+|fused_\w+|partitions\[\d\]", body)

        self.assertExpectedInline(
            "\n".join(launches(None)),
            """\
fused_add_0
nvtx.range_push('step 3')
push_range('record_function', 'step', None)
nvtx.range_push('side')
nvtx.range_push('branch')
kernels.mm
fused_mul_1
nvtx.range_pop()
nvtx.range_pop()
fused_mul_2
pop_range('record_function')
nvtx.range_pop()
nvtx.mark('joined')
fused_add_copy__3""",
        )
        self.assertExpectedInline(
            "\n".join(launches("reduce-overhead")),
            """\
partitions[0]
nvtx.range_push('step 3')
push_range('record_function', 'step', None)
nvtx.range_push('side')
nvtx.range_push('branch')
partitions[1]
nvtx.range_pop()
nvtx.range_pop()
partitions[2]
pop_range('record_function')
nvtx.range_pop()
nvtx.mark('joined')
partitions[3]""",
        )

    def test_two_threads_take_the_last_events_of_a_region(self) -> None:
        """Both have seen that there are events of an earlier call; one gets them, and the other makes its own."""

        class TakenMeanwhile(list):
            def __bool__(self) -> bool:
                return True

        several_devices = EventRegion(RegionSpec(device=None, streams=()))
        several_devices.frames = TakenMeanwhile()
        frames = [several_devices.enter()[0] for _ in range(2)]
        self.assertIsNot(*frames)

    def test_events_are_free_for_another_thread_when_a_call_is_done_with_them(self) -> None:
        """The streams of this call turn out to be one, so it orders them once more at the end."""
        several_devices = EventRegion(RegionSpec(device=None, streams=()))
        frame = EventFrame(several_devices)
        frame.is_aliased = True
        free_before: list[Any] = []
        with mock.patch.object(runtime, "order_aliased", lambda *args: free_before.extend(several_devices.frames)):
            frame.leave()
        self.assertEqual((free_before, several_devices.frames), ([], [frame]))


def updated_views(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:4].mul_(2)
    y.view(-1)[3:7].add_(1)
    return y.relu_()


def converted(x: torch.Tensor) -> torch.Tensor:
    y = (x * torch.full((16, 64), 1.0, device="cuda")).to(torch.float16).to(torch.float32)
    return y.view(64, 16).view(16, 64).permute(1, 0).permute(1, 0) @ x.t()


TEMPLATES = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
# The function of a side stream, the sizes of its inputs, the pass's mark in what is generated, and options.
PASSES: dict[str, tuple[Any, list[tuple[int, ...]], str, dict[str, Any]]] = {
    "decomposition": (lambda x: F.layer_norm(F.gelu(x), (64,)).log_softmax(-1), [(32, 64)], "aten.exp", {}),
    "functionalization": (updated_views, [(16, 64)], "aten.relu", {}),
    "joint_graph_passes": (converted, [(16, 64)], "aten.mm", {}),
    # Upstream lost the stream on the nodes of a replacement (#189095).
    "pattern_replaced_by_attention": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 8.0, -1) @ v,
        [(2, 4, 64, 64)] * 3,
        "scaled_dot_product",
        {},
    ),
    # Upstream computed the softmax on the default stream, outside its context (#189095).
    "online_softmax_in_front_of_a_matmul": (
        lambda x, y: torch.softmax(x, -1) @ y,
        [(64, 4096), (4096, 64)],
        "prepare_softmax_online",
        {},
    ),
    # A sum with a product becomes one kernel.
    "matmul_patterns": (lambda x, w, b: b + x @ w, [(64, 64)] * 3, "addmm", {}),
    "matmul_templates": (
        lambda x, y: (x @ y).relu(),
        [(128, 128)] * 2,
        r"triton_tem_fused_mm_relu_0\.run\(.*stream=stream1_raw\)",
        TEMPLATES,
    ),
    "dynamic_shapes": (lambda x, w: (x @ w).relu() * x.shape[0], [(48, 64), (64, 32)], r"f32\[s", {"dynamic": True}),
}


@instantiate_parametrized_tests
class TestPasses(TestCase):
    """A placement survives every pass between Dynamo and the wrapper."""

    def placements(self, graph: str) -> dict[str, int]:
        """Stream of each computing node, by name."""
        found = {}
        for line in graph.splitlines():
            match = re.match(r"(\w+)(?::.*?)? = (?!self\.)", line)
            if match:
                stream = re.search(r"# stream (\d+)$", line)
                found[match[1]] = int(stream[1]) if stream else 0
        return found

    def compile(
        self, fn: Any, *inputs: Any, mode: str | None = None, dynamic: bool | None = None, **options: Any
    ) -> Compiled:
        torch._dynamo.reset()
        with observe() as seen, config.patch(fold_branches_below_us=0.0):
            if mode is not None and options:
                options = {**torch._inductor.list_mode_options(mode, dynamic), **options}
                mode = None
            torch.compile(fn, mode=mode, dynamic=dynamic, fullgraph=True, options=options or None)(*inputs)
        return seen

    @parametrize("name", list(PASSES))
    @simulated_gpu()
    def test_side_stream_keeps_all_of_its_work(self, name: str) -> None:
        """And the current one the negation."""
        work, sizes, mark, options = PASSES[name]
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor, *others: torch.Tensor) -> Any:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                a = work(x, *others)
            b = x.neg()
            current.wait_stream(side)
            return a, b

        dtype = torch.float16 if "attention" in name else torch.float32
        seen = self.compile(fn, *(torch.randn(*size, device="cuda", dtype=dtype) for size in sizes), **options)
        self.assertRegex(seen.graphs[0] + "".join(seen.wrappers), mark)
        placed = self.placements(seen.graphs[0])
        self.assertEqual({name: s for name, s in placed.items() if not name.startswith("neg") and s != 1}, {})
        self.assertEqual([s for name, s in placed.items() if name == "neg"], [0])
        for op in seen.plans[0].ops:
            self.assertIn(op.stream, (0, 1, None))
        self.assertEqual(sum(op.stream == 0 for op in seen.plans[0].ops), 1)

    @simulated_gpu()
    def test_semaphores_of_one_stream_are_no_others(self) -> None:
        """Upstream makes them once for all kernels, and each kernel leaves them at zero for the next."""
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            fork(side)
            with torch.cuda.stream(side):
                a = x.sum(1)
                b = y.sum(0)
            c = y.sum(1)
            join(side)
            return a, b, c

        cooperative = {"triton.cooperative_reductions": True, "triton.force_cooperative_reductions": True}
        seen = self.compile(fn, *[torch.randn(64, 64, device="cuda") for _ in range(2)], **cooperative)
        (text,) = seen.wrappers
        used = re.findall(r"\.run\(.*(semaphores\w+),.*stream=(\w+)_raw\)", text)
        self.assertEqual(len(used), 3)
        self.assertEqual(len({*used}), 2)  # one pair of semaphores and stream for each of the streams
        self.assertEqual(len({name for name, _ in used}), 2)
        for name, stream in {*used}:
            made = text[: text.index(f" {name} = empty_strided_cuda(")]
            self.assertEqual(re.findall(r"(?:set|restore)_stream\((\w+)\)", made)[-1], stream)
            self.assertEqual(text.count(f" {name}.zero_()"), 1)

    @simulated_gpu()
    def test_common_subexpressions_of_two_streams_stay_two(self) -> None:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()

        def fn(x: torch.Tensor) -> Any:
            fork(first, second)
            with torch.cuda.stream(first):
                a = x.sin() + 1
            with torch.cuda.stream(second):
                b = x.sin() + 1
            join(first, second)
            return a, b

        seen = self.compile(fn, torch.randn(64, 64, device="cuda"))
        self.assertEqual(sorted(self.placements(seen.graphs[0]).values()), [1, 1, 2, 2])
        self.assertEqual(sorted(op.stream for op in seen.plans[0].ops), [1, 2])

    @simulated_gpu()
    def test_fusion_rounds(self) -> None:
        """Fusion happens within a stream, in every round, and never across."""
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor) -> Any:
            fork(side)
            a, b = x, x
            for i in range(4):
                with torch.cuda.stream(side):
                    a = (a * 2 + i).relu()
                b = (b * 3 - i).relu()
            with torch.cuda.stream(side):
                a = a.softmax(-1) + a
            b = b.sum(-1, keepdim=True) + b
            join(side)
            return a, b

        seen = self.compile(fn, torch.randn(64, 64, device="cuda"))
        self.assertEqual(sorted(op.stream for op in seen.plans[0].ops), [0, 1])

    @simulated_gpu()
    def test_combo_kernels(self) -> None:
        side = torch.cuda.Stream()

        def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
            fork(side)
            with torch.cuda.stream(side):
                a, b = a * 2, b.sin()
            c, d = c * 3, d.cos()
            join(side)
            return a, b, c, d

        inputs = [torch.randn(n, 64, device="cuda") for n in (8, 16, 24, 40)]
        seen = self.compile(fn, *inputs, combo_kernels=True, benchmark_combo_kernel=False)
        launches = re.findall(r"(\w+)\.run\(.*stream=stream(\d)_raw", seen.calls())
        self.assertEqual(sorted(stream for _, stream in launches), ["0", "1"])

    @simulated_gpu()
    def test_slices_of_one_concatenation_run_in_parallel(self) -> None:
        """Library kernels that write into parts of one block conflict with whoever reads all of it, not with each
        other.
        """
        sides = [torch.cuda.Stream() for _ in range(3)]

        def fn(x: torch.Tensor) -> Any:
            current, parts = torch.cuda.current_stream(), []
            for side in sides:
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    parts.append(x @ x)
            for side in sides:
                current.wait_stream(side)
            return torch.stack(parts).sum(0)

        (plan,) = self.compile(fn, torch.randn(64, 64, device="cuda")).plans
        self.assertExpectedInline(
            plan.table() + "\n",
            """\
   stream  operation  waits before       records after
           entry                         ev0@0
0  1       op0        ev0@1              ev1@1
1  2       op1        ev0@2              ev2@2
2  3       op2        ev0@3              ev3@3
3  -       op3
4  0       op4        ev1@0 ev2@0 ev3@0
           exit
""",
        )

    @simulated_gpu()
    def test_reordering_for_locality_keeps_a_branch_where_it_was_launched(self):
        """Its only consumer is the last operation; moved there, the branch would start when all else was launched."""
        side = torch.cuda.Stream()

        def fn(x, w):
            fork(side)
            with torch.cuda.stream(side):
                branch = (x @ w).relu() @ w
            for _ in range(4):
                x = (x @ w).relu()
            join(side)
            return x + branch

        with torch.no_grad():
            seen = self.compile(fn, torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda"))
        (plan,) = seen.plans
        launched = [op.stream for op in plan.ops if op.stream is not None]
        self.assertEqual(launched.count(1), 3)
        self.assertEqual(launched[:4].count(1), 3, plan.table())

    @simulated_gpu()
    def test_graph_partitions(self) -> None:
        """Each captured partition forks its side stream from the caller's and joins it again."""
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor, h: torch.Tensor) -> Any:
            fork(side)
            with torch.cuda.stream(side):
                a = x @ x
            h = h + 1
            b = h.to("cuda") * x
            with torch.cuda.stream(side):
                c = a @ a
            join(side)
            return b + c

        seen = self.compile(fn, torch.randn(64, 64, device="cuda"), torch.randn(64, 64), mode="reduce-overhead")
        text = seen.calls()
        bodies = [b for b in re.split(r"(?=^def )", text, flags=re.M) if b.startswith("def partition_")]
        regions = dict(re.findall(r"^_(region\d+) = region\(\n((?:    .*\n)*)", text, flags=re.M))
        placed = [b for b in bodies if "stream1" in b]
        self.assertTrue(placed)
        for body in placed:
            number = re.search(r"_(region\d+)\.enter", body)
            self.assertRegex(regions[number[1]], r"entry=.* wait ev\d+\w* stream1")
            self.assertRegex(body + regions[number[1]], r"\.wait\(stream0\w*\)|exit=.* wait ev\d+\w* stream0")
        check_wrapper(seen.wrappers[0], owned=True).raise_if_any()


@form.needs_gpu
@instantiate_parametrized_tests
class TestGpu(TestCase):
    """50 calls of each program under injected delays, as ordered eager. `tools/gpu_check.py` runs them in parallel."""

    def check(self, name: str, mode: str, sleeps: bool) -> None:
        program = by_name(name)
        if program.devices > gpu.devices():
            self.skipTest(f"needs {program.devices} GPUs")
        with config.patch(fold_branches_below_us=0.0):
            gpu.check(program, mode_of(mode), sleeps=sleeps)

    @parametrize("name,mode", ON_GPU)
    def test_delays_outside(self, name: str, mode: str) -> None:
        self.check(name, mode, sleeps=False)

    @parametrize("name,mode", ON_GPU)
    def test_delays_inside(self, name: str, mode: str) -> None:
        self.check(name, mode, sleeps=True)
