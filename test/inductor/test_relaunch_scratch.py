"""Scratch memory of launches in C: what stays allocated between them, for whom, and until when.

The device is that of `relaunch_fakes`; its raw memory is counted here, and poisoned when it is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from unittest import mock

import relaunch_driver
import torch
from hypothesis import given, HealthCheck, settings, strategies as st
from relaunch_case import Native
from relaunch_fakes import NativeLauncher

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._inductor.relaunch import runner
from torch_overlay._inductor.relaunch.capture.device import Cuda
from torch_overlay._inductor.relaunch.launch import native


AGAIN = 2  # the launch after which scratch stays
SIZE = 512  # of a region's scratch: a multiple of the alignment


def source(rows=4):
    """A region with scratch of 128 * rows bytes."""
    return f"""
def region(args):
    x, = args
    args.clear()
    buf0 = empty_strided_cuda(({rows}, 32), (32, 1), torch.float32)
    torch.mul(x, 2, out=buf0)
    buf1 = empty_strided_cuda(({rows}, 32), (32, 1), torch.float32)
    torch.add(buf0, x, out=buf1)
    del buf0
    return (buf1,)
"""


class Memory:
    """Raw memory of the device: by address, with the stream that it was allocated on."""

    def __init__(self):
        self.held, self.streams = {}, {}
        self.allocations = 0
        self.most = None  # pieces that may be there at once
        self.stream = 7

    def alloc(self, size, stream):
        if self.most is not None and len(self.held) >= self.most:
            raise torch.OutOfMemoryError("no memory")
        piece = torch.empty(size, dtype=torch.uint8)
        self.allocations += 1
        self.held[piece.data_ptr()] = piece
        self.streams[piece.data_ptr()] = stream
        return piece.data_ptr()

    def delete(self, address):
        self.held.pop(address).fill_(0xFF)

    @property
    def bytes(self):
        return sum(piece.numel() for piece in self.held.values())


class ScratchTests(Native):
    def setUp(self):
        super().setUp()
        self.memory = Memory()
        self.module = relaunch_driver.module()
        self.device.stream_of = lambda index: self.memory.stream
        self.device.raw_alloc = self.memory.alloc
        self.device.raw_delete = self.memory.delete
        self.asked = []
        self.ordinary = True
        self.device.is_ordinary = self.is_ordinary
        self.addCleanup(lambda: self.assertEqual((self.module.cached(), self.memory.held), (0, {})))
        self.addCleanup(gc.collect)
        self.addCleanup(runner.forget_all)

    def is_ordinary(self, address):
        self.assertIn(address, self.memory.held)
        self.asked.append(address)
        return self.ordinary

    def launch(self, run, times=1, rows=4):
        for _ in range(times):
            x = torch.randn(rows, 32)
            self.assertEqual(run([x])[0], x * 2 + x)

    def launched(self, rows=4):
        """A region that was launched until its scratch stays."""
        run = self.runner(source(rows))
        self.launch(run, AGAIN + 1, rows)
        self.assertEqual(self.counted("relaunches"), AGAIN)
        torch._dynamo.utils.counters.clear()
        return run


class TestScratchThatStays(ScratchTests):
    def test_scratch_stays_when_a_graph_is_launched_again(self):
        run = self.runner(source())
        self.launch(run, AGAIN)
        self.assertEqual((self.module.cached(), self.memory.bytes), (0, 0))
        self.launch(run)
        self.assertEqual((self.module.cached(), self.memory.bytes), (SIZE, SIZE))
        before = self.memory.allocations
        self.launch(run, 10)
        self.assertEqual((self.memory.allocations, self.memory.bytes, len(self.asked)), (before, SIZE, 1))

    def test_it_goes_with_its_graph(self):
        run = self.launched()
        runner.forget_all()
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))
        self.launch(run, AGAIN + 3)
        del run
        gc.collect()
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))

    def test_graphs_share_what_stays_on_a_stream(self):
        first, second = self.launched(), self.launched()
        self.assertEqual(self.memory.bytes, SIZE)
        before = self.memory.allocations
        for _ in range(3):
            self.launch(first)
            self.launch(second)
        self.assertEqual((self.memory.allocations, self.memory.bytes), (before, SIZE))
        del first
        gc.collect()
        self.assertEqual(self.memory.bytes, SIZE)
        self.launch(second, 2)
        self.assertEqual(self.memory.allocations, before)
        del second
        gc.collect()
        self.assertEqual(self.memory.held, {})

    def test_larger_scratch_takes_the_place_of_smaller(self):
        small = self.launched()
        large = self.launched(rows=8)
        self.assertEqual((self.module.cached(), self.memory.bytes), (2 * SIZE, 2 * SIZE))
        before = self.memory.allocations
        self.launch(small, 3)
        self.launch(large, 3, rows=8)
        self.assertEqual((self.memory.allocations, self.memory.bytes), (before, 2 * SIZE))
        del large
        gc.collect()
        self.assertEqual(self.memory.bytes, 2 * SIZE)
        del small
        gc.collect()
        self.assertEqual(self.memory.held, {})

    def test_each_stream_has_its_own(self):
        run = self.launched()
        for stream in (8, 7, 8, 7):
            self.memory.stream = stream
            self.launch(run, 2)
        self.assertEqual(sorted(self.memory.streams[a] for a in self.memory.held), [7, 8])
        before = self.memory.allocations
        for stream in (8, 7, 8, 7):
            self.memory.stream = stream
            self.launch(run, 2)
        self.assertEqual(self.memory.allocations, before)

    def test_a_graph_on_many_streams_keeps_memory_on_four(self):
        run = self.launched()
        for stream in range(7, 14):
            self.memory.stream = stream
            self.launch(run, 2)
        self.assertEqual(sorted(self.memory.streams[a] for a in self.memory.held), [7, 8, 9, 10])
        self.module.free_cached()
        for stream in range(11, 14):
            self.memory.stream = stream
            self.launch(run, 2)
        self.assertEqual(sorted(self.memory.streams[a] for a in self.memory.held), [11, 12, 13])

    def test_as_much_stays_as_the_option_says(self):
        for mib, bytes in ((64, 64 << 20), (0.5, 1 << 19), (0, 0)):
            with config.patch(cudagraph_scratch_cache_mib=mib):
                self.assertEqual(self.runner(source()).scratch_cache, bytes)
        small, large = self.runner(source()), self.runner(source(8))
        small.scratch_cache = large.scratch_cache = 2 * SIZE - 1
        self.launch(large, AGAIN + 3, rows=8)
        self.assertEqual(self.module.cached(), 0)
        self.launch(small, AGAIN + 3)
        self.assertEqual(self.module.cached(), SIZE)
        self.memory.stream = 8
        self.launch(small, 3)
        self.assertEqual((self.module.cached(), self.memory.bytes), (SIZE, SIZE))
        self.assertEqual(len(self.asked), 1)

    def test_nothing_stays_of_training(self):
        run = self.runner(source(), saved=[0])
        self.launch(run, AGAIN + 3)
        self.assertEqual(self.module.cached(), 0)

    def test_memory_of_a_pool_of_the_callers_does_not_stay(self):
        self.ordinary = False
        run = self.runner(source())
        self.launch(run, AGAIN + 5)
        self.assertEqual((self.module.cached(), self.memory.held, len(self.asked)), (0, {}, 1))

    def test_question_that_fails_costs_nobody_a_result(self):
        self.device.is_ordinary = mock.Mock(side_effect=RuntimeError("no snapshot"))
        run = self.runner(source())
        with mock.patch.object(sys, "unraisablehook") as told:
            self.launch(run, AGAIN + 5)
        self.assertEqual((self.module.cached(), self.memory.held, told.call_count), (0, {}, 1))

    def test_error_leaves_what_stays(self):
        run = self.launched()
        for name in ("cuGraphLaunch", "cuGraphExecKernelNodeSetParams"):
            relaunch_driver.driver().fail(name, 2)
            with self.assertRaisesRegex(RuntimeError, name):
                self.launch(run)
            self.launch(run)
        self.assertEqual((self.module.cached(), self.memory.bytes), (SIZE, SIZE))

    def test_launch_that_fails_keeps_nothing(self):
        run = self.runner(source())
        self.launch(run, AGAIN)
        relaunch_driver.driver().fail("cuGraphLaunch", 2)
        with self.assertRaisesRegex(RuntimeError, "cuGraphLaunch"):
            self.launch(run)
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))

    def test_launch_that_finds_no_memory_gets_what_stays(self):
        first, second = self.launched(), self.runner(source())
        second.scratch_cache = 0
        self.launch(second, 2)
        self.memory.most, self.memory.stream = 1, 8
        self.launch(second)
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))
        self.memory.most = 0
        with self.assertRaisesRegex(torch.OutOfMemoryError, "no memory"):
            self.launch(second)
        self.memory.most = None
        self.launch(first, 2)
        self.assertEqual(self.module.cached(), SIZE)

    def test_launch_that_finds_no_memory_for_outputs_gets_what_stays(self):
        run, empty, full = self.launched(), self.device.empty, []

        def may_be_full(*args):
            if self.memory.held and full:
                raise torch.OutOfMemoryError("no memory")
            return empty(*args)

        self.device.empty = may_be_full
        other = self.runner(source())
        other.scratch_cache = 0
        self.launch(other, 3)
        full.append(True)
        self.launch(other)
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))
        full.clear()
        self.launch(other)
        self.launch(run)

    def test_error_of_another_kind_is_told_at_once(self):
        run, other = self.launched(), self.runner(source())
        self.launch(other, 2)
        self.memory.stream = 8
        with mock.patch.object(self.memory, "held", None), self.assertRaises(TypeError):
            self.memory.most = 1
            self.launch(other)
        self.memory.most, self.memory.stream = None, 7
        self.assertEqual(self.module.cached(), SIZE)
        self.launch(run)

    def test_memory_in_use_is_given_back_behind_the_launch(self):
        run, seen = self.launched(), []
        original = NativeLauncher._run

        def free_cached(launcher):
            seen.append((self.module.free_cached(), self.module.cached(), self.memory.bytes))
            return original(launcher)

        with mock.patch.object(NativeLauncher, "_run", free_cached):
            self.launch(run)
        self.assertEqual(seen, [(0, SIZE, SIZE)])
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))
        self.launch(run, 2)
        self.assertEqual(self.module.cached(), SIZE)
        self.assertEqual(self.module.free_cached(), SIZE)
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))

    def test_graph_that_goes_while_another_thread_launches_it(self):
        run, original, inside, go = self.launched(), NativeLauncher._run, threading.Event(), threading.Event()

        def wait(launcher):
            inside.set()
            go.wait(20)
            return original(launcher)

        with mock.patch.object(NativeLauncher, "_run", wait):
            thread = threading.Thread(target=self.launch, args=(run,))
            thread.start()
            inside.wait(20)
            runner.forget_all()
            self.module.free_cached()
            self.assertEqual(self.memory.bytes, SIZE)
            go.set()
            thread.join()
        self.assertEqual(self.memory.held, {})

    def test_what_is_kept_is_told(self):
        made = mock.Mock(return_value=self.module)
        made.cache_info.return_value.currsize = 1
        with mock.patch.object(native, "implementation", made):
            self.assertEqual(native.cached(), 0)
            run = self.launched()  # noqa: F841
            self.assertEqual(runner.live()["scratch cache"], SIZE)
            made.cache_info.return_value.currsize = 0  # nobody has built it
            self.assertEqual(native.cached(), 0)
            native.free_cached()
            self.assertEqual(self.module.cached(), SIZE)
            made.cache_info.return_value.currsize = 1
            native.free_cached()
            self.assertEqual(self.module.cached(), 0)


class TestAnyOrder(ScratchTests):
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_what_stays_is_what_is_allocated(self, data):
        """Graphs of several sizes come, go, and are launched on several streams; memory is freed, runs out, or is
        a pool's; launches fail."""
        rows, most = (1, 4, 8, 20), 30 * 128
        graphs: list[tuple[int, object]] = []
        self.ordinary = True
        for _ in range(data.draw(st.integers(1, 40))):
            kind = data.draw(st.sampled_from(["launch"] * 6 + ["new", "go", "give back", "full", "fail", "pool"]))
            if kind == "new" or not graphs:
                size = data.draw(st.sampled_from(rows))
                run = self.runner(source(size))
                run.scratch_cache = most
                self.launch(run, 2, size)
                graphs.append((size, run))
                del run
                continue
            number = data.draw(st.integers(0, len(graphs) - 1))
            size, run = graphs[number]
            self.memory.stream = data.draw(st.integers(7, 12))
            if kind == "launch":
                self.launch(run, data.draw(st.integers(1, 3)), size)
            elif kind == "go":
                del graphs[number], run
                gc.collect()
            elif kind == "give back":
                held = self.memory.bytes
                self.assertEqual(self.module.free_cached(), held)
            elif kind == "full":
                self.memory.most = 0
                with contextlib.suppress(torch.OutOfMemoryError):
                    self.launch(run, 1, size)
                self.memory.most = None
            elif kind == "fail":
                relaunch_driver.driver().fail("cuGraphLaunch", 2)
                with self.assertRaisesRegex(RuntimeError, "cuGraphLaunch"):
                    self.launch(run, 1, size)
            else:
                self.ordinary = not self.ordinary
            run = None
            self.assertEqual(self.module.cached(), self.memory.bytes)
            self.assertLessEqual(self.memory.bytes, most)
            streams = [self.memory.streams[address] for address in self.memory.held]
            self.assertEqual(len(streams), len(set(streams)))
        graphs.clear()
        run = None
        runner.forget_all()
        gc.collect()
        self.assertEqual((self.module.cached(), self.memory.held), (0, {}))


