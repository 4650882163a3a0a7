"""The proof that every pointer of a captured graph is known: what it finds, what it lets pass, what it refuses.

The proof is pure, so two captures are a few lines of Python here, and no GPU is needed.
"""

import dataclasses
import struct
import unittest

import expecttest
from hypothesis import given, settings, strategies as st

import form  # noqa: F401
from stand_ins.captured_words import GRANULE, KIB, LOW, memory, slots, SPAN, u32, u64
from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    CopyNode,
    CopySide,
    EmptyNode,
    FillNode,
    FIXED,
    KernelNode,
    PointerSlot,
    Segment,
    Unprovable,
)
from torch_overlay._inductor.relaunch.proof.prove import prove, REACH


def kernel(index, *values, name="kernel", func=0x1000, offset=0, **changes):
    parameters = []
    for value in values:
        offset = -(-offset // min(8, len(value))) * min(8, len(value))
        parameters.append((offset, value))
        offset += len(value)
    node = KernelNode(index, 0x100 + index, name, func, 0, 0, (8, 1, 1), (128, 1, 1), 0, tuple(parameters))
    return dataclasses.replace(node, **changes)


def captured(low, segments, *values, span=SPAN):
    """A capture in a range from `low` on, of a kernel with these parameters."""
    return CapturedGraph((kernel(0, *values),), (), tuple(segments), low, low + span)


class Captures:
    """One program at two places: `build(at)` gives the nodes, with at(region, delta) the address of a byte."""

    def __init__(self, build, *, regions=((0, 4 * KIB), (1, 8 * KIB), (2, 64 * KIB)), edges=()):
        self.build, self.regions, self.edges = build, regions, edges

    def capture(self, which, **options):
        segments = memory(which, regions=self.regions, **options)
        base = {s.region: s.address for s in reversed(segments)}

        def at(region, delta=0):
            return base[region] + delta

        at.capture = which
        low = LOW[which]
        return CapturedGraph(tuple(self.build(at)), tuple(self.edges), segments, low, low + SPAN)

    def prove(self, *, a=None, b=None, **options):
        return prove(self.capture("a", **(a or {})), self.capture("b", **(b or {})), **options)


class ProofTest(expecttest.TestCase):
    def refused(self, captures, reason, pattern, **options):
        with self.assertRaisesRegex(Unprovable, pattern) as context:
            captures.prove(**options)
        self.assertEqual(context.exception.reason, reason)
        return context.exception


class TestPointers(ProofTest):
    def test_pointers_become_pointer_slots_and_numbers_do_not(self):
        def descriptor(address):
            return u64(address, 0x0000_1234_0000_0031) + bytes(range(112))

        def of_descriptors(at):
            return u32(128, 64) + bytes(56) + descriptor(at(0)) + descriptor(at(1, 256)) + u32(1)

        def fill_and_copy(at):
            yield FillNode(0, 1, at(0, 16), value=0, element_size=4, width=4, height=1, pitch=0)
            yield CopyNode(1, 2, (CopySide(at(1)), CopySide(at(2, 32))), 64, 1, 1)
            yield EmptyNode(2, 3)

        # (high half of a pointer, number) reads as an address in the first range, if the number is like a high half.
        like_a_high_half, weights = LOW["a"] >> 32, 0x7F1200000000
        for hazard, build, expected in (
            (
                "parameters of several kernels",
                lambda at: [kernel(0, u64(at(0)), u64(at(1, 512)), u32(1000), u64(7)), kernel(1, u64(at(2, 4096)))],
                [(0, 0, 0, 0, 0), (0, 1, 0, 1, 512), (1, 0, 0, 2, 4096)],
            ),
            (
                "in a blob, at offsets of four bytes",
                lambda at: [kernel(0, u32(5), u32(1) + u64(at(0, 8)) + u32(2, 3) + u64(at(1), at(2, 4)) + u32(9))],
                [(0, 1, 4, 0, 8), (0, 1, 20, 1, 0), (0, 1, 28, 2, 4)],
            ),
            (
                "descriptors in a packed block",
                lambda at: [kernel(0, of_descriptors(at), offset=16)],
                [(0, 0, 64, 0, 0), (0, 0, 192, 1, 256)],
            ),
            ("last window of a parameter", lambda at: [kernel(0, u32(0, 0, 0) + u64(at(1)))], [(0, 0, 12, 1, 0)]),
            ("bytes behind it", lambda at: [kernel(0, u64(at(0)) + b"\1\2\3")], [(0, 0, 0, 0, 0)]),
            (
                "half of a pointer beside a number",
                lambda at: [kernel(0, u64(at(0)) + u32(like_a_high_half, 0))],
                [(0, 0, 0, 0, 0)],
            ),
            ("null is a constant", lambda at: [kernel(0, u64(0), u64(0, at(0)))], [(0, 1, 8, 0, 0)]),
            ("pointer to other memory", lambda at: [kernel(0, u64(weights), u64(at(0)))], [(0, 1, 0, 0, 0)]),
            ("fills and copies", fill_and_copy, [(0, 0, 0, 0, 16), (1, 0, 0, 1, 0), (1, 1, 0, 2, 32)]),
        ):
            with self.subTest(hazard):
                found = Captures(build).prove()
                self.assertEqual((slots(found), found.regions), (expected, 3))

    def test_the_nodes_are_those_of_the_first_capture(self):
        captures = Captures(lambda at: [kernel(0, u64(at(0)), handle={"a": 11, "b": 22}[at.capture])])
        (node,) = captures.prove().nodes
        self.assertEqual((node.handle, node.parameters[0][1]), (11, u64(captures.capture("a").segments[0].address)))

    def test_a_pointer_does_not_span_two_parameters(self):
        def build(at):
            low, high = struct.unpack("<2I", u64(at(1)))
            return [kernel(0, u32(low), u32(high))]

        self.refused(Captures(build), "scalar", "parameter 0.*a scalar that differs")

    def test_a_number_beside_the_half_of_a_pointer_is_no_pointer(self):
        # (number, low half of a pointer) reads as an address in the range, if the low half is like a high half.
        places = ((low, low + (low >> 32)) for low in LOW.values())
        both = [captured(low, [Segment(at, 4 * KIB, 0)], u32(5) + u64(at)) for low, at in places]
        self.assertEqual(slots(prove(*both)), [(0, 0, 4, 0, 0)])

    def test_scratch_in_several_segments_is_one_region(self):
        both = [
            captured(low, [Segment(low, 512, 0, 0), Segment(low + step, 1024, 0, 512)], u64(low + step + 64))
            for low, step in zip(LOW.values(), (GRANULE, 3 * GRANULE))
        ]
        self.assertEqual(slots(prove(*both)), [(0, 0, 0, 0, 576)])

    def test_memory_that_outlives_the_capture_is_left_alone(self):
        both = []
        for which, seed in (("a", 0x7F0000001000), ("b", 0x7F0000002000)):
            segments = (*memory(which), Segment(seed, 512, FIXED))
            both.append(captured(LOW[which], segments, u64(segments[0].address), u64(seed + 8)))
        found = prove(*both, foreign=lambda address: True)
        self.assertEqual(slots(found), [(0, 0, 0, 0, 0)])
        self.assertEqual(found.nodes[0].parameters[1][1], u64(0x7F0000001008))

    def test_memory_that_outlives_only_one_capture(self):
        fixed = Segment(0x7F0000001000, 512, FIXED)
        for side, text in (("a", r"region -1 \+ 8.* in the first"), ("b", r"region -1 \+ 8.* in the second")):
            words = {which: 0x7F0000001008 if which == side else 0x550000001008 for which in "ab"}
            both = [captured(LOW[k], [*memory(k), fixed], u64(word, 0)) for k, word in words.items()]
            with self.subTest(side), self.assertRaisesRegex(Unprovable, text):
                prove(*both)

    def test_pointer_slots_are_frozen_and_comparable(self):
        (slot,) = Captures(lambda at: [kernel(0, u64(at(1, 4)))]).prove().slots
        self.assertEqual(slot, PointerSlot(node=0, parameter=0, offset=0, region=1, delta=4))
        with self.assertRaises(AttributeError):
            slot.delta = 0


class TestCoincidences(ProofTest):
    def test_number_that_is_no_pointer_of_the_first_capture(self):
        for number in (
            LOW["a"] + SPAN // 2,  # in its range, and in no allocation
            memory("b")[1].address,  # of memory that did not exist when the first gave the kernel the same number
        ):
            self.assertEqual(
                slots(Captures(lambda at, n=number: [kernel(0, u64(n), u64(at(0)))]).prove()), [(0, 1, 0, 0, 0)]
            )

    def test_number_that_is_an_address_of_the_first_capture_only(self):
        number = memory("a")[1].address
        captures = Captures(lambda at: [kernel(0, u32(3), u64(number), u64(at(0)))])
        refusal = self.refused(captures, "unmoved", "did not move: a coincidence, or a kept pointer")
        self.assertEqual((refusal.node, refusal.parameter, refusal.offset), ("0 (kernel)", 1, 0))
        with self.subTest("a declared scalar can't be a pointer"):
            self.assertEqual(slots(captures.prove(signatures={0x1000: "ssp"})), [(0, 2, 0, 0, 0)])
        with self.subTest("a capture at other addresses tells"):
            self.assertEqual(slots(captures.prove(a={"gap": 5})), [(0, 2, 0, 0, 0)])

    def test_pointer_kept_from_the_first_capture(self):
        kept = memory("a")[2].address + 256
        self.refused(Captures(lambda at: [kernel(0, bytes(8) + u64(kept))]), "unmoved", "offset 8: .*region 2 . 256")

    def test_two_readings_of_the_same_bytes(self):
        # Two overlapping windows, both of which move with an allocation.
        both = []
        for high in (0x7D00, 0x7A00):
            first = Segment((high << 32) + 0x5000_0000, GRANULE, 0)
            second = Segment((high + 1 << 32) + high, GRANULE, 1)
            both.append(captured(high << 32, [first, second], u32(0x5000_0000, high, high + 1, 0)))
        with self.assertRaisesRegex(Unprovable, "offset 4: .* can be read in two ways"):
            prove(*both)


class TestRefusals(ProofTest):
    def by_capture(self, a, b):
        return Captures(lambda at: [kernel(0, u64(at(0)), {"a": a, "b": b}[at.capture](at))])

    def test_pointer_that_is_a_different_one_in_the_second_capture(self):
        elsewhere = 0x7F0000000000
        for hazard, a, b, text in (
            ("another region", lambda at: at(1), lambda at: at(2), r"region 1 \+ 0.* in the first.*region 2 \+ 0"),
            ("another byte", lambda at: at(1, 512), lambda at: at(1, 1024), r"region 1 \+ 512.*region 1 \+ 1024"),
            ("in the first only", lambda at: at(1), lambda at: elsewhere, r"region 1 \+ 0.*outside the range"),
            ("in the second only", lambda at: elsewhere, lambda at: at(1), r"outside the range.*region 1 \+ 0"),
            ("null in the second", lambda at: at(1), lambda at: 0, r"region 1 \+ 0.*0x0 \(outside the range\)"),
        ):
            with self.subTest(hazard):
                captures = self.by_capture(lambda at, a=a: u64(a(at)), lambda at, b=b: u64(b(at)))
                self.refused(captures, "moved", f"parameter 1.*{text}")

    def test_address_in_one_capture_and_none_in_the_other_is_what_the_stack_held(self):
        heap = 0x2E749BC0
        for a, b in (
            (lambda at: u64(at(1)), lambda at: u64(heap)),
            (lambda at: u64(heap), lambda at: u64(at(1))),
            (lambda at: u64(LOW["a"] + 7 * KIB), lambda at: u64(heap)),  # between allocations
            (lambda at: u64(at(1)), lambda at: u64(LOW["a"] + GRANULE)),  # memory of the capture before
            (lambda at: u64(heap), lambda at: u64(LOW["a"] + GRANULE)),
        ):
            found = self.by_capture(a, b).prove(on_device=lambda address: address != heap)
            self.assertEqual(slots(found), [(0, 0, 0, 0, 0)])

    def test_addresses_with_three_bytes_overwritten_are_what_the_stack_held(self):
        captures = []
        for which, n, before in (("a", 5, 512), ("b", 7, 1024)):
            word = LOW[which] + SPAN - (1 << 24) * n
            segments = (*memory(which), Segment(word - before, 4 * KIB, 7))
            captures.append(captured(LOW[which], segments, u64(segments[0].address), u64(word)))
        self.assertEqual(slots(prove(*captures, on_device=lambda _: True)), [(0, 0, 0, 0, 0)])
        with self.assertRaisesRegex(Unprovable, "did not move with one allocation"):
            prove(*captures, on_device=lambda _: True, signatures={0x1000: "pp"})

    def test_declared_pointer_is_never_what_the_stack_held(self):
        captures = self.by_capture(lambda at: u64(at(1)), lambda at: u64(0x2E749BC0))
        self.refused(
            captures, "moved", "no known way|did not move", signatures={0x1000: "pp"}, on_device=lambda _: False
        )

    def test_null_or_device_memory_in_one_capture_could_be_an_argument(self):
        for other in (0, 0x7F0000000000):
            captures = self.by_capture(lambda at: u64(at(1)), lambda at, other=other: u64(other))
            self.refused(captures, "moved", r"region 1 \+ 0", on_device=lambda address: address == 0x7F0000000000)

    def half_null(self, a, b, **options):
        """A structure of four words, of which the capture has these two in the middle, after a pointer."""
        made = {"a": a, "b": b}
        captures = Captures(
            lambda at: [kernel(0, u64(at(0)) + u64(*[0 if k is None else at(k) for k in made[at.capture]]))]
        )
        return captures.prove(**options)

    def test_null_in_one_capture_is_null_in_the_graph(self):
        for a, b in (((1, None), (None, None)), ((None, None), (1, None)), ((1, 2), (None, None))):
            found = self.half_null(a, b)
            self.assertEqual(slots(found), [(0, 0, 0, 0, 0)])
            ((_, value),) = found.nodes[0].parameters
            self.assertEqual(value[8:], bytes(16))

    def test_words_that_are_null_in_different_captures(self):
        with self.assertRaisesRegex(Unprovable, "did not move with one allocation"):
            self.half_null((1, None), (None, 2))

    def test_node_that_is_never_patched_keeps_no_address(self):
        captures = Captures(lambda at: [kernel(0, u64(at(1) if at.capture == "a" else 0, 0))])
        self.refused(captures, "moved", "did not move with one allocation")

    def test_memory_that_no_region_stands_for(self):
        captures = Captures(lambda at: [kernel(0, u64(at(0, 7 * KIB)))])
        self.refused(captures, "outside", "it moved like an allocation, but is in none: .*in the range but in no alloc")

    def test_region_missing_from_captures(self):
        captures = Captures(lambda at: [kernel(0, u64(at(1)))])
        for missing, text in (
            ("ab", "in the range but in no allocation"),
            ("b", r"region 1 \+ 0.* in the first capture, .*in no allocation"),
        ):
            found = [captures.capture(which) for which in "ab"]
            for i, which in enumerate("ab"):
                kept = tuple(s for s in found[i].segments if s.region != 1 or which not in missing)
                found[i] = dataclasses.replace(found[i], segments=kept)
            with self.subTest(missing), self.assertRaisesRegex(Unprovable, text):
                prove(*found)

    def test_base_pointer_with_an_offset_taken_off(self):
        # The address lies before the whole range, and still moves like the allocation.
        captures = Captures(lambda at: [kernel(0, u64(at(0) - 3 * GRANULE))])
        self.refused(captures, "outside", "moved like an allocation, but is in none: .*outside the range", b={"gap": 2})

    def at_the_start_of_a_tebibyte(self, *values):
        """Captures with ranges like those of a real device, and a kernel for each (value in a, value in b)."""
        both = []
        for which, (low, step) in enumerate(((1 << 40, 2 * GRANULE), ((1 << 40) + (64 << 20), 4 * GRANULE))):
            segments = tuple(Segment(low + GRANULE + region * step, GRANULE, region) for region in range(4))
            nodes = tuple(kernel(i, pair[which]) for i, pair in enumerate(values))
            both.append(CapturedGraph(nodes, (), segments, low, low + (64 << 20)))
        return both

    def test_lower_half_of_an_address_is_no_pointer(self):
        # What a stack held before: the lower halves of two addresses that moved with region 3, for one.
        a, b = self.at_the_start_of_a_tebibyte()
        for first, second in ((0x5600000, 0xA600000), (0x6600000, 0xA400000), (0xE00000, 0x5A00000)):
            captures = [
                dataclasses.replace(g, nodes=(kernel(0, bytes(136) + u64(value)),), segments=(*g.segments, extra))
                for g, value, extra in (
                    (a, first, Segment(0x30000000000, GRANULE, 4)),
                    (b, second, Segment(0x30000000000 + second - first, GRANULE, 4)),
                )
            ]
            with self.subTest(hex(first)):
                self.assertEqual(slots(prove(*captures)), [])

    def test_lower_half_is_no_pointer_to_memory_near_a_range_that_begins_low(self):
        # No memory lies below 4 GiB, so a word without an upper half is no base pointer with an offset taken off.
        for upper, expected in ((0, "rubbish"), (1, "outside")):
            words = (((1 << 38) + moved, (upper << 32) + (8 << 20) + moved) for moved in (0, 4 << 20))
            both = [
                captured(low, [Segment(low, GRANULE, 0)], bytes(136) + u64(word), span=GRANULE) for low, word in words
            ]
            try:
                found = ("rubbish", slots(prove(*both)))
            except Unprovable as refusal:
                found = (refusal.reason, [])
            self.assertEqual(found, (expected, []))

    def test_small_number_in_one_capture_is_no_pointer_in_the_other(self):
        a, b = self.at_the_start_of_a_tebibyte()
        inside = b.segments[2].address

        def captures(first, second):
            return [
                dataclasses.replace(g, nodes=(kernel(0, bytes(472) + u64(value)),))
                for g, value in ((a, first), (b, second))
            ]

        self.assertEqual(slots(prove(*captures(2, inside))), [])
        self.assertEqual(slots(prove(*captures(a.segments[2].address, 2))), [])
        seconds, firsts = (0, b.segments[1].address, 1 << 33), (0, a.segments[1].address, 1 << 33)
        for words in (*((a.segments[2].address, second) for second in seconds), *((first, inside) for first in firsts)):
            with self.subTest(words), self.assertRaises(Unprovable) as raised:
                prove(*captures(*words))
            self.assertEqual(raised.exception.reason, "moved")

    def test_pointers_near_the_range_only(self):
        # A cuBLAS kernel with a workspace of its own: it lies below the range, and moved like it.
        both = []
        for low, word in ((0x7F73E4000000, 0x7F73E2000020), (0x7F73DE000000, 0x7F73DC000020)):
            segments = Segment(low, 16 << 20, 0), Segment(low + (32 << 20), 16 << 20, 1)
            both.append(captured(low, segments, bytes(376) + u64(word), span=64 << 20))
        with self.assertRaisesRegex(Unprovable, "parameter 0, offset 376: it moved like an allocation, but is in none"):
            prove(*both)

    def test_how_near_is_near(self):
        for distance, refused in ((-REACH, True), (-REACH - 4, False), (GRANULE + SPAN, True), (4 * REACH, False)):
            captures = Captures(lambda at, d=distance: [kernel(0, u64(at(0) - GRANULE + d))])
            options = {"b": {"gap": 1}}
            with self.subTest(distance):
                if refused:
                    self.refused(captures, "outside", "it moved like an allocation, but is in none", **options)
                else:
                    self.assertEqual(slots(captures.prove(**options)), [])

    def test_overwritten_remains_that_moved_like_an_allocation(self):
        low = 1 << 40, (1 << 40) + (64 << 20)
        captures = self.at_the_start_of_a_tebibyte([bytes(208) + u64(address) for address in low])
        with self.assertRaisesRegex(Unprovable, "it moved like an allocation, but is in none"):
            prove(*captures)
        self.assertEqual(slots(prove(*captures, on_device=lambda address: True)), [])

    def test_lower_half_that_is_a_shifted_address(self):
        captures = self.at_the_start_of_a_tebibyte((u64((1 << 40) + GRANULE >> 12), u64((1 << 40) + 0x4200000 >> 12)))
        with self.assertRaisesRegex(Unprovable, "an address, shifted right by 12 bits"):
            prove(*captures)

    def test_memory_below_four_gib(self):
        a, b = self.at_the_start_of_a_tebibyte()
        low = dataclasses.replace(a, low=1 << 21, high=1 << 24, segments=(Segment(1 << 22, 512, 0),))
        with self.assertRaisesRegex(Unprovable, "memory at 0x200000, below 0x100000000") as context:
            prove(low, b)
        self.assertEqual(context.exception.reason, "segments")

    def test_address_shifted_in_a_descriptor(self):
        for shift in (4, 8, 12):
            captures = Captures(lambda at, s=shift: [kernel(0, u64(at(0, 4 * KIB) >> s | 0b11 << 50, 0))])
            self.refused(captures, "encoded", f"shifted right by {shift} bits: .*region 0 . 4096")

    def test_address_packed_with_other_bits(self):
        captures = Captures(lambda at: [kernel(0, u64(5, at(0, 64) | 0xABCD << 48))])
        self.refused(captures, "encoded", "offset 8: an address, packed with other bits")

    def test_memory_of_others_that_is_free_by_now(self):
        captures = self.by_capture(lambda at: u64(0x7F0000000000), lambda at: u64(0x7F0000600000))
        self.assertEqual(slots(captures.prove()), [(0, 0, 0, 0, 0)])
        refuse = {"foreign": lambda address: address >> 32 == 0x7F00}
        self.refused(captures, "foreign", "device memory that is no part of the capture", **refuse)
        with self.subTest("rubbish is an address by chance, and not twice"):
            self.assertEqual(len(captures.prove(foreign=lambda address: address == 0x7F0000000000).slots), 1)

    def test_remains_are_not_memory_of_others(self):
        # Overwritten addresses of two regions, in pools of the captures, which the allocator calls inactive.
        remains = {"a": LOW["a"] + (16 << 20), "b": LOW["b"] + (48 << 20)}
        captures = Captures(lambda at: [kernel(0, bytes(208) + u64(remains[at.capture]))], regions=((0, 64 << 20),))
        self.refused(captures, "moved", "did not move with one allocation")
        options = {"on_device": lambda _: True, "foreign": lambda address: address in remains.values()}
        self.assertEqual(slots(captures.prove(**options)), [])

    def test_memset_of_memory_that_was_not_seen(self):
        captures = Captures(lambda at: [FillNode(0, 1, {"a": 64, "b": 128}[at.capture], 0, 1, 4, 1, 0)])
        self.refused(captures, "moved", r"node 0 \(memset\), parameter 0.*no known way")

    def test_end_pointers_belong_to_the_allocation_before(self):
        regions = ((0, GRANULE), (1, GRANULE), (2, GRANULE))
        captures = Captures(lambda at: [kernel(0, u64(at(0)), u64(at(0, GRANULE)), u64(at(1)))], regions=regions)
        self.assertEqual(slots(captures.prove())[1:], [(0, 1, 0, 0, GRANULE), (0, 2, 0, 1, 0)])
        with self.subTest("gaps in one capture suffice"):
            self.assertEqual(slots(captures.prove(a={"gap": 0}))[1:], [(0, 1, 0, 0, GRANULE), (0, 2, 0, 1, 0)])
        with self.subTest("without gaps there are two readings"):
            self.refused(captures, "ambiguous", r"region 0 \+ 2097152 or region 1 \+ 0", a={"gap": 0}, b={"gap": 0})

    def test_overlapping_ranges(self):
        a = Captures(lambda at: []).capture("a")
        with self.assertRaisesRegex(Unprovable, "ranges .* overlap"):
            prove(a, a)

    def test_overlapping_segments(self):
        a, b = (Captures(lambda at: []).capture(which) for which in "ab")
        b = dataclasses.replace(b, segments=(*b.segments, Segment(b.segments[0].address + 8, 8, 5)))
        with self.assertRaisesRegex(Unprovable, "overlap"):
            prove(a, b)


class TestRubbish(ProofTest):
    def test_padding_that_differs_keeps_the_first_value(self):
        def build(at):
            rubbish = {"a": 0xDEADBEEF_00000001, "b": 0xFEEDFACE_12345678}[at.capture]
            return [kernel(0, u64(rubbish, at(0), rubbish))]

        found = Captures(build).prove()
        self.assertEqual(slots(found), [(0, 0, 8, 0, 0)])
        self.assertEqual(found.nodes[0].parameters[0][1][:8], u64(0xDEADBEEF_00000001))

    def test_byte_of_an_empty_functor(self):
        captures = Captures(lambda at: [kernel(0, u32(64), {"a": b"\1", "b": b"\7"}[at.capture], u64(at(0)))])
        self.assertEqual(slots(captures.prove()), [(0, 2, 0, 0, 0)])

    def test_scalar_that_differs(self):
        captures = Captures(lambda at: [kernel(0, u64(at(0)), u32({"a": 1, "b": 2}[at.capture]))])
        refusal = self.refused(captures, "scalar", "a scalar that differs between the captures: 01000000, 02")
        self.assertEqual(refusal.parameter, 1)

    def test_what_is_declared(self):
        def differs(at):
            return u64({"a": 1 << 20, "b": 2 << 20}[at.capture])

        self.assertEqual(slots(Captures(lambda at: [kernel(0, differs(at))]).prove()), [])
        for letters, values, reason, pattern in (
            ("ps", lambda at: (u64(at(0)), differs(at)), "scalar", "parameter 1.*differs"),
            ("s", lambda at: (u64(at(0)),), "scalar", "parameter 0.*differs"),  # it moves
            ("p", lambda at: (differs(at),), "moved", "no known way"),
            ("pp", lambda at: (u64(at(0)),), "signature", r"node 0 \(kernel\): .* has 2 parameters"),
        ):
            with self.subTest(letters):
                captures = Captures(lambda at, values=values: [kernel(0, *values(at))])
                self.refused(captures, reason, pattern, signatures={0x1000: letters})


class TestStructure(ProofTest):
    def changed(self, reason, pattern, build, **change):
        captures = Captures(build)
        a, b = captures.capture("a"), captures.capture("b")
        with self.assertRaisesRegex(Unprovable, pattern) as context:
            prove(a, dataclasses.replace(b, **{key: value(b) for key, value in change.items()}))
        self.assertEqual(context.exception.reason, reason)

    def two(self, at):
        return [kernel(0, u64(at(0)), name="first"), kernel(1, u64(at(1)), name="second")]

    def test_missing_node(self):
        self.changed("nodes", "2 nodes in the first capture, 1", self.two, nodes=lambda g: g.nodes[:1])

    def test_reordered_nodes(self):
        def swap(g):
            return tuple(dataclasses.replace(n, index=i) for i, n in enumerate(reversed(g.nodes)))

        self.changed("nodes", r"node 0 \(first\): the second capture has second", self.two, nodes=swap)

    def test_reordered_nodes_of_one_kernel(self):
        def build(at):
            order = {"a": (0, 1), "b": (1, 0)}[at.capture]
            return [kernel(i, u64(at(region))) for i, region in enumerate(order)]

        self.refused(Captures(build), "moved", r"region 0 \+ 0.*region 1 \+ 0")

    def test_other_kind(self):
        captures = Captures(
            lambda at: [kernel(0, name="memset") if at.capture == "a" else FillNode(0, 1, at(0), 0, 1, 4, 1, 0)]
        )
        self.refused(captures, "nodes", "the second capture has memset in its place")

    def test_launch(self):
        for field, value in (("grid", (9, 1, 1)), ("block", (64, 1, 1)), ("shared_bytes", 4), ("func", 2), ("kern", 7)):
            with self.subTest(field):
                node = kernel(0, **{field: value})
                self.changed("launch", f"{field} is ", lambda at: [kernel(0)], nodes=lambda g, n=node: (n,))

    def test_sizes_of_a_memcpy(self):
        captures = Captures(
            lambda at: [CopyNode(0, 1, (CopySide(at(0)), CopySide(at(1))), {"a": 4, "b": 8}[at.capture], 1, 1)]
        )
        self.refused(captures, "launch", "width is 4 in one capture and 8")

    def test_layout(self):
        captures = Captures(lambda at: [kernel(0, *([bytes(8)] if at.capture == "a" else [bytes(4), bytes(4)]))])
        self.refused(captures, "layout", r"\[\(0, 8\)\] and \[\(0, 4\), \(4, 4\)\]")

    def test_edges(self):
        self.changed("edges", "one capture only: 0 -> 1", self.two, edges=lambda g: ((0, 1),))

    def test_edges_in_another_order_are_the_same(self):
        captures = Captures(lambda at: [kernel(i, u64(at(0))) for i in range(3)], edges=[(0, 1), (0, 2)])
        b = dataclasses.replace(captures.capture("b"), edges=((0, 2), (0, 1)))
        self.assertEqual(len(prove(captures.capture("a"), b).slots), 3)


LAYOUTS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
PIECES = st.one_of(
    st.tuples(st.just("pointer"), st.integers(0, 4), st.integers(0, 1 << 20)),
    st.tuples(st.just("number"), st.integers(0, (1 << 32) - 1)),
    st.tuples(st.just("pair"), st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 31) - 1)),
    st.tuples(st.just("rubbish"), st.integers(0xE0000000, (1 << 32) - 1)),
)


