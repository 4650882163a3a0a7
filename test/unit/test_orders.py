"""`orders`: orders of graphs, and what is before and after a node, against closures of the same edges."""

import random

from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay import orders


class TestOrders(TestCase):
    def test_drawn(self):
        draw = random.Random(1)
        for _ in range(50):
            names = draw.sample(range(100), draw.randrange(1, 12))
            pairs = [(i, j) for j in range(len(names)) for i in range(j) if draw.random() < 0.3]
            draw.shuffle(pairs)
            after = orders.directly_after(draw.sample(names, len(names)), [(names[i], names[j]) for i, j in pairs])
            order = orders.sort(after)
            self.assertEqual(sorted(order), sorted(names))
            before, later = orders.all_before(order, after), orders.all_after(order, after)
            for at, node in enumerate(order):
                following = orders.reached(after[node], after.__getitem__)
                self.assertEqual(later[at], sum(1 << order.index(other) for other in following))
                self.assertEqual(before[at], sum(1 << i for i, mask in enumerate(later) if mask >> at & 1))
                self.assertEqual(later[at] & ((2 << at) - 1), 0, "only later positions")

    def test_first_ready_nodes_come_first(self):
        self.assertEqual(orders.sort({"c": ["a"], "b": [], "a": [], "d": ["b"]}), ["c", "a", "d", "b"])

    def test_circle_is_left_out(self):
        self.assertEqual(orders.sort({0: [1], 1: [2], 2: [1, 3], 3: []}), [0])


class TestOnlyOrder(TestCase):
    def test_chain(self):
        self.assertEqual(orders.only_order(3, [(0, 1), (1, 2)]), (0, 1, 2))
        self.assertEqual(orders.only_order(3, [(2, 0), (0, 1), (2, 1)]), (2, 0, 1))
        self.assertEqual((orders.only_order(1, []), orders.only_order(0, [])), ((0,), ()))

    def test_several_orders(self):
        for nodes, edges in ((2, []), (3, [(0, 1)]), (3, [(0, 1), (0, 2)]), (4, [(0, 2), (1, 2), (2, 3)])):
            self.assertIsNone(orders.only_order(nodes, edges))

    def test_drawn(self):
        draw = random.Random(3)
        for _ in range(50):
            nodes = draw.randrange(2, 12)
            order = draw.sample(range(nodes), nodes)
            chain = list(zip(order, order[1:]))
            implied = [(order[i], order[draw.randrange(i + 1, nodes)]) for i in range(nodes - 1)]
            self.assertEqual(orders.only_order(nodes, [*implied, *chain]), tuple(order))
            chain.pop(draw.randrange(len(chain)))
            self.assertIsNone(orders.only_order(nodes, chain))
