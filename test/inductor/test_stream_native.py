"""The native events and regions: on a GPU for real, and elsewhere on a stand-in for the driver that notes its calls."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase
from triton.runtime.build import compile_so_from_file

import driver_stand_in
import form
import stream_stand_in
from torch_overlay import config, csrc
from torch_overlay._inductor.streams import runtime as stream_runtime


# Streams of the table are named by their handles; "current" is the caller's stream.
PREAMBLE = """
import ctypes, gc, sys, types
driver = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
driver.noted_calls.restype = ctypes.c_char_p
import importlib.util
spec = importlib.util.spec_from_file_location("cuda_driver_c", sys.argv[2])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
native = extension.events

class Stream:
    def __init__(self, handle): self.cuda_stream = handle

class Alike(Stream): pass

class Current:
    handle = 9
    def raw(self, device): return self.handle
    def stream(self, device): return Stream(self.handle)

current = Current()
thread = types.SimpleNamespace(objects=None)
turned = []

def region(indices, events, entry=(), exit=(), results=(), distinct=(), idle_streams=None):
    return native.Region(device=0, indices=indices, events=events, entry=entry, exit=exit, results=results,
        distinct=distinct, thread=thread, stream_type=Stream, current_raw=current.raw, current=current.stream,
        resolve=lambda found: Stream(found.cuda_stream) if isinstance(found, Alike) else found, aliased=turned.append,
        idle_streams=idle_streams)

def calls():
    return driver.noted_calls().decode().strip()

def fails(kind, fn, *args):
    try:
        fn(*args)
    except kind as error:
        return str(error)
    raise AssertionError("did not raise")

fork = dict(
    indices=(-1, 1, 2), events=3,
    entry=(("record_entry", 0, 1), ("record", 1, 0), ("wait_entry", 0, 0), ("wait", 1, 1), ("wait", 1, 2)),
    exit=(("record", 2, 1), ("wait", 2, 0), ("wait_exit", 2, 2)))
"""


class TestNativeRegion(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.driver = driver_stand_in.build(
            stream_stand_in.DRIVER, Path(folder) / "libdriver.so", "-Wl,-soname,libcuda.so.1"
        )
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
            cls.native = compile_so_from_file(**csrc.arguments())

    def run_script(self, script: str) -> str:
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), self.driver, self.native]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_enter_and_leave_record_and_wait_as_defined(self):
        output = self.run_script("""
            r = region(**fork, results=(("raw", 0), ("stream", 1), ("event", 2), ("object", 3), ("stream", 0)))
            one, two, event = Stream(11), Stream(12), object()
            thread.objects = (None, one, two, event)
            frame, raw, stream, mine, found, caller = r.enter()
            assert raw == 9 and stream is one and found is event and caller.cuda_stream == 9
            print(calls())
            mine.record(11)
            print(calls())
            assert frame.leave() is None
            print(calls())
        """)
        self.assertExpectedInline(
            output,
            """\
create1 create2 create3 record1@11 record2@9 wait1@9 wait2@11 wait2@12
record3@11
record3@11 wait3@9 wait3@12
""",
        )

    def test_calls_that_overlap_have_events_of_their_own(self):
        output = self.run_script("""
            r = region(**fork)
            thread.objects = [None, Stream(11), Stream(12)]
            first, = r.enter()
            second, = r.enter()
            calls()
            second.leave(); first.leave()
            print(calls())
            third, = r.enter()
            assert third is first
            print(fails(RuntimeError, second.leave))
        """)
        self.assertExpectedInline(
            output,
            """\
