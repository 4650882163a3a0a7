"""The checker on programs written down by hand: racy ones, clean ones, and what their reports say.

`main`, `side` and `other` are streams, and `host` is the host, whose launches run at once. A program is in host order,
in the notation of `written_traces`. The oracle (`brute_force`), which tries every order, is asked about each one, too.
"""

import brute_force
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from written_traces import Written

import form  # noqa: F401
from torch_overlay.analysis import check_trace, RaceError, Report, Trace
from torch_overlay.analysis.race_check.trace import ByteSpan, View


# Each program has exactly the hazard that it is named after: the race, and the events that order nothing.
RACY = {
    "read_before_write": ("main makes x; side uses x", "RAW: main makes, side uses"),
    "overwritten_while_read": (
        "main makes x; main -> side; side uses x; main refills > x",
        "WAR: side uses, main refills",
    ),
    "written_twice": ("main allocates x; main fills > x; side fills_again > x", "WAW: main fills, side fills_again"),
    "fork_without_join": (
        "main makes x; main -> side; side allocates y; side computes x > y; main uses y",
        "RAW: side computes, main uses",
    ),
    "event_recorded_too_early": (
        "main allocates x; record e main; main fills > x; wait e side; side uses x",
        "RAW: main fills, side uses",
        "wait of side for e: what it orders is ordered without it",
    ),
    "wait_before_record_waits_for_nothing": (
        "main makes x; wait e side; record e main; side uses x",
        "RAW: main makes, side uses",
        "wait of side for e: the event was not recorded before",
        "record of e on main: nobody waits for it",
    ),
    "wait_after_the_launch_that_needs_it": (
        "main makes x; record e main; side uses x; wait e side; side uses_again x",
        "RAW: main makes, side uses",
    ),
    "event_recorded_again_on_another_stream": (
        "main makes x; record e main; record e other; wait e side; side uses x",
        "RAW: main makes, side uses",
        "wait of side for e: what it orders is ordered without it",
        "record of e on main: nobody waits for it",
    ),
    "wait_of_the_wrong_stream": ("main makes x; main -> other; side uses x", "RAW: main makes, side uses"),
    "third_stream_knows_only_the_second": (
        "main makes x; side makes y; side -> other; other uses x y",
        "RAW: main makes, other uses",
    ),
    "memory_from_a_pool_is_first_used_by_another_stream": (
        "main makes x; free x; main allocates y; side fills > y",
        "reuse: main makes, side fills",
    ),
    "joined_only_after_the_memory_was_taken": (
        "main makes x; main -> side; side uses x; free x; main allocates y; main fills > y; side -> main; "
        "main fills_again > y",
        "reuse: side uses, main fills",
    ),
    "record_stream_of_another_stream": (
        "main makes x; main -> side; side uses x; record_stream x other; free x; main allocates y; main fills > y",
        "reuse: side uses, main fills",
    ),
    "used_after_free": ("main makes x; free x; main uses x", "use-after-free: main uses, main uses"),
    "host_refills_while_the_copy_reads": (
        "host makes h; main allocates x; main copies h > x; host refills > h",
        "host: main copies, host refills",
    ),
    "host_waits_for_the_wrong_stream": (
        "main makes x; host allocates h; main copies x > h; side makes y; synchronize side; host prints h",
        "host: main copies, host prints",
    ),
    "host_waits_for_an_event_before_the_copy": (
        "main makes x; host allocates h; record e main; main copies x > h; synchronize event e; host prints h",
        "host: main copies, host prints",
    ),
    # Memory of a private pool goes to nobody else, and there the same rule holds.
    "private_pools_are_pools": (
        "main allocates x of graph; main -> side; side fills > x; free x; main allocates y; main fills_y > y; "
        "main allocates z of other_graph; main fills_z > z; main allocates w of graph; main fills_w > w",
        "reuse: side fills, main fills_w",
        "wait of side for main -> side: what it orders is ordered without it",
    ),
    # One call is in order; the next one overwrites what the first still reads.
    "second_call_meets_the_first": (
        "main allocates x" + 3 * "; main fills > x; main -> side; side uses x",
        "WAR: side uses, main fills",
    ),
}

