# Owner(s): ["module: aotdispatch"]

import itertools
import random

from torch._functorch._activation_offloading.copy_placement import (
    held_from,
    held_until,
    just_in_time,
    LEAD,
    Load,
    MARGIN,
    place_loads,
    place_waits,
    STAGES,
    Store,
)
from torch.testing._internal.common_utils import run_tests, TestCase


def with_loads(live, loads, places):
    """The bytes at each step: by the definition, slowly."""
    return [
        now + sum(x.nbytes for x, p in zip(loads, places) if p <= step < x.first)
        for step, now in enumerate(live)
    ]


def without_stores(live, stores, places):
    return [
        now - sum(x.nbytes for x, p in zip(stores, places) if p <= step)
        for step, now in enumerate(live)
    ]


class TestLoads(TestCase):
    def test_drawn_schedules(self):
        """Each is as early as it can be, in the order of the readers."""
        rng, early, late = random.Random(0), 0, 0
        for _ in range(500):
            count = rng.randrange(1, 12)
            live = [rng.randrange(8) for _ in range(count)]
            firsts = rng.choices(range(count), k=rng.randrange(1, 6))
            loads = [Load(first, rng.randrange(1, 4)) for first in firsts]
            wanted = [rng.randrange(load.first + 1) for load in loads]
            budget = rng.randrange(10)
            places = place_loads(live, loads, budget, wanted)
            found = with_loads(live, loads, places)
            for now, before in zip(found, live):
                self.assertLessEqual(now, max(budget, before))
            order = sorted(range(len(loads)), key=lambda n: loads[n].first)
            for n, following in itertools.pairwise([*order, None]):
                self.assertGreaterEqual(places[n], min(wanted[n], loads[n].first))
                if following is not None:
                    self.assertLessEqual(places[n], places[following])
            last = order[-1]  # nothing was placed after it
            others = [places[n] for n in order[:-1]]
            if places[last] > max(wanted[last], *others, 0):
                more = found[places[last] - 1] + loads[last].nbytes
                self.assertGreater(more, budget)
                late += 1
            early += places[last] < loads[last].first
        self.assertGreater(early, 100)
        self.assertGreater(late, 50)

    def test_as_early_as_the_budget_allows(self):
        self.assertEqual(place_loads([8, 6, 4, 4, 4], [Load(4, 2)], 6), [2])
        self.assertEqual(place_loads([4, 4, 4, 4, 4], [Load(4, 2)], 6), [0])
        self.assertEqual(place_loads([9, 9, 9], [Load(2, 1)], 6), [2])

    def test_no_earlier_than_it_takes(self):
        """Steps of 10 us and copies of 5, which may take longer than estimated."""
        self.assertEqual((LEAD, MARGIN), (4.0, 1.5))
        starts = [10.0 * i for i in range(10)]
        us = [5.0, 5.0, 5.0]
        self.assertEqual(just_in_time(starts, [9, 6, 8], us), [7, 4, 6])
        # One after the other, for one reader.
        self.assertEqual(just_in_time(starts, [9] * 5, [5.0] * 5), [7, 7, 6, 6, 5])
        self.assertEqual(just_in_time(starts, [0, 1], [5.0, 5.0]), [0, 0])
        self.assertEqual(just_in_time([], [0], [5.0]), [0])


class TestStores(TestCase):
    def test_drawn_schedules(self):
        """No step waits for more than it has to, or exceeds the budget in vain."""
        rng, waited = random.Random(0), 0
        for _ in range(500):
            count, stores = rng.randrange(1, 12), []
            live = [rng.randrange(8) for _ in range(count)]
            for _ in range(rng.randrange(1, 6)):
                made = rng.randrange(count)
                last, ends = rng.randrange(made, count), rng.randrange(made, count + 1)
                stores.append(Store(made, last, rng.randrange(1, 4), ends))
                for step in range(made, count):
                    live[step] += stores[-1].nbytes
            budget = rng.randrange(12)
            places = place_waits(live, stores, budget)
            found = without_stores(live, stores, places)
            newest = {}  # step -> the store that it waits for last
            for n, place in sorted(enumerate(places), key=lambda x: stores[x[0]].made):
                ended = min(max(stores[n].ends, stores[n].last + 1), count)
                self.assertTrue(stores[n].last < place <= ended)
                if place < ended:
                    newest[place] = stores[n]
            for step, store in newest.items():  # without it, the step has too much
                self.assertGreater(found[step] + store.nbytes, budget)
                waited += 1
            for step, now in enumerate(found):
                if now > budget:
                    for store, place in zip(stores, places):
                        self.assertTrue(place <= step or store.last >= step)
        self.assertGreater(waited, 100)

    def test_copy_that_has_ended_is_waited_for_at_once(self):
        self.assertEqual(place_waits([1, 1, 1, 1], [Store(0, 1, 1, ends=2)], 9), [2])
        self.assertEqual(place_waits([1, 1, 1, 1], [Store(0, 2, 1, ends=1)], 9), [3])

    def test_the_oldest_copies_are_waited_for_first(self):
        stores = [Store(i, i, 1, ends=5) for i in range(5)]
        self.assertEqual(place_waits([1, 2, 3, 4, 5], stores, 3), [3, 4, 5, 5, 5])


class TestStages(TestCase):
    def test_a_step_is_in_one_stage(self):
        for count in range(1, 40):
            stages = {(held_from(i, count), held_until(i, count)) for i in range(count)}
            self.assertLessEqual(len(stages), STAGES)
            steps = [i for a, b in sorted(stages) for i in range(a, b + 1)]
            self.assertEqual(steps, list(range(count)))
        self.assertEqual((held_from(0, 0), held_until(0, 0)), (0, 0))


if __name__ == "__main__":
    run_tests()
