"""Arranges a proven capture for launches: gives each allocation its place, and cuts a backward into stages.

The proof has a region for each allocation of a capture: the inputs, the storages of outputs, and the scratch
allocations (`pieces`). Here they become the regions of an `OutputLayout`. Scratch allocations are packed into slabs
(`memory.packing`).

Note [Stages]
A graph launch needs all its memory at once. A backward that runs without a graph frees saved tensors while it allocates
gradients, so a single launch of the backward would need much more memory. Such a region is cut into a few stages, each
a graph with a layout of its own, launched one after the other on one stream. The memory that a stage makes is allocated
just before the stage, and the references to memory that no later stage touches are dropped right after it: an input is
freed if nothing else references it, and the caching allocator can use its memory for the next stage. So the owners of
inputs need not be known.

Stages pass memory to one another in a table of slots: the inputs by position, the storages of outputs, then slabs of
the scratch allocations that live across a cut, and outputs that are views of storages. Scratch allocations with the
same first and last stage share a slab: a backward that leaves the gradients of weights for later has more than a
hundred, and each allocation takes the host time.

A region whose graph uses random number generators is not cut: torch's graph launch advances the generators once for a
whole graph. A backward has no outputs in a slab: these are what a forward saves.

Finds where to cut a graph into parts that are launched one after the other, so that they need less memory.

A part needs all memory that is held anywhere in it, for it is launched at once. Only memory in slabs can be shared
inside of a part. With many parts a launch takes the host longer, so there are as few as bring most of the gain. This
module is pure: positions are those of an order of the nodes, sizes are bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import cast, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.memory.outputs import (
    OfStorage,
    OutputLayout,
    Recipe,
    Repeated,
    Storage,
    TensorView,
)
from torch_overlay._inductor.relaunch.memory.packing import aligned, Life, Order
from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, moved
from torch_overlay._inductor.relaunch.proof.nodes import FIXED, PointerSlot, Template


if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Node


CANDIDATES = 20  # places for cuts: so many where most bytes begin or end, and about as many at equal distances
LENIENT = 8
IGNORED = 2000  # memory in a slab with less than 1 / IGNORED of all bytes is ignored when cuts are looked for


@dataclass(frozen=True)
class LaunchMemory:
    """Memory that a launch needs from position `first` to `last`, in a slab with others or by itself."""

    size: int
    first: int
    last: int
    slab: bool = False


def cuts(held: Sequence[LaunchMemory], length: int, most: int, slack: int, inside: Container[int] = ()) -> list[int]:
    """Return where to cut a graph of `length` nodes into parts that are launched one after the other: the positions at
    which a part begins, including 0. Each part needs all memory that is held anywhere in it, but memory in slabs that
    is held only inside the part can be shared. No part begins at a position among `inside`. There are at most `most`
    parts, and no more than it takes to bring the largest need of a part within `slack` of the best.

    Memory that something else keeps alive is counted as freed here. In that case, the part that really needs most may
    be one that needs far more than is held at any moment of it. So the largest excess of a part's need over the most
    held at a moment is limited, too: it is within `LENIENT * slack` of the best."""
    total = sum(h.size for h in held)
    grid = [at for at in _candidates(held, length) if at not in inside]
    slabs = [h for h in held if h.slab and h.size * IGNORED > total]
    need = _needs([*slabs, *(h for h in held if not h.slab)], grid)
    goal, stage_cuts = _fewest(need, grid, most, slack)
    if len(stage_cuts) < 2:
        return [0]
    at_a_moment = _most_at_a_moment(held, grid)
    extra = {pair: cost - at_a_moment[pair] for pair, cost in need.items() if cost <= goal}
    return _fewest(extra, grid, most, LENIENT * slack)[1]


def _fewest(costs: Mapping[tuple[int, int], int], grid: Sequence[int], most: int, slack: int) -> tuple[int, list[int]]:
    """Return the cost of the best cut plus `slack`, and the starts of the fewest parts that each cost no more than
    that."""
    ways: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, ())}]  # by number of parts, and by where they end
    for _ in range(most):
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for (begin, end), cost in costs.items():
            if begin in ways[-1]:
                before, stage_cuts = ways[-1][begin]
                worst = max(before, cost)
                if end not in reached or worst < reached[end][0]:
                    reached[end] = worst, (*stage_cuts, begin)
        ways.append(reached)
    whole = [reached[grid[-1]] for reached in ways if grid[-1] in reached and grid[-1]]
    if not whole:
        return 0, [0]
    goal = min(cost for cost, _ in whole) + slack
    return goal, list(next(stage_cuts for cost, stage_cuts in whole if cost <= goal))


def _most_at_a_moment(held: Sequence[LaunchMemory], grid: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the most bytes held at any one moment of each part between two places of the grid."""
    change: dict[int, int] = dict.fromkeys(grid, 0)
    for h in held:
        change[h.first] = change.get(h.first, 0) + h.size
        change[h.last + 1] = change.get(h.last + 1, 0) - h.size
    live, cell, most = 0, -1, [0] * (len(grid) - 1)
    for at in sorted(change):
        live += change[at]
        cell += cell + 1 < len(grid) and at == grid[cell + 1]
        if cell < len(most):
            most[cell] = max(most[cell], live)
    return {(a, grid[j + 1]): max(most[i : j + 1]) for i, a in enumerate(grid[:-1]) for j in range(i, len(most))}


