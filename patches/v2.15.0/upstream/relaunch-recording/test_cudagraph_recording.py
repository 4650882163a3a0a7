# Owner(s): ["module: inductor"]

import contextlib
import gc
import itertools
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import recording as recordings
from torch._inductor.cudagraph_relaunch.outputs import View
from torch._inductor.cudagraph_relaunch.recording import Recording
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._python_dispatch import TorchDispatchMode


LOW, HIGH = 0x7E00_0000_0000, 0x7F00_0000_0000


class Allocator:
    """The caching allocator's pools: which are selected, and how often each is used."""

    def __init__(self):
        self.selected, self.uses, self.blocks = [], Counter(), {}
        self.caller = None  # a pool that the caller has selected
        self.numbers = itertools.count(1)

    def begin(self, index, pool):
        assert pool not in self.selected
        self.selected.append(pool)
        self.uses[pool] += 1

    def end(self, index, pool):
        if pool not in self.selected:
            raise RuntimeError("it is not selected")
        self.selected.remove(pool)

    def release(self, index, pool):
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def snapshot(self, pool, include_traces):
        assert not include_traces  # which takes long
        return [
            {"segment_pool_id": p, "blocks": blocks}
            for p, blocks in self.blocks.items()
            if p == pool
        ]


class Graph:
    """A torch.cuda.CUDAGraph: it retains the pool that it is begun with."""

    fails = False

    def __init__(self, keep_graph):
        self.is_reset = False

    def capture_begin(self, pool, capture_error_mode):
        self.pool, self.mode = pool, capture_error_mode
        self.allocator.begin(0, pool)

    def capture_end(self):
        if self.fails:
            raise RuntimeError("the capture is invalid")
        self.allocator.end(0, self.pool)

    def reset(self):
        self.is_reset = True


class Space:
    """An AddressSpace. What the thread allocates lies in it if one of its pools is the
    one that is selected."""

    low, high = LOW, HIGH

    def __init__(self, device, gap, inputs):
        self.given, self.next, self.closed, self.entered = [], LOW, False, 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *exc_info):
        self.entered -= 1

    def pool(self, no_split=False):
        return SimpleNamespace(id=("space", next(self.allocator.numbers), no_split))

    def allocate(self, size):
        self.given.append((self.next, size))
        self.next += 1 << 20
        return self.given[-1][0]

    def allocations(self, first=0):
        return self.given[first:]

    def count(self):
        return len(self.given)

    def close(self):
        self.closed = True


class Device:
    device = torch.device("cuda", 0)
    requested, noted, used = (0, 0), None, ()  # used: pools

    def allocated(self):
        return self.requested

    def is_unused(self, pool):
        return pool not in self.used

    def generators(self, inputs):
        return self.random

    def lines(self, namespace, nodes):
        return self.noted


