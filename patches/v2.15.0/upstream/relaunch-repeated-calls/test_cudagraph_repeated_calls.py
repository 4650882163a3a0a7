# Owner(s): ["module: inductor"]

import dataclasses
from types import SimpleNamespace

import torch
from torch._inductor.cudagraph_relaunch.library_calls import (
    _Place,
    Call,
    Differs,
    Repeat,
)
from torch._inductor.cudagraph_relaunch.nodes import (
    CapturedGraph,
    KernelNode,
    PointerSlot,
    Segment,
    Template,
)
from torch._inductor.cudagraph_relaunch.packing import Life
from torch._inductor.cudagraph_relaunch.repeated_calls import with_repeats
from torch.testing._internal.common_utils import run_tests, TestCase


AT = [1 << 40 | k << 20 for k in range(5)]


def kernel(index, *pointers):
    words = [(8 * k, at.to_bytes(8, "little")) for k, at in enumerate(pointers)]
    one = (1, 1, 1)
    return KernelNode(index, index, f"k{index}", 1, 0, 0, one, one, 0, tuple(words))


class TestWithRepeats(TestCase):
    """A capture of one call, of nodes 0 and 2 in the order 2, 0, with node 1 behind it;
    another such call came after node 1. Regions 0 to 3 are tensors, 4 is a workspace."""

    def setUp(self):
        super().setUp()
        segments = tuple([Segment(at, 1 << 12, k) for k, at in enumerate(AT)])
        first = kernel(2, AT[0], AT[4])
        nodes = kernel(0, AT[1] + 64, AT[4] + 8), kernel(1, AT[2]), first
        end = AT[4] + (1 << 20)
        self.graph = CapturedGraph(nodes, ((0, 1), (2, 0)), segments, AT[0], end)
        slots = [(0, 0, 0, 1, 64), (0, 1, 0, 4, 8), (1, 0, 0, 2, 0)]
        slots += [(2, 0, 0, 0, 0), (2, 1, 0, 4, 0)]
        self.template = Template(5, nodes, tuple([PointerSlot(*s) for s in slots]))
        self.places = [self.place(AT[0]), self.place(AT[1] + 64)]
        self.repeat = Repeat(0, (AT[2] + 256, AT[3]), 3, 7)
        self.lives = [Life(1 << 12, 0, None)] * 4 + [Life(1 << 12, 2, 3)]

    @staticmethod
    def place(at):
        return _Place(at, (4,), (1,), torch.int8, False)

    def expand(self, numbers=(4, 0, 1, 2, 3), **changed):
        x, out = self.places
        call = Call(torch.mm, (x,), {"out": out}, range(2), (), False)
        captured = SimpleNamespace(calls=[call], repeats=[self.repeat])
        captured.lives = self.lives
        graph = dataclasses.replace(self.graph, **changed)
        return with_repeats(captured, graph, self.template, lambda n: numbers[:n])

    def test_nodes_are_numbered_as_those_of_an_executable(self):
        graph, template, _ = self.expand()
        names = [node.name for node in graph.nodes]
        self.assertEqual(names, ["k0", "k1", "k2", "k0", "k2"])
        self.assertEqual([node.index for node in graph.nodes], list(range(5)))
        self.assertEqual(graph.edges, ((0, 1), (1, 2), (2, 3), (4, 0)))
        self.assertIs(template.nodes, graph.nodes)

    def test_nodes_are_numbered_in_the_order_of_the_stream(self):
        """If no executable has as many, whose number is asked for."""
        graph, template, _ = self.expand(range(9))
        names = [node.name for node in graph.nodes]
        self.assertEqual(names, ["k2", "k0", "k1", "k2", "k0"])
        self.assertEqual(graph.edges, ((0, 1), (1, 2), (2, 3), (3, 4)))
        self.assertIs(template.nodes, graph.nodes)

    def test_pointers_are_those_of_the_call_that_was_left_out(self):
        slots = [(0, 0, 0, 1, 64), (0, 1, 0, 4, 8), (1, 0, 0, 2, 0), (2, 0, 0, 2, 256)]
        slots += [(2, 1, 0, 4, 0), (3, 0, 0, 3, 0), (3, 1, 0, 4, 8), (4, 0, 0, 0, 0)]
        self.assertEqual(sorted(self.expand()[1].slots), [*slots, (4, 1, 0, 4, 0)])

    def test_workspace_lives_until_the_call_that_was_left_out(self):
        self.assertEqual(self.expand()[2], [*self.lives[:4], Life(1 << 12, 2, 8)])
        self.lives[4] = Life(1 << 12, 2, None)
        self.assertEqual(self.expand()[2], self.lives)

    def test_copies_of_a_node_are_launched_as_early(self):
        self.assertEqual(self.expand(partial=((2, 0),))[0].partial, ((2, 3), (4, 0)))
        self.assertEqual(self.expand(partial=((0, 1),))[0].partial, ((0, 1),))

    def test_what_differs(self):
        with self.assertRaisesRegex(Differs, "side by side"):
            self.expand(edges=((0, 1),))
        places, self.places = self.places, [self.places[0]] * 2
        with self.assertRaisesRegex(Differs, "share their memory"):
            self.expand()
        self.places = places
        self.repeat = self.repeat._replace(addresses=(AT[2], AT[3] + (1 << 14)))
        with self.assertRaisesRegex(Differs, "in no region"):
            self.expand()

    def test_memory_beside_a_tensor(self):
        """A workspace may lie in the segment of a tensor that an operator made."""
        for at, inside in ((60, False), (61, True), (64, True), (65, False)):
            self.places[1] = self.place(AT[1] + at)
            if inside:
                slots = self.expand()[1].slots
                self.assertIn((3, 0, 0, 3, 64 - at), slots)
                continue
            with self.assertRaisesRegex(Differs, "beside one of its tensors"):
                self.expand()


if __name__ == "__main__":
    run_tests()
