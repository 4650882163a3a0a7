# Owner(s): ["module: aotdispatch"]

import dataclasses
import itertools
import random

from torch._functorch._activation_offloading.cost_model import (
    Candidate,
    Link,
    Model,
    Recompute,
    Step,
)
from torch._functorch._activation_offloading.plan import choose
from torch.testing._internal.common_utils import run_tests, TestCase


FAST = Link(1e6, 1e6, 0.0)


def slow(us):
    """A link that takes so long for the value of a layer."""
    return Link(1 / us, 1 / us, 0.0)


def chain(layers, at_once=False, **changes):
    """Layer i takes 10 us and saves a value of one byte. `changes` are fields of
    candidates, by name."""
    forward = [
        Step(f"f{i}", 10.0, {f"a{i}": 1}, frozenset({f"a{i - 1}"} if i else ()))
        for i in range(layers)
    ]
    backward = [
        Step(f"b{i}", 10.0, {f"g{i}": 1}, frozenset({f"a{i}", f"g{i + 1}"}))
        for i in reversed(range(layers))
    ]
    saved = {f"a{i}": 1 for i in range(layers)}
    candidates = [Candidate(name, 1, **changes.get(name, {})) for name in saved]
    return Model(forward, backward, saved, ["g0"], candidates, at_once)


def draw(rng):
    count = rng.randrange(2, 7)
    saved = {f"a{i}": rng.randrange(1, 10) for i in range(count)}
    forward, backward = [], []
    for i, (name, size) in enumerate(saved.items()):
        reads = {f"a{j}" for j in range(i) if rng.random() < 0.3}
        makes = {name: size, f"t{i}": rng.randrange(5)}
        forward.append(Step(f"f{i}", rng.randrange(1, 20), makes, frozenset(reads)))
    order = rng.sample(range(count), count)
    for k, i in enumerate(order):
        reads = {f"a{i}"} | {f"g{j}" for j in order[:k] if rng.random() < 0.4}
        makes = {f"g{i}": rng.randrange(6)}
        backward.append(Step(f"b{i}", rng.randrange(1, 20), makes, frozenset(reads)))
    candidates = [Candidate(*item) for item in saved.items()]
    return Model(forward, backward, saved, [f"g{order[-1]}"], candidates)


