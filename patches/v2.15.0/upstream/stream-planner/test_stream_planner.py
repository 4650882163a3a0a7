# Owner(s): ["module: inductor"]

import dataclasses
import itertools
import random

from torch._functorch._streams.tokens import (
    caller_event,
    CALLER as AT_CALLER,
    record,
    state,
    streams_of,
    synchronization,
)
from torch._inductor.streams.plan import Buffer, ENTRY, HOST, Op
from torch._inductor.streams.planner import plan_streams
from torch.testing._internal.common_utils import run_tests, TestCase


NAMES = [f"b{i}" for i in range(6)]


def draw(rng):
    """A schedule on some streams and the host, and the memory of the region."""
    streams, ops = rng.randrange(2, 5), []
    for i in range(rng.randrange(1, 12)):
        stream = rng.choice([*range(streams), *range(streams), HOST])
        reads, writes = (frozenset(rng.sample(NAMES, rng.randrange(3))) for _ in "rw")
        op = Op(f"op{i}", stream, reads, writes)
        if stream != HOST:
            others = [state(s) for s in range(streams) if s != stream]
            after = rng.sample([*others, caller_event(9)], rng.randrange(2))
            before = rng.sample([*others, record(7, 0)], rng.randrange(2))
            op = dataclasses.replace(
                op,
                after=frozenset(after),
                before=frozenset(before),
                blocking=rng.random() < 0.1,
            )
            if rng.random() < 0.1:
                token = frozenset({record(7, 0)})
                op = Op(op.name, stream, requires=token, after=op.after)
        ops.append(op)
    blocks = rng.sample(NAMES, rng.randrange(len(NAMES)))
    buffers = [Buffer(b, rng.randrange(streams), rng.random() < 0.7) for b in blocks]
    return ops, buffers


def reached(plan, events):
    """What each operation, and each stream at the exit, comes after. An operation is
    its position; a stream at the entry is its token."""
    streams = {*plan.streams, *(s for op in plan.ops for s in streams_of(op.before))}
    now = {s: {state(s)} for s in streams} | {HOST: set()}
    entry = {s: frozenset(now[s]) for s in streams}
    waits, found = {}, {}
    for e in events:
        for at in e.waits:
            waits.setdefault(at, []).append((e.after, e.stream))

    def arrive(position, stream):
        if stream != HOST:
            now[stream] |= now[HOST]
        for after, source in waits.get((position, stream), ()):
            now[stream] |= entry[source] if after == ENTRY else found[after]
        for wait in plan.boundary_waits:
            if (wait.before, wait.stream) == (position, stream):
                now[stream].add(wait.token)

    for i, op in enumerate(plan.ops):
        arrive(i, op.stream)
        now[op.stream].add(i)
        found[i] = frozenset(now[op.stream])
        if op.blocking:
            now[HOST] |= found[i]
    for s in streams:
        arrive(len(plan.ops), s)
        found["exit", s] = frozenset(now[s])
    return found


def required(ops, buffers):
    """Every (earlier, later) that must be ordered, by looking at all pairs."""
    fresh = {b.name: b for b in buffers if b.fresh}
    last, written, pairs = {}, set(), set()
    for i, op in enumerate(ops):
        for j, old in enumerate(ops[:i]):
            conflict = old.writes & (op.reads | op.writes) or old.reads & op.writes
            if old.stream != HOST and (conflict or old.before & op.requires):
                pairs.add((j, i))
        for name in op.writes & fresh.keys() - written:  # here it is allocated
            owner = fresh[name].stream
            touched = any(name in old.reads for old in ops[:i])
            if op.stream not in (HOST, owner) and not touched:
                pairs |= {
                    (before, i) for before in (state(owner), *last.get(owner, ()))
                }
        written |= op.writes
        pairs |= {(token, i) for token in op.after}
        pairs |= {(i, ("exit", s)) for s in streams_of(op.before)}
        last[op.stream] = [i]
    return pairs


def missing(plan, events, buffers):
    found = reached(plan, events)
    return {(a, b) for a, b in required(plan.ops, buffers) if a not in found[b]}


def smaller(plan):
    """The plans that lack one wait, and their events."""
    for n, event in enumerate(plan.events):
        for wait in event.waits:
            rest = tuple(w for w in event.waits if w != wait)
            one = dataclasses.replace(event, waits=rest)
            yield plan, (*plan.events[:n], one, *plan.events[n + 1 :])
    for n, _ in enumerate(plan.boundary_waits):
        rest = plan.boundary_waits[:n] + plan.boundary_waits[n + 1 :]
        yield dataclasses.replace(plan, boundary_waits=rest), plan.events


def waits_of(plan):
    return {(e.after, at, stream) for e in plan.events for at, stream in e.waits}