def _needs(held: Sequence[LaunchMemory], grid: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return, for each part between two places of the grid, the bytes that it needs at once: all that is held anywhere
    in it, but of the slabs that are held only inside of it the most that are held at one position."""
    by_begin = sorted(held, key=lambda h: h.first)
    slabs = sorted([h for h in held if h.slab], key=lambda h: h.last)
    begins = sorted({h.first for h in slabs})
    by_end = [(h, bisect.bisect_left(begins, h.first), bisect.bisect_right(begins, h.last)) for h in slabs]
    needs: dict[tuple[int, int], int] = {}
    for i, a in enumerate(grid):
        touched = [h for h in by_begin if h.last >= a]
        inside = [found for found in by_end if found[0].first >= a]
        live, need, most, j, k = [0] * len(begins), 0, 0, 0, 0  # live: bytes of `inside` at each position of `begins`
        for b in grid[i + 1 :]:
            while j < len(touched) and touched[j].first < b:
                need += touched[j].size
                j += 1
            while k < len(inside) and inside[k][0].last < b:
                slab, first, end = inside[k]
                for at in range(first, end):
                    live[at] = now = live[at] + slab.size
                    if now > most:
                        most = now
                need -= slab.size
                k += 1
            needs[a, b] = need + most
    return needs


def _candidates(held: Sequence[LaunchMemory], length: int) -> list[int]:
    """Return positions where most bytes begin or end, and some at equal distances."""
    weight: dict[int, int] = {}
    for h in held:
        for at in (h.first, h.last + 1):
            if 0 < at < length:
                weight[at] = weight.get(at, 0) + h.size
    heavy = sorted(weight, key=lambda at: (-weight[at], at))[:CANDIDATES]
    return sorted({0, length, *heavy, *[length * i // CANDIDATES for i in range(1, CANDIDATES)]})


def need_of(held: Sequence[LaunchMemory], stage_cuts: Sequence[int], length: int) -> int:
    """Return the bytes that the part that needs most needs at once."""
    grid = [*stage_cuts, length]
    needs = _needs(held, grid)
    return max(needs[part] for part in itertools.pairwise(grid))


MOST_STAGES = 8
GAIN = 16 << 20  # bytes that stages must save
STEP = 4 << 20  # bytes that each further stage must save, or one PART-th of all if that is more
PART = 400
SMALL = 1 << 20  # bytes; if all scratch allocations together have no more, packing them is not worth the time


@dataclass(frozen=True)
class Stage:
    layout: OutputLayout  # its input k is the tensor in slot takes[k]
    template: Template
    takes: tuple[int, ...]
    gives: tuple[int, ...]  # the slots of its storages, then of the outputs that are views of them
    drops: tuple[int, ...]  # slots to empty after it, since no later stage touches them


@dataclass(frozen=True)
class Arrangement:
    layout: OutputLayout
    template: Template
    stages: tuple[Stage, ...] = ()  # empty: the graph is launched as a whole
    slots: int = 0
    results: tuple[tuple[int, int], ...] = ()  # (output, slot) of the outputs that stages make, repeated ones too

    @property
    def numbers(self) -> list[int]:
        """The positions of the inputs that number slots refer to. A stage gets these numbers after its tensors."""
        return sorted(inputs_of(slot.expression for slot in self.template.numbers))

    def describe(self) -> str:
        """Return a text with the MiB that each launch allocates, and how many of them are scratch."""
        layouts = [stage.layout for stage in self.stages] or [self.layout]
        made = [sum(aligned(s.size) for s in layout.storages) + layout.scratch_size for layout in layouts]
        each = zip(made, (layout.scratch_size for layout in layouts), strict=True)
        return ", ".join(f"{total / 2**20:.1f} MiB (scratch {scratch / 2**20:.1f})" for total, scratch in each)


@dataclass(frozen=True)
class Proven:
    """A proven capture. `places` has (region, delta) in the layout for each input and storage of the proof; scratch
    allocations (`pieces`) come after these. `holders` has a number for each input, which is the same for inputs that
    share their memory, and `held` the bytes of that memory; `static` inputs are not freed."""

    layout: OutputLayout
    template: Template
    edges: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int], ...]
    lives: tuple[Life, ...]  # of all regions of the proof
    holders: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    static: frozenset[int] = frozenset()  # numbers of inputs
    stages: bool = False  # may the graph be cut into stages?

    @property
    def pieces(self) -> range:
        return range(len(self.places), len(self.lives))

    @functools.cached_property
    def pointer_slots(self) -> Mapping[int, Sequence[PointerSlot]]:
        """Return the pointer slots of the template, by node."""
        by_node: defaultdict[int, list[PointerSlot]] = defaultdict(list)
        for slot in self.template.slots:
            by_node[slot.node].append(slot)
        return by_node


def arrange(proven: Proven) -> Arrangement:
    """Return the arrangement of a proven capture."""
    pieces = proven.pieces
    if sum(proven.lives[p].size for p in pieces) <= SMALL and not proven.stages:
        return _whole(proven, *_one_by_one(proven))
    pointer_slots = [(s.node, s.region) for s in proven.template.slots if s.region != FIXED]
    order = Order(len(proven.template.nodes), proven.edges, proven.lives, pointer_slots)
    spans = [order.span(r) for r in range(len(proven.lives))]
    whole = _whole(proven, *order.pack(pieces))
    if not proven.stages:
        return whole
    held = _held(proven, spans, order)
    length = len(order.order)
    at_once = need_of(held, [0], length)
    slack = max(STEP, at_once // PART)
    if not (stage_cuts := cuts(held, length, MOST_STAGES, slack, _inside(proven.template, order)))[1:]:
        return whole
    if at_once - need_of(held, stage_cuts, length) < GAIN:
        return whole
    return _Cut(proven, whole, order, spans, stage_cuts).arrangement()


def _inside(template: Template, order: Order) -> set[int]:
    """Return the positions between the nodes of a conditional, where the graph can't be cut."""
    found: set[int] = set()
    for each in template.conditionals:
        at = [order.position[node] for node in (each.setter, *itertools.chain(*each.branches))]
        found.update(range(min(at) + 1, max(at) + 1))
    return found


def _one_by_one(proven: Proven) -> tuple[dict[int, tuple[int, int]], list[int]]:
    offsets, end = {}, 0
    for p in proven.pieces:
        offsets[p] = 0, end
        end += aligned(proven.lives[p].size)
    return offsets, [end] if end else []


def _whole(proven: Proven, offsets: dict[int, tuple[int, int]], slabs: Sequence[int]) -> Arrangement:
    layout = _with_slabs(proven.layout, slabs)
    at = _slab_regions(layout, len(slabs))
    places = dict(enumerate(proven.places))
    places |= {p: (at[slab], offset) for p, (slab, offset) in offsets.items()}
    template = _moved(proven, places, proven.template.nodes, layout.scratch_region + 1)
    return Arrangement(layout, template)


def _with_slabs(layout: OutputLayout, slabs: Sequence[int]) -> OutputLayout:
    """Return the layout with these slabs: the first is the scratch region, the others are storages without outputs."""
    storages = (*layout.storages, *map(Storage, slabs[1:]))
    return dataclasses.replace(layout, storages=storages, scratch=tuple(slabs[:1]))


def _slab_regions(layout: OutputLayout, slabs: int) -> list[int]:
    scratch = layout.scratch_region
    return [scratch, *range(scratch - slabs + 1, scratch)]


def _moved(proven: Proven, places: Mapping[int, tuple[int, int]], nodes: Sequence[Node], regions: int) -> Template:
    """Return a template of these nodes, whose pointer slots refer to the regions' new places."""
    pointer_slots = []
    for node in nodes:
        for index, parameter, offset, region, delta in proven.pointer_slots.get(node.index, ()):
            new, moved = places[region]
            pointer_slots.append(PointerSlot(index, parameter, offset, new, moved + delta))
    own = {node.index for node in nodes}
    numbers = tuple(slot for slot in proven.template.numbers if slot.node in own)
    conditionals = tuple(each for each in proven.template.conditionals if each.setter in own)
    return Template(regions, tuple(nodes), tuple(pointer_slots), numbers, conditionals)


def _held(proven: Proven, spans: Sequence[tuple[int, int] | None], order: Order) -> list[LaunchMemory]:
    """Return the memory that a launch needs, and from where to where. Inputs that share memory are freed together,
    after the last use of any."""
    last = len(order.order)
    held = [
        LaunchMemory(proven.lives[p].size, *span, slab=True) for p in proven.pieces if (span := spans[p]) is not None
    ]
    inputs = len(proven.layout.inputs)
    for r in range(inputs, len(proven.places)):
        if (span := spans[r]) is not None:
            held.append(LaunchMemory(proven.lives[r].size, span[0], last))
    together: defaultdict[int, list[int]] = defaultdict(list)
    for r, holder in enumerate(proven.holders):
        together[holder].append(r)
    for regions in together.values():
        ends = [span[1] for r in regions if (span := spans[r]) is not None]
        stays = not proven.static.isdisjoint(regions)
        held.append(LaunchMemory(proven.held[regions[0]], 0, last if stays else max(ends, default=0)))
    return held


class _Cut:
    """A graph that is cut into stages at the positions `stage_cuts` of the order."""

    def __init__(
        self,
        proven: Proven,
        whole: Arrangement,
        order: Order,
        spans: Sequence[tuple[int, int] | None],
        stage_cuts: Sequence[int],
    ) -> None:
        self.proven, self.whole, self.order, self.stage_cuts = proven, whole, order, stage_cuts
        self.ends = [*stage_cuts[1:], len(order.order)]
        self.spans = [None if span is None else (self._stage(span[0]), self._stage(span[1])) for span in spans]
        layout = proven.layout
        self.inputs = len(layout.inputs)
        self.at: dict[int, tuple[int, int]] = {}  # (region, offset) of regions that lie in a chunk or slab with others
        self.storage = {region: number for number, region in enumerate(self._find_storages())}
        self.slab = self._pack_crossing()  # region -> bytes
        # Slots: positions of inputs, then storages, then slabs.
        slots = 1 + max(layout.inputs, default=-1)
        self.slot = dict(enumerate(layout.inputs))
        self.slot |= {r: slots + i for i, r in enumerate((*self.storage, *self.slab))}
        self.views: dict[int, list[tuple[int, int]]] = {}  # region -> (output, slot) of the views of its storage
        found = dict(self._find_results(slots + len(self.storage) + len(self.slab)))
        repeated = [(i, r.output) for i, r in enumerate(layout.recipes) if isinstance(r, Repeated)]
        self.results = found | {i: found[first] for i, first in repeated if first in found}
        self.slots = 1 + max([*self.slot.values(), *self.results.values()])

    def _find_results(self, free: int) -> Iterator[tuple[int, int]]:
        """Yield (output, slot). Slots from `free` on are unused. A storage is allocated with the view of one of its
        outputs; that output has the slot of the storage."""
        layout = self.proven.layout
        for region, number in self.storage.items():
            primary, taken = layout.primary(number), False
            for output in layout.outputs_of(number):
                if not taken and cast("OfStorage", layout.recipes[output]).view == primary:
                    taken = True
                    yield output, self.slot[region]
                else:
                    self.views.setdefault(region, []).append((output, free))
                    yield output, free
                    free += 1

    def _region(self, span: tuple[int, int] | None) -> int:
        """Add a region after all others, and return its number. `span`: the first and the last stage that touch it."""
        self.spans.append(span)
        return len(self.spans) - 1

    def _find_storages(self) -> list[int]:
        """Return the regions of the layout's storages: regions of the proof, or a new one for a chunk's members."""
        members: defaultdict[int, list[int]] = defaultdict(list)
        for r in range(self.inputs, len(self.proven.places)):
            members[self.proven.places[r][0]].append(r)
        return [self._joined(regions) if len(regions) > 1 else regions[0] for _, regions in sorted(members.items())]

    def _joined(self, regions: Sequence[int]) -> int:
        spans = [span for r in regions if (span := self.spans[r]) is not None]
        chunk = self._region((min(spans)[0], max(last for _, last in spans)) if spans else None)
        self.at |= {r: (chunk, self.proven.places[r][1]) for r in regions}
        return chunk

    def _pack_crossing(self) -> dict[int, int]:
        together: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for p in self.proven.pieces:
            if (span := self.spans[p]) is not None and span[0] < span[1]:
                together[span].append(p)
        found: dict[int, int] = {}
        for span, pieces in sorted(together.items()):
            places, sizes = self.order.pack(pieces)
            slabs = [self._region(span) for _ in sizes]
            self.at |= {p: (slabs[slab], offset) for p, (slab, offset) in places.items()}
            found |= zip(slabs, sizes, strict=True)
        return found

    def _stage(self, position: int) -> int:
        return next(i for i, end in enumerate(self.ends) if position < end)

    def arrangement(self) -> Arrangement:
        stages = tuple(self._make(number) for number in range(len(self.stage_cuts)))
        results = tuple(self.results.items())
        return Arrangement(self.proven.layout, self.whole.template, stages, self.slots, results)

    def _make(self, number: int) -> Stage:
        proven, spans = self.proven, self.spans
        begin, end = self.stage_cuts[number], self.ends[number]
        touched = {r for r, holders in enumerate(self.order.holders) if (holders >> begin) & ((1 << (end - begin)) - 1)}
        last = number == len(self.stage_cuts) - 1
        # A storage that no node touches is made by the last stage.
        first = [number if span is None and last else (span or (-1,))[0] for span in spans]
        own = [r for r in (*self.storage, *self.slab) if first[r] == number]
        held = {self.at[r][0] if r in self.at else r for r in touched}
        takes = sorted(r for r in held if r < self.inputs or (r in self.slot and first[r] < number))
        inside = [p for p in proven.pieces if p not in self.at and p in touched]
        offsets, slabs = self.order.pack(inside)
        storages, recipes, gives = self._outputs(own)
        made = _with_slabs(OutputLayout(tuple(range(len(takes))), storages, recipes, ()), slabs)
        at = _slab_regions(made, len(slabs))
        places = {r: (k, 0) for k, r in enumerate(takes)}
        places |= {r: (len(takes) + i, 0) for i, r in enumerate(own)}
        places |= {r: (places[home][0], offset) for r, (home, offset) in self.at.items() if home in places}
        places |= {p: (at[slab], offset) for p, (slab, offset) in offsets.items()}
        nodes = [proven.template.nodes[i] for i in sorted(self.order.order[begin:end])]
        template = _moved(proven, places, nodes, made.scratch_region + 1)
        given = {k: i for i, k in enumerate(self.whole.numbers, start=len(takes))}
        numbers = [slot._replace(expression=moved(slot.expression, given)) for slot in template.numbers]
        template = dataclasses.replace(template, numbers=tuple(numbers))
        return Stage(
            made,
            template,
            tuple(self.slot[r] for r in takes),
            gives,
            tuple(self.slot[r] for r in self._dropped(number)),
        )

    def _outputs(self, own: Sequence[int]) -> tuple[tuple[Storage, ...], tuple[Recipe, ...], tuple[int, ...]]:
        """Return the storages, recipes and slots of a stage that makes the regions `own`: its outputs are the storages,
        as the layout allocates them, the slabs, as bytes, and the views of the storages."""
        layout = self.proven.layout
        storages, recipes = [], []
        for i, r in enumerate(own):
            if r in self.slab:
                storages.append(Storage(self.slab[r]))
                size, stride, dtype = (self.slab[r],), (1,), torch.uint8
            else:
                storages.append(layout.storages[self.storage[r]])
                size, stride, dtype = layout.allocation(self.storage[r])
            recipes.append(OfStorage(i, TensorView(size, stride, dtype)))
        slots = [self.slot[r] for r in own]
        for i, r in enumerate(own):
            for output, slot in self.views.get(r, ()):
                recipes.append(OfStorage(i, cast("OfStorage", layout.recipes[output]).view))
                slots.append(slot)
        return tuple(storages), tuple(recipes), tuple(slots)

    def _dropped(self, number: int) -> list[int]:
        """Return the inputs and slabs to drop after a stage; an input that nothing touches goes after the first."""
        found = [r for r in range(self.inputs) if ((self.spans[r] or (0, 0))[1]) == number]
        return found + [slab for slab in self.slab if (self.spans[slab] or (0, 0))[1] == number]
