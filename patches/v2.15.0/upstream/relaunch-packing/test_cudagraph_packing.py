# Owner(s): ["module: inductor"]

import random

from torch._inductor.cudagraph_relaunch.packing import ALIGNMENT, Life, Order
from torch.testing._internal.common_utils import run_tests, TestCase


MIB = 1 << 20


class Program:
    """A drawn program: it allocates, launches nodes on streams, and frees."""

    def __init__(self, rng):
        self.nodes, streams = rng.randrange(1, 20), rng.choice((1, 1, 2, 3))
        self.edges, self.slots, self.touched = [], [], []  # touched: by node
        sizes, made, freed, alive, last = [], [], [], [], [None] * streams
        before = []  # the nodes that precede each node
        for node in range(self.nodes):
            for _ in range(rng.randrange(3)):
                alive.append(len(made))
                made.append(len(made))
                freed.append(None)
                sizes.append(rng.choice((1, 512, 4096, 5000)))
            stream = rng.randrange(streams)
            waits = {last[stream]} | {n for n in last if rng.random() < 0.3}
            self.edges += [(n, node) for n in waits if n is not None]
            before.append({n for n in waits if n is not None})
            before[node] |= {n for m in before[node] for n in before[m]}
            last[stream] = node
            held = rng.sample(alive, min(len(alive), rng.randrange(4)))
            self.slots += [(node, a) for a in held]
            # A node before may have left an address in memory for this one.
            told = {a for n in before[node] for a in self.touched[n] if a in alive}
            self.touched.append({*held, *(a for a in told if rng.random() < 0.2)})
            for a in [a for a in alive if rng.random() < 0.3]:
                alive.remove(a)
                freed[a] = len(made)
        self.lives = [Life(*life) for life in zip(sizes, made, freed)]

    def order(self):
        return Order(self.nodes, self.edges, self.lives, self.slots)

    def some_order(self, rng):
        """Yield the nodes in one of the orders that the edges allow."""
        todo = set(range(self.nodes))
        while todo:
            late = {v for u, v in self.edges if u in todo}
            node = rng.choice(sorted(todo - late))
            todo.remove(node)
            yield node

    def overwritten(self, places, rng):
        """Run once: an allocation that was written over while it was in use."""
        memory, begun = {}, set()
        for node in self.some_order(rng):
            for a in self.touched[node]:
                slab, at = places[a]
                for byte in range(at, at + self.lives[a].size, ALIGNMENT):
                    if a in begun and memory[slab, byte] != a:
                        return a
                    memory[slab, byte] = a
            begun |= self.touched[node]
        return None


def chain(*allocations):
    """Nodes one after the other; an allocation is (size, first node, last node)."""
    length = 1 + max(last for _, _, last in allocations)
    starts = [first for _, first, _ in allocations]
    lives, slots = [], []
    for a, (size, first, last) in enumerate(allocations):
        made = sum(start < first for start in starts)
        lives.append(Life(size, made, sum(start <= last for start in starts)))
        slots += [(node, a) for node in {first, last}]
    return Order(length, [(n, n + 1) for n in range(length - 1)], lives, slots)


class TestPacking(TestCase):
    def test_no_order_overwrites_memory_in_use(self):
        rng, shared = random.Random(0), 0
        for _ in range(200):
            program = Program(rng)
            places, slabs = program.order().pack(range(len(program.lives)))
            self.assertEqual(places.keys(), {a for _, a in program.slots})
            apart = sum(
                -(-program.lives[a].size // ALIGNMENT) * ALIGNMENT for a in places
            )
            self.assertLessEqual(sum(slabs), apart)
            shared += sum(slabs) < apart
            for a, (slab, at) in places.items():
                self.assertEqual(at % ALIGNMENT, 0)
                self.assertLessEqual(at + program.lives[a].size, slabs[slab])
            for _ in range(20):
                self.assertIsNone(program.overwritten(places, rng))
        self.assertGreater(shared, 50)

    def test_overwritten_memory_is_found(self):
        """The check above would see allocations that share memory without right."""
        rng, found = random.Random(0), 0
        for _ in range(200):
            program = Program(rng)
            places = dict.fromkeys(range(len(program.lives)), (0, 0))
            found += program.overwritten(places, rng) is not None
        self.assertGreater(found, 50)

    def test_chain_needs_what_is_live_at_once(self):
        order = chain(*[(4096, n, n + 1) for n in range(20)])
        self.assertEqual(order.pack(range(20))[1], [2 * 4096])

    def test_branches_share_nothing(self):
        lives, slots = [Life(512, 0, 1), Life(512, 1, 2)], [(1, 0), (2, 1)]
        fork = Order(3, [(0, 1), (0, 2)], lives, slots)
        self.assertEqual(fork.pack([0, 1])[1], [1024])
        line = Order(3, [(0, 1), (1, 2)], lives, slots)
        self.assertEqual(line.pack([0, 1])[1], [512])

    def test_edges_alone_are_not_enough(self):
        """The second one was made before the first was freed."""
        lives = [Life(512, 0, 2), Life(512, 1, 3), Life(512, 2, 3)]
        order = Order(2, [(0, 1)], lives, [(0, 0), (1, 1), (1, 2)])
        self.assertFalse(order.follows(1, 0))
        self.assertTrue(order.follows(2, 0))

    def test_memory_without_a_known_end_is_not_shared(self):
        lives, slots = [Life(512, 0), Life(512, 1, 2)], [(0, 0), (1, 1)]
        self.assertFalse(Order(2, [(0, 1)], lives, slots).clear(0, 1))

    def test_slabs_are_small_where_they_can_be(self):
        def slabs(*sizes):
            order = chain(*[(size * MIB, 0, 0) for size in sizes])
            return order.pack(range(len(sizes)))[1]

        self.assertEqual(slabs(9, 9), [9 * MIB, 9 * MIB])
        self.assertEqual(slabs(5, 4), [9 * MIB])
        self.assertEqual(slabs(32), [32 * MIB])
        self.assertEqual(slabs(32, 2), [34 * MIB])  # one allocation less
        self.assertEqual(slabs(32, 5), [32 * MIB, 5 * MIB])

    def test_longer_life_of_two_captures(self):
        self.assertEqual(Life(8, 2, 5).either(Life(9, 1, 7)), Life(9, 1, 7))
        self.assertEqual(Life(8, 2, 5).either(Life(8, 2)), Life(8, 2))

    def test_circle(self):
        with self.assertRaisesRegex(ValueError, "circle"):
            Order(2, [(0, 1), (1, 0)], [], [])


if __name__ == "__main__":
    run_tests()
