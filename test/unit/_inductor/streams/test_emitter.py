"""`_inductor.streams.emitter`: the lines that order a region's streams and keep its memory."""

import functools

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._inductor.codegen import wrapper as upstream
from torch._inductor.virtualized import V

import form  # noqa: F401
from stand_ins.schedules import ProgramCase, spec_of, written
from torch_overlay import config
from torch_overlay._functorch.streams.facts import ExitWait, note_fact, ResultMemory
from torch_overlay._functorch.streams.tokens import caller_event, record, state
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import stream_operation
from torch_overlay._inductor.streams.emitter import RegionEmitter
from torch_overlay._inductor.streams.planned_region import plan_region
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.switching import OnStream


aten, streams = torch.ops.aten, torch.ops.streams
CALLER = state(0)
BACKWARD = {"is_backward": True, "is_inference": False}


class EmitterTestCase(ProgramCase):
    def setUp(self):
        super().setUp()
        self.x = self.program.input(4, 4)

    def call(self, target, *args, stream=0, **fact):
        tokens = (CALLER,) if stream else ()
        return super().call(target, *args, stream=stream, **{"after": tokens, "promised_to": tokens, **fact})

    def product(self, *args, **where):
        return self.call(aten.mm.default, *(args or [self.x] * 2), **where)

    def begin(self, *results, enclosed=False, options=None, **scheduled):
        """Begin to write the region of a graph."""
        self.enterContext(config.patch({"fold_branches_below_us": 0.0, **(options or {})}))
        self.scheduler = self.enterContext(self.program.scheduled(*results, **scheduled))
        self.region = plan_region(self.scheduler, self.scheduler.nodes, enclosed)
        ScheduleNotes.of(self.scheduler).memory = self.region.plan.memory
        self.wrapper = V.graph.wrapper_code
        self.first = len(self.wrapper.lines)
        self.emitter = RegionEmitter(self.scheduler, self.region)

    def lines(self):
        return written(self.wrapper.lines[self.first :])

    def write(self, *results, frees=(), **options):
        """The lines of a region. A node's own ones are its name, and `frees` those
        in which a buffer's last use ends there: {node: buffer}."""
        self.begin(*results, **options)
        self.emitter.begin()
        for node in self.scheduler.nodes:
            self.emitter.before(node)
            stream_program = stream_operation(node) is not None
            if not (stream_program and self.emitter.write_stream_operation(node.node)):
                self.wrapper.writeline(node.get_name())
            if name := dict(frees).get(node.get_name()):
                free = functools.partial(self.wrapper.writeline, f"free {name}")
                self.emitter.free(V.graph.get_buffer(name), free)
        self.emitter.end()
        return self.lines()

    def places(self):
        """The streams of the lines, with their devices."""
        marks = [x for x in self.wrapper.lines if isinstance(x, OnStream)]
        return [(mark.stream, mark.device_index) for mark in marks]

    def spec(self):
        """The region as the module defines it."""
        return spec_of("_region0")


