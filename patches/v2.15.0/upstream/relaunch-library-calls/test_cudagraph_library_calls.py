# Owner(s): ["module: inductor"]

import contextlib
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import library_calls as module
from torch._inductor.cudagraph_relaunch.library_calls import (
    calls_of,
    capture_again,
    Differs,
    LibraryCalls,
)
from torch._inductor.cudagraph_relaunch.nodes import Segment
from torch.testing._internal.common_utils import run_tests, TestCase


class Recording:
    """Addresses in a block of the host's memory. A node is what `launch` is called with."""

    device = torch.device("cpu")

    def __init__(self):
        self.block = torch.zeros(1 << 15, dtype=torch.uint8)
        self.next = -(-self.block.data_ptr() // 256) * 256
        self.taken, self.launched, self.random = [], [], None

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def place(self, view, alignment=256):
        at = self.next + (alignment if alignment < 256 else 0)
        self.next += 1024
        self.taken.append((at, view.extent))
        storage = torch._C._construct_storage_from_data_pointer(
            at, self.device, view.extent
        )
        return torch.empty(0, dtype=view.dtype).set_(storage, 0, view.size, view.stride)

    def allocate(self, size):
        """Memory that a library allocates."""
        self.taken.append((self.next, size))
        self.next += 1024

    def count(self):
        return len(self.launched)

    def allocations_made(self):
        return len(self.taken)

    def allocations(self, first):
        return self.taken[first:]

    @contextlib.contextmanager
    def capturing(self, inputs, random):
        self.random = random
        yield

    def clear_stack(self):
        pass


class TestLibraryCalls(TestCase):
    def setUp(self):
        super().setUp()
        self.current = self.first = Recording()
        self.leaves, self.apart, self.times = 0, set(), iter(range(5, 100))
        self.calls = LibraryCalls(self.first, self)
        self.library = SimpleNamespace(mm=self.mm, sort=self.sort)
        self.scope = {"extern_kernels": self.library}

    def run_leaf(self, call, apart):
        self.leaves += 1
        self.apart.add(apart)
        return call()

    def leave_out(self):
        return next(self.times)

    def launch(self, name, *tensors):
        self.current.launched.append((name, [t.data_ptr() for t in tensors]))

    def mm(self, x, w, *, out):
        self.launch("mm", x, w, out)
        return out

    def sort(self, x):
        self.launch("sort", x)
        return x.clone()

    def tensor(self, *size, dtype=torch.float32, alignment=256):
        view = SimpleNamespace(
            size=size,
            stride=torch.empty(size).stride(),
            dtype=dtype,
            extent=torch.Size(size).numel() * dtype.itemsize,
        )
        return self.first.place(view, alignment)

    def note(self, region):
        with self.calls.noted(self.scope):
            region(self.scope["extern_kernels"])
        self.assertIs(self.scope["extern_kernels"], self.library)

    def again(self, *nodes):
        """Make the calls of these nodes again. Return, for each of the launches, the
        regions and the offsets in them that its arguments have."""
        wanted = calls_of(self.calls.made, set(nodes))
        regions = [
            Segment(at, size, i) for i, (at, size) in enumerate(self.first.taken)
        ]
        self.current = Recording()
        made = capture_again(wanted, regions, self.current)
        self.assertIs(made.recording, self.current)
        self.assertIs(self.current.random, False)

        def place(address):
            (found,) = [
                s for s in made.segments if s.address <= address < s.address + s.size
            ]
            return found.region, address - found.address

        return [
            (name, [place(address) for address in addresses])
            for name, addresses in self.current.launched
        ]

    def test_call_that_launched_a_node(self):
        x, w, a, b = (self.tensor(4, 4) for _ in range(4))

        def region(library):
            library.mm(x, w, out=a)
            library.mm(a, w, out=b)

        self.note(region)
        self.assertEqual(self.again(1), [("mm", [(2, 0), (1, 0), (3, 0)])])
        self.current = self.first
        self.assertEqual(len(self.again(0, 1)), 2)

    def test_parts_of_a_region_and_lists(self):
        x = self.tensor(8, 4)
        self.library.cat = lambda parts, *, out: self.launch("cat", *parts, out)
        out = self.tensor(4, 4)
        self.note(lambda library: library.cat([x[:2], x[6:]], out=out))
        self.assertEqual(self.again(0), [("cat", [(0, 0), (0, 96), (1, 0)])])

    def test_alignment(self):
        x, out = self.tensor(4, 4, alignment=16), self.tensor(4, 4, alignment=4)
        self.note(lambda library: library.mm(x, x, out=out))
        self.again(0)
        ((_, (first, second, third)),) = self.current.launched
        self.assertEqual((first % 256, second), (16, first))
        self.assertEqual(third % 256, 4)

    def test_tensors_are_not_held(self):
        x = self.tensor(4, 4)
        alive = weakref.ref(x)

        def region(library):
            nonlocal x
            library.mm(x, x, out=x)
            x = None

        self.note(region)
        self.assertIsNone(alive())
        self.first.launched.clear()
        self.assertEqual(self.again(0), [("mm", [(0, 0), (0, 0), (0, 0)])])

    def test_workspace(self):
        """The first call allocates it, so it is made again before the second."""
        x = self.tensor(4, 4)

        def mm(x, w, *, out):
            if not self.current.launched:
                self.current.allocate(64)
            self.launch("mm", x, w, out)

        self.library.mm = mm

        def region(library):
            for _ in range(3):
                library.mm(x, x, out=x)

        self.note(region)
        self.assertEqual(len(self.again(2)), 2)
        self.current = self.first
        self.assertEqual(len(self.again(0)), 1)

    def test_library_that_allocates_otherwise(self):
        x = self.tensor(4, 4)

        def mm(x, w, *, out):
            self.current.allocate(64 if self.current is self.first else 32)
            self.launch("mm", x, w, out)

        self.library.mm = mm
        self.note(lambda library: library.mm(x, x, out=x))
        with self.assertRaisesRegex(Differs, "allocates otherwise"):
            self.again(0)

    def test_memory_of_no_region(self):
        x, outside = self.tensor(4, 4), torch.ones(4, 4)
        self.note(lambda library: library.mm(x, outside, out=x))
        with self.assertRaisesRegex(Differs, "in no region"):
            self.again(0)

    def test_result_of_the_library(self):
        x = self.tensor(4, 4)
        self.note(lambda library: library.sort(x))
        with self.assertRaisesRegex(Differs, "memory of its own"):
            self.again(0)

    def test_node_of_other_code(self):
        x = self.tensor(4, 4)
        self.launch("triton", x)
        self.note(lambda library: library.mm(x, x, out=x))
        with self.assertRaisesRegex(Differs, "1 nodes are not launched by calls"):
            self.again(0, 1)

    def test_other_threads_are_not_noted(self):
        x = self.tensor(4, 4)

        def region(library):
            thread = threading.Thread(target=library.mm, args=(x, x), kwargs={"out": x})
            thread.start()
            thread.join()

        self.note(region)
        self.assertEqual(self.calls.made, [])
        self.assertEqual(len(self.first.launched), 1)

    def test_nothing_is_noted_unless_wanted(self):
        x = self.tensor(4, 4)
        self.calls = LibraryCalls(self.first, self, wanted=False)
        self.note(lambda library: library.mm(x, x, out=x))
        self.assertEqual(self.calls.made, [])

    def test_leaves(self):
        """Calls of one operator that returns nothing new."""
        x, y = self.tensor(4, 4).fill_(1), self.tensor(4, 4)
        self.library.mm, self.library.cat = torch.mm, torch.cat
        for call, leaves in (
            (lambda library: library.mm(x, x, out=y), 1),
            (lambda library: library.mm(x, x), 0),  # it returns memory
            (lambda library: library.cat([x[:2], x[2:]], out=y), 0),
        ):
            self.leaves = 0
            self.note(call)
            self.assertEqual(self.leaves, leaves)
        self.assertEqual([call.returns for call in self.calls.made], [0, 1, 0])
        self.assertEqual((self.calls.repeats, self.apart), ([], {False}))

    def left_out(self, *calls):
        """Calls of a leaf with (arguments, out), where one like an earlier one is left
        out. Return for each call that is the number of the earlier one."""

        def leaf(*args, out):
            self.launch("leaf", out)
            return out

        leaves = mock.patch.object(module, "LEAVES", (leaf,))
        self.library.leaf, self.leaves = leaf, 0
        self.calls = LibraryCalls(self.first, self, leaves_out=True)

        def region(library):
            for args, out in calls:
                self.assertIs(library.leaf(*args, out=out), out)

        with leaves:
            self.note(region)
        self.assertEqual(self.leaves, len(self.calls.made))
        self.assertEqual(len(calls), len(self.calls.made) + len(self.calls.repeats))
        return [repeat.like for repeat in self.calls.repeats]

    def test_calls_that_are_left_out(self):
        x, w, a, b, c = (self.tensor(4, 4) for _ in range(5))
        calls = [((x, w), a), ((x,), b), ((a, w), b), ((b,), c)]
        self.assertEqual(self.left_out(*calls), [0, 1])
        first, second = self.calls.repeats
        places = [tuple(t.data_ptr() for t in each) for each in ((a, w, b), (b, c))]
        self.assertEqual((first.at, first.time, first.addresses), (2, 5, places[0]))
        self.assertEqual((second.at, second.time, second.addresses), (2, 6, places[1]))
        self.assertEqual(self.apart, {True})  # no result may get what calls had

    def test_other_calls_are_made(self):
        x, w, a, b = (self.tensor(4, 4) for _ in range(4))
        self.calls = LibraryCalls(self.first, self, leaves_out=True)

        def region(library):
            for out in (a, b):
                library.mm(x, w, out=out)
                library.sort(out)

        self.note(region)
        self.assertEqual((len(self.calls.made), self.calls.repeats), (4, []))

    def test_tensors_tell_calls_apart(self):
        out, other = self.tensor(8, 4), self.tensor(8, 4)
        for alike, first, second in (
            (True, self.tensor(4, 4), self.tensor(4, 4)),
            (False, self.tensor(4, 4), self.tensor(4, 2)),
            (False, self.tensor(4, 4), self.tensor(4, 4).t()),
            (False, self.tensor(4, 4), self.tensor(4, 4, dtype=torch.int32)),
            (False, self.tensor(4, 4), self.tensor(4, 4, alignment=128)),
            (False, self.tensor(64)[4:8], self.tensor(64)[12:16]),  # 16 bytes, 48 bytes
            (True, self.tensor(128)[4:8], self.tensor(128)[68:72]),
            (False, self.tensor(0, 4), self.tensor(0, 4)),
        ):
            found = self.left_out(((first,), out), ((second,), other))
            self.assertEqual(found, [0] * alike, (first.shape, second.shape))

    def test_same_tensor_twice(self):
        x, y, out = self.tensor(4, 4), self.tensor(4, 4), self.tensor(4, 4)
        self.assertEqual(self.left_out(((x, x), out), ((y, y), out)), [])
        self.assertEqual(self.left_out(((x, y), x), ((y, x), y)), [])

    def test_numbers_tell_calls_apart(self):
        x, out = self.tensor(4, 4), self.tensor(4, 4)
        values = [1, True, 1.0, 0.0, -0.0, "1", None, float("nan"), torch.float32]
        calls = [((x, value), out) for value in values]
        self.assertEqual(self.left_out(*calls), [])
        self.assertEqual(self.left_out(*calls, *calls), [*range(len(values) - 1)])
        self.assertEqual(self.left_out(((x, (1,)), out), ((x, (1,)), out)), [])

    def test_conjugates_and_negatives(self):
        x, y = (self.tensor(4, 4, dtype=torch.complex64) for _ in range(2))
        out = self.tensor(4, 4, dtype=torch.complex64)
        for lazy in (torch.Tensor.conj, torch._neg_view):
            self.assertEqual(self.left_out(((lazy(x),), out), ((lazy(y),), out)), [])
            self.assertEqual(self.left_out(((x,), out), ((lazy(y),), out)), [])
            with self.assertRaisesRegex(Differs, "a conjugate or a negative"):
                self.again(self.calls.made[1].nodes.start)
            self.current = self.first


if __name__ == "__main__":
    run_tests()
