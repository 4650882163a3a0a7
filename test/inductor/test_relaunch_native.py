"""Aliased address space and the patching of executables, against a driver of our own that checks and records.

The driver is `relaunch_driver`'s.
"""

import ctypes
import functools
import gc
import os
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import torch
from torch._dynamo.test_case import TestCase

import form
from stand_ins import c_module, relaunch_driver
from stand_ins.relaunch_case import run_in_threads
from stand_ins.relaunch_driver import At, driver, kernel, Patched, word
from torch_overlay import csrc
from torch_overlay._inductor.relaunch.capture.recording import AddressSpace
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.launch import executable, relaunch
from torch_overlay._inductor.relaunch.launch.executable import call_maker, Part
from torch_overlay._inductor.relaunch.memory.outputs import OutputLayout
from torch_overlay._inductor.relaunch.proof.nodes import (
    CopyNode,
    CopySide,
    FillNode,
    KernelNode,
    PointerSlot,
    Segment,
    Template,
    Unprovable,
)


MiB = 1 << 20
BLOCK, GAP = 12 * MiB, 64 << 10
INVALID, OUT_OF_MEMORY = 1, 2

ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class DriverCase(TestCase):
    def setUp(self):
        super().setUp()
        driver().library.stub_reset()
        self.module = relaunch_driver.module()

    def tearDown(self):
        self.assertEqual(self.module.counts(), {"ranges": 0, "blocks": 0, "arenas": 0, "held": 0})
        self.assertEqual(driver().left(), (0, 0, 0))
        super().tearDown()