class TestOrder(EmitterTestCase):
    def test_fork_and_join(self):
        side = self.product(stream=1)
        joined = self.product(side, self.product())
        self.assertExpectedInline(
            self.write(joined),
            """\
frame0, ev1, stream1_raw, stream0_raw, = _region0.enter()
op0
ev1.record(stream1_raw)
op1
ev1.wait(stream0_raw)
op2
frame0.leave()""",
        )
        self.assertEqual(self.places(), [(1, 0), (0, 0), (0, 0)])
        spec = self.spec()
        record, wait = (OperationKind.RECORD, 0, 0), (OperationKind.WAIT, 0, 1)
        self.assertEqual((spec.entry, spec.exit), ((record, wait), ()))
        self.assertEqual((spec.events, spec.distinct), (2, (0, 1)))

    def test_view_by_a_call_launches_nothing(self):
        made = self.call(aten.complex.default, self.x, self.x, stream=1)
        self.write(self.call(aten.view_as_real.default, made))
        self.assertEqual(self.places(), [(1, 0), (None, None)])

    def test_order_at_the_exit(self):
        self.write(self.product(stream=1))
        record, wait = (OperationKind.RECORD, 1, 1), (OperationKind.WAIT, 1, 0)
        self.assertEqual(self.spec().exit, (record, wait))

    def test_stream_that_waits_at_the_exit(self):
        """It must not stay in a graph that the caller captures."""
        self.write(self.product(exit_waits=(ExitWait(1, (CALLER,)),)))
        self.assertEqual(self.spec().entry, ((OperationKind.RECORD, 0, 0),))
        self.assertEqual(self.spec().exit, ((OperationKind.WAIT_EXIT, 0, 1),))

    def test_what_a_side_stream_held_at_the_entry(self):
        """It is no part of a graph that the caller captures."""
        self.write(self.product(after=(state(1),)))
        wanted = (OperationKind.RECORD_ENTRY, 0, 1), (OperationKind.WAIT_ENTRY, 0, 0)
        self.assertEqual(self.spec().entry, wanted)

    def test_streams_that_wait_for_an_idle_one(self):
        for enclosed, kind in ((False, OperationKind.RECORD_BUSY), (True, OperationKind.RECORD)):
            self.setUp()
            made = [self.product(stream=stream) for stream in (1, 2, 3)]
            self.write(self.product(made[0], made[1]), made[2], enclosed=enclosed)
            self.assertEqual(self.spec().entry[0], (kind, 0, 0))

    def test_event_of_the_caller(self):
        found = self.write(self.product(after=(caller_event(5),)))
        self.assertEqual(found.splitlines()[1:3], ["event5.wait(stream0)", "op0"])
        self.assertEqual(self.spec().objects, {5})

    def test_host_that_reads_what_the_device_makes(self):
        args = self.product(), torch.device("cpu"), True
        host = self.call(torch.ops.prims.device_put.default, *args)
        found = self.write(self.call(aten.mm.default, host, host)).splitlines()
        wanted = ["op1", "ev0.record(stream0_raw)", "ev0.synchronize()", "op2"]
        self.assertEqual(found[2:-1], wanted)

    def test_region_without_a_side_stream(self):
        self.assertEqual(self.write(self.product()), "op0")

    def test_device_that_is_idle(self):
        limit = {"fold_branches_below_us": 1000.0}
        found = self.write(self.product(self.product(stream=1), self.x), options=limit).splitlines()
        self.assertIn("multi_stream", found[0])
        self.assertIn("if multi_stream: ev1.record(stream1_raw)", found)
        self.assertEqual(self.spec().idle_streams, (1,))

    def test_names_in_profiles(self):
        for shown, wanted in ((False, ""), (True, "side stream 1: model.py:12")):
            self.setUp()
            side = self.product(stream=1)
            side.meta["stack_trace"] = 'File "/a/model.py", line 12, in f\n    x @ x'
            self.write(side, options={"nvtx": shown})
            mark = next(x for x in self.wrapper.lines if isinstance(x, OnStream))
            self.assertEqual(mark.range, wanted)


