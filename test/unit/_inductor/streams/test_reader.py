"""`_inductor.streams.reader`: what a schedule launches, and what the host does between."""

import operator
from collections import Counter

import torch

import form  # noqa: F401
from stand_ins.schedules import Program, ProgramCase
from torch_overlay._functorch.streams.facts import ExitWait, ForeignRead, note_fact
from torch_overlay._functorch.streams.ids import copy_in_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, record, state, synchronization
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, register
from torch_overlay._inductor.streams.plan import HOST, Op
from torch_overlay._inductor.streams.reader import RegionReader


aten, streams, prims = torch.ops.aten, torch.ops.streams, torch.ops.prims
CPU, CALLER = torch.device("cpu"), state(0)
E5, R5, H0, C0 = caller_event(5), record(5, 0), synchronization(0), blocking_copy(0)


def op(name, stream, reads="", writes="", **fields):
    return Op(name, stream, frozenset(reads.split()), frozenset(writes.split()), **fields)


class ReaderTestCase(ProgramCase):
    def product(self, size=2, **where):
        return self.call(aten.mm.default, *[self.program.input(size, size)] * 2, **where)

    def read(self, *results, enclosed=False, first=0, awaited=False, **options):
        """Read the schedule, from a node on."""
        self.program.output(*results)
        with self.program.scheduled(**options) as scheduler:
            if awaited:
                ScheduleNotes.of(scheduler).awaited_stores = {scheduler.nodes[-1]: ["op0"]}
            reader = RegionReader(scheduler, scheduler.nodes[first:], enclosed)
            reader.read()
            reader.left_after = reader.promised()
            self.assertEqual(sorted(reader.index.values())[-1], len(reader.ops) - 1)
            return reader


