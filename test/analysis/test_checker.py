"""The checker on programs written down by hand: racy ones, clean ones, and what their reports say.

`main` and `side` are streams. A trace is in host order; `HOST` launches run at once.
"""

from torch._inductor.test_case import TestCase

import form  # noqa: F401
from torch_overlay.analysis import check_trace, RaceError, Report, Trace
from torch_overlay.analysis.race_check.trace import ByteSpan, HOST, Memory, View


def fork(t: Trace, event: str = "fork", of: str = "main", to: str = "side") -> None:
    t.record(event, of)
    t.wait(event, to)


def join(t: Trace, event: str = "join", of: str = "side", to: str = "main") -> None:
    fork(t, event, of, to)


def made(t: Trace, name: str = "x", on: str = "main", size: int = 64) -> Memory:
    """Memory that holds something."""
    memory = t.alloc(name, size, on=on)
    t.launch(f"make {name}", on, writes=[memory])
    return memory


class ReportTest(TestCase):
    maxDiff = None

    def setUp(self) -> None:
        super().setUp()
        self.t = Trace()

    def report(self) -> str:
        return str(check_trace(self.t)) + "\n"

    def finds(self, *expected: str) -> None:
        """Races, by what would order them; and whatever else the report says."""
        report = check_trace(self.t)
        found = [f"{race.kind}: {' '.join(race.edge.split())}" for race in report.races]
        found += [f"redundant: {r.what}: {r.why}" for r in report.redundant] + [
            f"note: {text}" for text in report.notes
        ]
        self.assertEqual((found, report.lost), (list(expected), []))

    def clean(self) -> None:
        report = check_trace(self.t)
        self.assertEqual(report.races, [], str(report))
        report.raise_if_any()


