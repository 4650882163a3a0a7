# Owner(s): ["module: inductor"]

from torch._functorch._streams.tokens import caller_event
from torch._inductor.streams.plan import (
    BoundaryWait,
    Buffer,
    ENTRY,
    Event,
    HOST,
    Op,
    Plan,
)
from torch.testing._internal.common_utils import run_tests, TestCase


OPS = (
    Op("make", 1, writes=frozenset("x")),
    Op("alias", None, frozenset("x"), frozenset("y")),
    Op("use", 0, frozenset("y"), frozenset("z")),
    Op("read", HOST, frozenset("z")),
)


class TestPlan(TestCase):
    def test_table(self):
        """What waits, for what and where; an event of the caller has no index."""
        plan = Plan(
            OPS,
            (
                Event(0, ENTRY, 0, ((0, 1),)),
                Event(1, 0, 1, ((2, 0), (4, 2))),
                Event(2, 2, 0, ((3, HOST),)),
            ),
            (BoundaryWait(2, 0, caller_event(5)),),
            release={"x": 2, "y": 4, "saved": 3},
            memory={"x": 1, "y": 0},
        )
        self.assertExpectedInline(
            plan.table(),
            """\
   stream  operation  waits before  records after
           entry                    ev0@0
0  1       make       ev0@1         ev1@1
1  -       alias
2  0       use        ev1@0 e5@0    ev2@0
3  host    read       ev2@host
           exit       ev1@2
free x (stream 1) after waits of 2
free y (stream 0) after exit""",
        )
        self.assertEqual(plan.num_waits, 5)

    def test_memory_that_is_written_in_parts_is_listed(self):
        cat = Buffer("cat", 0, views=frozenset("xy"))
        plan = Plan(OPS, release={"cat": 4}, memory={"cat": 0}, buffers=(cat,))
        self.assertIn("free cat (stream 0) after exit", plan.table())

    def test_streams(self):
        """Those that only record or wait are in use, and the host isn't one."""
        self.assertEqual(Plan(OPS).streams, (0, 1))
        events = (Event(0, ENTRY, 4, ((0, 1), (3, HOST), (4, 7))),)
        boundary = (BoundaryWait(3, 5, caller_event(1)),)
        self.assertEqual(Plan(OPS, events, boundary).streams, (0, 1, 4, 5, 7))

    def test_records_and_waits_at_a_position(self):
        first, second = Event(0, 0, 1, ((2, 0), (2, 3))), Event(1, 2, 0, ((4, 1),))
        plan = Plan(OPS, (first, second))
        self.assertEqual(plan.records_after(2), [second])
        self.assertEqual(plan.waits_before(2), [(first, 0), (first, 3)])
        self.assertEqual(plan.waits_before(len(OPS)), [(second, 1)])


if __name__ == "__main__":
    run_tests()