class TestLaunches(ReaderTestCase):
    def test_stream_and_memory(self):
        node = self.product(stream=2, after=(E5,), promised_to=(R5, CALLER))
        reader = self.read(node)
        tokens = {"after": frozenset({E5}), "promised_to": frozenset({R5, CALLER})}
        self.assertEqual(reader.ops, [op("op0", 2, "x0", "buf0", **tokens)])
        self.assertEqual(reader.devices, {0: 0})
        self.assertEqual(reader.writer_streams, {"buf0": [2]})
        self.assertEqual((reader.inner, reader.output_memory), (set(), {"buf0"}))

    def test_operation_that_touches_no_memory_of_the_caller(self):
        first = self.product(stream=1)
        second = self.call(aten.mm.default, first, first, stream=1)
        third = self.call(aten.mm.default, second, second)
        reader = self.read(third)
        reads = [set(o.reads) for o in reader.ops]
        self.assertEqual(reads, [{"x0"}, {"buf0"}, {"buf1"}])
        self.assertEqual(reader.inner, {1})

    def test_current_stream_of_another_device(self):
        x = self.program.input(4, device="cuda:1")
        reader = self.read(self.call(aten.sin.default, x))
        self.assertEqual(reader.ops, [op("op0", 1_000_001, "x0", "buf0")])
        self.assertEqual(reader.devices, {0: 1})

    def test_update_in_place(self):
        x, made = self.program.input(2, 2), self.product(stream=1)
        reader = self.read(self.call(aten.copy_.default, x, made, stream=2))
        update = reader.ops[-1]
        self.assertEqual((update.stream, update.reads), (2, {"buf0", "x0"}))
        self.assertEqual((update.writes, list(reader.fresh)), ({"x0"}, ["buf0"]))

    def test_concatenation(self):
        halves = self.product(stream=1), self.product(stream=2)
        reader = self.read(self.call(aten.cat.default, halves))
        *slices, whole = reader.ops
        self.assertEqual([o.stream for o in reader.ops], [1, 2, None])
        (name,) = whole.writes
        self.assertEqual(set(reader.owners.values()), {name})
        self.assertEqual(set(reader.owners), {n for o in slices for n in o.writes})
        self.assertEqual(list(reader.fresh), [name])
        self.assertEqual(reader.writer_streams, {name: [1, 2]})

    def test_outputs_of_one_kernel(self):
        kernel = self.call(aten.linalg_qr.default, self.program.input(4, 4), stream=1)
        reader = self.read(*(self.call(operator.getitem, kernel, i) for i in (0, 1)))
        self.assertEqual([o.stream for o in reader.ops], [1, None, None])
        self.assertEqual(list(reader.writer_streams.values()), [[1]] * 3)

    def test_call_that_returns_a_view(self):
        x = self.program.input(4, dtype=torch.complex64)
        made = self.call(aten.mul.Tensor, x, x, stream=1)
        reader = self.read(self.call(aten.view_as_real.default, made))
        launch, view = reader.ops[:2]
        self.assertEqual((launch.stream, view.stream), (1, None))
        self.assertTrue(launch.writes & view.reads)

    def test_promises_at_the_exit(self):
        leave = ExitWait(1, (CALLER,)), ExitWait(2, (E5,), C0)
        copy = self.call(prims.device_put.default, self.product(exit_waits=leave), CPU)
        note_fact(copy, requires=C0)
        self.assertEqual(self.read(copy).left_after, {1: {CALLER}})

    def test_results_and_inputs(self):
        """A result that the caller doesn't get is not in memory that leaves."""
        dropped, kept = self.product(is_dropped=True), self.product(3)
        for name, fact in (("is_owned", 0), ("is_computed", 1)):
            note_fact(list(self.program.graph.nodes)[2 * fact], **{name: True})
        reader = self.read(dropped, kept)
        self.assertEqual(reader.output_memory, {"buf1"})
        self.assertEqual((reader.owned, reader.kept), ({"x0"}, {"x1"}))
        self.program = Program()
        dropped = self.product(is_dropped=True)
        self.assertEqual(self.read(dropped, dropped).output_memory, {"buf0"})

    def test_order_that_a_schedule_was_given(self):
        reader = self.read(self.product(), self.product(3), awaited=True)
        self.assertEqual([set(o.order_after) for o in reader.ops], [set(), {"op0"}])

    def test_reads_of_other_streams_memory(self):
        reads = (
            ForeignRead(1, "freed"),
            ForeignRead(2, "kept", "y"),
            ForeignRead(2, "kept", "z"),
            ForeignRead(3, "kept", "z"),
            ForeignRead(3, "other"),
        )
        reader = self.read(self.product(reads=reads), self.product(3))
        self.assertEqual(reader.reads_as_eager, {0: {1, 2}})
        self.assertEqual(reader.kept_by_eager, {0: Counter({2: 2, 3: 1})})

    def test_memory_that_a_copy_stream_fills(self):
        node = self.product(stream=copy_in_stream(0))
        self.assertEqual(self.read(node).loaded, {"buf0"})


class TestHost(ReaderTestCase):
    def copy(self, source, device=CPU, non_blocking=False, **fact):
        target = prims.device_put.default
        return self.call(target, source, device, non_blocking, **fact)

    def test_host_reads_a_download(self):
        made = self.product(stream=1)
        copy = self.copy(made, stream=1, requires=C0)
        reader = self.read(self.call(aten.sin.default, copy))
        _, download, host = reader.ops
        self.assertEqual((download.stream, download.blocking), (1, True))
        self.assertEqual(download.requires, {C0})
        self.assertEqual((host.stream, host.reads), (HOST, download.writes))
        self.assertEqual(reader.devices, {0: 0, 1: 0})

    def test_copies_for_which_the_host_waits(self):
        made = self.product()
        number = self.program.input(device="cpu")
        values = self.program.input(4, device="cpu")
        gpu, other = torch.device("cuda", 0), torch.device("cuda", 1)
        reader = self.read(
            self.copy(made),
            self.copy(made, CPU, True),
            self.copy(values, gpu),
            self.copy(values, gpu, True),
            self.copy(number, gpu),
            self.copy(self.product(3), other),
        )
        kinds = [o.blocking for o in reader.ops if o.reads - {"x0", "x3"}]
        self.assertEqual(Counter(kinds), {True: 2, False: 4})
        blocking = [sorted(o.reads) for o in reader.ops if o.blocking]
        self.assertEqual(blocking, [["buf0"], ["x2"]])

    def test_host_reads_what_another_region_downloads(self):
        for token, wanted in ((None, {CALLER}), (H0, set())):
            self.program = Program()
            made = self.copy(self.program.input(4), CPU, True, promised_to=(H0,))
            self.call(streams.synchronize_stream.default, 1, requires=token)
            node = self.call(aten.sin.default, made)
            (host,) = self.read(node, enclosed=True, first=2).ops
            self.assertEqual((host.stream, host.after), (HOST, wanted))