class TestChoice(TestCase):
    def test_against_every_subset_of_drawn_steps(self):
        rng, cheapest = random.Random(0), 0
        for _ in range(400):
            model = draw(rng)
            link = Link(rng.choice((0.2, 1, 5)), rng.choice((0.2, 1, 5)), 0.0)
            before = model.peak(())
            budget = rng.randrange(before // 2, before + 1)
            found, ways = choose(model, budget, link), []
            for count in range(len(model.saved) + 1):
                for names in itertools.combinations(model.saved, count):
                    peak = model.peak(names)
                    exposed = model.exposed(names, link, (), max(budget, peak))
                    ways.append((max(0, peak - budget), exposed))
            missing, exposed = min(ways)
            self.assertEqual(max(0, found.peak - budget), missing)
            cheapest += found.exposed_us <= exposed + 1e-6
            self.assertLessEqual(found.least, found.peak)
            self.assertEqual(found.peak_before, before)
            self.assertEqual(found.nbytes, sum(model.saved[n] for n in found.chosen))
        self.assertGreaterEqual(cheapest, 340)

    def test_nothing_where_the_peak_fits(self):
        found = choose(chain(8), 9, FAST)
        self.assertEqual((found.chosen, found.peak, found.exposed_us), ((), 9, 0.0))

    def test_what_is_made_first_and_read_last_goes_first_and_no_more(self):
        for budget in range(4, 10):
            found = choose(chain(8), budget, FAST)
            self.assertEqual(found.chosen, tuple(f"a{i}" for i in range(9 - budget)))
            self.assertEqual((found.peak, found.exposed_us), (budget, 0.0))

    def test_what_frees_nothing_at_the_peak_stays(self):
        """Two temporaries make it, where only the first value is still needed."""
        model = chain(4)
        last = dataclasses.replace(model.backward[-1], makes={"g0": 1, "t": 9})
        steps = [*model.backward[:-1], last]
        model = Model(model.forward, steps, model.saved, ["g0"], model.candidates)
        found = choose(model, 5, FAST)
        self.assertEqual((found.chosen, found.peak), ((), model.peak(())))

    def test_small_values_stay_if_a_large_one_suffices(self):
        sizes = {"small": 1, "big": 400}
        forward = [Step(name, 10, {name: size}) for name, size in sizes.items()]
        backward = [Step("b0", 50, {"t": 100})]
        backward += [Step(name, 10, {}, frozenset({name})) for name in ("big", "small")]
        candidates = [Candidate(*item) for item in sizes.items()]
        model = Model([*forward, Step("f", 50, {})], backward, sizes, (), candidates)
        self.assertEqual(choose(model, 500, FAST).chosen, ("small",))
        self.assertEqual(choose(model, 450, FAST).chosen, ("big",))

    def test_budget_that_is_too_small(self):
        found = choose(chain(8), 0, FAST)
        self.assertEqual(found.peak, found.least)
        self.assertEqual(found.least, chain(8).peak([f"a{i}" for i in range(8)]))

    def test_what_was_asked_for_is_copied_in_any_case(self):
        found = choose(chain(8, a5={"must": True}), 100, FAST)
        self.assertEqual(found.chosen, ("a5",))

    def test_sets_are_spread_where_copies_in_a_row_could_not_keep_up(self):
        """A launched graph has the memory of all that stays from its begin on."""
        model, row = chain(100, at_once=True), [f"a{i}" for i in range(38)]
        self.assertGreater(model.exposed(row, slow(25), (), 65), 500.0)
        found = choose(model, 65, slow(25))
        self.assertEqual((found.peak, found.exposed_us), (65, 0.0))


class TestRecomputation(TestCase):
    def test_where_the_copy_would_show(self):
        model = chain(8, a1={"again": Recompute(1.0, frozenset({"a0"}))})
        found = choose(model, 6, slow(100))
        self.assertEqual((found.recomputed, found.recompute_us), (("a1",), 1.0))
        self.assertNotIn("a1", found.chosen)
        self.assertLessEqual(found.peak, 6)
        self.assertEqual(choose(model, 6, FAST).recomputed, ())

    def test_what_another_value_is_computed_of_is_not_computed_again(self):
        for costs in ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0)):
            again = {
                f"a{i}": {"again": Recompute(us, frozenset({f"a{i - 1}"}))}
                for i, us in enumerate(costs, 1)
            }
            found = choose(chain(8, **again), 6, slow(100))
            self.assertEqual(len(found.recomputed), 1)

    def test_all_that_is_cheap_is_computed_again_first(self):
        """And then as few are copied as the peak needs."""
        again = {
            f"a{i}": {"again": Recompute(0.5, frozenset({f"a{i - 1}"}))}
            for i in range(1, 12, 2)
        }
        found = choose(chain(12, at_once=True, **again), 6, slow(30))
        self.assertEqual((len(found.recomputed), len(found.chosen)), (6, 2))
        self.assertEqual((found.peak, found.exposed_us), (6, 0.0))

    def test_most_are_computed_again_where_the_link_is_far_too_slow(self):
        again = {
            f"a{i}": {"again": Recompute(0.5, frozenset({f"a{i - 1}"}))}
            for i in range(1, 20, 2)
        }
        for at_once in (False, True):
            without = choose(chain(20, at_once), 12, slow(60))
            found = choose(chain(20, at_once, **again), 12, slow(60))
            self.assertLessEqual(found.peak, 12)
            self.assertGreater(len(found.recomputed), len(found.chosen))
            cost = found.exposed_us + found.recompute_us
            self.assertLess(cost, without.exposed_us / 2)


if __name__ == "__main__":
    run_tests()