class TestRacy(ReportTest):
    """Each program has exactly the hazard that it is named after."""

    def test_read_before_write(self) -> None:
        x = made(self.t)
        self.t.launch("use", "side", reads=[x])
        self.finds("RAW: side must wait, before `use`, for an event that main records after `make x`")

    def test_overwritten_while_read(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.launch("refill", "main", writes=[x])
        self.assertExpectedInline(
            self.report(),
            """\
WAR: x is overwritten while it may still be read
  first   `use` on side reads x
  second  `refill` on main writes x
  missing: main must wait, before `refill`, for an event that side records after `use`
1 race, no lost promises, no redundant events
""",
        )

    def test_written_twice(self) -> None:
        x = self.t.alloc("x", 64, on="main")
        self.t.launch("fill", "main", writes=[x])
        self.t.launch("fill again", "side", writes=[x])
        self.finds("WAW: side must wait, before `fill again`, for an event that main records after `fill`")

    def test_updated_on_both_streams(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("add", "main", reads=[x], writes=[x], line="model.py:3: x.add_(1)")
        self.t.launch("mul", "side", reads=[x], writes=[x], line="model.py:5: x.mul_(2)")
        self.assertExpectedInline(
            self.report(),
            """\
RAW: x is read before it is known to be written
  first   `add` on main updates x  at model.py:3: x.add_(1)
  second  `mul` on side updates x  at model.py:5: x.mul_(2)
  missing: side must wait, before `mul`, for an event that main records after `add`
1 race, no lost promises, no redundant events
""",
        )

    def test_fork_without_join(self) -> None:
        x = made(self.t)
        fork(self.t)
        y = self.t.alloc("y", 64, on="side")
        self.t.launch("compute", "side", reads=[x], writes=[y])
        self.t.launch("use", "main", reads=[y])
        self.finds("RAW: main must wait, before `use`, for an event that side records after `compute`")

    def test_event_recorded_too_early(self) -> None:
        x = self.t.alloc("x", 64, on="main")
        self.t.record("done", "main")
        self.t.launch("fill", "main", writes=[x])
        self.t.wait("done", "side")
        self.t.launch("use", "side", reads=[x])
        self.finds(
            "RAW: side must wait, before `use`, for an event that main records after `fill`",
            "redundant: wait of side for done: what it orders is ordered without it",
        )

    def test_wait_before_record_waits_for_nothing(self) -> None:
        x = made(self.t)
        self.t.wait("done", "side")
        self.t.record("done", "main")
        self.t.launch("use", "side", reads=[x])
        self.finds(
            "RAW: side must wait, before `use`, for an event that main records after `make x`",
            "redundant: wait of side for done: the event was not recorded before",
            "redundant: record of done on main: nobody waits for it",
        )

    def test_wait_after_the_launch_that_needs_it(self) -> None:
        x = made(self.t)
        self.t.record("done", "main")
        self.t.launch("use", "side", reads=[x])
        self.t.wait("done", "side")
        self.t.launch("use again", "side", reads=[x])
        self.finds("RAW: side must wait, before `use`, for an event that main records after `make x`")

    def test_event_recorded_again_on_another_stream(self) -> None:
        x = made(self.t)
        self.t.record("e", "main")
        self.t.record("e", "other")
        self.t.wait("e", "side")
        self.t.launch("use", "side", reads=[x])
        self.finds(
            "RAW: side must wait, before `use`, for an event that main records after `make x`",
            "redundant: wait of side for e: what it orders is ordered without it",
            "redundant: record of e on main: nobody waits for it",
        )

    def test_wait_of_the_wrong_stream(self) -> None:
        x = made(self.t)
        fork(self.t, to="other")
        self.t.launch("use", "side", reads=[x])
        self.finds("RAW: side must wait, before `use`, for an event that main records after `make x`")

    def test_third_stream_knows_only_the_second(self) -> None:
        x = made(self.t)
        y = made(self.t, "y", on="side")
        fork(self.t, of="side", to="other")
        self.t.launch("use", "other", reads=[x, y])
        self.finds("RAW: other must wait, before `use`, for an event that main records after `make x`")

    def test_overlapping_slices(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("low", "main", writes=[x[0:40]])
        self.t.launch("high", "side", writes=[x[32:64]])
        self.assertExpectedInline(
            self.report(),
            """\
WAW: x is written twice in no order
  first   `low` on main writes x, bytes 0 to 39
  second  `high` on side writes x, bytes 32 to 63
  missing: side must wait, before `high`, for an event that main records after `low`
1 race, no lost promises, no redundant events
""",
        )

    def test_columns_that_overlap(self) -> None:
        x = made(self.t, size=64)
        fork(self.t)
        self.t.launch("left", "main", writes=[View(x, ByteSpan(0, (4, 3), (16, 4), 4))])
        self.t.launch("right", "side", writes=[View(x, ByteSpan(8, (4, 2), (16, 4), 4))])
        self.assertExpectedInline(
            self.report(),
            """\
WAW: x is written twice in no order
  first   `left` on main writes x, bytes 0 to 59 (12 bytes, 4 at every 16)
  second  `right` on side writes x, bytes 8 to 63 (8 bytes, 4 at every 16)
  missing: side must wait, before `right`, for an event that main records after `left`
1 race, no lost promises, no redundant events
""",
        )

    def test_freed_memory_is_handed_on_while_another_stream_reads_it(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.free(x)
        y = self.t.alloc("y", 64, on="main")
        self.t.launch("fill", "main", writes=[y])
        self.assertExpectedInline(
            self.report(),
            """\
reuse: y may get memory of x that is still in use
  first   `use` on side reads x
  second  `fill` on main writes y
  missing: main must wait, before `fill`, for an event that side records after `use`,
           or x needs record_stream(side) before it is freed
1 race, no lost promises, no redundant events
""",
        )

    def test_memory_from_a_pool_is_first_used_by_another_stream(self) -> None:
        self.t.free(made(self.t))
        y = self.t.alloc("y", 64, on="main")
        self.t.launch("fill", "side", writes=[y])
        self.finds("reuse: side must wait, before `fill`, for an event that main records after `make x`")

    def test_joined_only_after_the_memory_was_taken(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.free(x)
        y = self.t.alloc("y", 64, on="main")
        self.t.launch("fill", "main", writes=[y])
        join(self.t)
        self.t.launch("fill again", "main", writes=[y])
        self.finds(
            "reuse: main must wait, before `fill`, for an event that side records after `use`, or x needs "
            "record_stream(side) before it is freed"
        )

    def test_record_stream_of_another_stream(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.record_stream(x, "other")
        self.t.free(x)
        self.t.launch("fill", "main", writes=[self.t.alloc("y", 64, on="main")])
        self.finds(
            "reuse: main must wait, before `fill`, for an event that side records after `use`, or x needs "
            "record_stream(side) before it is freed"
        )

    def test_used_after_free(self) -> None:
        x = made(self.t)
        self.t.free(x)
        self.t.launch("use", "main", reads=[x])
        self.assertExpectedInline(
            self.report(),
            """\
use-after-free: x is used after it was freed
  use     `use` on main reads x
  missing: x must be freed after the launch of `use`
1 race, no lost promises, no redundant events
""",
        )

    def test_host_reads_before_the_copy_is_over(self) -> None:
        x, h = made(self.t), self.t.alloc("pinned", 64, on=HOST)
        self.t.launch("copy", "main", reads=[x], writes=[h])
        self.t.launch("print", HOST, reads=[h], line="train.py:9: print(h)")
        self.assertExpectedInline(
            self.report(),
            """\
host: pinned is used by the host and by the device in no order
  first   `copy` on main writes pinned
  second  `print` on host reads pinned  at train.py:9: print(h)
  missing: the host must wait for `copy` on main before `print`
1 race, no lost promises, no redundant events
""",
        )

    def test_host_refills_while_the_copy_reads(self) -> None:
        h, x = made(self.t, "pinned", on=HOST), self.t.alloc("x", 64, on="main")
        self.t.launch("copy", "main", reads=[h], writes=[x])
        self.t.launch("next batch", HOST, writes=[h])
        self.finds("host: the host must wait for `copy` on main before `next batch`")

    def test_host_waits_for_the_wrong_stream(self) -> None:
        x, h = made(self.t), self.t.alloc("pinned", 64, on=HOST)
        self.t.launch("copy", "main", reads=[x], writes=[h])
        made(self.t, "other", on="side")
        self.t.synchronize(stream="side")
        self.t.launch("print", HOST, reads=[h])
        self.finds("host: the host must wait for `copy` on main before `print`")

    def test_host_waits_for_an_event_before_the_copy(self) -> None:
        x, h = made(self.t), self.t.alloc("pinned", 64, on=HOST)
        self.t.record("e", "main")
        self.t.launch("copy", "main", reads=[x], writes=[h])
        self.t.synchronize(event="e")
        self.t.launch("print", HOST, reads=[h])
        self.finds("host: the host must wait for `copy` on main before `print`")

    def test_second_call_meets_the_first(self) -> None:
        """One call is in order; the next one overwrites what the first still reads."""
        x = self.t.alloc("x", 64, on="main")
        for _ in range(3):
            self.t.launch("fill", "main", writes=[x])
            fork(self.t)
            self.t.launch("use", "side", reads=[x])
        self.finds("WAR: main must wait, before `fill`, for an event that side records after `use`")

    def test_private_pools_are_pools(self) -> None:
        """Memory of a private pool goes to nobody else, and there the same rule holds."""
        x = self.t.alloc("x", 64, on="main", pool="graph pool")
        fork(self.t)
        self.t.launch("use", "side", writes=[x])
        self.t.free(x)
        for name, pool in (("y", ""), ("z", "other graph pool"), ("w", "graph pool")):
            self.t.launch(f"fill {name}", "main", writes=[self.t.alloc(name, 64, on="main", pool=pool)])
        self.assertExpectedInline(
            self.report(),
            """\
reuse: w may get memory of x that is still in use
  first   `use` on side writes x
  second  `fill w` on main writes w
  missing: main must wait, before `fill w`, for an event that side records after `use`,
           or x needs record_stream(side) before it is freed
redundant: wait of side for fork: what it orders is ordered without it
1 race, no lost promises, 1 redundant event
""",
        )


class TestClean(ReportTest):
    """Nothing is wrong with these, and nothing is said."""

    def test_one_stream(self) -> None:
        x = made(self.t)
        self.t.launch("use", "main", reads=[x], writes=[x])
        self.clean()

    def test_fork_and_join(self) -> None:
        x = made(self.t)
        fork(self.t)
        y = self.t.alloc("y", 64, on="side")
        self.t.launch("compute", "side", reads=[x], writes=[y])
        join(self.t)
        self.t.launch("use", "main", reads=[x, y], writes=[x])
        self.assertEqual(self.report(), "no races, no lost promises, no redundant events\n")

    def test_two_readers(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("read", "main", reads=[x])
        self.t.launch("read", "side", reads=[x])
        self.clean()

    def test_order_through_a_third_stream(self) -> None:
        x = made(self.t)
        fork(self.t, "a", "main", "other")
        fork(self.t, "b", "other", "side")
        self.t.launch("use", "side", reads=[x])
        self.clean()

    def test_ping_pong(self) -> None:
        x = made(self.t)
        for i in range(3):
            fork(self.t, f"to{i}")
            self.t.launch("there", "side", reads=[x], writes=[x])
            join(self.t, f"back{i}")
            self.t.launch("here", "main", reads=[x], writes=[x])
        self.clean()

    def test_event_waited_for_twice(self) -> None:
        x = made(self.t)
        self.t.record("e", "main")
        for stream in ("side", "other"):
            self.t.wait("e", stream)
            self.t.launch("use", stream, reads=[x])
        self.clean()

    def test_wait_for_the_record_before_the_last(self) -> None:
        """A wait takes the record that there is; a later record doesn't move it."""
        x = made(self.t)
        self.t.record("e", "main")
        self.t.wait("e", "side")
        self.t.record("e", "other")
        self.t.launch("use", "side", reads=[x])
        self.clean()

    def test_disjoint_slices(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("low", "main", writes=[x[0:32]])
        self.t.launch("high", "side", writes=[x[32:64]])
        self.clean()

    def test_interleaved_columns(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("even", "main", writes=[View(x, ByteSpan(0, (8,), (8,), 4))])
        self.t.launch("odd", "side", writes=[View(x, ByteSpan(4, (8,), (8,), 4))])
        self.clean()

    def test_blocks_of_a_matrix(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("left", "main", writes=[View(x, ByteSpan(0, (4, 2), (16, 4), 4))])
        self.t.launch("right", "side", writes=[View(x, ByteSpan(8, (4, 2), (16, 4), 4))])
        self.clean()

    def test_free_after_the_join(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        join(self.t)
        self.t.free(x)
        self.t.launch("fill", "main", writes=[self.t.alloc("y", 64, on="main")])
        self.clean()

    def test_free_before_the_join_and_alloc_after_it(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.free(x)
        join(self.t)
        self.t.launch("fill", "main", writes=[self.t.alloc("y", 64, on="main")])
        self.clean()

    def test_memory_of_another_pool(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.free(x)
        self.t.launch("fill", "other", writes=[self.t.alloc("y", 64, on="other")])
        self.clean()

    def test_freed_and_never_asked_for_again(self) -> None:
        x = made(self.t)
        self.t.launch("use", "main", reads=[x])
        self.t.free(x)
        self.clean()

    def test_record_stream(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.record_stream(x, "side")
        self.t.free(x)
        self.t.launch("fill", "main", writes=[self.t.alloc("y", 64, on="main")])
        self.clean()

    def test_record_stream_of_a_stream_that_has_joined_the_reader(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        join(self.t, to="other")
        self.t.record_stream(x, "other")
        self.t.free(x)
        self.t.launch("fill", "main", writes=[self.t.alloc("y", 64, on="main")])
        self.clean()

    def test_reuse_by_the_same_stream(self) -> None:
        for name in "xyz":
            self.t.free(made(self.t, name))
        self.clean()

    def test_host_reads_after_synchronize(self) -> None:
        x, h = made(self.t), self.t.alloc("pinned", 64, on=HOST)
        self.t.launch("copy", "main", reads=[x], writes=[h])
        self.t.synchronize(stream="main")
        self.t.launch("print", HOST, reads=[h])
        self.clean()

    def test_host_reads_after_the_event(self) -> None:
        x, h = made(self.t), self.t.alloc("pinned", 64, on=HOST)
        self.t.launch("copy", "main", reads=[x], writes=[h])
        self.t.record("e", "main")
        self.t.synchronize(event="e")
        self.t.launch("print", HOST, reads=[h])
        self.clean()

    def test_host_orders_streams(self) -> None:
        x = made(self.t)
        self.t.synchronize(stream="main")
        self.t.launch("use", "side", reads=[x])
        self.clean()

    def test_device_synchronize_orders_everything(self) -> None:
        x, y = made(self.t), made(self.t, "y", on="side")
        self.t.synchronize()
        self.t.launch("use", "other", reads=[x, y])
        self.clean()

    def test_host_writes_before_the_launch(self) -> None:
        h, x = made(self.t, "pinned", on=HOST), self.t.alloc("x", 64, on="main")
        self.t.launch("copy", "main", reads=[h], writes=[x])
        self.clean()


class TestRedundant(ReportTest):
    def test_order_that_is_already_there(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        fork(self.t, "again")
        self.t.launch("use", "side", reads=[x])
        self.finds("redundant: wait of side for again: what it orders is ordered without it")

    def test_implied_by_two_others(self) -> None:
        x = made(self.t)
        self.t.record("a", "main")
        self.t.wait("a", "other")
        fork(self.t, "b", "other", "side")
        self.t.wait("a", "side")
        self.t.launch("use", "side", reads=[x])
        self.finds("redundant: wait of side for a: what it orders is ordered without it")

    def test_nobody_waits(self) -> None:
        made(self.t)
        self.t.record("done", "main")
        self.finds("redundant: record of done on main: nobody waits for it")

    def test_a_stream_that_waits_for_itself(self) -> None:
        made(self.t)
        fork(self.t, to="main")
        self.finds("redundant: wait of main for fork: what it orders is ordered without it")

    def test_the_host_has_waited_already(self) -> None:
        x = made(self.t)
        self.t.synchronize(stream="main")
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.finds("redundant: wait of side for fork: what it orders is ordered without it")


class TestBoundary(ReportTest):
    def test_what_may_be_relied_on(self) -> None:
        x = made(self.t)
        fork(self.t)
        y = self.t.alloc("y", 64, on="side")
        self.t.launch("compute", "side", reads=[x], writes=[y])
        self.t.boundary("the fork", x, y)
        join(self.t)
        self.t.boundary("the join", x, y, events=["join"])
        self.finds(
            "note: after the fork, x may be read by main, side, overwritten by side",
            "note: after the fork, y may be read by side, overwritten by side",
            "note: after the join, x may be read by join, main, side, overwritten by join, main, side",
            "note: after the join, y may be read by join, main, side, overwritten by join, main, side",
        )

    def test_what_the_host_did_is_over_for_whoever_waits_later(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        h = self.t.alloc("h", 64, on=HOST)
        self.t.launch("compute", HOST, writes=[h])
        self.t.boundary("the call", h, events=["fork"])
        self.finds(
            "note: after the call, h may be read by fork, host, main, side, overwritten by fork, host, main, side"
        )

    def test_memory_that_may_be_handed_on(self) -> None:
        x = made(self.t)
        fork(self.t)
        self.t.launch("use", "side", reads=[x])
        self.t.free(x)
        self.t.boundary("the free")
        join(self.t)
        self.t.boundary("the join")
        self.finds(
            "note: after the free, free memory of main may be handed on by nobody",
            "note: after the join, free memory of main may be handed on by main",
        )


class TestReport(ReportTest):
    def test_a_race_is_reported_once_for_all_calls(self) -> None:
        for _ in range(4):
            x = self.t.alloc("x", 64, on="main")
            self.t.launch("fill", "main", writes=[x], line="model.py:1")
            self.t.launch("use", "side", reads=[x], line="model.py:2")
        self.assertEqual(len(check_trace(self.t).races), 1)

    def test_raise_if_any(self) -> None:
        x = made(self.t)
        self.t.launch("use", "side", reads=[x])
        report = check_trace(self.t)
        with self.assertRaises(RaceError) as raised:
            report.raise_if_any()
        self.assertIs(raised.exception.report, report)
        self.assertEqual(str(raised.exception), str(report))
        Report().raise_if_any()

    def test_a_slice_without_bytes(self) -> None:
        x = made(self.t)
        with self.assertRaisesRegex(ValueError, "no bytes from 64 to 80 in x, which has 64"):
            x[64:80]


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
