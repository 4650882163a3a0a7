"""Describes a region's outputs: where their bytes lie, and how a call makes the tensors.

    Given         the same object at every call: a number, None, or a tensor that the compiled module owns
    Computed      a number that is computed from numbers among the inputs
    Repeated      the same object as an earlier output
    SameInput     an input itself
    OfInput       a view of an input's memory
    OfStorage     a view of memory that the call allocates
    Empty         a tensor without bytes

Regions are numbered in this order: the tensor inputs, the storages, and the scratch slab. A storage of the layout may
hold several of the capture (Note [Slab and chunks]). A layout contains no address, so two captures of one program have
equal layouts.

Note [The largest first]
The memory of one launch is allocated all at once, so it can be allocated in any order. The caching allocator takes the
smallest block that is large enough, and splits it. Small allocations, if they came first, would split the blocks that
alone are large enough for the large ones.

Note [Slab and chunks]
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

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.memory.packing import aligned
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True)
class TensorView:
    """The layout of a tensor in its memory; `offset` counts bytes from the start of the region."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @functools.cached_property
    def extent(self) -> int:
        """Return the bytes from the start of the first element to the end of the last one."""
        last = 0
        for n, stride in zip(self.size, self.stride):
            if not n:
                return 0
            last += (n - 1) * stride
        return (last + 1) * self.dtype.itemsize


def view_of(tensor: torch.Tensor, offset: int = 0) -> TensorView:
    return TensorView(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, offset)


@dataclass(frozen=True, eq=False)
class Given:
    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Given) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, torch.Tensor):
            same_place = self.value.data_ptr() == other.value.data_ptr() and self.value.device == other.value.device
            return same_place and view_of(self.value) == view_of(other.value)
        return self.value is other.value or bool(bit_key(self.value) == bit_key(other.value))

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True)
class Computed:
    expression: tuple[Any, ...]  # of the numbers among the inputs


@dataclass(frozen=True)
class Repeated:
    output: int


@dataclass(frozen=True)
class SameInput:
    input: int


@dataclass(frozen=True)
class OfInput:
    input: int
    view: TensorView


@dataclass(frozen=True)
class OfStorage:
    storage: int
    view: TensorView


@dataclass(frozen=True)
class Empty:
    view: TensorView


Recipe: TypeAlias = Given | Computed | Repeated | SameInput | OfInput | OfStorage | Empty


@dataclass(frozen=True)
class Storage:
    size: int
    dtype: torch.dtype | None = None  # of one that is allocated as a vector: a slab, of bytes, or a chunk
    starts: tuple[int, ...] = (0,)  # where what was one storage in the capture begins


@dataclass(frozen=True)
class OutputLayout:
    inputs: tuple[int, ...]  # positions of the inputs that are regions
    storages: tuple[Storage, ...]
    recipes: tuple[Recipe, ...]
    scratch: tuple[int, ...]  # sizes of the sub-allocations of the scratch slab

    @functools.cached_property
    def computed(self) -> tuple[tuple[Any, ...], ...]:
        """Return the expressions of the outputs that are numbers."""
        return tuple([recipe.expression for recipe in self.recipes if isinstance(recipe, Computed)])

    @property
    def scratch_region(self) -> int:
        return len(self.inputs) + len(self.storages)

    @property
    def scratch_size(self) -> int:
        return sum(map(aligned, self.scratch))

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Return the regions in the order in which a call allocates them, counted from the first one after the inputs.
        Note [The largest first]"""
        sizes = [storage.size for storage in self.storages] + [self.scratch_size] * bool(self.scratch_size)
        return tuple(sorted(range(len(sizes)), key=lambda k: -sizes[k]))

    @functools.cached_property
    def _outputs_by_storage(self) -> Mapping[int, Sequence[int]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for i, recipe in enumerate(self.recipes):
            if isinstance(recipe, OfStorage):
                found[recipe.storage].append(i)
        return found

    def outputs_of(self, storage: int) -> Sequence[int]:
        return self._outputs_by_storage.get(storage, ())

    def primary(self, storage: int) -> TensorView | None:
        """Return the view that the storage is allocated as: a vector for a slab or a chunk, else the first output that
        spans all of the storage. None if there is no such output, or outputs have several types."""
        size, dtype = self.storages[storage].size, self.storages[storage].dtype
        if dtype is not None:
            return TensorView((size // dtype.itemsize,), (1,), dtype)
        views = [cast("OfStorage", self.recipes[output]).view for output in self.outputs_of(storage)]
        if len({view.dtype for view in views}) > 1:
            return None
        return next((view for view in views if not view.offset and view.extent >= size), None)

    def allocation(self, storage: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        view = self.primary(storage)
        if view is None:
            return (-(-self.storages[storage].size // 16) * 16,), (1,), torch.uint8
        return view.size, view.stride, view.dtype

    def names(self) -> dict[int, str]:
        """Return names of the regions, for tables and messages."""
        names = {region: f"input {position}" for region, position in enumerate(self.inputs)}
        for number in range(len(self.storages)):
            names[len(self.inputs) + number] = "output " + ", ".join(map(str, self.outputs_of(number)))
        return names | {self.scratch_region: "scratch"}


Maker: TypeAlias = "Callable[[Any, Sequence[Any]], Any]"  # of the inputs, and of storages or earlier outputs

reinterpret: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009


def maker_of(recipe: Recipe, empty: Callable[..., torch.Tensor]) -> Maker:
    """Return a function that makes an output of the inputs and of earlier outputs. `empty(size, stride, dtype)` makes a
    tensor."""
    match recipe:
        case Given(value):
            return lambda inputs, outputs: value
        case Repeated(output):
            return lambda inputs, outputs: outputs[output]
        case SameInput(position):
            return lambda inputs, outputs: inputs[position]
        case OfInput(position, view):
            return lambda inputs, outputs: _view_of_input(inputs[position], view)
        case Computed(expression):
            return lambda inputs, outputs: evaluate(expression, inputs)
        case Empty(view):
            return lambda inputs, outputs: empty(view.size, view.stride, view.dtype)
    raise TypeError(f"no input has the memory of {recipe}")


def _view_of_input(source: torch.Tensor, view: TensorView) -> torch.Tensor:
    if view.dtype == source.dtype and not view.offset % view.dtype.itemsize:
        return reinterpret(source, view.size, view.stride, view.offset // view.dtype.itemsize)
    offset = int(source.storage_offset()) * source.dtype.itemsize + view.offset
    empty = torch.empty(0, dtype=view.dtype, device=source.device)
    return empty.set_(source.untyped_storage(), offset // view.dtype.itemsize, view.size, view.stride)


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
