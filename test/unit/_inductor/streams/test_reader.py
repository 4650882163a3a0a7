"""`_inductor.streams.reader`: what a schedule launches, and what the host does between."""

import gc
import operator
import weakref
from collections import Counter

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.source import CurrentStreamSource, LocalSource
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._inductor import config

import form  # noqa: F401
from stand_ins.schedules import Program, ProgramCase
from torch_overlay import frame_facts
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import ExitWait, ForeignRead, note_fact, ResultMemory
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, record, state, synchronization
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins
from torch_overlay._inductor.streams import graph_facts
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION
from torch_overlay._inductor.streams.plan import HOST, Op
from torch_overlay._inductor.streams.reader import BoundaryTokens, RegionReader


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
        with self.program.scheduled(*results, **options) as scheduler:
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
        self.assertEqual(reader.output_memory, {"buf0"})

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

    def test_result_that_the_caller_does_not_get(self):
        """It is not in memory that leaves."""
        dropped, kept = self.product(is_dropped=True), self.product(3)
        self.assertEqual(self.read(dropped, kept).output_memory, {"buf1"})
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
        self.assertEqual(reader.foreign_reads, {0: {*reads}})


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


PRIVATE, OTHER = 3, 4  # made by the frame; the current stream of the other device
OTHER_DEVICE = 1_000_001  # the number that OTHER has where regions are planned


def current(device):
    stream = torch.Stream(stream_id=0, device_index=device, device_type=1)
    return stream, CurrentStreamSource(stream.device)


class SchedulesTestCase(ProgramCase):
    def setUp(self):
        super().setUp()
        self.objects = [current(0)]
        numbering.register_user_object(*self.objects[0])
        for index in (1, 2):
            stream = torch.Stream(stream_id=index, device_index=0, device_type=1)
            self.objects.append(stream)
            numbering.register_user_object(stream, LocalSource(f"s{index}"))
        stream = torch.Stream(stream_id=PRIVATE, device_index=0, device_type=1)
        self.objects.append(stream)
        self.assertEqual(registry.add_owned(stream, torch.Stream, (), {}), PRIVATE)
        self.objects.append(current(1))
        self.assertEqual(registry.add_current(*self.objects[-1]), OTHER)
        self.enterContext(frame_facts.compiling(registry.facts()))


