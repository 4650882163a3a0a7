"""`csrc/region.c`: order of a region's streams, in calls that overlap or fail."""

import ctypes
import functools
import gc
import sys
import types
import weakref

from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins import c_module
from stand_ins.stream_driver import DRIVER
from torch_overlay._inductor.streams.region_spec import OperationKind, RegionSpec, ResultKind


RECORD, RECORD_BUSY, RECORD_ENTRY, WAIT, WAIT_ENTRY, WAIT_EXIT = OperationKind
RAW, STREAM, EVENT, OBJECT, MULTI_STREAM = ResultKind


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle


class Other(Stream):
    """What has to be resolved first."""


FORK = {
    "streams": (-1, 1, 2),
    "events": 3,
    "entry": ((RECORD_ENTRY, 0, 1), (RECORD, 1, 0), (WAIT_ENTRY, 0, 0), (WAIT, 1, 1), (WAIT, 1, 2)),
    "exit": ((RECORD, 2, 1), (WAIT, 2, 0), (WAIT_EXIT, 2, 2)),
}
FORKED = "record1@11 record2@9 wait1@9 wait2@11 wait2@12"
JOINED = "record3@11 wait3@9 wait3@12"
CREATED = "create1 create2 create3 "


@c_module.needs_compiler
class TestRegion(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        module, cls.driver = c_module.build_module(DRIVER)
        cls.driver.noted_calls.restype = ctypes.c_char_p
        cls.Region = module.events.Region

    def setUp(self):
        super().setUp()
        self.driver.reset()
        self.one = Stream(11)
        self.thread = types.SimpleNamespace(objects=(None, self.one, Stream(12)))
        self.aliased = []

    def region(self, *args, **fields):
        return self.maker(*args, **fields)()

    def maker(self, streams, events, **fields):
        def resolve(found):
            return Stream(found.cuda_stream) if isinstance(found, Other) else found

        spec, stream = RegionSpec(0, streams, events, **fields), Stream(9)
        return functools.partial(
            self.Region,
            spec,
            self.thread,
            Stream,
            lambda device: 9,
            lambda device: stream,
            resolve,
            self.aliased.append,
        )

    def calls(self):
        return self.driver.noted_calls().decode().strip()

    def test_entry_and_exit(self):
        names = (RAW, 0), (STREAM, 1), (EVENT, 2), (OBJECT, 3), (STREAM, 0)
        region, event = self.region(**FORK, results=names), object()
        self.thread.objects += (event,)
        frame, raw, stream, mine, found, caller = region.enter()
        self.assertEqual((raw, caller.cuda_stream), (9, 9))
        self.assertIs(stream, self.one)
        self.assertIs(found, event)
        self.assertEqual(self.calls(), CREATED + FORKED)
        mine.record(11)
        self.assertEqual(self.calls(), "record3@11")
        self.assertIsNone(frame.leave())
        self.assertEqual(self.calls(), JOINED)

    def test_calls_that_overlap(self):
        region = self.region(**FORK)
        (first,), (second,) = region.enter(), region.enter()
        self.calls()
        second.leave()
        first.leave()
        self.assertEqual(self.calls().split()[:2], ["record6@11", "wait6@9"])
        (third,) = region.enter()
        self.assertIs(third, first)
        with self.assertRaisesRegex(RuntimeError, "left already"):
            second.leave()

    def test_capture_of_the_callers(self):
        region = self.region(**FORK)
        self.driver.set_capturing(9, 1)
        (frame,) = region.enter()
        wanted = "record1@11 record2@9 wait2@11 wait2@12"
        self.assertEqual(self.calls(), CREATED + wanted)
        frame.leave()  # stream 12 becomes part of the capture, and is joined
        joined = "create4 record4@12 wait4@9 destroy4"
        self.assertEqual(self.calls(), f"{JOINED} {joined}")

    def test_stream_that_holds_nothing(self):
        entry = (RECORD_BUSY, 0, 0), (WAIT, 0, 1)
        region = self.region((-1, 1), 1, entry=entry, results=((EVENT, 0),))
        recorded = "record1@9 wait1@11"
        for idle, capturing, wanted in (
            (0, 0, f"create1 query@9 {recorded} wait1@12"),
            (1, 0, "query@9"),
            (1, 1, f"{recorded} wait1@12"),
        ):
            self.driver.set_idle(idle)
            self.driver.set_capturing(9, capturing)
            frame, event = region.enter()
            event.wait(12)
            frame.leave()
            self.assertEqual(self.calls(), wanted)
        self.driver.set_capturing(9, 0)
        frame, event = region.enter()
        event.record(11)  # and what the entry left out is no longer true of it
        event.wait(12)
        self.assertEqual(self.calls(), "query@9 record1@11 wait1@12")

    def test_event_of_a_stream_that_held_nothing_is_recorded_again(self):
        """The second record is made, though the first one was left out."""
        entry, leave = ((RECORD_BUSY, 0, 0), (WAIT, 0, 1)), ((RECORD, 0, 1), (WAIT, 0, 0))
        region = self.region((-1, 1), 1, entry=entry, exit=leave)
        self.driver.set_idle(1)
        region.enter()[0].leave()
        self.assertEqual(self.calls(), "create1 query@9 record1@11 wait1@9")

    def test_idle_streams(self):
        """All are asked, and none that is captured."""
        names = (MULTI_STREAM, 0), (RAW, 0), (RAW, 1), (STREAM, 1)
        region = self.region(**FORK, results=names, idle_streams=(1, 2))
        for idle, capturing, entry, exit in (
            (0, 0, f"{CREATED}query@9 {FORKED}", None),
            (1, 0, "query@9 query@11 query@12", "record1@9 wait1@11 wait1@12"),
            (1, 9, FORKED.replace(" wait1@9", ""), None),
            (1, 12, f"query@9 record1@11 wait1@9 {FORKED}", None),
            (1, 0, "query@9 record1@11 wait1@9 record1@12 wait1@9", "record1@9 wait1@11 wait1@12"),
        ):
            self.driver.set_idle(idle)
            self.driver.set_capturing(capturing, 1)
            frame, multi_stream, caller, raw, stream = region.enter()
            self.assertEqual(self.calls(), entry)
            self.assertEqual((multi_stream, caller), (exit is None, 9))
            self.assertEqual(raw, 9 if exit else 11)
            self.assertIs(stream, self.one)  # whom memory is recorded on
            self.driver.set_capturing(capturing, 0)
            frame.leave()
            self.assertTrue(self.calls().startswith(exit or "record3@11 wait3@9"))

    def test_streams_that_turn_out_to_be_one(self):
        region = self.region(**FORK, distinct=(0, 1, 2))
        region.enter()[0].leave()
        self.assertEqual(self.aliased, [])
        self.thread.objects = (None, self.one, Other(11))
        (frame,) = region.enter()
        self.assertEqual(self.aliased, [True])
        frame.leave()
        self.assertEqual(self.aliased, [True, False])

    def test_streams_that_turn_out_to_be_one_are_spread(self):
        """Also in a call that would keep to one stream."""
        results = ((MULTI_STREAM, 0),)
        region = self.region(**FORK, results=results, distinct=(0, 1, 2), idle_streams=(1, 2))
        self.driver.set_idle(1)
        for second, wanted in ((11, (True, [True, False])), (12, (False, []))):
            self.thread.objects, self.aliased[:] = (None, self.one, Stream(second)), []
            frame, multi_stream = region.enter()
            frame.leave()
            self.assertEqual((multi_stream, self.aliased), wanted)

    def test_errors_of_a_call(self):
        region, objects = self.region(**FORK), self.thread.objects
        for changed, text in (
            (None, "outside the call of the graph"),
            (objects[:2], "stream object 2 isn't in the table"),
        ):
            self.thread.objects = changed
            with self.assertRaisesRegex(RuntimeError, text):
                region.enter()
        self.thread.objects = objects
        self.driver.set_failing(700)
        with self.assertRaisesRegex(RuntimeError, r"events: stand-in \(700\)"):
            region.enter()
        self.driver.set_failing(0)
        (frame,) = region.enter()
        self.driver.set_failing(700)
        with self.assertRaisesRegex(RuntimeError, r"events: stand-in \(700\)"):
            frame.leave()
        self.driver.set_failing(0)
        region.enter()[0].leave()  # the next call works

    def test_errors_of_a_definition(self):
        for error, text, fields in (
            (ValueError, "entry has 1 in item 0, which must be less than 1", {"entry": ((RECORD, 1, 0),)}),
            (ValueError, "exit has 1 in item 1, which", {"exit": ((RECORD, 0, 0), (WAIT, 0, 1))}),
            (ValueError, "exit has -1 in item 0", {"exit": ((RECORD, 0, -1),)}),
            (ValueError, "entry has 6 in item 0", {"entry": ((6, 0, 0),)}),
            (ValueError, "results has 5 in item 0", {"results": ((5, 0),)}),
            (ValueError, "results has an event or a stream", {"results": ((RAW, 1),)}),
            (ValueError, "results has an event or a stream", {"results": ((EVENT, 1),)}),
            (ValueError, "results has -1", {"results": ((OBJECT, -1),)}),
            (ValueError, "distinct has 1", {"distinct": (1,)}),
            (ValueError, "idle_streams has 2", {"idle_streams": (2,)}),
            (ValueError, "is negative", {"events": -1}),
            (ValueError, "idle streams need one", {"events": 0, "idle_streams": ()}),
            (TypeError, "distinct must be a tuple", {"distinct": None}),
            (TypeError, "entry must be a tuple", {"entry": [(RECORD, 0, 0)]}),
            (TypeError, r"\(kind, event, stream\)", {"entry": (5,)}),
            (TypeError, r"\(kind, event, stream\)", {"exit": ((RECORD, 0),)}),
            (TypeError, r"\(kind, number\)", {"results": ((RAW, 0, 0),)}),
            (TypeError, "integer", {"streams": ("cuda:0",)}),
        ):
            with self.assertRaisesRegex(error, text):
                self.region(**{"streams": (-1,), "events": 1, **fields})

    @c_module.needs_failing_allocations
    def test_host_without_memory(self):
        """Whichever allocation fails, the error is Python's own."""
        c_module.fail_each_allocation(self.maker(**FORK))

    def test_nothing_is_kept_alive(self):
        """Neither streams after the call, nor events after the region."""
        names = (RAW, 0), (STREAM, 1), (EVENT, 2), (STREAM, 0)
        region, watched = self.region(**FORK, results=names), weakref.ref(self.one)

        def counts(region):
            for _ in range(500):
                region.enter()[0].leave()
            return sys.getrefcount(self.one), sys.getrefcount(region)

        self.assertEqual(counts(region), counts(region))
        self.one = self.thread.objects = None
        self.assertIsNone(watched())
        self.calls()
        del region
        gc.collect()
        self.assertEqual(sorted(self.calls().split()), [f"destroy{i}" for i in (1, 2, 3)])
