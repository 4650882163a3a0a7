"""Which allocations of a captured graph share memory, and where a graph is cut into stages."""

import random
import unittest
from itertools import combinations
from unittest import mock

from hypothesis import given, settings, strategies as st

import form  # noqa: F401
from torch_overlay._inductor.relaunch.memory import arrange, packing
from torch_overlay._inductor.relaunch.memory.arrange import _most_at_a_moment, _needs, cuts, LaunchMemory, need_of
from torch_overlay._inductor.relaunch.memory.packing import aligned, Life, Order


MIB = 1 << 20


def need_of_part(held, begin, end):
    inside = [h for h in held if h.slab and begin <= h.first and h.last < end]
    alone = [h.size for h in held if h.first < end and h.last >= begin and h not in inside]
    at_once = (sum(h.size for h in inside if h.first <= at <= h.last) for at in range(begin, end))
    return sum(alone) + max(at_once)


def programs():
    """(nodes, edges, lives, slots) of programs that allocate, launch, and free, on one stream or on several."""
    return st.integers(0, 2**32).map(a_program)


def a_program(seed):
    rng = random.Random(seed)
    streams, count = rng.choice([1, 1, 2, 3]), rng.randrange(1, 24)
    last, edges, slots, touched = [None] * streams, [], [], []
    made, freed, sizes, alive = [], [], [], []
    now = 0
    for node in range(count):
        for _ in range(rng.randrange(3)):
            alive.append(len(made))
            made.append(now)
            freed.append(None)
            sizes.append(rng.choice([0, 1, 100, 512, 4096, 5000]))
            now += 1
        stream = rng.randrange(streams)
        sources = {last[stream]} | {s for s in last if rng.random() < 0.3}
        edges += [(s, node) for s in sources if s is not None]
        last[stream] = node
        used = rng.sample(alive, min(len(alive), rng.randrange(4)))
        slots += [(node, a) for a in used]
        touched.append(used)
        for a in list(alive):
            if rng.random() < 0.3 and all(a not in touched[n] or orders(edges, n, node) for n in range(node)):
                alive.remove(a)
                freed[a] = now
    lives = [Life(*each) for each in zip(sizes, made, freed)]
    return count, edges, lives, slots


def orders(edges, u, v):
    """Does a path lead from u to v?"""
    todo, seen = [u], {u}
    while todo:
        at = todo.pop()
        for a, b in edges:
            if a == at and b not in seen:
                seen.add(b)
                todo.append(b)
    return v in seen


def chain(*allocations):
    """A program on one stream. An allocation is (size, first node, last node): made just before, freed just after."""
    length = 1 + max(last for _, _, last in allocations)
    starts = [first for _, first, _ in allocations]
    lives = [Life(s, sum(x < f for x in starts), sum(x <= last for x in starts)) for s, f, last in allocations]
    slots = [(n, a) for a, (_, f, last) in enumerate(allocations) for n in {f, last}]
    return Order(length, [(n, n + 1) for n in range(length - 1)], lives, slots)