class TestFunctionsOfTorch(ScratchTests):
    """The stream is asked for, and memory is allocated, in C."""

    def setUp(self):
        super().setUp()
        self.calls, self.fail = [], set()
        address = ctypes.POINTER(ctypes.c_void_p)
        kinds = [(ctypes.c_int, address), (ctypes.c_uint64, address), (ctypes.c_void_p,)]
        bodies = [self.stream, self.alloc, self.release]
        self.made = [ctypes.CFUNCTYPE(ctypes.c_int, *kind)(body) for kind, body in zip(kinds, bodies)]
        self.device.functions = tuple(ctypes.cast(f, ctypes.c_void_p).value for f in self.made)
        self.device.stream_of = mock.Mock(side_effect=self.device.stream_of)
        self.device.raw_alloc = mock.Mock(side_effect=self.device.raw_alloc)
        self.device.raw_delete = mock.Mock(side_effect=self.device.raw_delete)

    def noted(self, name):
        self.calls.append(name)
        return name in self.fail

    def stream(self, device, out):
        out[0] = self.memory.stream
        return int(self.noted("stream"))

    def alloc(self, size, out):
        if self.noted("alloc"):
            return 1
        out[0] = self.memory.alloc(size, self.memory.stream)
        return 0

    def release(self, address):
        if self.noted("release"):
            return 1
        self.memory.delete(address)
        return 0

    def test_torchs_python_is_not_called(self):
        for kept, calls in ((0, 4 * ["stream", "alloc", "release"]), (SIZE, ["stream", "alloc", "release", "stream"])):
            run = self.runner(source())
            run.scratch_cache = kept
            self.calls.clear()
            self.launch(run, 5)
            self.assertEqual(self.calls, calls + ["alloc", "stream", "stream"] * bool(kept))
            self.assertEqual(self.module.cached(), kept)
        for function in (self.device.stream_of, self.device.raw_alloc, self.device.raw_delete):
            function.assert_not_called()

    def test_python_is_asked_where_they_fail(self):
        self.fail = {"stream", "alloc", "release"}
        run = self.runner(source())
        run.scratch_cache = 0
        self.launch(run, 3)
        for function in (self.device.stream_of, self.device.raw_alloc, self.device.raw_delete):
            self.assertEqual(function.call_count, 2)
        self.memory.most = 0
        with self.assertRaisesRegex(torch.OutOfMemoryError, "no memory"):
            self.launch(run)
        self.memory.most = None

    def test_torch_has_them(self):
        self.assertEqual(len(set(native.torch_functions()) - {0}), 3)

    def test_torch_that_has_them_not(self):
        with (
            mock.patch.object(native, "TORCH_FUNCTIONS", ("no_such_function",)),
            self.assertLogs(native.log, "INFO") as logs,
        ):
            self.assertEqual(native.torch_functions.__wrapped__(), (0,))
        self.assertIn("no_such_function", logs.output[0])


class TestOrdinaryMemory(ScratchTests):
    def test_pool_of_an_address(self):
        segments = [
            {"device": 0, "address": 4096, "total_size": 512, "segment_pool_id": (0, 0)},
            {"device": 0, "address": 8192, "total_size": 512, "segment_pool_id": (0, 3)},
            {"device": 1, "address": 9216, "total_size": 512, "segment_pool_id": (0, 0)},
        ]
        device = object.__new__(Cuda)
        device.index = 0
        with mock.patch.object(torch.cuda, "memory_snapshot", lambda include_traces: segments):
            found = [device.is_ordinary(a) for a in (4096, 4607, 4608, 8192, 9216)]
        self.assertEqual(found, [True, True, False, False, False])