class TestRandomCaptures(unittest.TestCase):
    """Blobs in which pointers, numbers and rubbish are mixed: what was planted is found, and nothing else."""

    def build(self, pieces, sizes):
        regions = tuple((i, size * 64 * KIB) for i, size in enumerate(sizes))
        planted, length = [], 0
        for piece in pieces:
            if piece[0] == "pointer":
                region = piece[1] % len(regions)
                planted.append((0, 0, length, region, piece[2] % (regions[region][1] + 1)))
            length += 4 if piece[0] in ("number", "rubbish") else 8

        def nodes(at, wrong=None):
            blob = bytearray()
            targets = iter(planted)
            for piece in pieces:
                if piece[0] == "pointer":
                    _, _, offset, region, delta = next(targets)
                    blob += u64(at(region, delta + (4 if offset == wrong and at.capture == "b" else 0)))
                elif piece[0] == "rubbish":
                    blob += u32(piece[1] ^ (0x1000 if at.capture == "b" else 0))
                else:
                    blob += u32(*piece[1:])
            return [kernel(0, bytes(blob) + bytes(4))]

        return nodes, regions, planted

    @settings(deadline=None, max_examples=300)
    @given(st.lists(PIECES, max_size=12), LAYOUTS)
    def test_what_was_planted_is_found(self, pieces, sizes):
        nodes, regions, planted = self.build(pieces, sizes)
        self.assertEqual(slots(Captures(nodes, regions=regions).prove()), planted)

    @settings(deadline=None, max_examples=200)
    @given(st.lists(PIECES, max_size=12), LAYOUTS, st.data())
    def test_a_pointer_that_moves_otherwise_is_refused(self, pieces, sizes, data):
        nodes, regions, planted = self.build([("pointer", 0, 0), *pieces], sizes)
        wrong = data.draw(st.sampled_from([offset for _, _, offset, _, _ in planted]))
        with self.assertRaises(Unprovable):
            Captures(lambda at: nodes(at, wrong), regions=regions).prove()