class TestRecording(TestCase):
    def setUp(self):
        super().setUp()
        self.allocator = Graph.allocator = Space.allocator = Allocator()
        self.owner, self.log = Device(), []
        stream = mock.Mock(cuda_stream=0x57)
        names = {
            "_cuda_beginAllocateCurrentThreadToPool": self.allocator.begin,
            "_cuda_endAllocateToPool": self.allocator.end,
            "_cuda_releasePool": self.allocator.release,
            "_cuda_clearCublasWorkspaces": lambda: self.log.append("workspaces"),
        }
        for name, value in names.items():
            self.patch(torch._C, name, value)
        self.patch(torch.cuda, "CUDAGraph", Graph)
        self.patch(torch.cuda, "graph_pool_handle", lambda: ("empty", 1))
        self.patch(torch.cuda, "memory_snapshot", self.allocator.snapshot)
        for name in ("device", "stream"):
            self.patch(torch.cuda, name, lambda given: contextlib.nullcontext())
        self.patch(torch.cuda, "current_blas_handle", mock.Mock())
        self.patch(torch.cuda, "current_stream", lambda device: "the caller's")
        self.patch(torch, "UntypedStorage", self.storage)
        self.patch(recordings, "AddressSpace", Space)
        self.patch(
            recordings, "streams_of", lambda *key: SimpleNamespace(get=lambda i: stream)
        )
        self.stream = stream

    def patch(self, owner, name, value):
        self.enterContext(mock.patch.object(owner, name, value, create=True))

    def storage(self, size, device):
        """An allocation by this thread."""
        (pool,) = self.allocator.selected[:1] or [None]
        if self.allocator.caller is not None:
            pool = self.allocator.caller
        at = (
            self.recording.space.allocate(size)
            if pool and pool[0] == "space"
            else 0x1000
        )
        return SimpleNamespace(data_ptr=lambda: at)

    def record(self, gap=1):
        self.recording = Recording(self.owner, gap)
        return self.recording

    def check_nothing_is_left(self, graphs=1):
        self.assertEqual(self.allocator.selected, [])
        left = {pool: uses for pool, uses in self.allocator.uses.items() if uses}
        self.assertEqual(left, {("empty", 1): graphs})

    def test_pools_of_a_capture(self):
        made, seen = self.record(), []
        with made, made.capturing((), False):
            seen.append([*self.allocator.selected])
            with made.apart((0, 0)):
                seen.append([*self.allocator.selected])
            with made.within(made.new_pool()):
                seen.append([*self.allocator.selected])
            seen.append([*self.allocator.selected])
            self.assertFalse(gc.isenabled())
        self.assertTrue(gc.isenabled())
        self.assertEqual([len(pools) for pools in seen], [1, 1, 1, 1])
        self.assertEqual(len({pool for pools in seen[:3] for pool in pools}), 3)
        self.assertEqual(seen[0], seen[3])
        self.assertTrue(seen[1][0][2])  # no segment is split there
        self.assertEqual(made.graph.mode, "thread_local")
        self.assertEqual(self.log, ["workspaces"] * 2)  # before, and none is kept
        self.stream.wait_stream.assert_called_once_with("the caller's")
        self.check_nothing_is_left()

    def test_error_in_the_region(self):
        for fails in (False, True):
            self.patch(Graph, "fails", fails)
            made = self.record()
            error, capturing = self.assertRaises(ZeroDivisionError), made.capturing
            with error, made, capturing((), False), made.apart(None):
                raise ZeroDivisionError
            self.allocator.selected = [
                pool for pool in self.allocator.selected if pool[0] != "empty"
            ]
            self.assertEqual((self.allocator.selected, made.space.entered), ([], 0))
        self.assertTrue(gc.isenabled())

    def test_capture_that_does_not_end(self):
        self.patch(Graph, "fails", True)
        made = self.record()
        error = self.assertRaisesRegex(RuntimeError, "the capture is invalid")
        with error, made, made.capturing((), False):
            pass
        self.check_nothing_is_left()

    def test_pool_of_the_callers(self):
        self.allocator.caller = ("the caller's", 1)
        made = self.record()
        error = self.assertRaisesRegex(RuntimeError, "another memory pool is selected")
        with error, made, made.capturing((), False):
            self.fail("it is captured")
        self.check_nothing_is_left()

    def test_check_leaves_no_segment(self):
        made = self.record()
        with made, made.capturing((), False):
            self.assertEqual(made.segments(), [])
            at = made.space.allocate(100)
        self.assertEqual(made.segments(), [(at, 100)])
        self.assertTrue(made.covers(at))
        self.assertFalse(made.covers(HIGH))

    def test_apart(self):
        made = self.record()
        for asked, now, requested, once in (
            ((2, 60), None, 60, True),
            ((3, 90), None, 90, False),
            (None, (2, 48), 48, True),
            (None, (5, 99), 99, False),
        ):
            self.owner.requested = (7, 100)
            with made.apart(asked) as apart:
                addresses = [made.space.allocate(size) for size in (20, 40)]
                if now is not None:
                    self.owner.requested = (7 + now[0], 100 + now[1])
            self.assertEqual(apart.segments, dict(zip(addresses, (20, 40))))
            self.assertEqual((apart.requested, apart.once), (requested, once))
        with made.apart(None) as apart:
            pass
        self.assertEqual((apart.segments, apart.requested, apart.count), ({}, 0, 0))

    def test_within(self):
        made, seen = self.record(), []
        pool = made.new_pool()
        with made, made.capturing((), False):
            selected = self.allocator.selected
            before, first = [*selected], made.allocations_made()
            with made.within(pool):
                seen.append([*selected])
                at = made.space.allocate(8)
                with made.apart((0, 0)):
                    self.assertNotIn(pool.id, selected)
                seen.append([*selected])
            self.assertEqual(selected, before)
        self.assertEqual(seen, [[pool.id]] * 2)
        self.assertEqual(made.allocations(first), [(at, 8)])
        self.check_nothing_is_left()

    def test_without_modes(self):
        seen, made = [], self.record()

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        x, out = torch.ones(2, 2), torch.empty(2, 2)
        with Mode():
            with made.without_modes():
                torch.mm(x, x, out=out)
            self.assertEqual(seen, [])
            torch.mm(x, x)
        self.assertEqual((out, len(seen)), (torch.full((2, 2), 2.0), 1))

    def test_random_numbers(self):
        def generator(seed, offset):
            at = [SimpleNamespace(data_ptr=lambda a=a: a) for a in (seed, offset)]
            return SimpleNamespace(philox_state=lambda step: (*at, 0))

        self.owner.random = (
            generator(0x10, 0x20),
            generator(0x10, 0x20),
            generator(1, 2),
        )
        made = self.record()
        with made, made.capturing((), True):
            pass
        self.assertEqual(made.fixed, [0x10, 0x20, 1, 2])
        self.check_nothing_is_left()

    def test_placed_tensors(self):
        made, calls = self.record(), []
        self.patch(torch._C, "_construct_storage_from_data_pointer", lambda *args: args)
        self.patch(
            torch._C,
            "_construct_CUDA_Tensor_From_Storage_And_Metadata",
            lambda metadata, storage: calls.append((metadata, storage)),
        )
        view = View((2, 3), (4, 1), torch.float32)
        made.place(view)
        made.place(view, 16)
        (first, size), (second, larger) = made.space.allocations()
        self.assertEqual((size, larger), (28, 44))
        storages = [storage for _, storage in calls]
        device = self.owner.device
        self.assertEqual(storages, [(first, device, 28), (second + 16, device, 28)])
        wanted = {"size": (2, 3), "stride": (4, 1), "dtype": torch.float32}
        self.assertEqual(calls[0][0], {**wanted, "storage_offset": 0})
        self.assertEqual(made.segments(), [(first, 28), (second + 16, 28)])

    def test_memory_that_is_kept(self):
        made = self.record()
        used = {"size": 512, "state": "active_allocated"}
        free = {"size": 64, "state": "inactive"}
        with made.apart((0, 0)):
            (pool,) = self.allocator.selected
        self.assertEqual(made.kept(), [])
        self.allocator.blocks = {pool: [used, free], ("other", 1): [used]}
        self.assertEqual(made.kept(), [])
        self.owner.used = {pool, ("other", 1)}
        self.assertEqual(made.kept(), [512])  # of its own pools
        with mock.patch.object(gc, "collect", self.allocator.blocks.clear):
            self.assertEqual(made.kept(), [])  # it was garbage

    def test_nodes_so_far(self):
        driver = mock.Mock()
        driver.captured_into.return_value = 0xF0
        driver.count.return_value, driver.nodes.return_value = 3, [11, 12, 13]
        self.patch(recordings, "NativeDriver", lambda: driver)
        made = self.record()
        self.assertEqual((made.count(), made.nodes()), (3, [11, 12, 13]))
        driver.captured_into.assert_called_once_with(0x57)
        driver.count.assert_called_once_with(0xF0)

    def test_lines_of_nodes(self):
        made = self.record()
        with made.noting_lines({}):
            self.assertIsNone(made.lines)
        self.owner.noted = contextlib.nullcontext("noted")
        with made.noting_lines({}) as noted:
            self.assertEqual(noted, "noted")
        self.assertIs(made.lines, self.owner.noted)

    def test_end(self):
        made = self.record()
        graph, space = made.graph, made.space
        self.assertIn(made, recordings.live_recordings)
        made.close()
        made.close()
        self.assertEqual((space.closed, graph.is_reset), (True, False))
        made = self.record()
        graph, space = made.graph, made.space
        made.discard()
        self.assertEqual((space.closed, graph.is_reset), (True, True))


if __name__ == "__main__":
    run_tests()