class TestPacking(unittest.TestCase):
    @settings(deadline=None, max_examples=200)
    @given(programs(), st.sampled_from((1, 4096, 1 << 20)), st.sampled_from((0, 2048, 1 << 20)))
    def test_what_overlaps_comes_one_after_the_other(self, program, slab, little):
        count, edges, lives, slots = program
        order = Order(count, edges, lives, slots)
        with mock.patch.object(packing, "SLAB", slab), mock.patch.object(packing, "LITTLE_SLAB", little):
            places, slabs = order.pack(range(len(lives)))
        holders = [{n for n, a in slots if a == b} for b in range(len(lives))]
        self.assertEqual(places.keys(), {a for a in range(len(lives)) if holders[a] and lives[a].size})
        for a, b in combinations(places, 2):
            (slab_a, at_a), (slab_b, at_b) = places[a], places[b]
            if slab_a == slab_b and at_a < at_b + lives[b].size and at_b < at_a + lives[a].size:
                ways = [
                    x
                    for x, y in ((a, b), (b, a))
                    if lives[x].freed is not None
                    and lives[x].freed <= lives[y].made
                    and all(orders(edges, u, v) and u != v for u in holders[x] for v in holders[y])
                ]
                self.assertTrue(ways, f"{a} and {b} overlap")
        self.assertLessEqual(sum(slabs), sum(aligned(life.size) for life in lives))
        for number, size in enumerate(slabs):
            inside = [(a, at) for a, (k, at) in places.items() if k == number]
            self.assertEqual(size, max(at + aligned(lives[a].size) for a, at in inside))
            most = max(slab, *[aligned(lives[a].size) for a, _ in inside])
            self.assertLessEqual(size, most + (0 if number else little))
        self.assertTrue(all(at % 512 == 0 for _, at in places.values()))

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=30))
    def test_chains_come_close_to_what_is_live_at_once(self, rows):
        rows = [(512 * size, first, first + length) for size, first, length in rows]
        size = sum(chain(*rows).pack(range(len(rows)))[1])
        live = max(sum(s for s, f, last in rows if f <= n <= last) for n in range(40))
        self.assertGreaterEqual(size, live)
        self.assertLessEqual(size, 2 * live)

    def test_little_slab_goes_behind_one_with_a_segment_of_its_own(self):
        def sizes(*pieces):
            return chain(*[(size << 20, 0, 0) for size in pieces]).pack(range(len(pieces)))

        places, slabs = sizes(32, 2)
        self.assertEqual((places, slabs), ({0: (0, 0), 1: (0, 32 << 20)}, [34 << 20]))
        places, slabs = sizes(32, 11, 3)
        self.assertEqual((places, slabs), ({0: (0, 0), 1: (1, 0), 2: (0, 32 << 20)}, [35 << 20, 11 << 20]))
        self.assertEqual(sizes(32, 5)[1], [32 << 20, 5 << 20])
        self.assertEqual(sizes(9, 2)[1], [9 << 20, 2 << 20])

    def test_chain_of_equal_sizes_takes_two(self):
        order = chain(*[(4096, n, n + 1) for n in range(20)])
        self.assertEqual(order.pack(range(20))[1], [2 * 4096])

    def test_equal_sizes_are_placed_in_the_order_in_which_they_are_made(self):
        """Whatever their numbers are: the last one of these would find no place among two others."""
        order = chain((4096, 0, 1), (4096, 4, 5), (4096, 1, 3), (4096, 2, 4))
        self.assertEqual(order.pack(range(4))[1], [2 * 4096])

    def test_parallel_branches_share_nothing(self):
        lives = [Life(512, 0, 1), Life(512, 1, 2)]
        slots = [(1, 0), (2, 1)]
        fork = Order(4, [(0, 1), (0, 2), (1, 3), (2, 3)], lives, slots)
        self.assertEqual(fork.pack([0, 1])[1], [1024])
        line = Order(4, [(0, 1), (1, 2), (2, 3)], lives, slots)
        self.assertEqual(line.pack([0, 1])[1], [512])

    def test_edges_alone_are_not_enough(self):
        """The program still held the first one: a kernel may have left its address in memory."""
        lives = [Life(512, 0, 3), Life(512, 1, 2), Life(512, 2, 4)]
        order = Order(3, [(0, 1), (1, 2)], lives, [(0, 0), (1, 1), (2, 2)])
        self.assertFalse(order.follows(1, 0))
        self.assertFalse(order.follows(2, 0))
        self.assertTrue(order.follows(2, 1))

    def test_program_alone_is_not_enough(self):
        """A kernel on a side stream is still at it."""
        lives = [Life(512, 0, 1), Life(512, 1, 2)]
        order = Order(3, [(0, 1), (0, 2)], lives, [(1, 0), (2, 1)])
        self.assertFalse(order.follows(1, 0))

    def test_node_without_an_address_may_have_been_told_one(self):
        """Node 1 reads what node 0 left in memory; the program freed allocation 0 after it."""
        lives = [Life(512, 0, 2), Life(512, 1, 2), Life(512, 2, 3)]
        order = Order(4, [(0, 1), (0, 2), (2, 3)], lives, [(0, 0), (2, 1), (3, 2)])
        self.assertEqual(order.touching[0], 0b111)
        self.assertFalse(order.follows(2, 0), "node 1 is not before node 3")

    def test_memory_that_never_ends_is_never_shared(self):
        order = Order(2, [(0, 1)], [Life(512, 0, None), Life(512, 1, 2)], [(0, 0), (1, 1)])
        self.assertFalse(order.follows(1, 0))
        self.assertEqual(order.span(0), (0, 1))

    def test_order_is_that_of_the_edges(self):
        order = Order(4, [(3, 0), (0, 2), (2, 1)], [], [])
        self.assertEqual(order.order, [3, 0, 2, 1])
        with self.assertRaisesRegex(ValueError, "circle"):
            Order(2, [(0, 1), (1, 0)], [], [])


