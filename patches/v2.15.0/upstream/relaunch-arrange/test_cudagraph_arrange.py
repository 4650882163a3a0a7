# Owner(s): ["module: inductor"]

import bisect
import dataclasses
import random

import torch
from torch._inductor.cudagraph_relaunch.arrange import arrange, GAIN, Proven
from torch._inductor.cudagraph_relaunch.expressions import evaluate
from torch._inductor.cudagraph_relaunch.nodes import (
    KernelNode,
    NumberSlot,
    PointerSlot,
    Template,
)
from torch._inductor.cudagraph_relaunch.outputs import (
    Layout,
    OfStorage,
    Repeated,
    SameInput,
    Storage,
    View,
)
from torch._inductor.cudagraph_relaunch.packing import Life
from torch.testing._internal.common_utils import run_tests, TestCase


MIB = 1 << 20


def bytes_view(size, offset=0):
    return View((size,), (1,), torch.uint8, offset)


def lives_of(spans, sizes, inputs, fixed):
    """Everything but inputs is allocated before its first node. Inputs and scratch,
    which comes after `fixed` regions, are freed after their last node."""
    made = sorted(first for first, _ in spans[inputs:])
    lives = []
    for r, ((first, last), size) in enumerate(zip(spans, sizes, strict=True)):
        begin = 0 if r < inputs else bisect.bisect_left(made, first)
        end = None if inputs <= r < fixed else bisect.bisect_right(made, last)
        lives.append(Life(size, begin, end))
    return tuple(lives)


