"""Properties of the stream planner, checked against brute force, and the plans of small schedules as tables.

The planner imports no torch, and neither do these tests: they run in milliseconds.
"""

import ast
import itertools
import unittest
from pathlib import Path

import expecttest
from hypothesis import example, given, settings
from plan_closure import at_exit, foreign_uses, happens_before, missing, planned, schedules, uses_of, without_one_wait

import form
from token_text import token as token_of, tokens as tokens_of
from torch_overlay import table
from torch_overlay._functorch.streams import tokens as tokens_module
from torch_overlay._inductor.streams import plan as plan_module, planner
from torch_overlay._inductor.streams.plan import Buffer, ENTRY, HOST, Op
from torch_overlay._inductor.streams.planner import plan_streams


RECORDS_OF_NOTHING_NEW = (
    [
        Op("first", 1, requires=tokens_of("e7.0"), rerecords=token_of("e9")),
        Op("second", 1, requires=tokens_of("h0"), rerecords=token_of("e9")),
        Op("write", 0, writes=frozenset(("b0",))),
    ],
    [Buffer("b0", 1)],
    frozenset(),
)


class TestStreamPlannerProperties(unittest.TestCase):
    @settings(max_examples=150, deadline=None)
    @example(RECORDS_OF_NOTHING_NEW)
    @given(schedules())
    def test_every_conflicting_pair_and_boundary_effect_is_ordered(self, schedule):
        plan, buffers = planned(schedule)
        self.assertEqual(missing(plan, plan.events, buffers), set(), plan.table())

    @settings(max_examples=100, deadline=None)
    @given(schedules())
    def test_without_any_one_wait_something_is_unordered(self, schedule):
        plan, buffers = planned(schedule)
        for what, smaller, events in without_one_wait(plan):
            self.assertTrue(missing(smaller, events, buffers), f"{what} is redundant\n{plan.table()}")

    @settings(max_examples=150, deadline=None)
    @given(schedules())
    def test_memory_is_freed_as_soon_as_its_streams_are_ordered_after_every_access(self, schedule):
        """Neither earlier nor later, and right after the last use where no stream but its own touches it."""
        plan, buffers = planned(schedule)
        ops = plan.ops
        done, end = happens_before(plan, plan.events), len(ops)
        for buffer in buffers:
            positions = [ENTRY]
            for owner in {buffer.stream, buffer.stream if buffer.saved_on is None else buffer.saved_on}:
                if foreign := foreign_uses(ops, buffer, owner):
                    last = max(uses_of(ops, buffer))
                    own = [i for i, op in enumerate(ops) if op.stream == owner]
                    before, later = [i for i in own if i <= last], [i for i in own if i > last]
                    if not before or not foreign <= done[before[-1]]:
                        positions.append(next((i for i in later if foreign <= done[i]), end))
            self.assertEqual(plan.release.get(buffer.name, ENTRY), max(positions), plan.table())

    @settings(max_examples=100, deadline=None)
    @given(schedules())
    def test_what_settles_is_ordered_at_the_exit(self, schedule):
        plan, buffers = planned(schedule)
        done = happens_before(plan, plan.events)
        for buffer in buffers:
            owner = buffer.stream if buffer.saved_on is None else buffer.saved_on
            if buffer.settles:
                self.assertLessEqual(foreign_uses(plan.ops, buffer, owner), at_exit(done, owner), plan.table())

    @form.slow
    @settings(max_examples=200, deadline=None)
    @given(schedules())
    def test_the_plan_is_a_function_of_its_input(self, schedule):
        ops, buffers, known = schedule
        again = plan_streams(list(ops), tuple(buffers), known=known)
        self.assertEqual(planned(schedule)[0], again)

    def test_needs_no_torch(self):
        def imported(module):
            return {
                name
                for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
            }

        pure = {"__future__", "collections", "collections.abc", "dataclasses", "typing"}
        self.assertEqual(imported(planner) - pure, {plan_module.__name__, tokens_module.__name__})
        self.assertEqual(imported(plan_module) - pure, {tokens_module.__name__, table.__name__})
        self.assertEqual(imported(table) - pure, set())
        self.assertEqual(imported(tokens_module) - pure, set())


