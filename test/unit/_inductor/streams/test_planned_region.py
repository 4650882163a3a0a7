"""`_inductor.streams.planned_region`: on which streams memory is used, and when it is free again."""

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

import form  # noqa: F401
from stand_ins.schedules import Program, ProgramCase
from torch_overlay._functorch.streams.facts import ExitWait, ForeignRead, note_fact, ResultMemory
from torch_overlay._functorch.streams.ids import copy_in_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, state, synchronization
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION
from torch_overlay._inductor.streams.planned_region import needs_plan, plan_region


aten, streams = torch.ops.aten, torch.ops.streams
CALLER, E5, H0 = state(0), caller_event(5), synchronization(0)
BACKWARD = {"is_backward": True, "is_inference": False}


class PlansTestCase(ProgramCase):
    def product(self, *args, size=2, **where):
        args = args or [self.program.input(size, size)] * 2
        return self.call(aten.mm.default, *args, **where)

    def plan(self, *results, enclosed=False, first=0, memory=None, **options):
        with self.program.scheduled(*results, **options) as scheduler:
            ScheduleNotes.of(scheduler).memory = memory
            self.region = plan_region(scheduler, scheduler.nodes[first:], enclosed)
            self.buffers = {b.name: b for b in self.region.plan.buffers}
            return self.region.plan