# Nothing is wrong with these.
CLEAN = {
    "one_stream": "main makes x; main uses x > x",
    "two_readers": "main makes x; main -> side; main reads x; side reads x",
    "order_through_a_third_stream": "main makes x; main -> other; other -> side; side uses x",
    "ping_pong": "main makes x" + 3 * "; main -> side; side uses x > x; side -> main; main uses x > x",
    "event_waited_for_twice": "main makes x; record e main; wait e side; side uses x; wait e other; other uses x",
    # A wait takes the record that there is; a later record doesn't move it.
    "wait_for_the_record_before_the_last": ("main makes x; record e main; wait e side; record e other; side uses x"),
    "disjoint_slices": "main makes x; main -> side; main writes > x[0:32]; side writes > x[32:64]",
    "free_after_the_join": (
        "main makes x; main -> side; side uses x; side -> main; free x; main allocates y; main fills > y"
    ),
    "free_before_the_join_and_alloc_after_it": (
        "main makes x; main -> side; side uses x; free x; side -> main; main allocates y; main fills > y"
    ),
    "memory_of_another_pool": ("main makes x; main -> side; side uses x; free x; other allocates y; other fills > y"),
    "freed_and_never_asked_for_again": "main makes x; main uses x; free x",
    "record_stream": (
        "main makes x; main -> side; side uses x; record_stream x side; free x; main allocates y; main fills > y"
    ),
    "record_stream_of_a_stream_that_has_joined_the_reader": (
        "main makes x; main -> side; side uses x; side -> other; record_stream x other; free x; main allocates y; "
        "main fills > y"
    ),
    "reuse_by_the_same_stream": "main makes x; free x; main makes y; free y; main makes z; free z",
    "host_reads_after_synchronize": (
        "main makes x; host allocates h; main copies x > h; synchronize main; host prints h"
    ),
    "host_reads_after_the_event": (
        "main makes x; host allocates h; main copies x > h; record e main; synchronize event e; host prints h"
    ),
    "host_orders_streams": "main makes x; synchronize main; side uses x",
    "device_synchronize_orders_everything": "main makes x; side makes y; synchronize; other uses x y",
    "host_writes_before_the_launch": "host makes h; main allocates x; main copies h > x",
}

# These are in order, with events that they could do without.
NEEDLESS = {
    "order_that_is_already_there": (
        "main makes x; main -> side; side uses x; record again main; wait again side; side uses x",
        "wait of side for again: what it orders is ordered without it",
    ),
    "implied_by_two_others": (
        "main makes x; record a main; wait a other; other -> side; wait a side; side uses x",
        "wait of side for a: what it orders is ordered without it",
    ),
    "nobody_waits": ("main makes x; record e main", "record of e on main: nobody waits for it"),
    "a_stream_that_waits_for_itself": (
        "main makes x; record e main; wait e main",
        "wait of main for e: what it orders is ordered without it",
    ),
    "the_host_has_waited_already": (
        "main makes x; synchronize main; record e main; wait e side; side uses x",
        "wait of side for e: what it orders is ordered without it",
    ),
}


class ReportTest(TestCase):
    maxDiff = None

    def finds(self, trace: Trace, *expected: str) -> None:
        """Races, by the two launches, and whatever else the report says."""
        report = check_trace(trace)
        launches = [(race.kind, race.first.launch, race.second.launch) for race in report.races]
        found = [f"{kind}: {a.stream} {a.name}, {b.stream} {b.name}" for kind, a, b in launches]
        found += [f"{r.what}: {r.why}" for r in report.redundant] + report.notes
        self.assertEqual((found, report.lost), (list(expected), []), str(report))

    def shows(self, trace: Trace, text: str) -> None:
        self.assertExpectedInline(str(check_trace(trace)) + "\n", text, skip=1)


@instantiate_parametrized_tests
class TestPrograms(ReportTest):
    @parametrize("name", list(RACY))
    def test_racy(self, name: str) -> None:
        program, *expected = RACY[name]
        self.finds(trace := Written(program), *expected)
        self.assertFalse(brute_force.is_right(trace.operations))

    @parametrize("name", list(CLEAN))
    def test_clean(self, name: str) -> None:
        report = check_trace(trace := Written(CLEAN[name]))
        self.assertEqual(report.races, [], str(report))
        report.raise_if_any()
        self.assertTrue(brute_force.is_right(trace.operations))

    @parametrize("name", list(NEEDLESS))
    def test_needless(self, name: str) -> None:
        program, *expected = NEEDLESS[name]
        self.finds(trace := Written(program), *expected)
        self.assertTrue(brute_force.is_right(trace.operations))


