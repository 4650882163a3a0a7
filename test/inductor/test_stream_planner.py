"""Properties of the stream planner, checked against brute force, and the plans of small schedules as tables.

The planner imports no torch, and neither do these tests: they run in milliseconds.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import sys
import unittest
from pathlib import Path

import expecttest
from hypothesis import example, given, settings, strategies as st


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import form  # noqa: F401
from torch_overlay._inductor.streams import planner


Buffer, Op, plan_streams = planner.Buffer, planner.Op, planner.plan_streams
ENTRY, HOST = planner.ENTRY, planner.HOST


def happens_before(plan, events):
    """Reachability over the launches, the entry and exit of each stream, and the caller's events, as sets of
    predecessors.

    Points: ("op", i), ("entry", stream), ("exit", stream), ("token", name). Works on the events alone, not on clocks.
    """
    count = len(plan.ops)
    waits = {}  # (position, stream) -> records
    for e in events:
        for position, stream in e.waits:
            waits.setdefault((position, stream), []).append((e.after, e.stream))
    boundary = {}
    for w in plan.boundary_waits:
        if all(op.renews != w.token for op in plan.ops[: w.before]):  # else the event stands for something else
            boundary.setdefault((w.before, w.stream), []).append(w.token)
    streams = set(plan.streams) | {int(t[1:]) for op in plan.ops for t in op.before if t[0] == "s"}
    streams.add(planner.CALLER)
    state = {s: {("entry", s)} for s in streams}
    for stream, tokens in plan.known.items():
        state.setdefault(stream, {("entry", stream)}).update(("entry", int(token[1:])) for token in tokens)
    state[HOST] = set()
    done = {}
    entry_state = {s: frozenset(state[s]) for s in streams}

    def arrive(position, stream):
        for after, source in waits.get((position, stream), ()):
            state[stream] |= entry_state[source] if after == ENTRY else done[after]
        for token in boundary.get((position, stream), ()):
            state[stream].add(("token", token))

    for i, op in enumerate(plan.ops):
        if op.stream is None:
            continue
        state.setdefault(op.stream, {("entry", op.stream)})
        if op.stream != HOST:
            state[op.stream] |= state[HOST]
        for s in {s for position, s in boundary if position == i} - {op.stream}:
            state.setdefault(s, {("entry", s)})
            arrive(i, s)
        arrive(i, op.stream)
        if op.waits:
            tokens = {t for token in op.after for t in (token, *plan.known.get(int(token[1:]), ())) if token[0] == "s"}
            state[op.stream] |= {("entry", int(t[1:])) for t in tokens}
            state[op.stream] |= {("token", t) for t in op.after if t[0] != "s"}
            for j in range(i):
                if set(plan.ops[j].before) & set(op.requires) and j in done:
                    state[op.stream] |= done[j]
        state[op.stream].add(("op", i))
        done[i] = frozenset(state[op.stream])
        if op.blocking:
            state[HOST] |= done[i]
    for s in sorted(streams):
        state[s] |= state[HOST]
        arrive(count, s)
        done[("exit", s)] = frozenset(state[s])
    done[("exit", HOST)] = frozenset(state[HOST])
    return done


def at_exit(done, stream):
    """All that a stream is ordered after at the exit; one without work of the region is ordered after the host."""
    return done.get(("exit", stream), done[("exit", HOST)])


def obligations(plan, buffers, done):
    """Every (earlier point, later point) that must be ordered, found by looking at all pairs.

    A block comes behind what its stream did last, but a record of an event uses no block: it counts only if the stream
    comes behind something new there, by what is `done` at each point.
    """
    members = {}
    taken = {}
    accesses = []
    found = set()
    fresh = {v: b for b in buffers if b.fresh for v in (b.name, *b.views)}
    last_on, latest = {}, {}  # of each stream, what uses blocks or brings something new, and whatever it is
    for i, op in enumerate(plan.ops):
        if op.stream is None:
            parts = frozenset().union(*(members.get(n, frozenset((n,))) for n in op.reads | op.writes))
            for n in op.writes:
                members[n] = parts
                if not op.reads and n in fresh:  # it is allocated here
                    taken.setdefault(fresh[n].name, last_on.get(fresh[n].stream))
            continue
        reads = frozenset().union(*(members.get(n, frozenset((n,))) for n in op.reads))
        writes = frozenset().union(*(members.get(n, frozenset((n,))) for n in op.writes))
        for j, r, w in accesses:
            if (w & reads) or (w & writes) or (r & writes):
                found.add((("op", j), i))
        for name in op.writes:
            b = fresh.get(name)
            if b is None:
                continue
            taken.setdefault(b.name, last_on.get(b.stream))
            first = not any(members.get(name, frozenset((name,))) & (r | w) for _, r, w in accesses)
            if op.stream not in (HOST, b.stream) and first:
                found.add((("entry", b.stream), i))
                if taken[b.name] is not None:
                    found.add((("op", taken[b.name]), i))
        for token in op.requires:
            if not op.waits:
                found |= {(("op", j), i) for j in range(i) if token in plan.ops[j].before}
        for token in op.after:
            found.add(((("entry", int(token[1:])) if token[0] == "s" else ("token", token)), i))
        accesses.append((i, reads, writes))
        at_entry = {("entry", op.stream), *(("entry", int(t[1:])) for t in plan.known.get(op.stream, ()))}
        before = done[latest[op.stream]] if op.stream in latest else at_entry
        latest[op.stream] = i
        if not op.renews or done[i] - {("op", i)} != before:
            last_on[op.stream] = i
    for i, op in enumerate(plan.ops):
        for token in op.before:
            if token[0] == "s":
                found.add((("op", i), ("exit", int(token[1:]))))
    for buffer in buffers:
        owner = buffer.stream if buffer.lender is None else buffer.lender
        if buffer.settles and ("exit", owner) in done:
            found |= {(use, ("exit", owner)) for use in foreign_uses(plan.ops, buffer, owner)}
    return found


def missing(plan, events, buffers):
    done = happens_before(plan, events)
    return {
        (a, b)
        for a, b in obligations(plan, buffers, done)
        if a not in done[b] and not (a[0] == "op" and plan.ops[a[1]].stream == HOST)
    }


NAMES = [f"b{i}" for i in range(6)]


@st.composite
def schedules(draw):
    """Random schedules: up to five streams, the host, blocking copies, mutations, foreign memory, boundary effects."""
    streams = draw(st.integers(2, 5))
    ops = []
    count = draw(st.integers(1, 14))
    kept = 0
    for i in range(count):
        if draw(st.integers(0, 7)) == 0:  # an allocation
            ops.append(Op(f"op{i}", None, writes=frozenset((draw(st.sampled_from(NAMES)),))))
            continue
        stream = draw(st.sampled_from([*range(streams), *range(streams), HOST]))
        reads = frozenset(draw(st.lists(st.sampled_from(NAMES), max_size=3)))
        writes = frozenset(draw(st.lists(st.sampled_from(NAMES), max_size=2)))
        after = before = requires = frozenset()
        blocking = waits = False
        renews = ""
        if stream == HOST and draw(st.integers(0, 3)) == 0:  # a synchronisation with the device
            waits = True
            after = frozenset(draw(st.lists(st.sampled_from([*(f"s{s}" for s in range(streams)), "e9"]), max_size=3)))
            if draw(st.booleans()):  # the user's: it carries no data
                reads = writes = frozenset()
                after, requires = frozenset(f"s{s}" for s in range(streams)), frozenset(("h1",))
        if stream != HOST:
            others = [f"s{s}" for s in range(streams) if s != stream]
            after = frozenset(draw(st.lists(st.sampled_from([*others, "e9"]), max_size=2)))
            before = frozenset(draw(st.lists(st.sampled_from([*others, "e7.0", "h0", "h1"]), max_size=2)))
            blocking = draw(st.integers(0, 9)) == 0
            if kept < 2 and draw(st.integers(0, 5)) == 0:
                kept += 1
                requires, before = frozenset(("e7.0" if kept == 1 else "h0",)), frozenset()
                reads = writes = frozenset()
                renews = draw(st.sampled_from(["", "e9"]))
        ops.append(Op(f"op{i}", stream, reads, writes, after, before, requires, blocking, waits, renews=renews))
    parts = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    buffers = [draw_buffer(draw, n, streams) for n in draw(st.lists(st.sampled_from(NAMES), unique=True))]
    if parts:  # a concatenation of them, written in place
        position = draw(st.integers(0, count))
        ops.insert(position, Op("cat", None, frozenset(parts), frozenset(("cat",))))
        for i in draw(st.lists(st.integers(0, count), max_size=3)):
            if i > position:
                ops[i] = dataclasses.replace(ops[i], reads=ops[i].reads | {"cat"})
        stream = draw(st.integers(0, streams - 1))
        buffers = [b for b in buffers if b.name not in parts] + [Buffer("cat", stream, views=frozenset(parts))]
    states = st.lists(st.sampled_from([f"s{s}" for s in range(streams)]), max_size=2).map(frozenset)
    known = draw(st.dictionaries(st.integers(0, streams - 1), states, max_size=2))
    for _ in range(streams):  # who has waited for a stream knows what that stream does
        known = {s: tokens.union(*(known.get(int(t[1:]), ()) for t in tokens)) for s, tokens in known.items()}
    return ops, buffers, known


def planned(schedule):
    ops, buffers, known = schedule
    return plan_streams(ops, buffers, known=known), buffers


def draw_buffer(draw, name, streams):
    """Memory of the region, or of one of two streams that came in."""
    stream, fresh = draw(st.integers(0, streams - 1)), draw(st.booleans())
    lender = None if fresh else draw(st.sampled_from([None, *range(streams)]))
    return Buffer(name, stream, fresh=fresh, lender=lender, settles=draw(st.integers(0, 3)) == 0)


def uses_of(ops, buffer):
    """The launches that touch a buffer, under whatever name."""
    names = {buffer.name, *buffer.views}
    return [i for i, op in enumerate(ops) if op.stream is not None and names & (op.reads | op.writes)]


def foreign_uses(ops, buffer, owner):
    return {("op", i) for i in uses_of(ops, buffer) if ops[i].stream not in (owner, HOST)}


def check_schedule(schedule):
    """The plan orders all that it must, and nothing is left over. Returns the number of its waits."""
    plan, buffers = planned(schedule)
    unordered = missing(plan, plan.events, buffers)
    assert not unordered, f"unordered: {sorted(map(str, unordered))}\n{plan.table()}"
    for what, smaller, events in without_one_wait(plan):
        assert missing(smaller, events, buffers), f"{what} is redundant\n{plan.table()}"
    return plan.num_waits


def without_one_wait(plan):
    """Each of the plans that lack one wait: what it lacks, the plan, its events."""
    for event in plan.events:
        for wait in event.waits:
            rest = tuple(w for w in event.waits if w != wait)
            events = [
                planner.Event(e.index, e.after, e.stream, rest) if e.index == event.index else e for e in plan.events
            ]
            yield f"ev{event.index} wait {wait}", plan, events
    for boundary in plan.boundary_waits:
        others = tuple(w for w in plan.boundary_waits if w != boundary)
        yield str(boundary), planner.Plan(plan.ops, plan.events, others), plan.events


RECORDS_OF_NOTHING_NEW = (
    [
        Op("first", 1, requires=frozenset(("e7.0",)), renews="e9"),
        Op("second", 1, requires=frozenset(("h0",)), renews="e9"),
        Op("write", 0, writes=frozenset(("b0",))),
    ],
    [Buffer("b0", 1)],
    frozenset(),
)


class TestStreamPlannerProperties(unittest.TestCase):
    @settings(max_examples=600, deadline=None)
    @example(RECORDS_OF_NOTHING_NEW)
    @given(schedules())
    def test_every_conflicting_pair_and_boundary_effect_is_ordered(self, schedule):
        plan, buffers = planned(schedule)
        self.assertEqual(missing(plan, plan.events, buffers), set(), plan.table())

    @settings(max_examples=400, deadline=None)
    @given(schedules())
    def test_without_any_one_wait_something_is_unordered(self, schedule):
        plan, buffers = planned(schedule)
        for what, smaller, events in without_one_wait(plan):
            self.assertTrue(missing(smaller, events, buffers), f"{what} is redundant\n{plan.table()}")

    @settings(max_examples=600, deadline=None)
    @given(schedules())
    def test_memory_is_freed_as_soon_as_its_streams_are_ordered_after_every_access(self, schedule):
        """Neither earlier nor later, and right after the last use where no stream but its own touches it."""
        plan, buffers = planned(schedule)
        ops = plan.ops
        done, end = happens_before(plan, plan.events), len(ops)
        for buffer in buffers:
            positions = [ENTRY]
            for owner in {buffer.stream, buffer.stream if buffer.lender is None else buffer.lender}:
                if foreign := foreign_uses(ops, buffer, owner):
                    last = max(uses_of(ops, buffer))
                    own = [i for i, op in enumerate(ops) if op.stream == owner]
                    before, later = [i for i in own if i <= last], [i for i in own if i > last]
                    if not before or not foreign <= done[before[-1]]:
                        positions.append(next((i for i in later if foreign <= done[i]), end))
                        if positions[-1] == end and buffer.name not in plan.unordered_at_exit:
                            self.assertLessEqual(foreign, at_exit(done, owner), plan.table())
            self.assertEqual(plan.release.get(buffer.name, ENTRY), max(positions), plan.table())

    @settings(max_examples=400, deadline=None)
    @given(schedules())
    def test_what_settles_is_ordered_at_the_exit(self, schedule):
        plan, buffers = planned(schedule)
        done = happens_before(plan, plan.events)
        for buffer in buffers:
            owner = buffer.stream if buffer.lender is None else buffer.lender
            if buffer.settles:
                self.assertLessEqual(foreign_uses(plan.ops, buffer, owner), at_exit(done, owner), plan.table())

    @settings(max_examples=200, deadline=None)
    @given(schedules())
    def test_the_plan_is_a_function_of_its_input(self, schedule):
        ops, buffers, known = schedule
        again = plan_streams(list(ops), tuple(buffers), known=known)
        self.assertEqual(planned(schedule)[0], again)

    def test_needs_no_torch(self):
        tree = ast.parse(Path(planner.__file__).read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        self.assertEqual(imported, {"__future__", "collections", "dataclasses", "typing"})


class TestStreamPlannerTables(expecttest.TestCase):
    def plan(self, *ops, buffers=(), promised=None):
        return plan_streams(ops, buffers, promised)

    def test_one_stream_needs_no_event(self):
        plan = self.plan(Op("a", 0, writes=frozenset("x")), Op("b", 0, reads=frozenset("x")))
        self.assertEqual((plan.events, plan.boundary_waits, plan.release), ((), (), {}))

    def test_read_after_write_across_streams(self):
        plan = self.plan(
            Op("produce", 1, writes=frozenset("x")),
            Op("consume", 0, frozenset("x"), frozenset("y")),
            buffers=[Buffer("x", 1), Buffer("y", 0)],
        )
        self.assertExpectedInline(
            plan.table(),
            """\
   stream  operation  waits before  records after
           entry
