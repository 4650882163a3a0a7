# Owner(s): ["module: inductor"]

import dataclasses
import random
from collections import defaultdict

import torch
from torch._inductor.cudagraph_relaunch import chunks
from torch._inductor.cudagraph_relaunch.chunks import place
from torch._inductor.cudagraph_relaunch.outputs import (
    Given,
    OfStorage,
    Repeated,
    SameInput,
    View,
)
from torch.testing._internal.common_utils import run_tests, TestCase


CHUNK, MIB = chunks.CHUNK, 1 << 20


def vector(storage, size, dtype=torch.float32):
    return OfStorage(storage, View((size // dtype.itemsize,), (1,), dtype))


class Saved:
    """A region whose outputs are one vector each. `made`: the order of the forward."""

    def __init__(self, sizes, *, dtypes=(), made=None, saved=None, **options):
        dtypes = [*dtypes, *[torch.float32] * (len(sizes) - len(dtypes))]
        self.sizes, outputs = sizes, range(len(sizes))
        self.before = [vector(i, sizes[i], dtypes[i]) for i in outputs]
        saved = frozenset(outputs if saved is None else saved)
        made = outputs if made is None else made
        self.recipes, self.storages, self.places = place(
            self.before, sizes, saved, made, **options
        )

    def members(self):
        """The old storages in each new one, by address."""
        found = defaultdict(list)
        for i, (number, at) in enumerate(self.places):
            found[number].append((at, i))
        return {number: [i for _, i in sorted(rows)] for number, rows in found.items()}

    def chunks(self):
        return sorted(s.size for s in self.storages if s.dtype is not None)


class TestPlace(TestCase):
    def check(self, region):
        """Each output is what it was, at a place that it shares with no other."""
        self.assertEqual(len(region.recipes), len(region.before))
        taken = []
        for i, (old, new) in enumerate(zip(region.before, region.recipes)):
            number, at = region.places[i]
            view = dataclasses.replace(old.view, offset=at)
            self.assertEqual(new, OfStorage(number, view))
            storage = region.storages[number]
            self.assertLessEqual(at + old.view.extent, storage.size)
            self.assertIn(storage.dtype, (None, old.view.dtype))
            self.assertEqual(at % 512, 0)
            start = storage.offset if storage.saved else 0
            slab = -1 if storage.saved else number
            taken.append((slab, start + at, start + at + old.view.extent))
        taken.sort()
        for (slab, _, end), (other, start, _) in zip(taken, taken[1:]):
            self.assertTrue(slab < other or end <= start)

    def test_drawn_regions(self):
        rng, chunked, holes_filled = random.Random(0), 0, 0
        for _ in range(200):
            count = rng.randrange(1, 40)
            sizes = [rng.choice((4, 512, MIB, 3 * MIB, 9 * MIB)) for _ in range(count)]
            region = Saved(
                sizes,
                dtypes=rng.choices((torch.float32, torch.float16), k=count),
                made=rng.sample(range(count), count),
                saved=rng.sample(range(count), rng.randrange(count + 1)),
                holes=rng.choices((MIB, 4 * MIB, 30 * MIB), k=rng.randrange(4)),
                gradients=rng.random() < 0.5,
            )
            self.check(region)
            self.assertTrue(all(size <= CHUNK for size in region.chunks()))
            chunked += bool(region.chunks())
            holes_filled += 4 * MIB in region.chunks()
        self.assertGreater(chunked, 50)
        self.assertGreater(holes_filled, 5)

    def test_little_memory_is_one_slab(self):
        region = Saved([4000, 4000])
        self.assertTrue(all(s.saved for s in region.storages))
        self.assertEqual([s.offset for s in region.storages], [0, 4096])

    def test_neighbours_of_the_forward_are_in_one_chunk(self):
        made = [5 * i % 16 for i in range(16)]
        region = Saved([5 * MIB] * 16, made=made)
        self.check(region)
        self.assertEqual(region.chunks(), [CHUNK] * 4)
        for members in region.members().values():
            times = [made[i] for i in members]
            self.assertEqual(max(times) - min(times), 3)

    def test_small_ones_beside_large_ones_are_in_the_slab(self):
        region = Saved([5 * MIB] * 16 + [16, 16])
        is_saved = [region.storages[number].saved for number, _ in region.places]
        self.assertEqual(is_saved, [False] * 16 + [True] * 2)

    def test_holes_get_the_neighbours_that_fill_them(self):
        sizes = [size * MIB for size in (20, 4, 7, 2, 11, 20, 20)]
        region = Saved(sizes, holes=[9 * MIB])
        (hole,) = (n for n, s in enumerate(region.storages) if s.size == 9 * MIB)
        self.assertEqual(region.members()[hole], [2, 3])
        self.check(region)

    def test_large_hole_gets_several_chunks(self):
        region = Saved([5 * MIB] * 16, holes=[2 * CHUNK + 15 * MIB])
        self.assertEqual(region.chunks(), [15 * MIB, CHUNK, CHUNK, CHUNK])

    def test_what_the_caller_may_hold_is_by_itself(self):
        recipes = [
            *[vector(i, MIB) for i in range(3)],
            Repeated(2),
            Given(5),
            SameInput(0),
        ]
        # Output 3 is output 2, and is not saved.
        moved, storages, _ = place(recipes, [MIB] * 3, frozenset([1, 2]), range(3))
        self.assertEqual(list(moved), recipes)
        self.assertFalse(any(s.saved or s.dtype for s in storages))

    def test_storage_with_outputs_of_two_types(self):
        recipes = [vector(0, CHUNK), vector(0, CHUNK, torch.int32), vector(1, CHUNK)]
        _, storages, places = place(recipes, [CHUNK] * 2, frozenset(range(3)), range(2))
        self.assertTrue(storages[places[0][0]].saved)

    def test_small_gradients(self):
        sizes = [32 << 10, 64, 40 << 10] * 8
        without = Saved(sizes, saved=())
        self.assertEqual(without.chunks(), [])
        region = Saved(sizes, saved=(), gradients=True)
        self.check(region)
        small, large = 8 * ((32 << 10) + 512), 256 << 10
        self.assertEqual(sum(region.chunks()), small)
        self.assertLessEqual(max(region.chunks()), large)
        alone = [s.size for s in region.storages if s.dtype is None]
        self.assertEqual(alone, [40 << 10] * 8)


if __name__ == "__main__":
    run_tests()
