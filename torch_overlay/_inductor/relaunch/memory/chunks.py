"""Puts the outputs that are saved for a backward into a slab or chunks, and small gradients into chunks.

The saved tensors of a forward are not allocated one by one. If they are small together, they share one slab. If they
are large, one slab would keep all of them alive until the backward has used the last one, so they are allocated in
chunks: a chunk has tensors of one type that the forward made one after the other, since the backward has used them all
at about the same time. A chunk is no larger than the segments that the same tensors would fill without a graph, so it
fits where those were. Between tensors that live longer (for example the optimizer's, which are allocated when the first
step's tensors are freed) there are holes, which tensors allocated one by one would fill. So when the region is
captured, each hole gets the sequence of tensors that fills most of it, a large hole several sequences, and the
remaining tensors are cut into chunks of full size. Segments larger than a chunk that are entirely free are not used as
holes: a chunk would take a part of a segment that an allocation of its full size needs.

The small gradients of a backward, those of biases and norms, are put into chunks as well: they are half of a model's
gradients or more, and would be allocated and freed one by one at each step, for a thousandth of the bytes. A chunk
lives as long as any of its gradients, so it is no larger than the block that the caching allocator takes from the
device for an allocation of that size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.memory.outputs import OfStorage, Repeated, Storage, TensorView
from torch_overlay._inductor.relaunch.memory.packing import aligned


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_overlay._inductor.relaunch.memory.outputs import Recipe

CHUNK = 20 << 20  # a segment of the caching allocator for allocations of less than 10 MiB
HOLE = 2 << 20  # bytes; a hole that takes less is not worth an allocation,
HOLES = 256  # nor is a hole that takes less than 1 / HOLES of all bytes; at most so many holes are filled
LITTLE = 32 << 10  # bytes; a gradient of at most this size is put into a chunk
LITTLE_CHUNK = 256 << 10


def place(
    recipes: Sequence[Recipe],
    sizes: Sequence[int],
    saved: frozenset[int],
    made: Sequence[int],
    *,
    gradients: bool = False,
    holes: Sequence[int] = (),
) -> tuple[tuple[Recipe, ...], tuple[Storage, ...], tuple[tuple[int, int], ...]]:
    """Put storages that only saved outputs use into a slab or chunks, and small `gradients` into chunks. Return the new
    recipes, the new storages, and (new storage, byte in it) for each old storage. `made` has the order in which the
    region makes the storages, `holes` the sizes of the allocator's free blocks."""

    def in_order(storages: Iterable[int]) -> list[int]:
        return sorted(storages, key=lambda i: (made[i], i))

    users: list[list[int]] = [[] for _ in sizes]
    types: list[set[torch.dtype]] = [set() for _ in sizes]
    for output, recipe in enumerate(recipes):
        if isinstance(recipe, OfStorage):
            users[recipe.storage].append(output)
            types[recipe.storage].add(recipe.view.dtype)
        elif isinstance(recipe, Repeated) and isinstance(first := recipes[recipe.output], OfStorage):
            users[first.storage].append(output)
    needs = list(map(aligned, sizes))
    ours = [i for i, outputs in enumerate(users) if saved.issuperset(outputs)]
    slab = set(ours if len(ours) > 1 else ())
    members: list[list[int]] = []
    if (total := sum(needs[i] for i in slab)) >= 2 * CHUNK:
        slab = _small(ours, sizes, types, total // 64)
        rest = set(ours) - slab
        filled = _fill(in_order(rest), needs, types, holes, max(HOLE, total // HOLES))
        members = [chunk for chunk in filled if len(chunk) > 1]
        members += _chunks(in_order(rest.difference(*filled)), needs, types, CHUNK)
    if gradients:
        little = {i for i, size in enumerate(sizes) if size <= LITTLE and len(types[i]) == 1}
        members += _chunks(in_order(little.difference(ours)), needs, types, LITTLE_CHUNK)
    groups: list[tuple[list[int], torch.dtype | None]] = [(sorted(slab), torch.uint8)] * bool(slab)
    groups += [(sorted(chunk), next(iter(types[chunk[0]]))) for chunk in members]
    groups += [([i], None) for i in set(range(len(sizes))).difference(*[held for held, _ in groups])]
    storages: list[Storage] = []
    places: dict[int, tuple[int, int]] = {}
    for number, (held, dtype) in enumerate(sorted(groups, key=lambda group: group[0])):
        *starts, end = 0, *itertools.accumulate(needs[i] for i in held)
        places |= {i: (number, start) for i, start in zip(held, starts, strict=True)}
        storages.append(Storage(sizes[held[0]] if dtype is None else end, dtype, tuple(starts)))
    at = tuple([places[i] for i in range(len(sizes))])
    return tuple(_placed(recipe, at) for recipe in recipes), tuple(storages), at


def _placed(recipe: Recipe, places: Sequence[tuple[int, int]]) -> Recipe:
    if not isinstance(recipe, OfStorage):
        return recipe
    storage, offset = places[recipe.storage]
    view = recipe.view
    return OfStorage(storage, TensorView(view.size, view.stride, view.dtype, view.offset + offset) if offset else view)


def _small(ours: Sequence[int], sizes: Sequence[int], types: Sequence[set[torch.dtype]], most: int) -> set[int]:
    """Return the smallest storages, up to `most` bytes together, and those whose outputs have several types or none."""
    found, total = {i for i in ours if len(types[i]) != 1}, 0
    for i in sorted(ours, key=sizes.__getitem__):
        total += aligned(sizes[i])
        if total > most:
            break
        found.add(i)
    return found


def _fill(
    ours: Sequence[int], needs: Sequence[int], types: Sequence[set[torch.dtype]], holes: Sequence[int], least: int
) -> list[list[int]]:
    """Return for each hole, the largest first, the sequence of storages of one type that fills most of it, if it fills
    at least `least` bytes. Storages that are in no sequence remain."""
    rows: dict[torch.dtype, list[int]] = {}
    for i in ours:
        (dtype,) = types[i]
        rows.setdefault(dtype, []).append(i)
    found: list[list[int]] = []
    taken: set[int] = set()
    parts = [part for hole in holes for part in [*[CHUNK] * (hole // CHUNK), hole % CHUNK] if part >= least]
    for hole in sorted(parts, reverse=True)[:HOLES]:
        best = least - 1
        members: list[int] = []
        for row in rows.values():
            first = size = 0  # of a window that ends with each storage of the row in turn, and contains no taken one
            for last, i in enumerate(row):
                if i in taken:
                    first, size = last + 1, 0
                    continue
                size += needs[i]
                while size > hole:
                    size -= needs[row[first]]
                    first += 1
                if size > best:
                    best, members = size, row[first : last + 1]
        if members:
            found.append(members)
            taken.update(members)
    return found


def _chunks(ours: Sequence[int], needs: Sequence[int], types: Sequence[set[torch.dtype]], full: int) -> list[list[int]]:
    """Return groups of storages of one type that become one chunk, of up to `full` bytes each. A storage that is alone
    in its group is left out."""
    chunks: list[list[int]] = []
    filled: dict[torch.dtype, tuple[list[int], int]] = {}
    for i in ours:
        (dtype,) = types[i]
        chunk, size = filled.get(dtype, ([], 0))
        if not chunk or size + needs[i] > full:
            chunks.append(chunk := [])
            size = 0
        chunk.append(i)
        filled[dtype] = chunk, size + needs[i]
    return [chunk for chunk in chunks if len(chunk) > 1]