0  1       produce                  ev0@1
1  0       consume    ev0@0
           exit
free x (stream 1) after exit""",
        )

    def test_diamond_shares_the_fork_event(self):
        fork = frozenset(("s0",))
        plan = self.plan(
            Op("left", 1, frozenset("x"), frozenset("l"), after=fork),
            Op("right", 2, frozenset("x"), frozenset("r"), after=fork),
            Op("join", 0, frozenset("lr"), frozenset("o")),
            buffers=[Buffer("l", 1), Buffer("r", 2), Buffer("o", 0)],
        )
        self.assertExpectedInline(
            plan.table(),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0
0  1       left       ev0@1         ev1@1
1  2       right      ev0@2         ev2@2
2  0       join       ev1@0 ev2@0
           exit
free l (stream 1) after exit
free r (stream 2) after exit""",
        )

    def test_order_that_is_implied_is_not_emitted_again(self):
        plan = self.plan(
            Op("a", 0, writes=frozenset("x")),
            Op("b", 1, frozenset("x"), frozenset("y")),
            Op("c", 2, frozenset("xy"), frozenset("z")),
            Op("d", 0, frozenset("yz")),
        )
        self.assertExpectedInline(
            plan.table(),
            """\
   stream  operation  waits before  records after
           entry
0  0       a                        ev0@0
1  1       b          ev0@1         ev1@1
2  2       c          ev1@2         ev2@2
3  0       d          ev2@0
           exit""",
        )

    def test_write_after_read_by_another_stream_waits(self):
        plan = self.plan(Op("read", 1, frozenset("x")), Op("overwrite", 0, writes=frozenset("x")))
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 1, ((1, 0),))])

    def test_memory_read_by_another_stream_is_freed_behind_it(self):
        plan = self.plan(
            Op("make", 0, writes=frozenset("x")),
            Op("use", 1, frozenset("x"), frozenset("y")),
            Op("other", 0, writes=frozenset("z")),
            Op("join", 0, frozenset("y"), frozenset("w")),
            buffers=[Buffer("x", 0), Buffer("y", 1), Buffer("z", 0), Buffer("w", 0)],
        )
        self.assertEqual(plan.release, {"x": 3, "y": 4})

    def test_memory_of_two_streams_is_freed_after_the_later_one(self):
        for first, second in ((0, 1), (1, 0)):
            plan = self.plan(
                Op("use", 2, frozenset("x"), frozenset("y")),
                Op("join", first, frozenset("y")),
                Op("join_later", second, frozenset("y")),
                buffers=[Buffer("x", first, fresh=False, lender=second), Buffer("z", 0)],
            )
            self.assertEqual(plan.release, {"x": 2})
            swapped = plan_streams(plan.ops, [Buffer("x", second, fresh=False, lender=first)])
            self.assertEqual(swapped.release, {"x": 2})

    def test_a_host_reader_delays_no_free(self):
        """It has read when it returns."""
        plan = self.plan(
            Op("make", 1, writes=frozenset("x")),
            Op("use", 0, frozenset("x"), frozenset("y")),
            Op("read", HOST, frozenset("x"), frozenset("h")),
            buffers=[Buffer("y", 0), Buffer("x", 0)],
        )
        self.assertEqual(plan.release, {})

    def test_host_read_of_a_copy_waits_on_the_host(self):
        plan = self.plan(Op("d2h", 1, frozenset("x"), frozenset("h")), Op("cpu", HOST, frozenset("h"), frozenset("r")))
        self.assertExpectedInline(
            plan.table(),
            """\
   stream  operation  waits before  records after
           entry
0  1       d2h                      ev0@1
1  host    cpu        ev0@host
           exit""",
        )

    def test_launches_after_a_host_wait_need_no_event(self):
        plan = self.plan(
            Op("d2h", 1, frozenset("x"), frozenset("h")),
            Op("cpu", HOST, frozenset("h"), frozenset("r")),
            Op("overwrite", 2, writes=frozenset("x")),
        )
        self.assertEqual(plan.num_waits, 1)

    def test_callers_event_is_waited_for_once(self):
        after = frozenset(("e5",))
        plan = self.plan(Op("a", 1, frozenset("x"), after=after), Op("b", 1, frozenset("x"), after=after))
        self.assertEqual([(w.before, w.stream, w.token) for w in plan.boundary_waits], [(0, 1, "e5")])

    def test_callers_event_is_waited_for_before_it_is_recorded_anew(self):
        after = frozenset(("e5",))
        plan = self.plan(
            Op("record_event", 0, requires=frozenset(("e5.0",)), renews="e5"),
            Op("a", 1, frozenset("x"), frozenset("y"), after=after),
            Op("b", 2, frozenset("y"), after=after),
            promised={3: after},
        )
        self.assertEqual([(w.before, w.stream, w.token) for w in plan.boundary_waits], [(0, 1, "e5"), (0, 3, "e5")])

    def test_unjoined_work_stays_unjoined(self):
        plan = self.plan(Op("prefetch", 1, frozenset("h"), frozenset("d")), buffers=[Buffer("d", 1)])
        self.assertEqual((plan.events, plan.boundary_waits), ((), ()))

    def test_work_that_the_user_joined_is_joined_at_the_exit(self):
        plan = self.plan(Op("mutate", 1, frozenset("x"), frozenset("x"), before=frozenset(("s0",))))
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 1, ((1, 0),))])

    def test_join_of_a_stream_without_work_is_kept(self):
        plan = self.plan(Op("a", 0), promised={0: frozenset(("s1",))})
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(ENTRY, 1, ((1, 0),))])

    def test_branches_into_one_concatenation_stay_parallel(self):
        plan = self.plan(
            Op("left", 1, frozenset("x"), frozenset(("l",)), after=frozenset(("s0",))),
            Op("right", 2, frozenset("x"), frozenset(("r",)), after=frozenset(("s0",))),
            Op("cat", None, frozenset(("l", "r")), frozenset(("c",))),
            Op("use", 0, frozenset(("c",)), frozenset(("o",))),
            buffers=[Buffer("c", 0, views=frozenset(("l", "r"))), Buffer("o", 0)],
        )
        waits = {(e.after, at, s) for e in plan.events for at, s in e.waits}
        self.assertEqual(waits, {(ENTRY, 0, 1), (ENTRY, 1, 2), (0, 3, 0), (1, 3, 0)})

    def test_a_block_of_another_stream_is_taken_behind_that_streams_work(self):
        plan = self.plan(
            Op("busy", 0, writes=frozenset("a")),
            Op("write", 1, writes=frozenset("b")),
            buffers=[Buffer("a", 0), Buffer("b", 0)],
        )
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 0, ((1, 1),))])

    def test_a_part_that_is_written_again_takes_no_block(self):
        """The block of a concatenation is taken at the first write of each part."""
        plan = self.plan(
            Op("busy", 0, writes=frozenset("a")),
            Op("host_fill", HOST, writes=frozenset("l")),
            Op("left", 1, writes=frozenset("l")),
            Op("right", 2, writes=frozenset("r")),
            buffers=[Buffer("a", 0), Buffer("c", 0, views=frozenset("lr"))],
        )
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 0, ((3, 2),))])

    def test_launches_after_a_synchronisation_need_no_event(self):
        """The host has waited for the carriers of its token."""
        token = frozenset(("h1",))
        plan = self.plan(
            Op("side", 1, writes=frozenset("x"), before=token),
            Op("synchronize", HOST, requires=token, waits=True),
            Op("use", 0, frozenset("x")),
        )
        self.assertEqual(plan.num_waits, 0)

    def test_a_fill_waits_for_what_the_next_operation_waits_for(self):
        plan = self.plan(
            Op("produce", 1, writes=frozenset("x")),
            Op("fill", 0, writes=frozenset("z"), after=frozenset(("s1",))),
            Op("use", 0, frozenset("xz"), frozenset("y")),
        )
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 1, ((1, 0),))])

    def test_a_name_that_was_written_before_it_names_others_counts_as_well(self):
        plan = self.plan(
            Op("write", 1, writes=frozenset("c")),
            Op("left", 2, writes=frozenset("l")),
            Op("alias", None, frozenset("l"), frozenset("c")),
            Op("use", 0, frozenset("c")),
        )
        self.assertEqual({(e.after, e.waits) for e in plan.events}, {(0, ((3, 0),)), (1, ((3, 0),))})

    def test_an_operation_that_must_come_after_another_waits_without_its_data(self):
        plan = self.plan(Op("a", 1), Op("b", 0, behind=frozenset("a")))
        self.assertEqual([(e.after, e.waits) for e in plan.events], [(0, ((1, 0),))])

    def test_a_computation_does_not_wait_for_what_only_the_next_operation_needs(self):
        plan = self.plan(
            Op("produce", 1, writes=frozenset("x")),
            Op("compute", 0, frozenset("w"), frozenset("z"), after=frozenset(("s1",))),
            Op("use", 0, frozenset("xz"), frozenset("y")),
        )
        waits = {(e.after, e.stream, e.waits) for e in plan.events}
        self.assertEqual(waits, {(ENTRY, 1, ((1, 0),)), (0, 1, ((2, 0),))})

    def test_an_early_wait_that_another_one_brings_is_not_emitted(self):
        after = frozenset(("e5",))
        plan = self.plan(
            Op("record_event", 0, requires=frozenset(("e5.0",)), renews="e5"),
            Op("b", 2, writes=frozenset("x")),
            Op("a", 1, frozenset("x"), after=after),
            Op("c", 2, after=after),
        )
        self.assertEqual([(w.before, w.stream, w.token) for w in plan.boundary_waits], [(0, 2, "e5")])

    def test_record_of_the_users_event_covers_joined_streams(self):
        token = frozenset(("e3.0",))
        plan = self.plan(
            Op("side", 1, writes=frozenset("x"), before=token),
            Op("main", 0, writes=frozenset("y"), before=token),
            Op("record_event", 0, requires=token),
        )
        self.assertEqual([(e.after, e.waits) for e in plan.events], [(0, ((2, 0),))])


class TestBruteForce(unittest.TestCase):
    def test_the_check_sees_a_missing_wait(self):
        """The oracle of the properties above is itself able to fail."""
        ops = [Op("a", 1, writes=frozenset("x")), Op("b", 0, frozenset("x"))]
        plan = plan_streams(ops)
        self.assertEqual(missing(plan, plan.events, []), set())
        self.assertEqual(missing(plan, [], []), {(("op", 0), 1)})

    def test_all_small_programs_on_two_streams(self):
        """Exhaustive: three operations, two streams, one or two buffers, every combination of reads and writes."""
        kinds = [(frozenset(r), frozenset(w)) for r, w in itertools.product(("", "x", "y"), repeat=2)]
        for streams in itertools.product((0, 1), repeat=3):
            for uses in itertools.product(kinds, repeat=3):
                ops = [Op(f"op{i}", s, r, w) for i, (s, (r, w)) in enumerate(zip(streams, uses))]
                plan = plan_streams(ops)
                self.assertEqual(missing(plan, plan.events, []), set(), plan.table())


if __name__ == "__main__":
    unittest.main()
