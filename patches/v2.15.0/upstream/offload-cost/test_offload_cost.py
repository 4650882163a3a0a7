# Owner(s): ["module: aotdispatch"]

import itertools
import random

from torch._functorch._activation_offloading.cost_model import (
    Candidate,
    Link,
    Model,
    Recompute,
    Step,
)
from torch.testing._internal.common_utils import run_tests, TestCase


def chain(layers, us=10.0, at_once=False):
    """Layer i saves a value of one byte, and the backward reads it."""
    reads = [frozenset({f"a{i - 1}"} if i else ()) for i in range(layers)]
    forward = [Step(f"f{i}", us, {f"a{i}": 1}, reads[i]) for i in range(layers)]
    reads = [frozenset({f"a{i}", f"g{i + 1}"}) for i in range(layers)]
    backward = [Step(f"b{i}", us, {f"g{i}": 1}, r) for i, r in enumerate(reads)][::-1]
    saved = {f"a{i}": 1 for i in range(layers)}
    candidates = [Candidate(*item) for item in saved.items()]
    return Model(forward, backward, saved, ["g0"], candidates, at_once)


def draw(rng):
    count = rng.randrange(1, 7)
    saved = {f"a{i}": rng.randrange(1, 10) for i in range(count)}
    forward, backward = [], []
    for i, (name, size) in enumerate(saved.items()):
        reads = {f"a{j}" for j in range(i) if rng.random() < 0.3}
        makes = {name: size, f"t{i}": rng.randrange(5)}
        forward.append(Step(f"f{i}", rng.randrange(20), makes, frozenset(reads)))
    order = rng.sample(range(count), count)
    for k, i in enumerate(order):
        reads = {f"a{i}"} | {f"g{j}" for j in order[:k] if rng.random() < 0.4}
        makes = {f"g{i}": rng.randrange(6)}
        backward.append(Step(f"b{i}", rng.randrange(20), makes, frozenset(reads)))
    results = rng.sample([*saved, *(f"g{i}" for i in order)], 1)
    candidates = [Candidate(*item) for item in saved.items()]
    return Model(forward, backward, saved, results, candidates)


def peak(model, chosen):
    """The peak if steps wait for each copy: by the definition, slowly."""
    most = 0
    for now in range(len(model.forward)):
        live = 0
        for i, step in enumerate(model.forward):
            for name, size in step.makes.items():
                readers = [j for j, s in enumerate(model.forward) if name in s.reads]
                stays = name in model.saved or name in model.results
                end = max([i, *readers])
                if stays and name not in chosen:
                    end = len(model.forward)
                live += size if i <= now <= end else 0
        most = max(most, live)
    for now in range(len(model.backward)):
        live = 0
        made = [(0, item, True) for item in model.saved.items()]
        made += [
            (i, item, False)
            for i, step in enumerate(model.backward)
            for item in step.makes.items()
        ]
        for begin, (name, size), is_saved in made:
            readers = [j for j, s in enumerate(model.backward) if name in s.reads]
            if name in chosen:
                begin = readers[0]
            end = max([begin, *readers])
            if name in model.results and not is_saved:
                end = len(model.backward)
            live += size if begin <= now <= end else 0
        most = max(most, live)
    return most


class TestMemory(TestCase):
    def test_drawn_steps(self):
        rng, lower = random.Random(0), 0
        for _ in range(200):
            model = draw(rng)
            for count in range(len(model.saved) + 1):
                chosen = rng.sample(sorted(model.saved), count)
                self.assertEqual(model.peak(chosen), peak(model, chosen))
                lower += model.peak(chosen) < model.peak(())
        self.assertGreater(lower, 100)

    def test_chain(self):
        """All that is saved, and one gradient."""
        model = chain(8)
        self.assertEqual(model.peak(()), 9)
        self.assertEqual([model.peak([f"a{i}"]) for i in range(8)], [8] * 6 + [9, 9])

    def test_memory_is_used_while_a_copy_is_on_its_way(self):
        """It takes longer than the two steps before the reader."""
        model, link = chain(8), Link(1 / 25, 1 / 25, 0.0)
        self.assertEqual(model.peak(["a0"], link), 8)
        self.assertEqual(model.peak(["a5"]), 8)
        self.assertEqual(model.peak(["a5"], link), 9)

    def test_memory_is_freed_when_the_copy_has_ended(self):
        """It runs from 10 to 25 us, in the second and the third step of 10 us."""
        link, peaks = Link(4 / 15, 4 / 15, 0.0), []
        for large in range(4):
            sizes = [{"a": 4}, {}, {}, {}]
            sizes[large] = {**sizes[large], "t": 100}
            forward = [Step(f"f{i}", 10.0, sizes[i]) for i in range(4)]
            backward = [Step("b", 10.0, {}, frozenset({"a"}))]
            model = Model(forward, backward, {"a": 4}, (), [Candidate("a", 4)])
            peaks.append(model.peak(["a"], link))
        self.assertEqual(peaks, [104, 104, 104, 100])

    def test_launched_graph_has_inputs_and_outputs_for_whole_stages(self):
        self.assertEqual((chain(8).peak(()), chain(8, at_once=True).peak(())), (9, 10))

    def test_what_is_read_to_compute_a_value_again_is_needed_for_longer(self):
        model = chain(8)
        again = Candidate("a5", 1, again=Recompute(1.0, frozenset({"a7"})))
        self.assertEqual(model.peak((), None, [again]), 9)  # a7 in place of a5
        again = Candidate("a5", 1, again=Recompute(1.0, frozenset({"a0"})))
        self.assertEqual(model.peak((), None, [again]), 8)