class Region:
    """A drawn region on one stream, or on two: which nodes touch what."""

    def __init__(self, rng, inputs=6, outputs=6, pieces=12, streams=2):
        self.length = rng.randrange(8, 24)
        size = lambda: rng.randrange(1, 9) * MIB  # noqa: E731
        layout_inputs = tuple(range(1, 2 * inputs, 2))
        self.sizes = [size() for _ in range(inputs + outputs)]
        spans = [(0, rng.randrange(self.length)) for _ in range(inputs)]
        spans += [(rng.randrange(self.length), self.length - 1) for _ in range(outputs)]
        # The first two outputs are members of a chunk, each other is one storage.
        own = self.sizes[inputs:]
        storages = [Storage(own[0] + own[1], dtype=torch.uint8), *map(Storage, own[2:])]
        at = [(0, 0), (0, own[0]), *((i, 0) for i in range(1, outputs - 1))]
        recipes = [OfStorage(2, bytes_view(100, MIB // 2))]
        rows = zip(at, own, strict=True)
        recipes += [OfStorage(n, bytes_view(s, d)) for (n, d), s in rows]
        recipes += [Repeated(3), SameInput(1)]
        layout = Layout(layout_inputs, tuple(storages), tuple(recipes), ())
        # Scratch: allocated before its first node, freed after its last one.
        steps = sorted(rng.randrange(self.length) for _ in range(pieces))
        spans += [(n, min(self.length - 1, n + rng.randrange(6))) for n in steps]
        self.sizes += [size() for _ in range(pieces)]
        lives = lives_of(spans, self.sizes, inputs, inputs + outputs)
        last_of, self.edges = [None] * streams, []
        for node in range(self.length):
            stream = rng.randrange(streams)
            waits = {last_of[stream]} | {n for n in last_of if rng.random() < 0.5}
            self.edges += [(n, node) for n in waits if n is not None]
            last_of[stream] = node
        self.touched = [[] for _ in range(self.length)]
        for r, (first, last) in enumerate(spans):
            for node in {
                first,
                last,
                *(n for n in range(first, last) if rng.random() < 0.3),
            }:
                self.touched[node].append(r)
        self.inputs, self.fixed = inputs, inputs + outputs
        places = [(r, 0) for r in range(inputs)]
        places += [(inputs + number, delta) for number, delta in at]
        nodes, slots = [], []
        for node, regions in enumerate(self.touched):
            parameters = tuple((8 * i, bytes(8)) for i in range(len(regions)))
            launch = (1, 1, 1), (32, 1, 1), 0
            nodes.append(
                KernelNode(node, node, f"k{node}", 7, 0, 0, *launch, parameters)
            )
            slots += [PointerSlot(node, i, 0, r, 0) for i, r in enumerate(regions)]
        self.proven = Proven(
            layout,
            Template(len(spans), tuple(nodes), tuple(slots)),
            tuple(self.edges),
            tuple(places),
            lives,
            holders=tuple(range(inputs)),
            held=tuple(self.sizes[:inputs]),
            stages=True,
        )


class Memory:
    """Cells of half a MiB. Nothing gets an address that was in use before."""

    def __init__(self, region):
        self.region, self.next = region, MIB
        self.cells, self.live = {}, {}  # address -> what was written; base -> bytes
        self.begun = set(range(region.inputs))
        self.peak = 0

    def allocate(self, size):
        base, self.next = self.next, self.next + size + MIB
        self.live[base] = size
        self.peak = max(self.peak, sum(self.live.values()))
        return base

    def free_all_but(self, kept):
        """Keep the allocations that these addresses are in."""
        for base, size in list(self.live.items()):
            if not any(base <= address < base + size for address in kept):
                del self.live[base]

    def span(self, address, size):
        if not any(
            b <= address and address + size <= b + s for b, s in self.live.items()
        ):
            raise AssertionError("memory that is not there is touched")
        return range(address, address + size, MIB // 2)

    def write(self, r, address):
        for cell in self.span(address, self.region.sizes[r]):
            if r in self.begun and self.cells.get(cell) != r:
                raise AssertionError(f"region {r} was overwritten, or has moved")
            self.cells[cell] = r

    def launch(self, rng, template, bases):
        """Run the nodes in an order that the edges allow."""
        slots, todo = template.slots, {node.index for node in template.nodes}
        while todo:
            late = {v for u, v in self.region.edges if u in todo}
            node = rng.choice(sorted(todo - late))
            todo.remove(node)
            regions = self.region.touched[node]
            for slot in [slot for slot in slots if slot.node == node]:
                self.write(regions[slot.parameter], bases[slot.region] + slot.delta)
            self.begun.update(regions)


class TestArrange(TestCase):
    def run_stage(self, rng, memory, layout, template, inputs):
        """Returns the base of each storage."""
        own = [memory.allocate(layout.storages[i].size) for i in layout.own]
        scratch = memory.allocate(layout.scratch_size)
        memory.launch(rng, template, [*inputs, *own, None, scratch])
        return own

    def run_once(self, rng, region, arrangement):
        """Returns the memory after a call, and the addresses of outputs."""
        memory, layout = Memory(region), region.proven.layout
        given = [memory.allocate(region.sizes[r]) for r in range(region.inputs)]
        for r, base in enumerate(given):
            memory.cells |= dict.fromkeys(memory.span(base, region.sizes[r]), r)
        if not arrangement.stages:
            whole = arrangement.layout
            own = self.run_stage(rng, memory, whole, arrangement.template, given)
            views = {
                i: r for i, r in enumerate(layout.recipes) if isinstance(r, OfStorage)
            }
            return memory, {i: own[r.storage] + r.view.offset for i, r in views.items()}
        slots = [None] * arrangement.slots
        for position, base in zip(layout.inputs, given):
            slots[position] = base
        done = []
        for stage in arrangement.stages:
            taken = [slots[k] for k in stage.takes]
            own = self.run_stage(rng, memory, stage.layout, stage.template, taken)
            for slot, recipe in zip(stage.gives, stage.layout.recipes, strict=True):
                slots[slot] = own[recipe.storage] + recipe.view.offset
            for slot in stage.drops:
                slots[slot] = None
            memory.free_all_but([address for address in slots if address is not None])
            done += stage.nodes
        self.assertEqual(sorted(done), list(range(region.length)))
        return memory, {output: slots[slot] for output, slot in arrangement.results}

    def check(self, rng, region, arrangement):
        memory, found = self.run_once(rng, region, arrangement)
        layout = region.proven.layout
        by_place = {place: r for r, place in enumerate(region.proven.places)}
        for output, recipe in enumerate(layout.recipes):
            if not isinstance(recipe, OfStorage):
                continue
            number, offset = region.inputs + recipe.storage, recipe.view.offset
            r = by_place.get((number, offset), by_place[number, 0])
            size = recipe.view.extent
            cells = [memory.cells[cell] for cell in memory.span(found[output], size)]
            self.assertEqual(set(cells), {r}, f"output {output}")
        self.assertEqual(found[0], found[4] + MIB // 2)
        if arrangement.stages:
            self.assertEqual(found[layout.recipes.index(Repeated(3))], found[3])
        return memory.peak

    def test_drawn_regions(self):
        rng, cut = random.Random(0), 0
        for _ in range(150):
            region = Region(rng, streams=rng.choice((1, 2)))
            arrangement = arrange(region.proven)
            peak = self.check(rng, region, arrangement)
            if arrangement.stages:
                cut += 1
                self.assertEqual(arrangement.whole.stages, ())
                self.assertLess(peak, self.check(rng, region, arrangement.whole))
        self.assertGreater(cut, 20)

    def test_cuts_that_are_given(self):
        rng = random.Random(0)
        for _ in range(150):
            region = Region(rng)
            inner = rng.sample(range(1, region.length), rng.randrange(1, 4))
            starts = [0, *sorted(inner)]
            arrangement = arrange(region.proven, starts)
            self.assertEqual(arrangement.starts, tuple(starts))
            self.check(rng, region, arrangement)
            self.check(rng, region, arrangement.whole)

    def backward(self, **changes):
        """Each of eight layers reads what was saved and makes a gradient."""
        layout = Layout(
            tuple(range(8)),
            tuple(Storage(8 * MIB) for _ in range(8)),
            tuple(OfStorage(i, bytes_view(8 * MIB)) for i in range(8)),
            (),
        )
        parameters, launch = ((0, bytes(8)), (8, bytes(8))), ((1, 1, 1), (32, 1, 1), 0)
        nodes = tuple(
            KernelNode(n, n, "k", 7, 0, 0, *launch, parameters) for n in range(8)
        )
        slots = [
            PointerSlot(n, i, 0, r, 0)
            for n in range(8)
            for i, r in enumerate((n, 8 + n))
        ]
        proven = Proven(
            layout,
            Template(16, nodes, tuple(slots)),
            tuple((n, n + 1) for n in range(7)),
            tuple((r, 0) for r in range(16)),
            lives_of(
                [*((0, n) for n in range(8)), *((n, 7) for n in range(8))],
                [8 * MIB] * 16,
                8,
                16,
            ),
            holders=tuple(range(8)),
            held=(8 * MIB,) * 8,
            stages=True,
        )
        return dataclasses.replace(proven, **changes)

    def test_backward_is_cut(self):
        made = arrange(self.backward())
        self.assertGreater(len(made.stages), 2)
        self.assertEqual(
            sorted(k for stage in made.stages for k in stage.drops), [*range(8)]
        )

    def test_when_there_is_nothing_to_gain(self):
        self.assertEqual(arrange(self.backward(static=frozenset(range(8)))).stages, ())
        self.assertEqual(arrange(self.backward(holders=(0,) * 8)).stages, ())
        self.assertEqual(arrange(self.backward(held=(GAIN // 16,) * 8)).stages, ())

    def test_saved_outputs_are_not_cut(self):
        layout = self.backward().layout
        saved = (Storage(8 * MIB, saved=True), *layout.storages[1:])
        layout = dataclasses.replace(layout, storages=saved)
        places = [*((r, 0) for r in range(8)), (layout.saved_region, 0)]
        places += [(r, 0) for r in range(8, 15)]
        made = arrange(self.backward(layout=layout, places=tuple(places)))
        self.assertEqual(made.stages, ())
        slot = next(slot for slot in made.template.slots if slot[:2] == (0, 1))
        self.assertEqual(slot.region, made.layout.saved_region)

    def test_numbers_come_after_the_tensors_of_a_stage(self):
        expression = ("add", ("input", 20, int), ("input", 30, int))
        numbers = tuple(NumberSlot(n, 0, "l", expression) for n in range(8))
        template = dataclasses.replace(self.backward().template, numbers=numbers)
        made = arrange(self.backward(template=template))
        self.assertEqual(made.numbers, [20, 30])
        self.assertGreater(len(made.stages), 1)
        for stage in made.stages:
            inputs = [None] * len(stage.takes) + [3, 4]
            self.assertEqual(
                [n.node for n in stage.template.numbers], list(stage.nodes)
            )
            for number in stage.template.numbers:
                self.assertEqual(evaluate(number.expression, inputs), 7)


if __name__ == "__main__":
    run_tests()