class TestStreamPlannerTables(expecttest.TestCase):
    def plan(self, *ops, buffers=(), promised=None):
        return plan_streams(ops, buffers, promised)

    def test_one_stream_needs_no_event(self):
        plan = self.plan(Op("a", 0, writes=frozenset("x")), Op("b", 0, reads=frozenset("x")))
        self.assertEqual((plan.events, plan.boundary_waits, plan.release), ((), (), {}))

    def test_diamond_shares_the_fork_event(self):
        fork = tokens_of("s0")
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

    def test_join_of_a_stream_without_work_is_kept(self):
        plan = self.plan(Op("a", 0), promised={0: tokens_of("s1")})
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(ENTRY, 1, ((1, 0),))])

    def test_launches_after_a_synchronisation_need_no_event(self):
        """The host has waited for the carriers of its token."""
        token = tokens_of("h1")
        plan = self.plan(
            Op("side", 1, writes=frozenset("x"), promised_to=token),
            Op("synchronize", HOST, requires=token, waits=True),
            Op("use", 0, frozenset("x")),
        )
        self.assertEqual(plan.num_waits, 0)

    def test_a_fill_waits_for_what_the_next_operation_waits_for(self):
        plan = self.plan(
            Op("produce", 1, writes=frozenset("x")),
            Op("fill", 0, writes=frozenset("z"), after=tokens_of("s1")),
            Op("use", 0, frozenset("xz"), frozenset("y")),
        )
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 1, ((1, 0),))])

    def test_an_operation_that_must_come_after_another_waits_without_its_data(self):
        plan = self.plan(Op("a", 1), Op("b", 0, order_after=frozenset("a")))
        self.assertEqual([(e.after, e.waits) for e in plan.events], [(0, ((1, 0),))])

    def test_a_computation_does_not_wait_for_what_only_the_next_operation_needs(self):
        plan = self.plan(
            Op("produce", 1, writes=frozenset("x")),
            Op("compute", 0, frozenset("w"), frozenset("z"), after=tokens_of("s1")),
            Op("use", 0, frozenset("xz"), frozenset("y")),
        )
        waits = {(e.after, e.stream, e.waits) for e in plan.events}
        self.assertEqual(waits, {(ENTRY, 1, ((1, 0),)), (0, 1, ((2, 0),))})

    def test_record_of_the_users_event_covers_joined_streams(self):
        token = tokens_of("e3.0")
        plan = self.plan(
            Op("side", 1, writes=frozenset("x"), promised_to=token),
            Op("main", 0, writes=frozenset("y"), promised_to=token),
            Op("record_event", 0, requires=token),
        )
        self.assertEqual([(e.after, e.waits) for e in plan.events], [(0, ((2, 0),))])

    def test_a_record_before_which_its_stream_waits_for_nothing_new_frees_no_block(self):
        plan = self.plan(
            Op("record_event", 1, requires=tokens_of("e5.0"), rerecords=token_of("e5")),
            Op("record_event_1", 1, requires=tokens_of("e5.1"), rerecords=token_of("e5")),
            Op("write", 0, writes=frozenset("b")),
            buffers=[Buffer("b", 1)],
        )
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(ENTRY, 1, ((2, 0),))])

    def test_streams_that_are_after_all_that_the_callers_is_after(self):
        fork = tokens_of("s0")
        record = Op("record_event", 0, requires=tokens_of("e5.0"), rerecords=token_of("e5"))
        side = Op("side", 1, after=fork)
        late = Op("a", 1), Op("b", 0, order_after=frozenset("a")), Op("c", 1), Op("d", 2, order_after=frozenset("b"))
        for ops, known, streams in (
            ((record, side), {}, {1}),  # a record is no work
            ((Op("a", 0), side), {}, set()),
            ((side, Op("a", 0, blocking=True)), {}, {1}),  # what comes next comes after the host's wait
            ((record,), {1: fork}, {1}),
            (late, {}, {2}),
        ):
            self.assertEqual(plan_streams(ops, known=known).after_caller, streams, ops)


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