class TestTokensOfLaunches(SchedulesTestCase):
    def setUp(self):
        super().setUp()
        self.x = self.program.input(4)

    def launches(self, *results, enclosed=False, **options):
        """The tokens before and after the kernel of each result."""
        with self.program.scheduled(*results, **options) as scheduler:
            self.tokens = BoundaryTokens(scheduler, scheduler.nodes, enclosed)
            order, found = list(self.program.graph.nodes), {}
            for node in scheduler.nodes:
                made = max(fx_origins(node), key=order.index)
                tokens = self.tokens.of_launch(node, node_stream(made))
                found[made] = tuple(map(set, tokens))
                self.tokens.note_origins(node)
            return [found[node] for node in results]

    def test_tokens_of_a_node(self):
        known = {"after": (E5, state(0)), "promised_to": (R5, state(0), state(2))}
        node = self.call(aten.sin.default, self.x, stream=1, **known)
        wanted = {E5, state(0)}, {R5, state(0), state(2)}
        self.assertEqual(self.launches(node), [wanted])

    def test_own_stream_and_streams_that_nobody_sees(self):
        tokens = (state(1), state(2), state(PRIVATE))
        node = self.call(aten.sin.default, self.x, stream=1)
        note_fact(node, after=tokens, promised_to=tokens)
        self.assertEqual(self.launches(node), [({state(2)}, {state(2)})])

    def test_backward_sees_the_streams_of_its_forward(self):
        node = self.call(aten.sin.default, self.x, stream=1, after=(state(PRIVATE),))
        found = self.launches(node, is_backward=True, is_inference=False)
        self.assertEqual(found, [({state(PRIVATE)}, set())])

    def test_current_stream_of_another_device(self):
        node = self.call(aten.sin.default, self.x, stream=1, after=(state(OTHER),))
        self.assertEqual(self.launches(node), [({state(OTHER_DEVICE)}, set())])

    def test_nodes_of_one_kernel(self):
        first = self.call(aten.sin.default, self.x, after=(E5,), promised_to=())
        second = self.call(aten.cos.default, first, after=(state(1),), promised_to=(R5,))
        self.assertEqual(self.launches(second), [({E5, state(1)}, {R5})])

    def test_node_that_made_what_a_kernel_reads(self):
        first = self.call(aten.sum.default, self.x, stream=1, after=(E5,), promised_to=(R5,))
        second = self.call(aten.cos.default, first, stream=2, after=(), promised_to=())
        found = self.launches(first, second)
        self.assertEqual(found, [({E5}, {R5}), (set(), set())])

    def sum_and_its_reader(self, of_input=False, **fact):
        """The kernels of both compute `inner`; the second reads the first's result."""
        made = self.program.input(64, 64)
        made = made if of_input else self.call(aten.mm.default, made, made)
        inner = self.call(aten.relu.default, made, after=(E5,), promised_to=(R5,))
        total = self.call(aten.sum.dim_IntList, inner, [1], True)
        reader = self.call(aten.add.Tensor, inner, total, **fact)
        with config.patch(max_fusion_size=1):
            return self.launches(total, reader)

    def test_node_that_went_into_what_a_kernel_reads(self):
        found = self.sum_and_its_reader(after=(state(1),), promised_to=())
        self.assertEqual(found, [({E5}, {R5}), ({state(1)}, set())])

    def test_node_that_reads_the_callers_memory_again(self):
        found = self.sum_and_its_reader(of_input=True, after=(state(1),), promised_to=())
        self.assertEqual(found, [({E5}, {R5}), ({state(1), E5}, {R5})])

    def test_node_that_is_computed_in_two_kernels(self):
        shared = self.call(aten.neg.default, self.x, after=(E5,), promised_to=())
        results = [
            self.call(aten.cos.default, self.call(aten.slice.Tensor, shared, 0, *ends)) for ends in ((0, 1), (1, 4))
        ]
        for node in results:
            note_fact(node, after=(), promised_to=())
        self.assertEqual(self.launches(*results), [({E5}, set())] * 2)

    def test_view(self):
        view = self.call(aten.slice.Tensor, self.x, 0, 0, 2, after=(E5,), promised_to=(R5,))
        node = self.call(aten.cos.default, view, after=(state(1),), promised_to=())
        self.assertEqual(self.launches(node), [({state(1)}, set())])

    def test_node_that_lost_its_tokens(self):
        first = self.call(aten.sum.default, self.x, stream=1, after=(E5,), promised_to=(R5,))
        other = self.call(aten.mm.default, *[self.program.input(2, 2)] * 2, stream=1)
        third = self.call(aten.mm.default, *[self.program.input(3, 3)] * 2, stream=2)
        found = self.launches(first, other, third)
        self.assertEqual(found, [({E5}, {R5})] * 2 + [(set(), set())])

    def test_reader_that_lost_its_tokens(self):
        """A fact of an earlier node doesn't hold of this one, which isn't unknown either."""
        self.assertEqual(self.sum_and_its_reader()[1], (set(), set()))

    def test_enclosed_regions_fork_and_join(self):
        tokens = {"after": (E5,), "promised_to": (R5, H0, state(2), state(0))}
        side = self.call(aten.sum.default, self.x, stream=1, **tokens)
        other = self.call(aten.cos.default, self.program.input(8), promised_to=(R5,))
        found = self.launches(side, other, enclosed=True)
        self.assertEqual(found, [({state(0)}, {state(0), R5, H0}), (set(), {R5})])
        self.assertEqual(self.tokens.concerned, {0, 1, 2})

    def test_reads_of_other_streams_memory(self):
        one, two = ForeignRead(1, "freed"), ForeignRead(2, "kept", "y")
        inner = self.call(aten.sin.default, self.x, reads=(one,))
        y, z = self.program.input(2, 2), self.program.input(3, 3)
        results = [
            self.call(aten.cos.default, inner, reads=(one, two)),
            self.call(aten.mm.default, y, y, reads=()),
            self.call(aten.mm.default, z, z),
            self.call(aten.clone.default, self.call(aten.slice.Tensor, y, 0, 0, 1)),
        ]
        with self.program.scheduled(*results) as scheduler:
            tokens = BoundaryTokens(scheduler, scheduler.nodes, False)
            nodes = {n: node for node in scheduler.nodes for n in fx_origins(node)}
            found = [tokens.foreign_reads(nodes[n]) for n in results]
            self.assertEqual(found, [{one, two}, set(), None, None])
            view = nodes[results[-1]]
            view.node.origins.remove(results[-1])
            self.assertEqual(tokens.foreign_reads(view), set())