class TestReport(ReportTest):
    def test_each_kind_of_race(self) -> None:
        t = Written("main makes a; main makes b; main makes c; main makes d; main makes e; main makes f; main -> side")
        a = t.memory["a"]
        t.launch("add", "main", reads=[a], writes=[a], line="model.py:3: a.add_(1)")
        t.launch("mul", "side", reads=[a], writes=[a], line="model.py:5: a.mul_(2)")
        t.then("side uses b; main refills > b; main low > c[0:40]; side high > c[32:64]")
        t.then("side reads d; free d; main allocates g; main fills > g; free e; main uses e")
        t.then("host allocates h; main copies f > h; host prints h")
        self.shows(
            t,
            """\
RAW: a is read before it is known to be written
  first   `add` on main updates a  at model.py:3: a.add_(1)
  second  `mul` on side updates a  at model.py:5: a.mul_(2)
  missing: side must wait, before `mul`, for an event that main records after `add`
WAR: b is overwritten while it may still be read
  first   `uses` on side reads b
  second  `refills` on main writes b
  missing: main must wait, before `refills`, for an event that side records after `uses`
WAW: c is written twice in no order
  first   `low` on main writes c, bytes 0 to 39
  second  `high` on side writes c, bytes 32 to 63
  missing: side must wait, before `high`, for an event that main records after `low`
reuse: g may get memory of d that is still in use
  first   `reads` on side reads d
  second  `fills` on main writes g
  missing: main must wait, before `fills`, for an event that side records after `reads`,
           or d needs record_stream(side) before it is freed
use-after-free: e is used after it was freed
  use     `uses` on main reads e
  missing: e must be freed after the launch of `uses`
host: h is used by the host and by the device in no order
  first   `copies` on main writes h
  second  `prints` on host reads h
  missing: the host must wait for `copies` on main before `prints`
6 races, no lost promises, no redundant events
""",
        )

    def test_fork_and_join(self) -> None:
        program = "main makes x; main -> side; side allocates y; side computes x > y; side -> main; main uses x y > x"
        self.shows(Written(program), "no races, no lost promises, no redundant events\n")

    def test_parts_of_a_matrix(self) -> None:
        """Columns: the first two overlap, the others are interleaved, or side by side."""
        for first, second, text in (
            ((0, (4, 3), (16, 4), 4), (8, (4, 2), (16, 4), 4), "x, bytes 0 to 59 (12 bytes, 4 at every 16)"),
            ((0, (8,), (8,), 4), (4, (8,), (8,), 4), ""),
            ((0, (4, 2), (16, 4), 4), (8, (4, 2), (16, 4), 4), ""),
        ):
            t = Written("main makes x; main -> side")
            for stream, span in (("main", first), ("side", second)):
                t.launch("fill", stream, writes=[View(t.memory["x"], ByteSpan(*span))])
            races = check_trace(t).races
            self.assertEqual([str(race.first.view) for race in races], [text] if text else [])

    def test_a_race_is_reported_once_for_all_calls(self) -> None:
        t = Trace()
        for _ in range(4):
            x = t.alloc("x", 64, on="main")
            t.launch("fill", "main", writes=[x], line="model.py:1")
            t.launch("use", "side", reads=[x], line="model.py:2")
        self.assertEqual(len(check_trace(t).races), 1)

    def test_raise_if_any(self) -> None:
        report = check_trace(Written("main makes x; side uses x"))
        with self.assertRaises(RaceError) as raised:
            report.raise_if_any()
        self.assertIs(raised.exception.report, report)
        self.assertEqual(str(raised.exception), str(report))
        Report().raise_if_any()

    def test_a_slice_without_bytes(self) -> None:
        with self.assertRaisesRegex(ValueError, "no bytes from 64 to 80 in x, which has 64"):
            Written("main makes x; main uses x[64:80]")


class TestBoundary(ReportTest):
    def test_what_may_be_relied_on(self) -> None:
        t = Written("main makes x; main -> side; side allocates y; side computes x > y")
        t.boundary("the fork", *t.memory.values())
        t.then("record join side; wait join main").boundary("the join", *t.memory.values(), events=["join"])
        self.finds(
            t,
            "after the fork, x may be read by main, side, overwritten by side",
            "after the fork, y may be read by side, overwritten by side",
            "after the join, x may be read by join, main, side, overwritten by join, main, side",
            "after the join, y may be read by join, main, side, overwritten by join, main, side",
        )

    def test_what_the_host_did_is_over_for_whoever_waits_later(self) -> None:
        t = Written("main makes x; record fork main; wait fork side; side uses x; host makes h")
        t.boundary("the call", t.memory["h"], events=["fork"])
        self.finds(t, "after the call, h may be read by fork, host, main, side, overwritten by fork, host, main, side")

    def test_memory_that_may_be_handed_on(self) -> None:
        t = Written("main makes x; main -> side; side uses x; free x")
        t.boundary("the free")
        t.then("side -> main").boundary("the join")
        self.finds(
            t,
            "after the free, free memory of main may be handed on by nobody",
            "after the join, free memory of main may be handed on by main",
        )


class TestSpan(TestCase):
    def test_overlap_is_that_of_the_bytes(self) -> None:
        """Against the sets of bytes, for all small pairs of rows and columns."""
        spans = [
            ByteSpan(offset, (rows, columns), (pitch, step), item)
            for offset in (0, 3, 8)
            for rows, pitch in ((1, 8), (3, 8), (2, 12))
            for columns, step in ((1, 4), (2, 4), (3, 2))
            for item in (1, 2, 4)
        ]

        def touched(span: ByteSpan) -> set[int]:
            (rows, columns), (pitch, step) = span.sizes, span.strides
            starts = [span.offset + r * pitch + c * step for r in range(rows) for c in range(columns)]
            return {at + i for at in starts for i in range(span.item)}

        both = [0, 0]
        for a in spans:
            for b in spans:
                expected = bool(touched(a) & touched(b))
                self.assertEqual(a.overlaps(b), expected, f"{a} {b}")
                both[expected] += 1
        self.assertGreater(min(both), 1000)

    def test_large_spans_are_told_apart_by_arithmetic(self) -> None:
        even = ByteSpan(0, (1 << 20,), (8,), 4)
        self.assertFalse(even.overlaps(ByteSpan(4, (1 << 20,), (8,), 4)))
        self.assertTrue(even.overlaps(ByteSpan(6, (1 << 20,), (8,), 4)))