record6@11 wait6@9 wait6@12 record3@11 wait3@9 wait3@12
leave() of a region that was left already
""",
        )

    def test_under_capture_what_lies_outside_is_not_waited_for(self):
        """Note [Boundary events under the caller's capture]."""
        output = self.run_script("""
            r = region(**fork)
            thread.objects = (None, Stream(11), Stream(12))
            driver.set_capturing(9, 1)
            frame, = r.enter()
            print(calls())
            driver.set_capturing(11, 1)
            frame.leave()
            print(calls())
        """)
        self.assertExpectedInline(
            output,
            """\
create1 create2 create3 record1@11 record2@9 wait2@11 wait2@12
record3@11 wait3@9 wait3@12 create4 record4@12 wait4@9 destroy4
""",
        )

    def test_idle_stream_is_not_waited_for(self):
        """Note [Streams that hold nothing]."""
        output = self.run_script("""
            r = region((-1, 1, 2), 1, entry=(("record_busy", 0, 0), ("wait", 0, 1)), results=(("event", 0),))
            thread.objects = (None, Stream(11), Stream(12))
            for idle, capturing in ((0, 0), (1, 0), (0, 0), (1, 1)):
                driver.set_idle(idle)
                driver.set_capturing(9, capturing)
                frame, event = r.enter()
                event.wait(12)
                frame.leave()
                print(calls())
            driver.set_capturing(9, 0)
            frame, event = r.enter()
            event.record(11)
            event.wait(12)
            print(calls())
        """)
        self.assertExpectedInline(
            output,
            """\
create1 query@9 record1@9 wait1@11 wait1@12
query@9
query@9 record1@9 wait1@11 wait1@12
record1@9 wait1@11 wait1@12
query@9 record1@11 wait1@12
""",
        )

    def test_event_of_an_idle_stream_is_recorded_again(self):
        """What the first record left out does not make the second one void."""
        output = self.run_script("""
            entry, leave = (("record_busy", 0, 0), ("wait", 0, 1)), (("record", 0, 1), ("wait", 0, 0))
            r = region((-1, 1), 1, entry=entry, exit=leave)
            thread.objects = (None, Stream(11))
            driver.set_idle(1)
            frame, = r.enter()
            frame.leave()
            print(calls())
        """)
        self.assertExpectedInline(output, """create1 query@9 record1@11 wait1@9\n""")

    def test_idle_streams_follow_the_callers(self):
        """Note [Streams can't pay on an idle device]: asked are all, captured is none."""
        output = self.run_script("""
            results = (("multi_stream", 0), ("raw", 0), ("raw", 1), ("stream", 1))
            r = region(**fork, results=results, idle_streams=(1, 2))
            one = Stream(11)
            thread.objects = (None, one, Stream(12))
            for idle, capturing in ((0, 0), (1, 0), (1, 9), (1, 12), (1, 0)):
                driver.set_idle(idle)
                driver.set_capturing(capturing, 1)
                frame, multi_stream, caller, raw, stream = r.enter()
                assert caller == 9 and raw == (11 if multi_stream else 9) and stream is (one if multi_stream else None)
                print(multi_stream, calls())
                frame.leave()
                print("leave", calls())
                driver.set_capturing(capturing, 0)
        """)
        self.assertExpectedInline(
            output,
            """\
True create1 create2 create3 query@9 record1@11 record2@9 wait1@9 wait2@11 wait2@12
leave record3@11 wait3@9 wait3@12
False query@9 query@11 query@12
leave record1@9 wait1@11 wait1@12
True record1@11 record2@9 wait2@11 wait2@12
leave record3@11 wait3@9 wait3@12 create4 record4@12 wait4@9 destroy4
True query@9 record1@11 wait1@9 record1@11 record2@9 wait1@9 wait2@11 wait2@12
leave record3@11 wait3@9 wait3@12
False query@9 record1@11 wait1@9 record1@12 wait1@9
leave record1@9 wait1@11 wait1@12
""",
        )

    def test_streams_that_turn_out_to_be_one_are_spread(self):
        output = self.run_script("""
            r = region(**fork, results=(("multi_stream", 0),), distinct=(0, 1, 2), idle_streams=(1, 2))
            driver.set_idle(1)
            for second in (11, 12):
                thread.objects = (None, Stream(11), Stream(second))
                frame, multi_stream = r.enter()
                frame.leave()
                print(multi_stream, turned)
        """)
        self.assertExpectedInline(
            output,
            """\
True [True, False]
False [True, False]
""",
        )

    def test_streams_that_turn_out_to_be_one(self):
        output = self.run_script("""
            r = region(**fork, distinct=(0, 1, 2))
            thread.objects = (None, Stream(11), Stream(12))
            frame, = r.enter(); frame.leave()
            print(turned)
            thread.objects = (None, Stream(11), Alike(11))
            frame, = r.enter()
            print(turned)
            frame.leave()
            print(turned)
        """)
        self.assertExpectedInline(
            output,
            """\
[]
[True]
[True, False]
""",
        )

    def test_errors_say_what_is_wrong_and_the_next_call_works(self):
        output = self.run_script("""
            r = region(**fork)
            print(fails(RuntimeError, r.enter))
            thread.objects = (None, Stream(11))
            print(fails(RuntimeError, r.enter))
            thread.objects = (None, Stream(11), Stream(12))
            driver.set_failing(700)
            print(fails(RuntimeError, r.enter))
            driver.set_failing(0)
            frame, = r.enter()
            driver.set_failing(700)
            print(fails(RuntimeError, frame.leave))
            driver.set_failing(0)
            frame, = r.enter()
            frame.leave()
            print(fails(ValueError, lambda: region((-1,), 1, entry=(("record", 1, 0),))))
            print(fails(ValueError, lambda: region((-1,), 1, entry=(("forget", 0, 0),))))
            print(fails(ValueError, lambda: region((-1,), 1, results=(("raw", 1),))))
            print(fails(ValueError, lambda: region((-1,), 1, distinct=(1,))))
            print(fails(ValueError, lambda: region((-1, 1), 1, idle_streams=(2,))))
            print(fails(ValueError, lambda: region((-1, 1), 0, idle_streams=())))
            print(fails(TypeError, lambda: region((-1, 1), 1, idle_streams=[1])))
        """)
        self.assertExpectedInline(
            output,
            """\
a stream was looked up outside the call of the graph it belongs to
stream object 2 isn't in the table of the running graph
CUDA driver error in a region's events: stand-in (700)
CUDA driver error in a region's events: stand-in (700)
Region: an operation names an event or a stream that it doesn't have
Region: unknown kind 'forget'
Region: a result names an event or a stream it doesn't have
Region: distinct names a stream that the region doesn't have
Region: idle_streams names a stream that the region doesn't have
Region: idle streams need an event
Region: idle_streams is a tuple or None
""",
        )

    def test_events_release_the_context(self):
        """Also where they could not be made; and what was not retained is not released."""
        output = self.run_script("""
            events = [native.Event(1) for _ in range(5)]
            print(driver.retains(), end=" ")
            del events[1:]
            print(driver.retains(), end=" ")
            driver.set_failing_creation(2)
            message = fails(RuntimeError, native.Event, 1)
            driver.set_failing_creation(0)
            del events
            print(driver.retains(), end=" ")
            fails(RuntimeError, native.Event, 2)
            print(driver.retains(), message)
            calls()
        """)
        self.assertExpectedInline(output, """5 1 0 0 CUDA driver error in Event(): stand-in (2)\n""")

    def test_handle_that_is_no_number(self):
        """Also while the null stream, for which it would pass, is captured."""
        output = self.run_script("""
            event = native.Event(0)
            for capturing in (0, 1):
                driver.set_capturing(0, capturing)
                for take in (event.record, event.wait, event.wait_entry):
                    print(fails(TypeError, take, "9"), end="; ")
            print(calls())
        """)
        self.assertExpectedInline(output, "an integer is required; " * 6 + "create1\n")

    def test_what_is_no_tuple_is_named(self):
        output = self.run_script("""
            print(fails(TypeError, lambda: region((-1,), 1, entry=(("record", 0, 0), 5))))
            print(fails(TypeError, lambda: region((-1,), 1, exit=(["record", 0, 0],))))
            print(fails(TypeError, lambda: region((-1,), 1, exit=(("record", 0),))))
            print(fails(TypeError, lambda: region((-1,), 1, results=("raw",))))
            print(fails(TypeError, lambda: region((-1,), 1, results=(("raw", 0, 0),))))
            print(fails(ValueError, lambda: region((-1,), -1)))
        """)
        self.assertExpectedInline(
            output,
            """\
Region: operation 1 must be a tuple, not int
Region: operation 0 must be a tuple, not list
Region: an operation is (kind, event, stream)
Region: result 0 must be a tuple, not str
Region: a result is (kind, number)
Region: a negative number of events
""",
        )

    @unittest.skipUnless(importlib.util.find_spec("_testcapi"), "lets allocations fail")
    def test_host_without_memory(self):
        """Whichever allocation fails, the error is Python's own."""
        self.run_script("""
            import _testcapi, functools
            def at(allocation, make):
                _testcapi.set_nomemory(allocation, allocation + 1)
                try: make()
                finally: _testcapi.remove_mem_hooks()
            make = functools.partial(native.Region, **fork, device=0, results=(), distinct=(), thread=thread,
                stream_type=Stream, current_raw=len, current=len, resolve=len, aliased=len)
            for allocation in range(1, 40):
                try: at(allocation, make)
                except MemoryError: pass
        """)

    def test_nothing_is_kept_alive(self):
        """Neither the caller's streams after the call, nor events after the module; no reference is lost or gained."""
        output = self.run_script("""
            import weakref
            r = region(**fork, results=(("raw", 0), ("stream", 1), ("event", 2), ("stream", 0)), distinct=(0, 1, 2))
            one = Stream(11)
            watched = weakref.ref(one)
            thread.objects = (None, one, Stream(12))
            def call():
                frame, raw, stream, event, caller = r.enter()
                frame.leave()
            call(); call(); calls()
            before = sys.getrefcount(one), sys.getrefcount(r), sys.getrefcount(None)
            for _ in range(1000): call()
            after = sys.getrefcount(one), sys.getrefcount(r), sys.getrefcount(None)
            assert after[:2] == before[:2] and abs(after[2] - before[2]) < 50, (before, after)
            del one
            thread.objects = None
            assert watched() is None
            calls()
            del r, call
            gc.collect()
            print(*sorted(calls().split()))
        """)
        self.assertExpectedInline(output, "destroy1 destroy2 destroy3\n")


class TestNotBuilt(TestCase):
    def test_first_call_says_what_it_takes(self):
        error = csrc.NotBuiltError("the C module can't be built")
        one_device = stream_runtime.region(device=0, streams={"stream0": "cuda:0"})
        with mock.patch.object(csrc, "extension", side_effect=error):
            for _ in range(2):
                with self.assertRaisesRegex(csrc.NotBuiltError, "can't be built"):
                    one_device.enter()


@form.needs_gpu
class TestCallersCapture(TestCase):
    def test_branches_and_waits(self) -> None:
        """Folded and unfolded branches, and waits for what a stream held before, inside torch.cuda.graph."""
        for limit in (0.0, 5.0):
            torch._dynamo.reset()
            stream = torch.cuda.Stream()

            def fork_join(x, stream=stream):
                current = torch.cuda.current_stream()
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    side = x.sin()
                current.wait_stream(stream)
                return side + x

            fn = torch.compile(fork_join, fullgraph=True)
            x = torch.randn(64, 64, device="cuda")
            with config.patch(fold_branches_below_us=limit):
                warm = torch.cuda.Stream()
                warm.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(warm):
                    for _ in range(3):
                        fn(x)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = fn(x)
            x.copy_(torch.randn(64, 64, device="cuda"))
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(result, x.sin() + x)