class TestRanges(DriverCase):
    def setUp(self):
        super().setUp()
        self.alloc = ALLOC(self.module.alloc_address)
        self.free = FREE(self.module.free_address)

    def allocate(self, *sizes, device=0):
        return [self.alloc(size, device, None) for size in sizes]

    def allocations(self, made, first=0):
        return list(struct.iter_unpack("QQ", self.module.allocations(made, first)))

    def fill(self, *sizes, gap=1, device=0, bytes=1 << 40, block=0):
        """A range with these allocations, no longer in use."""
        made = self.module.reserve(device, bytes, gap, block)
        before = self.module.use(made)
        addresses = self.allocate(*sizes, device=device)
        self.module.use(before)
        return made, addresses

    def drop(self, made, addresses):
        self.module.release(made)
        for address in addresses:
            self.free(address, 0, 0, None)

    def test_addresses_are_inside_and_apart(self):
        for gap in (1, 3):
            made, addresses = self.fill(100, 2 * MiB, 5 * MiB, gap=gap)
            self.module.seal(made)
            low, high = self.module.state(made)[:2]
            distances = [b - a - gap * GAP for a, b in zip([low, *addresses], [*addresses, high])]
            self.assertEqual(distances, [0, 512, 2 * MiB, 5 * MiB])
            self.assertEqual(self.allocations(made), list(zip(addresses, (100, 2 * MiB, 5 * MiB))))
            self.drop(made, addresses)

    def test_stack_is_cleared_as_far_as_the_thread_has_one(self):
        done = []
        before = threading.stack_size(64 << 10)
        try:
            thread = threading.Thread(target=lambda: done.append(self.module.clear_stack()))
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        self.module.clear_stack()
        self.assertEqual(done, [None])

    def test_allocations_leave_no_block_on_the_stack(self):
        made = self.module.reserve(0, 1 << 40)
        low, high = self.module.state(made)[:2]
        driver().library.stub_litter()
        self.module.use(made)
        self.module.take(made, BLOCK)
        found = [driver().library.stub_remains(low, high, BLOCK)]
        addresses = self.allocate(BLOCK)
        found.append(driver().library.stub_remains(low, high, BLOCK))
        self.module.use(None)
        self.drop(made, addresses)
        self.assertEqual(found, [0, 0])

    def test_addresses_that_a_call_leaves_on_the_stack_are_cleared(self):
        low, step = 1 << 40, BLOCK
        found = []
        for clear in (lambda: None, self.module.clear_stack):
            driver().library.stub_reset()
            driver().library.stub_litter()
            driver().library.cuMemMap(*[ctypes.c_uint64(number) for number in (low + step, step, 0, 1000, 0)])
            clear()
            found.append(driver().library.stub_remains(low, low + 8 * step, step))
        self.assertGreater(found[0], 1000)
        self.assertEqual(found[1], 0)

    def test_taken_addresses_are_nobodys_to_free(self):
        made = self.module.reserve(0, 1 << 40)
        addresses = [self.module.take(made, size) for size in (0, 100)]
        self.assertEqual(self.allocations(made), list(zip(addresses, (0, 100))))
        self.assertEqual(self.allocations(made, 1), [(addresses[1], 100)])
        self.assertEqual(self.allocations(made, 2), [])
        self.assertEqual(self.module.state(made)[2], 2)
        self.module.seal(made)
        with self.assertRaisesRegex(RuntimeError, "the range is sealed, for an allocation of 5 bytes"):
            self.module.take(made, 5)
        with self.assertRaisesRegex(ValueError, "wants bytes >= 0"):
            self.module.take(made, -1)
        self.module.release(made)

    def test_all_of_an_allocation_maps_one_small_block(self):
        made, (address,) = self.fill(3 * BLOCK - 5 * MiB)
        low = self.module.state(made)[0]
        (handle, size, *_) = driver().calls("create")[0]
        self.assertEqual(int(size), BLOCK)
        maps = [(int(at, 16) - low, int(size), int(offset), h) for at, size, offset, h in driver().calls("map")]
        self.assertEqual(maps, [(at, BLOCK, 0, handle) for at in range(0, 3 * BLOCK, BLOCK)])
        self.assertEqual(driver().calls("access"), [[hex(low), str(3 * BLOCK), "device", "0"]])
        self.drop(made, [address])

    def sizes(self, kind):
        """Of what the driver was called for, in order."""
        return [int(size) for _, size, *_ in driver().calls(kind)]

    def test_range_for_much_memory_maps_a_larger_block(self):
        filled = [self.fill(100), self.fill(8 * BLOCK, block=4 * BLOCK)]
        self.assertEqual(self.sizes("create"), [BLOCK, 4 * BLOCK])
        self.assertEqual(self.sizes("map"), [BLOCK, *3 * [4 * BLOCK]])
        filled.append(self.fill(100))
        self.assertEqual(self.sizes("create"), [BLOCK, 4 * BLOCK], "the block that is there serves it, too")
        for made, addresses in filled:
            self.drop(made, addresses)

    def test_larger_block_than_the_device_has_room_for(self):
        driver().fail("cuMemCreate", OUT_OF_MEMORY)
        made, addresses = self.fill(3 * BLOCK, block=4 * BLOCK)
        self.assertEqual({*self.sizes("map")}, {BLOCK})
        self.drop(made, addresses)

    def test_many_small_allocations_need_few_calls(self):
        made, addresses = self.fill(*[100_000] * 1000)
        low, high = self.module.state(made)[0], addresses[-1] + 100_000
        self.assertLessEqual(len(driver().calls("map")), (high - low) // BLOCK + 5)
        self.assertLessEqual(len(driver().calls("access")), (high - low) // (4 * BLOCK) + 4)
        self.drop(made, addresses)
        self.assertEqual(len(driver().calls("unmap")), 1)

    def test_mapping_ahead_ends_with_the_range(self):
        made, addresses = self.fill(BLOCK - 2 * MiB, BLOCK - 2 * MiB, BLOCK + MiB, bytes=3 * BLOCK)
        self.assertNotIn(None, addresses)
        self.assertEqual(len(driver().calls("map")), 3)
        self.drop(made, addresses)

    def test_ranges_of_a_device_share_one_block_until_the_last_goes(self):
        (first, a), (second, b), (other, c) = self.fill(100), self.fill(100), self.fill(100, device=1)
        self.assertEqual([line[-1] for line in driver().calls("create")], ["0", "1"])
        self.drop(first, a)
        self.assertEqual(driver().calls("destroy"), [])
        self.drop(second, b)
        self.assertEqual(driver().calls("destroy"), [[driver().calls("create")[0][0]]])
        self.drop(other, c)

    def test_freed_addresses_are_not_handed_out_again(self):
        made = self.module.reserve(0, 1 << 40)
        self.module.use(made)
        seen = []
        for _ in range(5):
            (address,) = self.allocate(100)
            seen.append(address)
            self.free(address, 100, 0, None)
        self.module.use(None)
        self.assertEqual(len(set(seen)), 5)
        self.module.release(made)

    def test_sealing_frees_the_rest(self):
        first, a = self.fill(100)
        self.module.seal(first)
        second, b = self.fill(100)
        self.assertLess(self.module.state(first)[1], self.module.state(second)[0])
        self.assertEqual(self.module.state(first)[0] + BLOCK, self.module.state(second)[0])
        self.assertEqual(len(driver().calls("reserve")), 1)
        self.drop(first, a)
        self.drop(second, b)

    def test_what_a_range_refuses(self):
        self.assertEqual(self.allocate(100), [None])
        made, addresses = self.fill(*3 * [BLOCK - 2 * MiB], bytes=2 * BLOCK)
        self.assertEqual([address is None for address in addresses], [False, False, True])
        self.assertEqual(self.module.state(made)[3], f"the range is too small, for an allocation of {10 * MiB} bytes")
        self.assertEqual(self.allocate(100), [None])  # it is not in use
        self.module.use(made)
        for device, why in ((1, "another device than the range's"), (0, "the range is sealed")):
            self.assertEqual(self.allocate(100, device=device), [None])
            self.assertEqual(self.module.state(made)[3], f"{why}, for an allocation of 100 bytes")
            self.module.seal(made)
        self.module.use(None)
        self.drop(made, addresses[:2])

    def test_addresses_outlive_the_mapping_until_torch_lets_go(self):
        made, (a, b) = self.fill(100, 100)
        self.module.release(made)
        self.assertEqual(driver().left(), (1, 0, 0))
        self.free(a, 100, 0, None)
        self.assertEqual(driver().calls("unreserve"), [])
        self.free(b, 100, 0, None)
        self.assertEqual(len(driver().calls("unreserve")), 1)

    def test_range_after_a_released_one_gets_other_addresses(self):
        first, a = self.fill(100)
        self.module.release(first)
        second, b = self.fill(100)
        self.assertGreater(b[0], a[0])
        self.free(a[0], 100, 0, None)
        self.drop(second, b)

    def test_other_thread_shares_the_one_range_in_use(self):
        made = self.module.reserve(0, 1 << 40)
        self.module.use(made)
        other = self.module.reserve(0, 1 << 40)
        result = []
        allocate = lambda: result.extend(self.allocate(100))  # noqa: E731
        run_in_threads(allocate)
        self.assertEqual(self.allocations(made), [(result[0], 100)])

        def allocate_in_the_other():
            self.module.use(other)
            run_in_threads(allocate)  # a third thread: two ranges are in use, and it can't be either's
            self.module.use(None)

        run_in_threads(allocate_in_the_other)
        self.assertIsNone(result[1])
        self.module.use(None)
        self.module.release(other)
        self.drop(made, result[:1])

    def test_use_nests(self):
        first, second = self.module.reserve(0, 1 << 40), self.module.reserve(0, 1 << 40)
        self.assertIsNone(self.module.use(first))
        self.assertEqual(self.module.use(second), first)
        with self.assertRaisesRegex(RuntimeError, f"range {second} is in use"):
            self.module.release(second)
        self.assertEqual(self.module.use(first), second)
        self.module.release(second)
        self.assertEqual(self.module.use(None), first)
        self.module.release(first)

    def test_failed_mapping_leaves_nothing_behind(self):
        size = 3 * BLOCK - 5 * MiB
        for name, skip in (("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0)):
            made = self.module.reserve(0, 1 << 40)
            self.module.use(made)
            driver().fail(name, OUT_OF_MEMORY, skip)
            self.assertEqual(self.allocate(size), [None])
            self.assertEqual(driver().left()[1], 0)
            self.assertEqual(
                self.module.state(made)[3],
                f"CUDA driver error in {name}: out of memory (2), for an allocation of {size} bytes",
            )
            (address,) = self.allocate(size)
            self.assertIsNotNone(address)
            self.module.use(None)
            self.assertEqual(self.allocations(made), [(address, size)])
            self.drop(made, [address])

    def test_failed_reservation_says_which_call_failed(self):
        for name in ("cuMemGetAllocationGranularity", "cuMemCreate"):
            driver().fail(name, OUT_OF_MEMORY)
            with self.assertRaisesRegex(RuntimeError, rf"CUDA driver error in {name}: out of memory \(2\)"):
                self.module.reserve(0, 1 << 40)
        driver().library.stub_reserve_at_most(BLOCK)
        with self.assertRaisesRegex(RuntimeError, r"CUDA driver error in cuMemAddressReserve: out of memory \(2\)"):
            self.module.reserve(0, 1 << 40)

    def test_place_that_the_driver_does_not_give(self):
        driver().library.stub_refuse_wishes()
        made, addresses = self.fill(100)
        self.assertEqual(self.sizes("reserve"), [-(-(4 << 40) // BLOCK) * BLOCK])
        self.drop(made, addresses)

    def test_addresses_below_four_gib_are_refused(self):
        driver().library.stub_reserve_at(ctypes.c_uint64(1 << 30))
        with self.assertRaisesRegex(RuntimeError, "which gave addresses below 4 GiB"):
            self.module.reserve(0, 1 << 40)

    def test_smaller_reservation_is_tried(self):
        driver().library.stub_reserve_at_most((1 << 38) + BLOCK)
        made, addresses = self.fill(100, bytes=1 << 30)
        (size,) = self.sizes("reserve")
        self.assertTrue(1 << 38 <= size <= (1 << 38) + BLOCK, size)
        self.assertEqual(size % BLOCK, 0)
        self.drop(made, addresses)

    def test_driver_that_unmaps_one_mapping_a_call(self):
        made, addresses = self.fill(3 * BLOCK - 5 * MiB, 100)
        driver().library.stub_unmap_one_by_one()
        self.drop(made, addresses)
        self.assertEqual(self.sizes("unmap"), 3 * [BLOCK])

    def test_capture_mode_is_as_before(self):
        mode = ctypes.c_int(1)
        driver().library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        made, addresses = self.fill(100)
        self.drop(made, addresses)
        driver().library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self.assertEqual(mode.value, 1)

    def test_threads_get_disjoint_memory(self):
        sizes = [1 + (i * 7919) % (9 * MiB) for i in range(60)]
        made: dict[int, tuple[int, list[int]]] = {}

        def work(index):
            made[index] = self.fill(*sizes)

        run_in_threads(*[functools.partial(work, i) for i in range(4)])
        spans = []
        for one, addresses in made.values():
            self.assertEqual(self.allocations(one), list(zip(addresses, sizes)))
            spans += [(address, address + size) for address, size in zip(addresses, sizes)]
        spans.sort()
        self.assertTrue(all(end < start for (_, end), (start, _) in zip(spans, spans[1:])))
        for one, addresses in made.values():
            self.drop(one, addresses)

    def test_unknown_range_and_senseless_reservation(self):
        for call in ("use", "seal", "release", "allocations", "state", "take"):
            with self.assertRaisesRegex(ValueError, "there is no range 12345"):
                getattr(self.module, call)(12345, *([1] if call == "take" else []))
        for arguments in ((0, 0), (0, -1), (0, 1 << 30, 0), (0, 1 << 30, 1, -1)):
            with self.assertRaisesRegex(ValueError, "wants bytes > 0 and gap > 0, and block >= 0"):
                self.module.reserve(*arguments)

    def test_address_space(self):
        space = AddressSpace(0, gap=2, module=self.module)
        with space:
            (address,) = self.allocate(100)
            with space:
                (second,) = self.allocate(3 * MiB)
            third = space.allocate(100)
        self.assertEqual(space.allocations()[2:], [(third, 100)])
        self.assertEqual(space.allocations()[:2], [(address, 100), (second, 3 * MiB)])
        self.assertEqual((address - space.low, space.high - space.allocations()[2][0]), (2 * GAP, 512 + 2 * GAP))
        with space:
            self.assertEqual(self.allocate(100), [None])
        space.close()
        space.close()
        for at in (address, second):
            self.free(at, 0, 0, None)
        with self.assertRaisesRegex(RuntimeError, "this address space is closed"), space:
            pass
        with self.assertRaisesRegex(RuntimeError, "this address space is closed"):
            space.allocate(1)

    def test_forgotten_address_space_frees_its_memory(self):
        space = AddressSpace(0, module=self.module)
        with space:
            (address,) = self.allocate(100)
        del space
        gc.collect()
        self.assertEqual(driver().left(), (1, 0, 0))
        self.free(address, 100, 0, None)


class TestExec(DriverCase):
    make = staticmethod(Patched)

    def pair(self):
        """Two nodes: the first reads region 0 and writes region 1, the second reads region 1."""
        nodes = [kernel(0, word(1), word(2), b"\x05\0\0\0"), kernel(1, word(3))]
        slots = [PointerSlot(0, 0, 0, 0, 0x10), PointerSlot(0, 1, 0, 1, 0), PointerSlot(1, 0, 0, 1, 0x20)]
        return self.make(nodes, slots, 2)

    def set(self):
        """{node handle: values of its parameters} of the kernel nodes set since the last look."""
        return {int(line[2], 16): line[8].split(",") for line in driver().take() if line[0] == "kernel"}

    def test_what_the_driver_is_given(self):
        self.assertEqual(self.pair().patch([0x7000, 0x9000]), 2)
        lines = [line[:-2] for line in driver().take()]
        first = ",".join([word(0x7010).hex(), word(0x9000).hex(), "05000000"])
        shape = ["1,2,3", "4,5,6", "7", "0x77", "0x88"]
        self.assertEqual(
            lines,
            [["kernel", "0xe0", "0x1000", *shape, first], ["kernel", "0xe0", "0x1001", *shape, word(0x9020).hex()]],
        )

    def test_only_nodes_of_what_moved(self):
        exec = self.pair()
        exec.patch([0x7000, 0x9000])
        self.set()
        self.assertEqual(exec.patch([0x7000, 0x9000]), 0)
        self.assertEqual(self.set(), {})
        self.assertEqual(exec.patch([0x7100, 0x9000]), 1)
        self.assertEqual(self.set(), {0x1000: [word(0x7110).hex(), word(0x9000).hex(), "05000000"]})
        self.assertEqual(exec.patch([0x7100, 0x9100]), 2)
        self.assertEqual(set(self.set()), {0x1000, 0x1001})

    def test_words_are_found_at_any_offset(self):
        blob = bytes(range(1, 65))
        exec = self.make([kernel(0, b"\xff" * 4, blob)], [PointerSlot(0, 1, 12, 0, 1), PointerSlot(0, 1, 56, 0, 2)], 1)
        exec.patch([0x1122334455667788])
        expected = bytearray(blob)
        struct.pack_into("<Q", expected, 12, 0x1122334455667789)
        struct.pack_into("<Q", expected, 56, 0x112233445566778A)
        self.assertEqual(self.set(), {0x1000: ["ffffffff", expected.hex()]})

    def test_parameters_keep_their_packed_alignment(self):
        """A CUtensorMap stands at a multiple of 64 in the packed block, and in ours."""
        node = kernel(0, word(1), bytes(128))
        node = KernelNode(**{**vars(node), "parameters": ((0, word(1)), (64, bytes(128)))})
        self.make([node], [PointerSlot(0, 1, 0, 0, 0)], 1).patch([0x7000])
        (line,) = driver().calls("kernel")
        block, arguments = int(line[-2], 16), int(line[-1], 16)
        self.assertEqual(block % 64, 0)
        self.assertTrue(arguments)

    def test_regions_without_memory(self):
        blocks = call_maker(self.module, 0, Template(1, (kernel(0, word(1)),), (PointerSlot(0, 0, 0, 0, 0),)))
        with self.assertRaisesRegex(ValueError, "region 0 has no memory"):
            relaunch_driver.call_of(blocks)  # the scratch
        with self.assertRaisesRegex(ValueError, "region 1 has no memory"):
            relaunch_driver.call_of(call_maker(self.module, 0, Template(2, (), ())))

    def test_after_an_error_every_node_is_set(self):
        exec = self.pair()
        exec.patch([0x7000, 0x9000])
        driver().fail("cuGraphExecKernelNodeSetParams", INVALID, skip=1)
        message = r"CUDA driver error in cuGraphExecKernelNodeSetParams: invalid argument \(1\), at node 1 \(kernel_1\)"
        with self.assertRaisesRegex(RuntimeError, message):
            exec.patch([0x7000, 0x9100])
        self.set()
        self.assertEqual(exec.patch([0x7000, 0x9000]), 2)
        first = [word(0x7010).hex(), word(0x9000).hex(), "05000000"]
        self.assertEqual(self.set(), {0x1000: first, 0x1001: [word(0x9020).hex()]})
        self.assertEqual(exec.patch([0x7000, 0x9000]), 0)

    def test_relaunch_that_has_forgotten_its_nodes_launches_on(self):
        nodes = (kernel(0, word(1)), kernel(1, word(3)))
        template = Template(1, nodes, tuple([PointerSlot(node.index, 0, 0, 0, 0) for node in nodes]))
        part = mock.Mock(spec=Part)
        part.raw_cuda_graph_exec.return_value = relaunch_driver.EXECUTABLE
        device = SimpleNamespace(empty=None, index=0, current=int, stream_of=lambda index: 0, functions=(0, 0, 0))
        device.raw_alloc = device.raw_delete = None
        made = executable.Executable(part, template, part.replay, True)
        with mock.patch.object(relaunch, "implementation", lambda: self.module):
            launched = relaunch.Relaunch(device, OutputLayout((0,), (), (), ()), made, [1])
        launched.forget()
        self.assertEqual((launched.template, launched.nodes), (Template(1, (), ()), 2))
        launched.launch([relaunch_driver.At(0x7000)])
        self.assertEqual(self.set(), dict.fromkeys((0x1000, 0x1001), [word(0x7000).hex()]))

    def test_bad_base_changes_nothing(self):
        exec = self.pair()
        exec.patch([0x7000, 0x9000])
        self.set()
        for bad, error in (("x", AttributeError), (-1, OverflowError), (1 << 64, OverflowError)):
            with self.assertRaises(error):
                exec.patch([0x7777, bad])
        with self.assertRaisesRegex(TypeError, "wants a list of 2 inputs or more"):
            exec.patch([0x7777])
        self.assertEqual(exec.patch([0x7000, 0x9000]), 0)
        self.assertEqual(driver().calls(), [])

    def test_tensors_are_bases(self):
        x, p = torch.zeros(8), torch.nn.Parameter(torch.zeros(3))
        exec = self.pair()
        self.assertEqual(exec.patch([x, p]), 2)
        self.assertEqual(exec.patch([x.data_ptr(), p.data_ptr()]), 0)
        self.assertEqual(exec.patch([x[1:], p]), 1)
        self.set()
        exec.patch([torch.empty(0), p])
        self.assertEqual(self.set()[0x1000][0], word(0x10).hex())

    def test_blocks_stay_where_they_are(self):
        exec = self.pair()
        seen = set()
        for i in range(4):
            exec.patch([0x7000 + i, 0x9000 + i])
            gc.collect()
            junk = [bytearray(200) for _ in range(1000)]
            seen |= {tuple(line[-2:]) for line in driver().calls("kernel")}
            del junk
            driver().take()
        self.assertEqual(len(seen), 2)

    def test_fill_and_copy_nodes(self):
        fill = FillNode(0, 0x51, 0, 9, 4, 100, 1, 0)
        copy = CopyNode(1, 0x52, (CopySide(0, 64, 1), CopySide(0, 64, 1)), 64, 1, 1)
        exec = self.make(
            [fill, copy], [PointerSlot(0, 0, 0, 0, 8), PointerSlot(1, 0, 0, 1, 0), PointerSlot(1, 1, 0, 0, 16)], 2
        )
        self.assertEqual(exec.patch([0x7000, 0x9000]), 2)
        ((_, handle, params, context),) = driver().calls("fill")
        self.assertEqual((handle, context), ("0x51", "0xc0ffee"))
        self.assertEqual(struct.unpack("<QQIIQQ", bytes.fromhex(params)), (0x7008, 0, 9, 4, 100, 1))
        ((_, handle, params, context),) = driver().calls("copy")
        fields = struct.unpack("<25Q", bytes.fromhex(params))
        self.assertEqual((handle, context), ("0x52", "0xc0ffee"))
        self.assertEqual(
            {i: f for i, f in enumerate(fields) if f},
            {4: 2, 6: 0x7010, 9: 64, 10: 1, 15: 2, 17: 0x9000, 20: 64, 21: 1, 22: 64, 23: 1, 24: 1},
        )
        for name, node in (("Memset", r"node 0 \(memset\)"), ("Memcpy", r"node 1 \(memcpy\)")):
            driver().fail(f"cuGraphExec{name}NodeSetParams", INVALID)
            message = rf"cuGraphExec{name}NodeSetParams: invalid argument \(1\), at {node}"
            with self.assertRaisesRegex(RuntimeError, message):
                exec.patch([0x8000, 0xA000])
            exec.patch([0x7000, 0x9000])

    def test_nodes_without_words_have_no_block(self):
        exec = self.make([kernel(0, word(1)), kernel(5, word(1))], [PointerSlot(5, 0, 0, 0, 0)], 1)
        exec.patch([0x10])
        self.assertEqual(set(self.set()), {0x1005})

    def test_word_outside_of_its_parameter(self):
        for bad in (PointerSlot(0, 0, 1, 0, 0), PointerSlot(0, 0, -8, 0, 0)):
            with self.assertRaisesRegex(ValueError, r"node 0 \(kernel_0\), parameter 0: no pointer slot at "):
                self.make([kernel(0, word(1))], [bad], 1)
        with self.assertRaisesRegex(ValueError, "pointer slot has a number that isn't there: 1"):
            self.make([kernel(0, word(1))], [PointerSlot(0, 0, 0, 1, 0)], 1)

    def test_thread_without_a_context_gets_the_executables(self):
        """The driver reads through the thread's context unasked, and dies where there is none."""
        exec = self.pair()
        exec.patch([1, 2])
        driver().take()
        driver().library.forget_context()
        self.assertEqual(exec.patch([3, 2]), 1)
        exec.patch([4, 2])
        self.assertEqual([line[0] for line in driver().take()], ["context", "kernel", "kernel"])

    def test_list_that_changes_while_it_is_read(self):
        class Sly(At):
            def data_ptr(self):
                inputs.clear()
                return 3

        inputs: list[object] = [Sly(0), Sly(0)]
        with self.assertRaisesRegex(RuntimeError, "the list of inputs changed while it was read"):
            self.pair().call.launch(inputs)

    def test_references_are_given_back(self):
        exec = self.pair()
        values = [At(1 << 40), torch.zeros(1)]
        counts = lambda: [sys.getrefcount(o) for o in (*values, exec.call)]  # noqa: E731
        before = counts()
        for i in range(50):
            values[0].address = (1 << 40) + i  # type: ignore[union-attr]
            exec.patch(values)
            with self.assertRaises(AttributeError):
                exec.patch([values[0], "x"])
        self.assertEqual(counts(), before)

    def test_memory_is_freed(self):
        driver().library.stub_quiet()
        pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])  # noqa: E731
        big, sizes = bytes(1 << 20), []
        for _ in range(60):
            slots = [PointerSlot(i, 0, 0, 0, 0) for i in range(4)]
            self.make([kernel(i, word(0), big) for i in range(4)], slots, 1).patch([5])
            sizes.append(pages())
        self.assertLess((sizes[-1] - sizes[9]) * os.sysconf("SC_PAGE_SIZE"), 60 * MiB)

    @hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.data())
    def test_executable_holds_what_the_bases_say(self, data):
        """Random templates, moves and driver errors: after a call that succeeds, each node that was ever
        set holds base + delta in its pointer slots and its own bytes elsewhere."""
        driver().library.stub_reset()
        draw = data.draw
        regions, sizes = draw(st.integers(1, 4)), st.lists(st.sampled_from([4, 8, 24]), min_size=1, max_size=3)
        drawn = draw(st.lists(sizes, min_size=1, max_size=5))
        nodes = [kernel(i, *(bytes([17 + i]) * size for size in each)) for i, each in enumerate(drawn)]
        region, delta = st.integers(0, regions - 1), st.integers(0, 99)
        slots = [
            PointerSlot(node.index, p, offset, draw(region), draw(delta))
            for node in nodes
            for p, (_, value) in enumerate(node.parameters)
            for offset in range(0, len(value) - 7, 8)
            if draw(st.booleans())
        ]
        taken = {slot.node for slot in slots}
        exec = self.make(nodes, slots, regions)
        held: dict[int, list[str]] = {}
        bases = [draw(st.integers(0, 1 << 48)) for _ in range(regions)]
        for _ in range(draw(st.integers(1, 6))):
            fails = draw(st.booleans()) and bool(taken)
            if fails:
                driver().fail("cuGraphExecKernelNodeSetParams", INVALID, skip=draw(st.integers(0, 3)))
            try:
                count = exec.patch(bases)
            except RuntimeError:
                count = None
            driver().fail("", 0)
            seen = self.set()
            held.update({handle - 0x1000: values for handle, values in seen.items()})
            if count is not None:
                self.assertEqual(count, len(seen))
                self.assertEqual(set(held), taken)
                for index in taken:
                    expected = [bytearray(value) for _, value in nodes[index].parameters]
                    for s in slots:
                        if s.node == index:
                            struct.pack_into("<Q", expected[s.parameter], s.offset, bases[s.region] + s.delta)
                    self.assertEqual(held[index], [value.hex() for value in expected])
            moved = [draw(st.booleans()) for _ in range(regions)]
            bases = [draw(st.integers(0, 1 << 48)) if m else b for m, b in zip(moved, bases)]


class TestArguments(TestCase):
    """What a module in C is given by code of ours alone; what is wrong is named, and nothing is read beyond it."""

    NODE = (0, 0x1000, "a node", bytes(72), ())

    def maker(self, **arguments):
        parts = {"exec": 0, "nodes": (self.NODE,), "regions": 0}
        parts |= dict.fromkeys(("slots", "words"), ())
        return functools.partial(relaunch_driver.module().call, **relaunch_driver.call_arguments(**parts | arguments))

    def call(self, **arguments):
        return self.maker(**arguments)()

    def blocks(self, nodes, slots=(), regions=0, words=()):
        """Make a call whose regions are its inputs."""
        inputs = tuple((k, 0) for k in range(regions))
        numbers = ((0, 0),), (), (), (0,) * len(words)
        self.call(nodes=nodes, slots=slots, regions=regions, words=words, numbers=numbers, inputs=inputs)

    def check(self, kind, message, make, *args, **kwargs):
        with self.assertRaisesRegex(kind, message):
            make(*args, **kwargs)

    def test_recipes(self):
        slab, part = ((4,), (1,), torch.uint8), (relaunch.PART, 1, None, (1,), (1,), 0)
        self.call(recipes=(part,), typed=((0, torch.float32),), allocations=(slab,), order=(0,))
        absent = "a recipe of an output names what isn't there"
        self.check(ValueError, absent, self.call, recipes=(part,), allocations=(slab,), order=(0,))
        for storage in (1, -1):
            make = self.maker(typed=((storage, torch.float32),), allocations=(slab,), order=(0,))
            self.check(ValueError, "a typed view of no storage", make)
        self.check(TypeError, "typed view 0 must be a tuple, not int", self.call, typed=(0,))
        self.check(TypeError, "recipe 1 must be a tuple, not list", self.call, recipes=((0, 0, *[None] * 4), [0]))
        self.check(TypeError, "recipe 0 must be a tuple, not NoneType", self.call, recipes=(None,))
        self.check(TypeError, r"a recipe is \(kind, number, object, size", self.call, recipes=((0, 0),))
        self.check(ValueError, absent, self.call, recipes=((relaunch.REPEATED, 0, *[None] * 4),))

    def test_allocations(self):
        self.check(TypeError, "allocation 0 must be a tuple, not int", self.call, allocations=(3,), order=(0,))
        self.check(ValueError, "the order has a number that isn't there: 0", self.call, order=(0,))
        self.check(ValueError, "so many regions are not allocated", self.call, scratch=8)
        vectors = (((4,), (1,), torch.uint8),) * 2
        self.check(ValueError, "the order names a region twice", self.call, allocations=vectors, order=(0, 0))
        for order in ((0, 2), (-1, 0)):
            self.check(ValueError, "the order has a number that", self.call, allocations=vectors, order=order)

    @c_module.needs_failing_allocations
    def test_host_without_memory(self):
        vector = ((4,), (1,), torch.uint8)
        make = self.maker(allocations=(vector,), order=(0,), numbers=(((0, 0),), (1,), ((0, 0, 1),), ()))
        c_module.fail_each_allocation(make)

    def test_numbers(self):
        def run(inputs=(), constants=(), steps=(), results=()):
            self.call(numbers=(inputs, constants, steps, results))

        run(((0, 0),), (0.5,), ((13, 0, 0), (6, 1, 2), (14, 0, 0), (17, 0, 0), (11, 1, 1)))
        self.check(TypeError, "the numbers must be a tuple, not int", self.call, numbers=3)
        self.check(TypeError, r"numbers are \(inputs, constants", self.call, numbers=((), ()))
        self.check(TypeError, "number 0 must be a tuple, not int", run, (3,))
        for position in (-1, sys.maxsize):
            self.check(ValueError, f"number has a number that isn't there: {position}", run, ((position, 0),))
        run(((sys.maxsize - 1, 0),))
        self.check(TypeError, "cannot be interpreted as an integer", run, (), ([0, 1],))
        self.check(OverflowError, "", run, (), (1 << 63,))
        self.check(TypeError, "step 0 must be a tuple", run, (), (), (None,))
        absent, wrong = "has a number that isn't there", "a step of numbers takes a number of another type"
        for step in ((0, 0, 1), (18, 0, 0), (-1, 0, 0), (0, 0, -1)):
            self.check(ValueError, f"step {absent}", run, ((0, 0),), (), (step,))
        for step in ((11, 0, 0), (6, 0, 0)):
            self.check(ValueError, wrong, run, ((0, 0),), (), (step,))
        self.check(ValueError, wrong, run, ((0, 0),), (0.5,), ((0, 0, 1),))
        self.check(ValueError, f"a result {absent}: 1", run, ((0, 0),), (), (), (1,))
        self.check(ValueError, "so many number slots have no numbers", self.call, words=((0, 8, 2),))

    def test_positions_of_inputs(self):
        make = functools.partial(self.call, regions=1)
        for position in (-1, sys.maxsize):
            absent = f"input has a number that isn't there: {position}"
            self.check(ValueError, absent, make, inputs=((position, 0),))
        self.check(ValueError, "so many inputs are no regions", make, inputs=((0, 0), (0, 0)))
        self.check(TypeError, "input 0 must be a tuple, not int", make, inputs=(0,))

    def test_number_slots(self):
        make = self.blocks
        node = (0, 0x1000, "a node", bytes(144), (128,))
        make((node,), (), 0, ((0, 128, 3),))
        self.check(TypeError, "number slot 0 must be a tuple", make, (node,), (), 0, (3,))
        absent, outside = "number slot has a number that isn't there", "a number slot lies outside of its node"
        self.check(ValueError, outside, make, (node,), (), 0, ((0, 141, 2),))
        for slot in ((1, 128, 0), (0, 128, 10), (0, 128, -1)):
            self.check(ValueError, absent, make, (node,), (), 0, (slot,))
        fill = (1, 0x1000, "a node", bytes(40), ())
        self.check(ValueError, outside, make, (fill,), (), 0, ((0, 0, 0),))

    def test_nodes_and_pointer_slots(self):
        make = self.blocks
        make((self.NODE,), ((0, 0, 0, 0),), 1)
        self.check(TypeError, "node 1 must be a tuple, not list", make, (self.NODE, list(self.NODE)))
        self.check(TypeError, r"a node is \(kind, handle, label", make, (self.NODE[:3],))
        self.check(TypeError, "pointer slot 0 must be a tuple, not int", make, (self.NODE,), (0,), 1)
        self.check(TypeError, "pointer slot 0 must have 4 numbers", make, (self.NODE,), ((0, 0),), 1)
        far = (*self.NODE[:4], (73,))
        self.check(ValueError, "an argument of a block has a number that isn't there: 73", make, (far,))

    def test_block_that_is_smaller_than_the_drivers_struct(self):
        for kind, size in ((0, 72), (1, 40), (2, 200)):
            node = (kind, *self.NODE[1:3], bytes(size), ())
            self.blocks((node,))
            short = (*node[:3], bytes(size - 1), ())
            self.check(ValueError, "not a node that can be patched", self.blocks, (short,))


class TestBuild(TestCase):
    def test_region_has_no_graph_without_it(self):
        """Where it can't be built; that is tried once, and the reason says what it takes."""
        build = mock.Mock(side_effect=RuntimeError("no compiler"))
        with (
            mock.patch.object(executable, "implementation", executable.implementation.__wrapped__),
            mock.patch.object(csrc, "_attempt", functools.cache(csrc._attempt.__wrapped__)),
            mock.patch.object(csrc, "build", build),
        ):
            for _ in range(2):
                with self.assertRaisesRegex(Unprovable, r"no compiler.* a C compiler \(gcc,"):
                    executable.implementation()
            with self.assertRaisesRegex(csrc.NotBuiltError, "no compiler"):
                Driver(mock.Mock())
        build.assert_called_once_with()

    def test_driver_that_is_missing_or_too_old_is_named(self):
        flags = mock.patch.object(csrc, "FLAGS", (*csrc.FLAGS, "-O0"))
        for name, said in (("libno_such_driver.so", "can't be loaded"), ("libm.so.6", r"has no cu\w+")):
            cache = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(c_module.builds()))
            with flags, cache, self.assertRaisesRegex(ImportError, f"{name} {said}"):
                csrc.build(name)


def tensor_at(space: AddressSpace, size: int) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(space.allocate(size), space.device, size)
    return torch.empty(0, dtype=torch.uint8, device=space.device).set_(storage, 0, (size,), (1,))


@form.needs_gpu
class TestOnAGpu(TestCase):
    """The real driver."""

    def test_capture_of_any_size_costs_a_few_mib(self):
        """One of several captures shows it: other processes allocate and free meanwhile."""
        torch.zeros(64, dtype=torch.uint8, device="cuda")[:4].fill_(7).tolist()  # loads what is launched below
        costs: list[tuple[int, int]] = []

        def shown() -> bool:
            return any(0 <= during < 17 * MiB and -MiB < after < 8 * MiB for during, after in costs)

        while not shown() and len(costs) < 8:
            costs.append(self.capture_in_an_address_space())
        self.assertTrue(shown(), costs)

    def capture_in_an_address_space(self) -> tuple[int, int]:
        """Return the bytes of the device that it takes, and those that it leaves behind."""
        module = executable.implementation()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        space = AddressSpace(torch.cuda.current_device(), module=module)
        with space:
            one = tensor_at(space, 24 << 30)
            with torch.cuda.use_mem_pool(space.pool()):
                two = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
            with torch.cuda.use_mem_pool(space.pool(no_split=True)):
                three = torch.empty(5, device="cuda")
        during = free - torch.cuda.mem_get_info()[0]
        segments = space.allocations()
        for tensor in (one, two, three):
            self.assertTrue(space.low < tensor.data_ptr() < space.high)
            self.assertIn(tensor.data_ptr(), [address for address, _ in segments])
        self.assertEqual(len(segments), 3)
        one[: 12 * MiB].fill_(7)  # the addresses can be used, though those of all blocks mean the same bytes
        self.assertEqual(three.view(torch.uint8)[:4].tolist(), [7] * 4)
        del one, two, three, tensor
        space.close()
        torch.cuda.empty_cache()
        self.assertEqual(module.counts(), {"ranges": 0, "blocks": 0, "arenas": 0, "held": 0})
        return during, free - torch.cuda.mem_get_info()[0]

    def test_relaunch_on_other_memory(self):
        """Two captures of a region with a side stream are proven, and what they make runs on tensors that moved."""
        from torch_overlay._inductor.relaunch.graph import read
        from torch_overlay._inductor.relaunch.proof import prove

        side = torch.cuda.Stream()

        def region(x, y, out):
            scratch = torch.empty_like(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.mul(y, 3, out=out)
            torch.add(x, 1, out=scratch)
            torch.cuda.current_stream().wait_stream(side)
            out.add_(scratch)

        def capture(module, gap):
            space = AddressSpace(torch.cuda.current_device(), gap=gap, module=module)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with space:
                tensors = [tensor_at(space, 4000).view(torch.float) for _ in range(3)]
                with torch.cuda.graph(graph, pool=space.pool().id):
                    region(*tensors)
            at = {tensor.data_ptr(): k for k, tensor in enumerate(tensors)}
            segments, scratch = [], 0
            for address, size in space.allocations():
                segments.append(Segment(address, size, at.get(address, 3), 0 if address in at else scratch))
                scratch += 0 if address in at else size
            captured = read.read(graph, segments, space.low, space.high, driver=Driver())
            return space, graph, captured, scratch

        warm = [torch.ones(1000, device="cuda") for _ in range(3)]
        region(*warm)
        torch.cuda.synchronize()
        module = executable.implementation()
        (a, graph, first, scratch), (b, second_graph, second, _) = capture(module, 1), capture(module, 3)
        proven = prove.prove(first, second)
        graph.instantiate()
        blocks = call_maker(module, graph.raw_cuda_graph_exec(), proven)
        call = relaunch_driver.call_of(blocks, inputs=tuple((k, 0) for k in range(4)), replay=graph.replay)
        del second_graph
        a.close()
        b.close()
        for _ in range(4):
            x, y, out = (torch.randn(1000, device="cuda") for _ in range(3))
            slab = torch.empty(scratch, dtype=torch.uint8, device="cuda")
            before = call.patched
            for _ in range(2):
                call.launch([x, y, out, slab])
            self.assertEqual(out, y * 3 + (x + 1))
            self.assertGreater(call.patched, before)
        before = call.patched
        call.launch([torch.empty_like(x), y, out, slab])
        self.assertEqual(call.patched - before, 1)
        del blocks, call, graph
        gc.collect()
        torch.cuda.empty_cache()
        self.assertEqual(module.counts(), {"ranges": 0, "blocks": 0, "arenas": 0, "held": 0})
