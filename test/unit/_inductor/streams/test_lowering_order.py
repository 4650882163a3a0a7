"""`_inductor.streams.lowering`: blocking and visible operations keep the program's order."""

from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.scheduler import Scheduler

import form  # noqa: F401
from stand_ins.schedules import ProgramCase
from torch_overlay._dynamo.ops import range_mark
from torch_overlay._functorch.streams.tokens import blocking_copy, record, synchronization
from torch_overlay._inductor.scheduler_nodes import fx_origins
from torch_overlay._inductor.streams.lowering import order_blocking_operations, order_stream_operations


aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
R5, H0, C0 = record(5, 0), synchronization(0), blocking_copy(0)
CPU = torch.device("cpu")


def with_orders(scheduler):
    order_stream_operations(scheduler)
    compute_dependencies(scheduler)
    order_blocking_operations(scheduler)


compute_dependencies = Scheduler.compute_dependencies


@config.patch(max_fusion_size=1)  # so that each kernel has a node of its own
class ScheduleOrderTestCase(ProgramCase):
    def visible(self, target=streams.record_event.default, token=R5, **fact):
        args = {
            streams.record_event.default: (5, 0),
            streams.synchronize_stream.default: (0,),
            streams.synchronize_device.default: ("cuda", 0),
            range_mark: ("here",),
        }[target]
        return self.call(target, *args, requires=token, **fact)

    def sine(self, *args, device="cuda:0", size=4, **fact):
        x = args[0] if args else self.program.input(size, device=device)
        return self.call(aten.sin.default, x, **fact)

    def ancestors(self, *results):
        """Which nodes come before each node in any order of the schedule."""
        patch = mock.patch.object(Scheduler, "compute_dependencies", with_orders)
        with patch, self.program.scheduled(*results) as scheduler:
            made = {node.get_name(): n for node in scheduler.nodes for n in self.last(node)}
            return {made[node.get_name()]: {made[name] for name in node.ancestors} for node in scheduler.nodes}

    def last(self, node):
        origins = set(fx_origins(node))
        return [n for n in self.program.graph.nodes if n in origins][-1:]


class TestVisibleOperations(ScheduleOrderTestCase):
    def test_without_stream_operations(self):
        one, other = self.sine(promised_to=(R5,)), self.sine()
        self.assertEqual(self.ancestors(one, other), {one: set(), other: set()})

    def test_record_comes_after_what_it_is_to_cover(self):
        covered, other = self.sine(promised_to=(R5,)), self.sine()
        rec = self.visible()
        later = self.sine(promised_to=(R5,))
        found = self.ancestors(covered, other, later)
        self.assertEqual(found[rec], {covered})
        self.assertEqual(found[other], set())

    def test_their_own_order(self):
        ops = [self.visible(token=record(5, i)) for i in range(3)]
        found = self.ancestors(self.program.input(4))
        self.assertEqual([found[n] for n in ops], [set(ops[:i]) for i in range(3)])

    def test_host_memory_after_a_synchronization(self):
        early = self.sine(device="cpu", size=2)
        sync = self.visible(streams.synchronize_stream.default, H0)
        late, other = self.sine(device="cpu"), self.sine()
        found = self.ancestors(early, late, other)
        self.assertEqual(found, {early: set(), sync: set(), late: {sync}, other: set()})

    def test_callers_memory_after_a_synchronization_of_the_device(self):
        made = self.call(aten.mm.default, *[self.program.input(2, 2)] * 2)
        sync = self.visible(streams.synchronize_device.default, H0)
        inner, late = self.call(aten.mm.default, made, made), self.sine()
        found = self.ancestors(inner, late)
        self.assertEqual(found, {made: set(), sync: set(), inner: {made}, late: {sync}})

    def test_record_is_no_synchronization(self):
        rec = self.visible()
        late = self.sine(device="cpu")
        self.assertEqual(self.ancestors(late), {rec: set(), late: set()})

    def test_ranges(self):
        inside = [self.sine(range=0), self.sine(size=3, range=0)]
        mark = self.visible(range_mark, None, range=0)
        after, unknown = self.sine(size=5, range=1), self.sine(size=6)
        found = self.ancestors(*inside, after, unknown)
        self.assertEqual(found[mark], set(inside))
        self.assertEqual(found[after], {mark, *inside})
        self.assertEqual(found[unknown], set())


class TestBlockingOperations(ScheduleOrderTestCase):
    known = {"after": (), "promised_to": ()}

    def copy(self, source, **fact):
        return self.call(prims.device_put.default, source, CPU, False, **fact)

    def test_copy_comes_after_its_stream(self):
        same, other = (self.sine(stream=s, size=s, **self.known) for s in (1, 2))
        copy = self.copy(self.program.input(8), stream=1, requires=C0, **self.known)
        later = self.sine(stream=1, size=3, **self.known)
        found = self.ancestors(same, other, copy, later)
        wanted = {same: set(), other: set(), copy: {same}, later: set()}
        self.assertEqual(found, wanted)

    def test_copy_comes_after_what_it_was_promised(self):
        fact = {"after": (), "promised_to": (C0,)}
        promised = self.sine(stream=2, **fact)
        copy = self.copy(self.program.input(8), stream=1, requires=C0, **self.known)
        late = self.sine(stream=2, size=3, **fact)
        reader = self.call(aten.cos.default, copy, **fact)
        found = self.ancestors(promised, copy, late, reader)
        self.assertEqual(found[copy], {promised, late})
        self.assertEqual(found[reader], {copy, promised, late})

    def test_host_memory_is_touched_afterwards(self):
        early = self.sine(device="cpu", size=2, **self.known)
        copy = self.copy(self.program.input(8), stream=1, requires=C0, **self.known)
        late = self.sine(device="cpu", size=3, **self.known)
        kept = self.sine(device="cpu", size=5, after=(), promised_to=(C0,))
        found = self.ancestors(early, copy, late, kept)
        self.assertEqual(found[late], {copy, kept})
        self.assertEqual((found[early], found[kept]), (set(), set()))

    def test_copy_that_does_not_block(self):
        same = self.sine(stream=1, **self.known)
        args = prims.device_put.default, self.program.input(8), CPU, True
        copy = self.call(*args, stream=1, **self.known)
        self.assertEqual(self.ancestors(same, copy)[copy], set())

    def test_program_without_streams(self):
        other = self.sine()
        copy = self.copy(self.program.input(8))
        self.assertEqual(self.ancestors(other, copy)[copy], set())