class TestPlans(PlansTestCase):
    def fork_and_join(self, **kwargs):
        tokens = {"after": (CALLER,), "promised_to": (CALLER,)}
        side = self.product(stream=1, **tokens)
        tokens = {"after": (), "promised_to": ()}
        return self.plan(self.product(side, side, **tokens), **kwargs)

    def test_fork_and_join(self):
        self.assertExpectedInline(
            self.fork_and_join().table(),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0
0  1       op0        ev0@1         ev1@1
1  0       op1        ev1@0
           exit
free buf0 (stream 1) after exit""",
        )
        self.assertEqual(self.region.concerned, {0, 1})
        self.assertFalse(self.region.enclosed)

    def test_part_of_a_graph(self):
        plan = self.fork_and_join(first=1, memory={"buf0": 1})
        self.assertEqual([op.name for op in plan.ops], ["op1"])
        buffer = self.buffers["buf0"]
        self.assertFalse(buffer.fresh)
        self.assertEqual((buffer.stream, buffer.saved_on), (0, 1))
        self.assertTrue(buffer.settles)
        for enclosed, stream in ((True, 1), (False, 0)):
            self.program = Program()
            self.fork_and_join(first=1, memory={"buf0": stream}, enclosed=enclosed)
            buffer = self.buffers["buf0"]
            self.assertEqual(buffer.saved_on, stream or None)
            self.assertFalse(buffer.settles)

    def test_promise_at_the_exit(self):
        node = self.product(exit_waits=(ExitWait(1, (CALLER,)),))
        (event,) = self.plan(node).events
        self.assertEqual((event.stream, event.waits), (0, ((1, 1),)))

    def test_promises_that_nobody_needs(self):
        kept = (E5, H0, CALLER, blocking_copy(0))
        first = self.product(stream=1, after=(), promised_to=())
        inner = self.product(first, first, stream=1, after=(), promised_to=kept)
        last = self.product(inner, inner, stream=1, after=(), promised_to=())
        plan = self.plan(last)
        self.assertEqual(plan.ops[1].promised_to, {E5, H0})

    def test_promises_about_another_streams_block(self):
        first = self.product(after=(), promised_to=())
        inner = self.product(first, first, stream=1, after=(), promised_to=(CALLER, state(2)))
        last = self.product(inner, inner, stream=1, after=(), promised_to=())
        self.assertEqual(self.plan(last).ops[1].promised_to, {CALLER})


class TestBuffers(PlansTestCase):
    def test_size_and_stream(self):
        products = self.product(size=8, stream=2), self.product(size=4)
        on_host = self.call(aten.sin.default, self.program.input(4, device="cpu"))
        self.plan(*products, on_host)
        sizes = {name: (b.stream, b.size, b.leaves) for name, b in self.buffers.items()}
        wanted = {"buf0": (2, 256, True), "buf1": (0, 64, True), "x0": (0, 0, False), "x1": (0, 0, False)}
        self.assertEqual(sizes, wanted)

    def test_memory_that_several_streams_write(self):
        halves = self.product(stream=1), self.product(stream=2)
        self.plan(self.call(aten.cat.default, halves))
        (buffer,) = [b for b in self.buffers.values() if b.fresh]
        self.assertEqual((buffer.stream, len(buffer.views)), (0, 2))

    def test_result_that_is_memory_of_a_stream_in_eager(self):
        halves = self.product(stream=1), self.product(stream=2)
        whole = self.call(aten.cat.default, halves)
        note_fact(whole, results=(ResultMemory("output[0]", (2,)),))
        output = self.program.output(whole)
        output.meta["desc"] = [PlainAOTOutput(0)]
        self.plan()
        (buffer,) = [b for b in self.buffers.values() if b.fresh]
        self.assertEqual(buffer.stream, 2)

    def test_memory_that_a_copy_stream_fills(self):
        self.plan(self.product(stream=copy_in_stream(0)))
        self.assertEqual(self.buffers["buf0"].stream, 0)

    def test_saved_memory(self):
        x, y, z = (self.program.input(4, 4) for _ in "xyz")
        note_fact(x, memory=1, is_computed=True)
        note_fact(y, memory=2, is_owned=True)
        self.plan(self.product(x, y), self.product(z, z), **BACKWARD)
        found = {name: (b.stream, b.saved_on, b.settles, b.size) for name, b in self.buffers.items() if not b.fresh}
        wanted = {"x0": (0, 1, True, 64), "x1": (2, 2, True, 0), "x2": (0, None, False, 0)}
        self.assertEqual(found, wanted)

    def settles(self, *, results=1, known=(), enclosed=False, **fact):
        """Is stream 1 to be ordered after the reader of its memory at the exit?"""
        self.program = Program()
        side = self.product(stream=1)
        reader = self.product(side, side, **fact)
        options = BACKWARD if self.is_backward else {}
        note_fact(side, results=[ResultMemory("output[1]", known)] if known else None)
        output = self.program.output(*(reader, side)[:results])
        output.meta["desc"] = [PlainAOTOutput(i) for i in range(results)]
        self.plan(enclosed=enclosed, **options)
        return self.buffers["buf0"].settles

    is_backward = False

    def test_readers_that_eager_does_not_have(self):
        freed, other = ForeignRead(1, "freed"), ForeignRead(1, "other")
        self.assertTrue(self.settles(reads=()))
        self.assertTrue(self.settles(reads=(ForeignRead(2, "freed"),)))
        self.assertTrue(self.settles(reads=(freed, other)))
        self.assertFalse(self.settles(reads=(freed,)))
        self.assertFalse(self.settles())
        self.assertFalse(self.settles(reads=(), enclosed=True))

    def test_memory_that_eager_returns(self):
        kept = (ForeignRead(1, "kept", "y"),)
        self.assertTrue(self.settles(reads=kept))
        self.assertFalse(self.settles(reads=kept, results=2))

    def test_result_that_eager_returns_in_the_same_memory(self):
        self.assertTrue(self.settles(reads=(), results=2))
        self.assertFalse(self.settles(reads=(), results=2, known=(1,)))

    def test_memory_of_a_backward(self):
        self.is_backward = True
        self.assertTrue(self.settles())
        self.assertFalse(self.settles(results=2))


class TestNeedsPlan(PlansTestCase):
    def needed(self, *results, **options):
        with self.program.scheduled(*(results or [self.product()]), **options) as scheduler:
            found = needs_plan(scheduler)
            self.assertIs(ScheduleNotes.of(scheduler).needs_plan, found)
        self.program = Program()
        return found

    def test_program_without_streams(self):
        self.assertFalse(self.needed())
        self.assertFalse(self.needed(self.product(after=(), promised_to=())))

    def test_programs_with_streams(self):
        self.assertTrue(self.needed(self.product(stream=1)))
        self.assertTrue(self.needed(self.product(after=(E5,))))
        self.assertTrue(self.needed(self.product(promised_to=(CALLER,))))
        note_fact(self.program.input(4), exit_waits=(ExitWait(1, (CALLER,)),))
        self.assertTrue(self.needed())
        note_fact(self.program.input(4), memory=1)
        self.assertTrue(self.needed(**BACKWARD))
        self.call(streams.record_event.default, 5, 0)
        self.assertTrue(self.needed())

    def test_host_beside_copies(self):
        for on_host in (False, True):
            host = self.program.input(4, device="cpu")
            copy = self.call(COPY_ASYNC, host, self.program.input(4))
            copy.meta[DESTINATION] = host.meta["val"]
            device = "cpu" if on_host else "cuda:0"
            node = self.call(aten.sin.default, self.program.input(4, device=device))
            self.assertEqual(self.needed(node), on_host)
