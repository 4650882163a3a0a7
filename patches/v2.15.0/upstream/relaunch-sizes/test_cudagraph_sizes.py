# Owner(s): ["module: inductor"]

import dataclasses
import random
from types import SimpleNamespace

from torch._inductor.cudagraph_relaunch.executable import Executable, Shape
from torch._inductor.cudagraph_relaunch.functions import Functions, without
from torch._inductor.cudagraph_relaunch.nodes import (
    CapturedGraph,
    CopyNode,
    EmptyNode,
    FIXED,
    KernelNode,
    Segment,
)
from torch._inductor.cudagraph_relaunch.prove import prove
from torch.testing._internal.common_utils import run_tests, TestCase


REGIONS, BYTES = 6, 1 << 16


def u64(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


FIVE = u64(5)


class Kernel:
    """A function with pointers at drawn places of its parameters."""

    def __init__(self, rng, func):
        self.func, self.name = func, f"k{func}"
        self.parameters = []  # "p" pointer, "n" number, or a list of these
        for _ in range(rng.randrange(1, 5)):
            kinds = [rng.choice("pn") for _ in range(rng.randrange(2, 5))]
            self.parameters.append(rng.choice(("p", "n", kinds)))

    def node(self, index, rng, low):
        """A launch: `rng` draws the numbers, and what pointers point to."""

        def word(kind):
            if kind == "n":
                return u64(rng.randrange(1 << 20))
            region, delta = rng.randrange(REGIONS), 16 * rng.randrange(BYTES // 16)
            return u64(low + (region + 1) * 2 * BYTES + delta)

        values = [b"".join(map(word, kinds)) for kinds in self.parameters]
        parameters = tuple((8 * i, value) for i, value in enumerate(values))
        launch = (rng.randrange(1, 99), 1, 1), (32, 1, 1), 0
        return KernelNode(index, index, self.name, self.func, 0, 0, *launch, parameters)


def capture(kernels, seed, which):
    """A size is a seed: the same numbers and regions in both of its captures."""
    low = (3 + 4 * which + 8 * seed) << 40
    rng = random.Random(seed)
    nodes = [kernel.node(i, rng, low) for i, kernel in enumerate(kernels)]
    segments = tuple(
        Segment(low + (r + 1) * 2 * BYTES, BYTES, r) for r in range(REGIONS)
    )
    edges = tuple((i, i + 1) for i in range(len(nodes) - 1))
    return CapturedGraph(tuple(nodes), edges, segments, low, low + (1 << 24))


def proven(kernels, seed):
    return prove(*(capture(kernels, seed, which) for which in range(2)))


class TestFunctions(TestCase):
    def test_one_capture_finds_what_two_prove(self):
        rng = random.Random(0)
        for _ in range(60):
            kernels = rng.choices([Kernel(rng, func) for func in range(1, 5)], k=8)
            functions = Functions()
            functions.learn(proven(kernels, 1))
            for size in (2, 3):
                slots, unknown = functions.slots_of(capture(kernels, size, 0))
                self.assertEqual(unknown, {})
                self.assertEqual(slots, list(proven(kernels, size).slots))

    def test_the_rest_is_proven_by_a_second_capture(self):
        rng = random.Random(0)
        for _ in range(60):
            known, new = ([Kernel(rng, f) for f in range(at, at + 3)] for at in (1, 4))
            functions = Functions()
            functions.learn(proven(known, 1))
            kernels = rng.sample(known + new, 6)
            first, second = (capture(kernels, 2, which) for which in range(2))
            slots, unknown = functions.slots_of(first)
            names = {first.nodes[i].name for i in unknown}
            self.assertEqual(names, {kernel.name for kernel in new})
            found = {node.index for node in first.nodes} - unknown.keys()
            rest = prove(without(first, found), without(second, found))
            whole = sorted([*slots, *rest.slots])
            self.assertEqual(whole, sorted(proven(kernels, 2).slots))
            functions.learn(rest)
            self.assertEqual(functions.slots_of(capture(kernels, 3, 0))[1], {})

    def graph(self, low, *values, name="k", func=7):
        parameters = tuple((8 * i, value) for i, value in enumerate(values))
        node = KernelNode(0, 0, name, func, 0, 0, (1, 1, 1), (32, 1, 1), 0, parameters)
        segment = Segment(low + 4096, 4096, 0)
        return CapturedGraph((node,), (), (segment,), low, low + (1 << 20))

    def why(self, build, other=FIVE):
        """Why a launch is unknown, where the first parameter is a pointer and
        the second, of that value in a proof, is none."""
        functions = Functions()
        lows = 1 << 40, 2 << 40
        functions.learn(prove(*(self.graph(a, u64(a + 4096), other) for a in lows)))
        slots, unknown = functions.slots_of(self.graph(lows[0], *build(lows[0])))
        if not unknown:
            return slots
        self.assertEqual(slots, [])
        return unknown[0]

    def test_null(self):
        self.assertEqual(self.why(lambda at: (u64(0), u64(5))), [])

    def test_pointer_to_another_place(self):
        (slot,) = self.why(lambda at: (u64(at + 4096 + 64), u64(9)))
        self.assertEqual(slot, (0, 0, 0, 0, 64))

    def test_address_where_there_was_none(self):
        why = self.why(lambda at: (u64(at + 4096), u64(at + 4200)))
        self.assertRegex(why, "k: parameter 1, offset 0: an address where")

    def test_address_in_a_structure(self):
        for at in (0, 8, 4):

            def build(low):
                value = bytearray(24)
                value[at : at + 8] = u64(low + 4096)  # noqa: B023
                return u64(low + 4096), bytes(value)

            why = self.why(build, bytes(24))
            self.assertRegex(why, f"parameter 1, offset {at}: an address")

    def test_number_where_there_was_a_pointer(self):
        self.assertRegex(self.why(lambda at: (u64(7), u64(5))), "outside the range")
        freed = self.why(lambda at: (u64(at + 16384), u64(5)))
        self.assertRegex(freed, "in no allocation")

    def test_address_in_the_middle_of_a_word(self):
        for at, value in ((4, 36), (8, 41)):

            def build(low):
                word = u64(low + 4096)
                return u64(low + 4096), bytes(at) + word + bytes(value - at - 8)  # noqa: B023

            why = self.why(build, bytes(value))
            self.assertRegex(why, f"parameter 1, offset {at}: an address")

    def test_pointers_among_numbers_in_a_structure(self):
        """With a word of four bytes before, one after, and a byte."""
        functions, lows = Functions(), (1 << 40, 2 << 40)

        def value(low):
            return bytes(4) + u64(low + 4096, 5, low + 4160) + bytes(5)

        functions.learn(prove(*(self.graph(a, b"?", value(a)) for a in lows)))
        slots, unknown = functions.slots_of(self.graph(3 << 40, b"!", value(3 << 40)))
        self.assertEqual(unknown, {})
        self.assertEqual(slots, [(0, 1, 4, 0, 0), (0, 1, 20, 0, 64)])
        low = lows[0]
        numbers = bytes(4) + u64(low + 4096, low + 4200, low + 4160) + bytes(5)
        slots, unknown = functions.slots_of(self.graph(low, b"!", numbers))
        self.assertRegex(unknown[0], "parameter 1, offset 12: an address")

    def test_address_outside_of_the_segments(self):
        """It is in the range of the capture, GiB behind the segments."""
        functions, lows = Functions(), (1 << 40, 2 << 40)
        functions.learn(prove(*(self.graph(a, u64(a + 4096), FIVE) for a in lows)))
        low, high = lows[0], lows[0] + (3 << 32)
        for word, is_known in ((high - 8, False), (high, True), (low - 8, True)):
            graph = self.graph(low, u64(low + 4096), u64(word))
            graph = dataclasses.replace(graph, high=high)
            self.assertEqual(functions.slots_of(graph)[1] == {}, is_known)

    def test_what_is_learned_later(self):
        """A proof finds another pointer of a function that was read before."""
        functions, lows = Functions(), (1 << 40, 2 << 40)
        at = lows[0] + 4096
        graph = self.graph(lows[0], u64(at), u64(at))
        for build, wanted in (
            (lambda a: (u64(a), u64(0)), {0}),
            (lambda a: (u64(a), u64(a)), set()),
        ):
            functions.learn(prove(*(self.graph(a, *build(a + 4096)) for a in lows)))
            self.assertEqual(functions.slots_of(graph)[1].keys(), wanted)

    def test_structure_that_is_shorter(self):
        functions, lows = Functions(), (1 << 40, 2 << 40)
        functions.learn(prove(*(self.graph(a, u64(5, 6, a + 4096)) for a in lows)))
        _, unknown = functions.slots_of(self.graph(lows[0], u64(5, 6)))
        self.assertIn("for the first time", unknown[0])  # it is another function

    def test_function_that_is_loaded_again(self):
        functions, lows = Functions(), (1 << 40, 2 << 40)
        functions.learn(prove(*(self.graph(a, u64(a + 4096)) for a in lows)))
        graph = self.graph(lows[0], u64(lows[0] + 4096), func=70)
        slots, unknown = functions.slots_of(graph)
        self.assertEqual(([slot.region for slot in slots], unknown), ([0], {}))

    def test_handle_that_is_used_again(self):
        functions, lows = Functions(), (1 << 40, 2 << 40)
        functions.learn(prove(*(self.graph(a, u64(a + 4096)) for a in lows)))
        graph = self.graph(lows[0], u64(lows[0] + 4096), name="other")
        self.assertIn("first time", functions.slots_of(graph)[1][0])

    def test_argument_that_was_missing_in_one_proof(self):
        functions, lows = Functions(), (1 << 40, 2 << 40)
        first, second = (lambda a: (u64(a), u64(0))), (lambda a: (u64(0), u64(a)))
        for build in (first, second):
            functions.learn(prove(*(self.graph(a, *build(a + 4096)) for a in lows)))
        at = lows[0] + 4096
        slots, unknown = functions.slots_of(self.graph(lows[0], u64(at), u64(at)))
        self.assertEqual(([slot.parameter for slot in slots], unknown), ([0, 1], {}))

    def test_memory_that_keeps_its_address(self):
        functions, low = Functions(), 1 << 40
        functions.learn(prove(*(self.graph(a, u64(a + 4096)) for a in (low, 2 << 40))))
        graph = self.graph(low, u64(low + 4096))
        segments = (dataclasses.replace(graph.segments[0], region=FIXED),)
        graph = dataclasses.replace(graph, segments=segments)
        self.assertEqual(functions.slots_of(graph), ([], {}))

    def test_copies_need_no_proof(self):
        low = 1 << 40
        sizes = dict.fromkeys(("width", "height", "depth"), 1)
        sizes |= dict.fromkeys(
            ("dst_pitch", "dst_height", "src_pitch", "src_height"), 1
        )
        copy = CopyNode(0, 0, low + 4096, low + 8192, **sizes)
        nodes = (copy, dataclasses.replace(copy, index=1, src=512, src_on_host=True))
        segments = (Segment(low + 4096, 512, 0), Segment(low + 8192, 512, 1))
        graph = CapturedGraph(nodes, (), segments, low, low + (1 << 20))
        slots, unknown = Functions().slots_of(graph)
        self.assertEqual(unknown, {})
        found = [(s.node, s.parameter, s.region) for s in slots]
        self.assertEqual(found, [(0, 0, 0), (0, 1, 1), (1, 0, 0)])


class TestExecutable(TestCase):
    def setUp(self):
        super().setUp()
        rng = random.Random(0)
        self.kernels = [Kernel(rng, func) for func in range(1, 5)]
        self.graph = capture(self.kernels, 1, 0)

    def shape(self, graph, fixed=(), drawn=(4,)):
        return Shape.of(graph, fixed, drawn)

    def test_what_can_be_set(self):
        """Functions, grids and parameters."""
        wanted = self.shape(self.graph)
        self.assertEqual(self.shape(capture(self.kernels, 2, 0)), wanted)
        self.assertEqual(self.shape(capture(self.kernels[::-1], 2, 0)), wanted)

    def test_what_cannot_be_set(self):
        wanted, (first, *rest) = self.shape(self.graph), self.graph.nodes
        changed = [
            dataclasses.replace(self.graph, edges=((0, 1),)),
            dataclasses.replace(self.graph, partial=((0, 1),)),
        ]
        for node in (
            EmptyNode(0, 0),
            dataclasses.replace(first, ctx=1),
            dataclasses.replace(first, attributes=b"cluster"),
        ):
            changed.append(dataclasses.replace(self.graph, nodes=(node, *rest)))
        for graph in changed:
            self.assertNotEqual(self.shape(graph), wanted)
        self.assertNotEqual(self.shape(self.graph, fixed=(1 << 40,)), wanted)
        self.assertNotEqual(self.shape(self.graph, drawn=(8,)), wanted)

    def test_stages(self):
        def arrangement(*stages):
            return SimpleNamespace(stages=[SimpleNamespace(nodes=s) for s in stages])

        made = Executable(self.shape(self.graph), arrangement((0, 1), (2, 3)), [])
        self.assertTrue(made.fits(arrangement((0, 1), (2, 3))))
        for other in (arrangement(), arrangement((0,), (1, 2, 3)), arrangement((0, 1))):
            self.assertFalse(made.fits(other))


if __name__ == "__main__":
    run_tests()
