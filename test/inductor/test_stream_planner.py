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

    @form.slow
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
                        if positions[-1] == end and buffer.name not in plan.unordered_at_exit:
                            self.assertLessEqual(foreign, at_exit(done, owner), plan.table())
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
                buffers=[Buffer("x", first, fresh=False, saved_on=second), Buffer("z", 0)],
            )
            self.assertEqual(plan.release, {"x": 2})
            swapped = plan_streams(plan.ops, [Buffer("x", second, fresh=False, saved_on=first)])
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
        after = tokens_of("e5")
        plan = self.plan(Op("a", 1, frozenset("x"), after=after), Op("b", 1, frozenset("x"), after=after))
        self.assertEqual([(w.before, w.stream, str(w.token)) for w in plan.boundary_waits], [(0, 1, "e5")])

    def test_callers_event_is_waited_for_before_it_is_recorded_anew(self):
        after = tokens_of("e5")
        plan = self.plan(
            Op("record_event", 0, requires=tokens_of("e5.0"), rerecords=token_of("e5")),
            Op("a", 1, frozenset("x"), frozenset("y"), after=after),
            Op("b", 2, frozenset("y"), after=after),
            promised={3: after},
        )
        self.assertEqual(
            [(w.before, w.stream, str(w.token)) for w in plan.boundary_waits], [(0, 1, "e5"), (0, 3, "e5")]
        )

    def test_unjoined_work_stays_unjoined(self):
        plan = self.plan(Op("prefetch", 1, frozenset("h"), frozenset("d")), buffers=[Buffer("d", 1)])
        self.assertEqual((plan.events, plan.boundary_waits), ((), ()))

    def test_work_that_the_user_joined_is_joined_at_the_exit(self):
        plan = self.plan(Op("mutate", 1, frozenset("x"), frozenset("x"), promised_to=tokens_of("s0")))
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(0, 1, ((1, 0),))])

    def test_join_of_a_stream_without_work_is_kept(self):
        plan = self.plan(Op("a", 0), promised={0: tokens_of("s1")})
        self.assertEqual([(e.after, e.stream, e.waits) for e in plan.events], [(ENTRY, 1, ((1, 0),))])

    def test_branches_into_one_concatenation_stay_parallel(self):
        plan = self.plan(
            Op("left", 1, frozenset("x"), frozenset(("l",)), after=tokens_of("s0")),
            Op("right", 2, frozenset("x"), frozenset(("r",)), after=tokens_of("s0")),
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

    def test_a_name_that_was_written_before_it_names_others_counts_as_well(self):
        plan = self.plan(
            Op("write", 1, writes=frozenset("c")),
            Op("left", 2, writes=frozenset("l")),
            Op("alias", None, frozenset("l"), frozenset("c")),
            Op("use", 0, frozenset("c")),
        )
        self.assertEqual({(e.after, e.waits) for e in plan.events}, {(0, ((3, 0),)), (1, ((3, 0),))})

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

    def test_an_early_wait_that_another_one_brings_is_not_emitted(self):
        after = tokens_of("e5")
        plan = self.plan(
            Op("record_event", 0, requires=tokens_of("e5.0"), rerecords=token_of("e5")),
            Op("b", 2, writes=frozenset("x")),
            Op("a", 1, frozenset("x"), after=after),
            Op("c", 2, after=after),
        )
        self.assertEqual([(w.before, w.stream, str(w.token)) for w in plan.boundary_waits], [(0, 2, "e5")])

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
