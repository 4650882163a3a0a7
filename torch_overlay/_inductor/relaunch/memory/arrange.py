"""From a proven capture to what is launched: where everything lies, and in how many parts.

The proof knows each allocation of a capture as a region of its own: the inputs, the storages of outputs, and the pieces
of scratch memory. Here they become the regions of a `Layout`. Pieces are packed into slabs (`memory.packing`).

Note [Stages]
A graph launch needs all its memory at once. A backward that runs without a graph frees what the forward saved while it
allocates gradients, so one launch for all of it would need much more. Such a region is cut into a few stages, each a
graph with a layout of its own, launched one after the other on one stream. What a stage makes is allocated just before
it, and what no later stage touches is dropped right after it: an input goes if nobody else holds it, whoever that may
be, and the caching allocator hands its memory to the next stage. So nothing has to be known of the owners of inputs.

What stages hand to one another is in a table of slots: the inputs by position, the storages of outputs, then slabs
of the pieces that live across a cut, and outputs that are views of storages. Pieces that come and go with the same
stages lie together: a backward that leaves the gradients of weights for later has more than a hundred, and each
allocation takes the host a few microseconds.

A region with outputs in a slab, or whose graph knows generators of random numbers, stays whole: a launch of torch's
advances those once for a whole graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import cast, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.memory.outputs import Layout, OfStorage, Recipe, Repeated, Storage, View
from torch_overlay._inductor.relaunch.memory.packing import aligned, cuts, Held, Life, need_of, Order
from torch_overlay._inductor.relaunch.proof.nodes import FIXED, Template, Word


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Node

MOST_STAGES = 8
GAIN = 16 << 20  # bytes that stages must save
STEP = 4 << 20  # and that a stage more must, or this part of all:
PART = 400
SMALL = 1 << 20  # pieces that are no more than this together are not worth a plan


@dataclass(frozen=True)
class Stage:
    nodes: tuple[int, ...]  # in the captured graph
    layout: Layout  # its input k is what lies in slot takes[k]
    template: Template
    takes: tuple[int, ...]
    gives: tuple[int, ...]  # the slots of its storages, then of the outputs that are views of them
    drops: tuple[int, ...]  # slots that no later stage touches


@dataclass(frozen=True)
class Arrangement:
    layout: Layout
    template: Template
    stages: tuple[Stage, ...] = ()  # none: it is launched as a whole
    slots: int = 0
    results: tuple[tuple[int, int], ...] = ()  # (output, slot) of what stages make, repeated ones too

    def describe(self) -> str:
        """What each launch allocates, and what of that is scratch."""
        layouts = [stage.layout for stage in self.stages] or [self.layout]
        made = [sum(aligned(s.size) for s in layout.storages) + layout.scratch_size for layout in layouts]
        each = zip(made, (layout.scratch_size for layout in layouts), strict=True)
        return ", ".join(f"{total / 2**20:.1f} MiB (scratch {scratch / 2**20:.1f})" for total, scratch in each)


@dataclass(frozen=True)
class Proven:
    """`places` has (region, delta) in the layout for each input and storage of the proof; pieces come after these.
    `holders` tells inputs that share their memory, a number for each input, and `held` how many bytes there are;
    `static` inputs don't go."""

    layout: Layout
    template: Template
    edges: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int], ...]
    lives: tuple[Life, ...]  # of all regions of the proof
    holders: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    static: frozenset[int] = frozenset()  # numbers of inputs
    stages: bool = False  # may there be any?

    @property
    def pieces(self) -> range:
        return range(len(self.places), len(self.lives))

    @functools.cached_property
    def words(self) -> Mapping[int, Sequence[Word]]:
        """Of the template, by node."""
        by_node: defaultdict[int, list[Word]] = defaultdict(list)
        for word in self.template.words:
            by_node[word.node].append(word)
        return by_node