class TestMemory(EmitterTestCase):
    def freed(self, **where):
        """The lines when a side stream's buffer is used last by the second node."""
        side = self.product(stream=1)
        other = self.product(side, side)
        last = self.product(other, self.x, **where)
        return self.write(last, frees={"op1": "buf0"}).splitlines()

    def test_memory_of_a_stream_that_is_ordered_later(self):
        found = self.freed(stream=1)
        self.assertGreater(found.index("free buf0"), found.index("op1"))
        self.assertEqual(found[found.index("free buf0") + 1], "op2")

    def test_memory_of_a_stream_that_is_ordered_at_the_exit(self):
        self.assertNotIn("free buf0", self.freed())

    def test_memory_of_the_stream_that_used_it(self):
        made = self.product(stream=1)
        found = self.write(self.product(made, made, stream=1), frees={"op1": "buf0"})
        self.assertIn("op1\nfree buf0", found)

    def test_memory_of_a_slab(self):
        self.begin(self.product(self.product(), self.x))
        ScheduleNotes.of(self.scheduler).slabs = ["buf0"]
        self.emitter.free(V.graph.get_buffer("buf0"), self.fail)

    def test_pinned_memory(self):
        """The host may not get it for something else while a copy is under way."""
        self.begin(self.product(self.product(), self.x))
        buffer = V.graph.get_buffer("buf0")
        buffer.get_output_spec().is_pinned = True
        self.emitter.free(buffer, self.fail)
        self.assertIsInstance(self.wrapper.lines[-1], upstream.FreeLine)
        self.assertIn("buf0", self.wrapper.freed)

    def test_writing_in_place(self):
        side = self.product(stream=1)
        own = self.product()
        self.begin(self.product(own, own), self.product(side, side, stream=1), side)
        nodes = {node.get_name(): node for node in self.scheduler.nodes}
        may = self.emitter.may_write_in_place
        self.assertTrue(may("buf1", nodes["op2"]))
        self.assertFalse(may("buf0", nodes["op2"]))
        self.assertTrue(may("buf0", nodes["op3"]))

    def recorded(self, *results, known=(), **options):
        """What is recorded on results that eager has in the memory of streams."""
        results = results or (self.product(stream=1),)
        memory = tuple(ResultMemory(f"output[{i}]", known) for i in range(len(results)))
        for node in results:
            note_fact(node, results=memory)
        output = self.program.output(*results)
        output.meta["desc"] = [PlainAOTOutput(i) for i in range(len(results))]
        found = self.write(**options).splitlines()
        return [line for line in found if "record_stream" in line]

    def test_result_that_is_another_streams_in_eager(self):
        found = self.recorded(known=(1, 2))
        self.assertEqual(found, ["buf0.record_stream(stream2)"])

    def test_gradient_of_a_side_stream(self):
        found = self.recorded(self.product(stream=1), self.product(), **BACKWARD)
        self.assertEqual(found, ["buf0.record_stream(stream0)"])

    def test_result_of_a_nested_region(self):
        found = self.recorded(self.product(stream=1), self.product(), name="body")
        self.assertEqual(found, ["body_buf0.record_stream(stream0)"])


class TestStreamProgram(EmitterTestCase):
    """Operations of the user's that somebody outside can see."""

    def written(self, target, *args, **fact):
        made = self.product()
        self.call(target, *(made if a is None else a for a in args), **fact)
        found = self.write(made).splitlines()
        return [line for line in found if not line.startswith(("op0", "frame0"))]

    def test_direct_calls(self):
        for target, args, wanted in (
            (streams.record_event, (5, 1), "event5.record(stream1)"),
            (streams.wait_event, (5, 1), "event5.wait(stream1)"),
            (streams.wait_stream, (1, 2), "stream1.wait_stream(stream2)"),
            (streams.synchronize_event, (5,), "event5.synchronize()"),
            (streams.synchronize_stream, (1,), "stream1.synchronize()"),
            (streams.record_stream, (None, 1), "buf0.record_stream(stream1)"),
        ):
            self.setUp()
            self.assertEqual(self.written(target.default, *args), [wanted])

    def test_event_that_is_recorded(self):
        self.written(streams.record_event.default, 5, 1, requires=record(5, 0))
        self.assertEqual(self.spec().records_again, ((5, 1),))

    def test_other_operations(self):
        found = self.written(streams.synchronize_device.default, "cuda", 0)
        self.assertEqual(found, ["op1"])  # its own line

    def test_input_that_may_have_been_copied(self):
        """The caller's tensor is recorded, and not the aligned copy."""
        made = self.product()
        self.call(streams.record_stream.default, self.x, 1)
        self.begin(made)
        self.wrapper._alignment_orig_saved.add("x0")
        node = next(n for n in self.scheduler.nodes if stream_operation(n) is not None)
        self.emitter.write_stream_operation(node.node)
        self.assertEqual(self.lines(), "x0_orig.record_stream(stream1)")