class TestStreamOperations(ReaderTestCase):
    def operation(self, target, *args, enclosed=False, **fact):
        self.call(target, *args, **fact)
        (found,) = self.read(self.program.input(4), enclosed=enclosed).ops
        self.assertEqual(found.name, target._schema.name.partition("::")[2])
        return found

    def test_record(self):
        tokens = {"after": (E5, CALLER), "requires": R5}
        found = self.operation(streams.record_event.default, 5, 2, **tokens)
        self.assertEqual((found.stream, found.rerecords), (2, caller_event(5)))
        self.assertEqual((found.after, found.requires), ({E5, CALLER}, {R5}))
        self.assertFalse(found.blocking or found.waits)

    def test_record_in_an_enclosed_region(self):
        for stream, wanted in ((2, {CALLER}), (0, set())):
            self.program = Program()
            args = streams.record_event.default, 5, stream
            found = self.operation(*args, enclosed=True, after=(E5,), requires=R5)
            self.assertEqual(found.after, wanted)

    def test_synchronization_of_a_stream(self):
        args = streams.synchronize_stream.default, 2
        found = self.operation(*args, after=(E5,), requires=H0)
        self.assertEqual((found.stream, found.blocking, found.waits), (2, True, False))
        self.assertEqual((found.after, found.requires), ({E5}, {H0}))

    def test_synchronization_of_an_event_or_the_device(self):
        for target, args, wanted in (
            (streams.synchronize_event.default, (5,), set()),
            (streams.synchronize_device.default, ("cuda", 0), {CALLER}),
        ):
            for enclosed, after in ((False, {E5}), (True, wanted)):
                self.program = Program()
                tokens = {"after": (E5,), "requires": H0}
                found = self.operation(target, *args, enclosed=enclosed, **tokens)
                self.assertEqual((found.stream, found.waits), (HOST, True))
                self.assertEqual(found.after, after)


class TestParts(ReaderTestCase):
    def rows(self, *ends, places=(1, 2), read=False):
        register()
        host = self.program.input(4, 8, device="cpu")
        for (first, last), stream in zip(ends, places):
            value = self.program.input(last - first, 8)
            copy = self.call(COPY_ASYNC, host, value, stream=stream)
            with self.program.mode:
                copy.meta[DESTINATION] = host.meta["val"][first:last]
        to = prims.device_put.default
        device = torch.device("cuda:0")
        reader = self.read(*([self.call(to, host, device)] if read else ()))
        return [{n for n in o.writes if n.startswith("x0")} for o in reader.ops], reader

    def test_rows_that_two_streams_write(self):
        found, reader = self.rows((0, 2), (2, 4))
        self.assertFalse(found[0] & found[1])
        self.assertEqual(reader.owners, dict.fromkeys(found[0] | found[1], "x0"))

    def test_reader_of_all_rows(self):
        (one, other, _), reader = self.rows((0, 2), (2, 4), read=True)
        self.assertLess(one | other, reader.ops[-1].reads)

    def test_rows_that_overlap(self):
        self.assertEqual(self.rows((0, 3), (2, 4))[0], [{"x0"}] * 2)

    def test_rows_of_one_stream(self):
        self.assertEqual(self.rows((0, 2), (2, 4), places=(1, 1))[0], [{"x0"}] * 2)