class TestDrawnSchedules(TestCase):
    def test_all_that_must_be_ordered_is_and_no_wait_is_redundant(self):
        rng, waits = random.Random(0), 0
        for _ in range(300):
            ops, buffers = draw(rng)
            plan = plan_streams(ops, buffers)
            self.assertEqual(missing(plan, plan.events, buffers), set(), plan.table())
            for less, events in smaller(plan):
                self.assertTrue(missing(less, events, buffers), plan.table())
            waits += plan.num_waits
        self.assertGreater(waits, 600)

    def test_memory_is_freed_neither_early_nor_late(self):
        rng, later = random.Random(0), 0
        for _ in range(300):
            ops, buffers = draw(rng)
            plan = plan_streams(ops, buffers)
            found = reached(plan, plan.events)
            for b in buffers:
                uses = [i for i, op in enumerate(ops) if b.name in op.reads | op.writes]
                foreign = {i for i in uses if ops[i].stream not in (b.stream, HOST)}
                own = [i for i, op in enumerate(ops) if op.stream == b.stream]
                after = [i for i in own if foreign <= found[i]] + [len(ops)]
                wanted = after[0] if foreign and after[0] > max(uses) else None
                self.assertEqual(plan.release.get(b.name), wanted, plan.table())
                later += wanted is not None and wanted < len(ops)
        self.assertGreater(later, 20)

    def test_all_programs_of_three_operations(self):
        kinds = [
            tuple(map(frozenset, k))
            for k in itertools.product(("", "x", "y"), repeat=2)
        ]
        for streams in itertools.product((0, 1), repeat=3):
            for uses in itertools.product(kinds, repeat=3):
                ops = [
                    Op(f"{i}", s, *use) for i, (s, use) in enumerate(zip(streams, uses))
                ]
                plan = plan_streams(ops)
                self.assertEqual(missing(plan, plan.events, []), set(), plan.table())


class TestPlanner(TestCase):
    def test_one_stream_needs_nothing(self):
        ops = [Op("a", 0, writes=frozenset("x")), Op("b", 0, frozenset("x"))]
        plan = plan_streams(ops, [Buffer("x", 0)])
        self.assertEqual((plan.num_waits, plan.release), (0, {}))

    def test_parts_of_one_concatenation_are_written_side_by_side(self):
        fork = frozenset({AT_CALLER})
        ops = [
            Op("left", 1, frozenset("x"), frozenset("l"), after=fork),
            Op("right", 2, frozenset("x"), frozenset("r"), after=fork),
            Op("cat", None, frozenset("lr"), frozenset("c")),
            Op("use", 0, frozenset("c"), frozenset("o")),
        ]
        plan = plan_streams(ops, [Buffer("c", 0, views=frozenset("lr"))])
        wanted = {(ENTRY, 0, 1), (ENTRY, 1, 2), (0, 3, 0), (1, 3, 0)}
        self.assertEqual(waits_of(plan), wanted)

    def test_work_that_nobody_joined_stays_so(self):
        prefetch = Op("prefetch", 1, frozenset("h"), frozenset("d"))
        self.assertEqual(plan_streams([prefetch], [Buffer("d", 1)]).num_waits, 0)

    def test_join_of_a_stream_without_work_is_kept(self):
        plan = plan_streams([Op("a", 0)], promised={0: frozenset({state(1)})})
        self.assertEqual(waits_of(plan), {(ENTRY, 1, 0)})
        known = {0: frozenset({state(1)})}  # the caller had waited for it before
        plan = plan_streams([Op("a", 0)], promised=known, known=known)
        self.assertEqual(plan.num_waits, 0)

    def test_synchronization_orders_what_the_host_launches_next(self):
        token = frozenset({synchronization(0)})
        ops = [
            Op("side", 1, writes=frozenset("x"), before=token),
            Op("synchronize", HOST, requires=token, waits=True),
            Op("use", 0, frozenset("x")),
        ]
        self.assertEqual(plan_streams(ops).num_waits, 0)

    def test_event_is_waited_for_before_it_is_recorded_anew(self):
        event, after = caller_event(5), frozenset({caller_event(5)})
        requires = frozenset({record(5, 0)})
        ops = [
            Op("record", 0, requires=requires, rerecords=event),
            Op("a", 1, frozenset("x"), frozenset("y"), after=after),
            Op("b", 2, frozenset("y"), after=after),
        ]
        plan = plan_streams(ops)
        waits = [(wait.before, wait.stream) for wait in plan.boundary_waits]
        self.assertEqual((waits, waits_of(plan)), ([(0, 1)], {(1, 2, 2)}))

    def test_memory_that_settles_is_ordered_at_the_exit(self):
        ops = [Op("use", 1, frozenset("x"))]
        for settles, waits in ((False, set()), (True, {(0, 1, 0)})):
            saved = Buffer("x", 0, fresh=False, settles=settles)
            plan = plan_streams(ops, [saved])
            self.assertEqual(waits_of(plan), waits)
            self.assertEqual("x" in plan.unordered_at_exit, not settles)


if __name__ == "__main__":
    run_tests()