class TestTime(TestCase):
    def test_drawn_steps(self):
        """Copies of a direction run one after the other, and none before its value is
        there. Each reader waits, so that the steps take as long as they do."""
        rng, waited = random.Random(0), 0
        for _ in range(200):
            model, link = draw(rng), Link(rng.choice((0.2, 5)), rng.choice((0.2, 5)))
            chosen = rng.sample(
                sorted(model.saved), rng.randrange(len(model.saved) + 1)
            )
            found = {t.name: t for t in model.transfers(chosen, link)}
            self.assertEqual(found.keys(), set(chosen))
            for times in (
                [t.out for t in found.values()],
                [t.back for t in found.values()],
            ):
                for one, following in itertools.pairwise(sorted(times)):
                    self.assertLessEqual(one[1], following[0])
            now = longest = 0.0
            for step in model.forward:
                now += step.us
                for name in step.makes.keys() & found.keys():
                    self.assertGreaterEqual(found[name].out[0], now)
                    longest = max(longest, found[name].out[1])
            delays = max(0.0, longest - now)
            now = 0.0
            for step in model.backward:
                begin = max(
                    [now, *(found[n].back[1] for n in step.reads & found.keys())]
                )
                delays += begin - now
                now = begin + step.us
            exposed = model.exposed(chosen, link)
            self.assertGreaterEqual(exposed + 1e-6, delays)
            self.assertTrue(delays or exposed < 1e-6)
            waited += delays > 0
            for t in found.values():
                self.assertTrue(0.0 <= t.hidden <= 1.0)
        self.assertGreater(waited, 50)

    def test_each_copy_says_when_it_runs_and_how_much_of_it_shows(self):
        """The third one ends 5 us after the forward, and in between is waited for."""
        model, link = chain(8), Link(1 / 25, 1 / 25, 0.0)
        found = {t.name: t for t in model.transfers(["a0", "a1", "a2"], link)}
        out = [found[n].out for n in ("a0", "a1", "a2")]
        self.assertEqual(out, [(10.0, 35.0), (35.0, 60.0), (60.0, 85.0)])
        # They come back in the order of their readers, at 50, 60 and 70 us.
        back = [found[n].back for n in ("a2", "a1", "a0")]
        self.assertEqual(back, [(0.0, 25.0), (25.0, 50.0), (50.0, 75.0)])
        shown = [found[n].exposed_us for n in ("a0", "a1", "a2")]
        self.assertEqual(shown, [5.0, 0.0, 5.0])
        self.assertEqual(found["a0"].hidden, 0.9)

    def test_without_room_loads_come_later_and_steps_wait_longer(self):
        model, link, chosen = chain(8), Link(1 / 25, 1 / 25, 0.0), ["a0", "a1", "a2"]
        self.assertEqual(model.exposed(chosen, link), 10.0)
        self.assertEqual(model.exposed(chosen, link, budget=6), 30.0)

    def test_slack_is_that_of_the_tighter_direction(self):
        names = ("a", "b", "c")
        forward = [Step(n, 10.0, {n: 1}) for n in names]
        backward = [Step(n, 10.0, {}, frozenset({n})) for n in ("a", "c", "b")]
        candidates = [Candidate(n, 1) for n in names]
        model = Model(forward, backward, dict.fromkeys(names, 1), (), candidates)
        # a is read at once, and c is made at the end.
        self.assertEqual([model.slack(c) for c in candidates], [0.0, 10.0, 0.0])


if __name__ == "__main__":
    run_tests()
