# Owner(s): ["module: aotdispatch"]

import gc
import io
import threading
from unittest import mock

import torch
from torch._functorch._activation_offloading import host_memory, runtime
from torch._functorch._activation_offloading.runtime import (
    check_host_memory,
    copy_in,
    copy_out,
    live,
    note_use,
    OffloadError,
    take_slab,
)
from torch._functorch._streams.ids import copy_in_stream, copy_out_stream
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import checkpoint


class Stream:
    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


class Keep(torch.autograd.Function):
    """Saves a slab, as a compiled forward does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(take_slab(4096, 0))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (slab,) = ctx.saved_tensors
        note_use(slab)
        return grad * 2


class SlabCase(TestCase):
    def setUp(self):
        super().setUp()
        self.stream = Stream()
        self.pinned = []
        self.pin_error = 0

        def pin(address, nbytes):
            if not self.pin_error:
                self.pinned.append((address, nbytes))
            return self.pin_error

        for patch in (
            mock.patch.object(host_memory, "pin", pin),
            mock.patch.object(runtime, "_current_stream", lambda device: self.stream),
            mock.patch.object(runtime, "_is_capturing", lambda: False),
            mock.patch.multiple(runtime, _free=[], _all={}, _kept=[]),
        ):
            patch.start()
            self.addCleanup(patch.stop)


class TestLifetime(SlabCase):
    def setUp(self):
        super().setUp()
        self.x = torch.ones(3, requires_grad=True)

    def test_slab_is_free_after_the_backward(self):
        for _ in range(3):
            y = Keep.apply(self.x).sum()
            self.assertEqual(live()["in_use"], 1)
            y.backward()
            self.assertEqual(live(), {"slabs": 1, "in_use": 0, "bytes": 4096})
        self.assertEqual(len(self.pinned), 1)

    def test_retained_graph_keeps_its_slab(self):
        y = Keep.apply(self.x).sum()
        y.backward(retain_graph=True)
        self.assertEqual(live()["in_use"], 1)
        y.backward()
        self.assertEqual(live()["in_use"], 0)

    def test_backward_that_never_runs(self):
        y = Keep.apply(self.x)
        self.assertEqual(live()["in_use"], 1)
        del y
        gc.collect()
        self.assertEqual(live()["in_use"], 0)

    def test_view_keeps_the_slab(self):
        part = take_slab(1024, 0)[512:].view(torch.float32)
        self.assertEqual(live()["in_use"], 1)
        del part
        self.assertEqual(live()["in_use"], 0)

    def test_forwards_that_are_alive_at_once(self):
        slabs = [take_slab(1024, 0) for _ in range(3)]
        self.assertEqual(len({slab.data_ptr() for slab in slabs}), 3)
        del slabs[1]
        self.assertEqual(live(), {"slabs": 3, "in_use": 2, "bytes": 3 * 1024})

    def test_threads_take_different_slabs(self):
        found = []
        take = [
            threading.Thread(target=lambda: found.append(take_slab(64, 0)))
            for _ in range(8)
        ]
        for thread in take:
            thread.start()
        for thread in take:
            thread.join()
        self.assertEqual(len({slab.data_ptr() for slab in found}), 8)

    def test_free_slab_is_not_much_larger_than_it_has_to_be(self):
        address = take_slab(1200, 0).data_ptr()
        self.assertEqual(take_slab(1000, 0).data_ptr(), address)
        self.assertNotEqual(take_slab(100, 0).data_ptr(), address)

    def test_slab_that_a_capture_took_never_returns(self):
        with mock.patch.object(runtime, "_is_capturing", lambda: True):
            address = take_slab(64, 0).data_ptr()
        gc.collect()
        self.assertNotEqual(take_slab(64, 0).data_ptr(), address)

    def test_free_slabs_are_unpinned(self):
        used, unpinned = take_slab(64, 0), []
        take_slab(1024, 0)
        with (
            mock.patch.object(torch.cuda, "synchronize"),
            mock.patch.object(host_memory, "unpin", unpinned.append),
        ):
            runtime.release_free()
        self.assertEqual(live(), {"slabs": 1, "in_use": 1, "bytes": 64})
        self.assertEqual(unpinned, [self.pinned[1][0]])
        self.assertTrue(runtime.is_slab(used))

    def test_slab_is_told_from_one_that_lay_there_before(self):
        slab = take_slab(64, 0)
        address, number = runtime.identity(slab)
        self.assertEqual(address, slab.data_ptr())
        runtime.slab_of(slab).number = number + 1
        self.assertNotEqual(runtime.identity(slab), (address, number))
        self.assertFalse(runtime.is_slab(torch.zeros(64, dtype=torch.uint8)))
        self.assertTrue(runtime.holds(address + 63))
        self.assertFalse(runtime.holds(address + 64))


class TestOrder(SlabCase):
    def test_same_stream_waits_for_nothing(self):
        for _ in range(2):
            slab = take_slab(64, 0)
            note_use(slab)
            del slab
        self.assertEqual(self.stream.waited, [])

    def test_another_stream_waits_for_the_last_one(self):
        first, self.stream = self.stream, Stream()
        with mock.patch.object(runtime, "_current_stream", lambda device: first):
            slab = take_slab(64, 0)
        note_use(slab)  # a backward on another stream than its forward
        self.assertEqual(self.stream.waited, [first])
        del slab
        second, self.stream = self.stream, Stream()
        take_slab(64, 0)
        self.assertEqual(self.stream.waited, [second])

    def test_copy_streams_of_a_capture(self):
        number = copy_out_stream(0)
        made = []

        class Made:
            def __init__(self, device, priority):
                made.append(device)

        with (
            mock.patch.object(torch.cuda, "Stream", Made),
            mock.patch.dict(runtime._streams, clear=True),
        ):
            usual = runtime.copy_stream(number)
            with runtime.exchanged(lambda number: ("captured", number)):
                self.assertEqual(runtime.copy_stream(number), ("captured", number))
            self.assertIs(runtime.copy_stream(number), usual)
            self.assertIsNot(runtime.copy_stream(copy_in_stream(0)), usual)
            self.assertIsNot(runtime.copy_stream(copy_out_stream(1)), usual)
        self.assertEqual(made, [0, 0, 1])


class TestCopies(SlabCase):
    def test_layouts_are_kept(self):
        slab = take_slab(4096, 0)
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            whole = torch.randn(3, 4, 5).mul(3).to(dtype)
            for source in (whole, whole.transpose(0, 2), whole[1]):
                copy_out(slab, source, 1024)
                target = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
                copy_in(target, slab, 1024)
                self.assertEqual(target, source)


class TestHostMemory(SlabCase):
    def test_pages_are_made_by_several_threads(self):
        small = runtime._Slab(5)
        parts = []

        class Pool:
            def __init__(self, threads):
                self.threads = threads

            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

            def map(self, function, given):
                parts.extend(given)
                return map(function, given)

        with (
            mock.patch.object(host_memory, "PART", 24 << 20),
            mock.patch("concurrent.futures.ThreadPoolExecutor", Pool),
        ):
            host_memory.populate(small.address, 5)  # that is left to pinning
            self.assertEqual(parts, [])
            made = runtime._Slab((64 << 20) + 5)
        sizes = [size for _, size in parts]
        self.assertEqual(sizes, [24 << 20, 24 << 20, (16 << 20) + 5])
        self.assertEqual(parts[1][0], made.address + (24 << 20))
        self.assertEqual(bytes(made.memory[-3:]), bytes(3))

    def test_what_is_left_is_the_least_of_all_accounts(self):
        texts = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8 kB\n"}
        group = "/sys/fs/cgroup/memory."

        def opened(path):
            if path not in texts:
                raise FileNotFoundError(path)
            return io.StringIO(texts[path])

        with mock.patch("builtins.open", opened):
            self.assertEqual(host_memory.available_bytes(), 8192)
            texts |= {f"{group}max": "max", f"{group}current": "4096"}
            self.assertEqual(host_memory.available_bytes(), 8192)
            texts[f"{group}max"] = "5000"
            self.assertEqual(host_memory.available_bytes(), 904)
            texts[f"{group}max"] = "4000"
            self.assertEqual(host_memory.available_bytes(), 0)
            texts.clear()
            self.assertIsNone(host_memory.available_bytes())

    def test_host_without_room(self):
        def available(nbytes):
            return mock.patch.object(host_memory, "available_bytes", lambda: nbytes)

        with (
            available(10**9),
            self.assertRaisesRegex(OffloadError, r"keeps 2.00 GB .* 900.00 MB would"),
        ):
            check_host_memory(2 * 10**9)
        with available(1), self.assertRaisesRegex(OffloadError, "would fit"):
            take_slab(64, 0)
        with available(None):  # nothing is known
            check_host_memory(2 * 10**9)
        take_slab(4096, 0)
        with available(0):  # a slab is free
            check_host_memory(4000)

    def test_free_slabs_make_room(self):
        take_slab(4096, 0)
        unpinned = []
        with (
            mock.patch.object(torch.cuda, "synchronize"),
            mock.patch.object(host_memory, "unpin", unpinned.append),
            mock.patch.object(host_memory, "available_bytes", lambda: 3000),
        ):
            slab = take_slab(6200, 0)
        self.assertEqual(unpinned, [self.pinned[0][0]])
        self.assertEqual(live(), {"slabs": 1, "in_use": 1, "bytes": slab.numel()})

    def test_advice_is_enough(self):
        for nbytes in (1, 9999, 10001, 49152, 99999, 20 * 10**9 + 1):
            text = host_memory.gigabytes(nbytes)
            self.assertGreaterEqual(round(float(text) * 1e9), nbytes)
            self.assertLess(float(text) * 1e9, 1.001 * nbytes + 1)
            self.assertLessEqual(len(text.partition("e")[0].strip("0.")), 5)

    def test_memory_that_can_not_be_pinned(self):
        self.pin_error = 2
        with self.assertRaisesRegex(OffloadError, r"be pinned \(CUDA error 2\)"):
            take_slab(64, 0)
        with self.assertLogs(runtime.__name__, "WARNING"):
            slab = take_slab(64, 0, strict=False)
        self.assertFalse(runtime.holds(slab.data_ptr()))

    def test_saved_tensor_hooks(self):
        hooks = torch.autograd.graph.saved_tensors_hooks
        with (
            hooks(lambda t: t.clone(), lambda t: t),
            self.assertRaisesRegex(OffloadError, "saved-tensor hooks are active"),
        ):
            take_slab(64, 0)
        x = torch.ones(3, requires_grad=True)
        checkpoint(Keep.apply, x, use_reentrant=False).sum().backward()
        self.assertEqual(x.grad, 2 * torch.ones(3))
        self.assertEqual(live()["in_use"], 0)


if __name__ == "__main__":
    run_tests()