class TestExit(SchedulesTestCase):
    def at_exit(self, *leave, blocking=(), enclosed=False):
        x = self.program.input(4)
        node = self.call(aten.sin.default, x, exit_waits=leave)
        with self.program.scheduled(node) as scheduler:
            tokens = BoundaryTokens(scheduler, scheduler.nodes, enclosed)
            return tokens.at_exit(blocking)

    def test_what_streams_are_left_after(self):
        leave = (
            ExitWait(1, (state(0), state(PRIVATE))),
            ExitWait(1, (E5,)),
            ExitWait(OTHER, (state(OTHER), state(2))),
            ExitWait(PRIVATE, (state(0),)),
        )
        wanted = {1: {state(0), E5}, OTHER_DEVICE: {state(OTHER_DEVICE), state(2)}}
        self.assertEqual(self.at_exit(*leave), wanted)

    def test_copy_that_is_left_out(self):
        leave = ExitWait(1, (state(0),)), ExitWait(2, (E5,), C0)
        self.assertEqual(self.at_exit(*leave), {1: {state(0)}, 2: {E5}})
        self.program = Program()
        self.assertEqual(self.at_exit(*leave, blocking={C0}), {1: {state(0)}})

    def test_enclosed_region(self):
        self.assertEqual(self.at_exit(ExitWait(1, (state(0),)), enclosed=True), {})


class TestGraphFacts(SchedulesTestCase):
    def test_streams_of_the_frame(self):
        self.assertEqual(graph_facts.private_streams(), {PRIVATE})
        self.assertEqual(graph_facts.stream_devices(), {0: 0, 1: 0, 2: 0, 3: 0, 4: 1})

    def test_stream_that_the_frame_hands_out(self):
        registry.current().locals[PRIVATE] = "made"
        with frame_facts.compiling(registry.facts()):
            self.assertEqual(graph_facts.private_streams(), set())

    def test_exit_of_a_graph_that_computes_nothing(self):
        x = self.program.input(4)
        note_fact(x, exit_waits=(ExitWait(1, (E5,)),))
        with self.program.scheduled(x):
            self.assertEqual(graph_facts.exit_waits(), (ExitWait(1, (E5,)),))

    def test_graph_without_facts(self):
        with self.program.scheduled(self.program.input(4)):
            self.assertEqual(graph_facts.exit_waits(), ())
            self.assertEqual(graph_facts.eager_memory_of_results(), {})

    def test_saved_values(self):
        inputs = [self.program.input(4) for _ in range(3)]
        note_fact(inputs[1], memory=2)
        with self.program.scheduled(*inputs):
            self.assertEqual(graph_facts.streams_of_saved(), {2})

    def memory_of_results(self, **options):
        x, host = self.program.input(4), self.program.input(4, device="cpu")
        made = self.call(aten.sum.default, x)
        updated = self.call(aten.copy_.default, x, self.call(aten.sin.default, x))
        download = self.call(aten.sin.default, host)
        unknown = self.call(aten.mm.default, *[self.program.input(2, 2)] * 2)
        results = made, updated, download, unknown, made
        names = [f"output[{i}]" for i in (0, 1, 2, 4)]
        for node in (made, updated, download, unknown):
            note_fact(node, results=[ResultMemory(n, (1, i)) for i, n in enumerate(names)])
        output = self.program.output(*results)
        output.meta["desc"] = [PlainAOTOutput(i) for i in range(len(results))]
        with self.program.scheduled(**options):
            return graph_facts.eager_memory_of_results()

    def test_memory_of_results(self):
        """Of results that are the caller's own memory, or the host's, nothing is said."""
        self.assertEqual(self.memory_of_results(), {"buf0": {0, 1, 3}})

    def test_results_of_a_backward(self):
        found = self.memory_of_results(is_backward=True, is_inference=False)
        self.assertEqual(found, {})

    def test_what_nodes_make_happen(self):
        x = self.program.input(4)
        self.call(streams.record_event.default, 5, 1, requires=R5)
        node = self.call(aten.sin.default, x)
        with self.program.scheduled(node) as scheduler:
            found = [graph_facts.required(n) for n in scheduler.nodes]
            self.assertEqual(found, [{R5}, set()])


class TestNotes(SchedulesTestCase):
    def test_notes_live_as_long_as_the_schedule(self):
        with self.program.scheduled(self.call(aten.sin.default, self.program.input(4))) as made:
            notes = ScheduleNotes.of(made)
            notes.awaited_stores = dict.fromkeys(made.nodes, ())
            self.assertIs(ScheduleNotes.of(made), notes)

        class Schedule:
            pass

        other = Schedule()
        self.assertIsNot(ScheduleNotes.of(other), notes)
        ScheduleNotes.of(other).awaited_stores = {other: ()}
        gone = weakref.ref(ScheduleNotes.of(other))
        del other
        gc.collect()
        self.assertIsNone(gone())
