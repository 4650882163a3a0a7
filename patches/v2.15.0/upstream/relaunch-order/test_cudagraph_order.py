# Owner(s): ["module: inductor"]

import itertools
import random

from torch._inductor.cudagraph_relaunch.order import only_order
from torch.testing._internal.common_utils import run_tests, TestCase


def orders(nodes, edges):
    """All orders that the edges allow."""
    for order in itertools.permutations(range(nodes)):
        at = {node: place for place, node in enumerate(order)}
        if all(at[node] < at[later] for node, later in edges):
            yield order


class TestOrder(TestCase):
    def test_drawn_graphs(self):
        rng, found = random.Random(0), []
        for _ in range(600):
            nodes = rng.randrange(1, 6)
            names = rng.sample(range(nodes), nodes)
            pairs = itertools.combinations(names, 2)
            edges = [pair for pair in pairs if rng.random() < 0.7]
            possible = list(itertools.islice(orders(nodes, edges), 2))
            wanted = possible[0] if len(possible) == 1 else None
            self.assertEqual(only_order(nodes, edges), wanted)
            found.append(wanted is not None)
        self.assertTrue(100 < sum(found) < 500)

    def test_chain(self):
        chain = [(i + 1, i) for i in range(99)]
        self.assertEqual(only_order(100, chain), tuple(range(99, -1, -1)))
        implied = [*chain, (99, 0), (50, 3)]
        self.assertEqual(only_order(100, implied), tuple(range(99, -1, -1)))

    def test_no_order(self):
        self.assertIsNone(only_order(2, [(0, 1), (1, 0)]))
        self.assertIsNone(only_order(3, [(0, 1), (1, 2), (2, 1)]))

    def test_few_nodes(self):
        self.assertEqual((only_order(0, []), only_order(1, [])), ((), (0,)))
        self.assertIsNone(only_order(2, []))


if __name__ == "__main__":
    run_tests()
