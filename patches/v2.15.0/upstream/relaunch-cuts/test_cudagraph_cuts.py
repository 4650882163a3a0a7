# Owner(s): ["module: inductor"]

import itertools
import random

from torch._inductor.cudagraph_relaunch.cuts import cuts, Held, LENIENT, need_of
from torch.testing._internal.common_utils import run_tests, TestCase


MIB = 1 << 20


def live(held, at):
    return sum(h.size for h in held if h.first <= at <= h.last)


def need(held, begin, end):
    """The bytes that the part [begin, end) needs: by the definition, slowly."""
    touched = [h for h in held if h.first < end and h.last >= begin]
    inside = [h for h in touched if h.slab and begin <= h.first and h.last < end]
    shared = max((live(inside, at) for at in range(begin, end)), default=0)
    return sum(h.size for h in touched if h not in inside) + shared


def excess(held, begin, end):
    return need(held, begin, end) - max(live(held, at) for at in range(begin, end))


def parts(starts, length):
    return list(zip(starts, [*starts[1:], length]))


def every_cut(length, most):
    for count in range(most):
        for inner in itertools.combinations(range(1, length), count):
            yield [0, *inner]


def draw(rng, length):
    held = []
    for _ in range(rng.randrange(1, 10)):
        first, last = sorted(rng.choices(range(length), k=2))
        held.append(Held(rng.randrange(1, 10), first, last, slab=rng.random() < 0.5))
    return list(dict.fromkeys(held))


class TestCuts(TestCase):
    def test_against_every_cut_of_small_graphs(self):
        rng, cut = random.Random(0), 0
        for _ in range(300):
            length, most = rng.randrange(2, 9), rng.randrange(1, 5)
            held, slack = draw(rng, length), rng.choice((0, 0, 1, 1, 3))

            def worst(starts, cost):
                return max(cost(held, *part) for part in parts(starts, length))  # noqa: B023

            ways = list(every_cut(length, most))
            goal = min(worst(starts, need) for starts in ways) + slack
            found = cuts(held, length, most, slack)
            self.assertIn(found, ways)
            self.assertLessEqual(worst(found, need), goal)
            ways = [starts for starts in ways if worst(starts, need) <= goal]
            if [0] not in ways:
                limit = min(worst(s, excess) for s in ways) + LENIENT * slack
                ways = [starts for starts in ways if worst(starts, excess) <= limit]
                self.assertLessEqual(worst(found, excess), limit)
            self.assertEqual(len(found), min(map(len, ways)))
            cut += len(found) > 1
        self.assertGreater(cut, 50)

    def test_need_of(self):
        rng = random.Random(0)
        for _ in range(200):
            length = rng.randrange(1, 12)
            held = draw(rng, length)
            inner = [at for at in range(1, length) if rng.random() < 0.3]
            wanted = max(need(held, *part) for part in parts([0, *inner], length))
            self.assertEqual(need_of(held, [0, *inner], length), wanted)

    def test_saved_memory_goes_while_gradients_come(self):
        saved = [Held(10 * MIB, 0, 96 - 6 * i) for i in range(16)]
        gradients = [Held(10 * MIB, 6 * i, 96) for i in range(16)]
        starts = cuts(saved + gradients, 96, 8, MIB)
        self.assertEqual(need_of(saved + gradients, [0], 96), 320 * MIB)
        self.assertLessEqual(need_of(saved + gradients, starts, 96), 200 * MIB)

    def test_long_graph(self):
        """Thousands of tensors, each a small part of all memory."""
        saved = [Held(MIB // 4, 0, 1500 - n) for n in range(1500)]
        gradients = [Held(MIB // 4, n, 1500) for n in range(1500)]
        starts = cuts([*saved, *gradients], 1500, 8, MIB)
        self.assertLessEqual(need_of(saved + gradients, starts, 1500), 450 * MIB)

    def test_parts_that_need_less_than_another_are_small_too(self):
        """The large tensor may be the caller's, and not be freed after all."""
        large = [Held(1000 * MIB, 0, 5)]
        saved = [Held(2 * MIB, 0, 400 - n) for n in range(300)]
        gradients = [Held(2 * MIB, n, 400) for n in range(100, 400)]
        rest = saved + gradients
        starts = cuts(large + rest, 400, 8, MIB)
        lazy = need(rest, starts[1], 400)
        for part in parts(starts, 400)[1:]:
            self.assertLess(need(rest, *part), 0.75 * lazy)

    def test_nothing_to_gain(self):
        held = [Held(100 * MIB, 0, 50), Held(MIB, 3, 40, slab=True)]
        self.assertEqual(cuts(held, 50, 8, MIB), [0])

    def test_memory_without_uses(self):
        self.assertEqual(cuts([], 50, 8, MIB), [0])


if __name__ == "__main__":
    run_tests()