def arrange(proven: Proven) -> Arrangement:
    layout, pieces = proven.layout, proven.pieces
    if sum(proven.lives[p].size for p in pieces) <= SMALL and not proven.stages:
        return _whole(proven, *_one_by_one(proven))
    words = [(w.node, w.region) for w in proven.template.words if w.region != FIXED]
    order = Order(len(proven.template.nodes), proven.edges, proven.lives, words)
    whole = _whole(proven, *order.pack(pieces))
    if not proven.stages or layout.saved_size:
        return whole
    spans = [order.span(r) for r in range(len(proven.lives))]
    held = _held(proven, spans, order)
    length = len(order.order)
    at_once = need_of(held, [0], length)
    slack = max(STEP, at_once // PART)
    if not (starts := cuts(held, length, MOST_STAGES, slack))[1:]:
        return whole
    if at_once - need_of(held, starts, length) < GAIN:
        return whole
    return _Cut(proven, whole, order, spans, starts).arrangement()


def _one_by_one(proven: Proven) -> tuple[dict[int, tuple[int, int]], list[int]]:
    offsets, end = {}, 0
    for p in proven.pieces:
        offsets[p] = 0, end
        end += aligned(proven.lives[p].size)
    return offsets, [end] if end else []


def _whole(proven: Proven, offsets: dict[int, tuple[int, int]], slabs: Sequence[int]) -> Arrangement:
    old, layout = proven.layout, _with_slabs(proven.layout, slabs)
    at = _slab_regions(layout, len(slabs))
    places = {r: (layout.saved_region if k == old.saved_region else k, d) for r, (k, d) in enumerate(proven.places)}
    places |= {p: (at[slab], offset) for p, (slab, offset) in offsets.items()}
    template = _moved(proven, places, proven.template.nodes, layout.scratch_region + 1)
    return Arrangement(layout, template)


def _with_slabs(layout: Layout, slabs: Sequence[int]) -> Layout:
    """The first slab is the scratch region, others are storages that no output lies in."""
    storages = (*layout.storages, *map(Storage, slabs[1:]))
    return dataclasses.replace(layout, storages=storages, scratch=tuple(slabs[:1]))


def _slab_regions(layout: Layout, slabs: int) -> list[int]:
    first = layout.saved_region - (slabs - 1)
    return [layout.scratch_region, *range(first, first + slabs - 1)]


def _moved(proven: Proven, places: Mapping[int, tuple[int, int]], nodes: Sequence[Node], regions: int) -> Template:
    """With the words of these nodes, each by its region's new place."""
    words = []
    for node in nodes:
        for index, parameter, offset, region, delta in proven.words.get(node.index, ()):
            new, moved = places[region]
            words.append(Word(index, parameter, offset, new, moved + delta))
    return Template(regions, tuple(nodes), tuple(words))


def _held(proven: Proven, spans: Sequence[tuple[int, int] | None], order: Order) -> list[Held]:
    """What a launch needs. Inputs that share memory go together, with the last of them."""
    last = len(order.order)
    held = [Held(proven.lives[p].size, *span, slab=True) for p in proven.pieces if (span := spans[p]) is not None]
    inputs = len(proven.layout.inputs)
    for r in range(inputs, len(proven.places)):
        if (span := spans[r]) is not None:
            held.append(Held(proven.lives[r].size, span[0], last))
    together: defaultdict[int, list[int]] = defaultdict(list)
    for r, holder in enumerate(proven.holders):
        together[holder].append(r)
    for regions in together.values():
        ends = [span[1] for r in regions if (span := spans[r]) is not None]
        stays = not proven.static.isdisjoint(regions)
        held.append(Held(proven.held[regions[0]], 0, last if stays else max(ends, default=0)))
    return held


class _Cut:
    """The stages of a graph that is cut at these positions."""

    def __init__(
        self,
        proven: Proven,
        whole: Arrangement,
        order: Order,
        spans: Sequence[tuple[int, int] | None],
        starts: Sequence[int],
    ) -> None:
        self.proven, self.whole, self.order, self.starts = proven, whole, order, starts
        self.ends = [*starts[1:], len(order.order)]
        self.spans = [None if span is None else (self._stage(span[0]), self._stage(span[1])) for span in spans]
        layout = proven.layout
        self.inputs = len(layout.inputs)
        self.at: dict[int, tuple[int, int]] = {}  # (region, offset) of what lies in a storage or slab with others
        self.storage = {region: number for number, region in zip(layout.own, self._find_storages(), strict=True)}
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
        """(output, slot); from this slot on they are free. Whatever is all of its storage needs none of its own."""
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
        """A new one, after all others, with the first and the last stage that touch it."""
        self.spans.append(span)
        return len(self.spans) - 1

    def _find_storages(self) -> list[int]:
        """The regions of the layout's own storages: those of the proof, or one for the members of a chunk."""
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
        stages = tuple(self._make(number) for number in range(len(self.starts)))
        results = tuple(self.results.items())
        return dataclasses.replace(
            self.whole, layout=self.proven.layout, stages=stages, slots=self.slots, results=results
        )

    def _make(self, number: int) -> Stage:
        proven, spans = self.proven, self.spans
        begin, end = self.starts[number], self.ends[number]
        indices = tuple(sorted(self.order.order[begin:end]))
        touched = {r for r, holders in enumerate(self.order.holders) if (holders >> begin) & ((1 << (end - begin)) - 1)}
        last = number == len(self.starts) - 1
        # A storage that no node looks at is made by the last stage.
        first = [number if span is None and last else (span or (-1,))[0] for span in spans]
        own = [r for r in (*self.storage, *self.slab) if first[r] == number]
        held = {self.at[r][0] if r in self.at else r for r in touched}
        takes = sorted(r for r in held if r < self.inputs or (r in self.slot and first[r] < number))
        inside = [p for p in proven.pieces if p not in self.at and p in touched]
        offsets, slabs = self.order.pack(inside)
        storages, recipes, gives = self._outputs(own)
        made = _with_slabs(Layout(tuple(range(len(takes))), storages, recipes, ()), slabs)
        at = _slab_regions(made, len(slabs))
        places = {r: (k, 0) for k, r in enumerate(takes)}
        places |= {r: (len(takes) + i, 0) for i, r in enumerate(own)}
        places |= {r: (places[home][0], offset) for r, (home, offset) in self.at.items() if home in places}
        places |= {p: (at[slab], offset) for p, (slab, offset) in offsets.items()}
        nodes = [proven.template.nodes[i] for i in indices]
        template = _moved(proven, places, nodes, made.scratch_region + 1)
        return Stage(
            indices,
            made,
            template,
            tuple(self.slot[r] for r in takes),
            gives,
            tuple(self.slot[r] for r in self._dropped(number)),
        )

    def _outputs(self, own: Sequence[int]) -> tuple[tuple[Storage, ...], tuple[Recipe, ...], tuple[int, ...]]:
        """A stage gives what the region's storages are allocated as, slabs as bytes, and views of the storages."""
        layout = self.proven.layout
        storages, recipes = [], []
        for i, r in enumerate(own):
            if r in self.slab:
                storages.append(Storage(self.slab[r]))
                size, stride, dtype = (self.slab[r],), (1,), torch.uint8
            else:
                storages.append(layout.storages[self.storage[r]])
                size, stride, dtype = layout.allocation(self.storage[r])
            recipes.append(OfStorage(i, View(size, stride, dtype)))
        slots = [self.slot[r] for r in own]
        for i, r in enumerate(own):
            for output, slot in self.views.get(r, ()):
                recipes.append(OfStorage(i, cast("OfStorage", layout.recipes[output]).view))
                slots.append(slot)
        return tuple(storages), tuple(recipes), tuple(slots)

    def _dropped(self, number: int) -> list[int]:
        """An input that nothing touches goes with the first stage."""
        found = [r for r in range(self.inputs) if ((self.spans[r] or (0, 0))[1]) == number]
        return found + [slab for slab in self.slab if (self.spans[slab] or (0, 0))[1] == number]