class TestCuts(unittest.TestCase):
    SAVED = [LaunchMemory(10 * MIB, 0, 96 - 6 * i) for i in range(16)]
    GRADIENTS = [LaunchMemory(10 * MIB, 6 * i, 96) for i in range(16)]
    HELD = [LaunchMemory(1, 0, 3), LaunchMemory(10, 2, 2), LaunchMemory(100, 4, 9), LaunchMemory(1000, 9, 9)]

    def test_saved_memory_goes_while_gradients_come(self):
        held = self.SAVED + self.GRADIENTS
        starts = cuts(held, 96, 8, MIB)
        self.assertEqual(starts[0], 0)
        self.assertLessEqual(len(starts), 8)
        self.assertEqual(need_of(held, [0], 96), 320 * MIB)
        self.assertLessEqual(need_of(held, starts, 96), 200 * MIB)

    def test_a_part_does_not_begin_inside_of_a_conditional(self):
        held = self.SAVED + self.GRADIENTS
        anywhere = cuts(held, 96, 8, MIB)
        inside = set(range(anywhere[1] - 3, anywhere[1] + 4))
        starts = cuts(held, 96, 8, MIB, inside)
        self.assertGreater(len(starts), 1)
        self.assertTrue(inside.isdisjoint(starts))

    def test_many_small_ones_count(self):
        saved = [LaunchMemory(MIB // 4, 0, 1500 - n) for n in range(1500)]
        gradients = [LaunchMemory(MIB // 4, n, 1500) for n in range(1500)]
        large = [LaunchMemory(100 * MIB, 0, 1500)]  # beside which none of the others counts for much
        starts = cuts([*large, *saved, *gradients], 1500, 8, MIB)
        self.assertLessEqual(need_of(saved + gradients, starts, 1500), 450 * MIB)

    def test_parts_that_need_less_than_another_are_small_too(self):
        first = [LaunchMemory(1000 * MIB, 0, 5)]
        saved = [LaunchMemory(2 * MIB, 0, 400 - n) for n in range(300)]
        gradients = [LaunchMemory(2 * MIB, n, 400) for n in range(100, 400)]
        starts = cuts([*first, *saved, *gradients], 400, 8, MIB)
        lazy = need_of(saved + gradients, [starts[1]], 400)
        for begin, end in zip(starts[1:], [*starts[2:], 400]):
            self.assertLess(need_of_part(saved + gradients, begin, end), 0.75 * lazy)

    def test_most_at_a_moment(self):
        found = _most_at_a_moment(self.HELD, grid := [0, 2, 3, 4, 9, 10])
        for (begin, end), most in found.items():
            live = [sum(h.size for h in self.HELD if h.first <= at <= h.last) for at in range(begin, end)]
            self.assertEqual(most, max(live))
        self.assertEqual(len(found), len(grid) * (len(grid) - 1) // 2)

    def test_sums_of_parts(self):
        for begin in range(10):
            for end in range(begin + 1, 11):
                expected = sum(h.size for h in self.HELD if h.first < end and h.last >= begin)
                self.assertEqual(_needs(self.HELD, range(11))[begin, end], expected)

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 12)), max_size=12))
    def test_what_lives_and_dies_in_a_part_shares_memory(self, rows):
        slabs = [LaunchMemory(size, min(a, b), max(a, b), slab=True) for size, a, b in rows]
        grid = [0, 1, 2, 5, 6, 9, 13]
        needs = _needs(slabs, grid)
        self.assertEqual(list(needs), list(combinations(grid, 2)))
        for (begin, end), need in needs.items():
            self.assertEqual(need, need_of_part(slabs, begin, end))

    def test_what_shares_a_slab_and_is_too_little_to_matter_is_not_looked_at(self):
        large = [LaunchMemory(4 * MIB, n, n + 1, slab=True) for n in range(100)]
        little = [LaunchMemory(512, n, n, slab=True) for n in range(100)]
        with mock.patch.object(arrange, "_needs", wraps=_needs) as needs:
            starts = cuts([*large, *little], 101, 8, MIB)
        self.assertEqual(needs.call_args.args[0], large)
        self.assertEqual(starts, cuts(large, 101, 8, MIB))

    def test_nothing_to_gain_is_not_cut(self):
        held = [LaunchMemory(100 * MIB, 0, 50), LaunchMemory(MIB, 3, 40, slab=True)]
        self.assertEqual(cuts(held, 50, 8, MIB), [0])
        self.assertEqual(cuts([], 0, 8, MIB), [0])
        self.assertEqual(cuts([], 3, 8, MIB), [0])

    def test_slab_counts_what_is_live_at_once(self):
        held = [LaunchMemory(MIB, n, n, slab=True) for n in range(10)]
        self.assertEqual(need_of(held, [0], 10), MIB)
        self.assertEqual(need_of([LaunchMemory(MIB, 0, 9, slab=True)], [0, 5], 10), MIB)

    @settings(deadline=None, max_examples=60)
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=25),
        st.integers(1, 41),
        st.integers(1, 8),
    )
    def test_parts_are_in_order_and_never_need_more_than_the_whole(self, rows, length, most):
        held = [LaunchMemory(s, min(a, b, length - 1), min(max(a, b), length - 1), slab) for s, a, b, slab in rows]
        starts = cuts(held, length, most, 0)
        self.assertEqual(starts, sorted(set(starts)))
        self.assertEqual(starts[0], 0)
        self.assertLess(starts[-1], length)
        self.assertLessEqual(len(starts), most)
        self.assertLessEqual(need_of(held, starts, length), need_of(held, [0], length))
