"""What a region's outputs are made of: where their bytes lie, and how a call makes the tensors again.

    Given         the same object at every call: a number, None, or a tensor that the compiled module owns
    Repeated      the same object as an earlier output
    SameInput     an input itself
    OfInput       a view of an input's memory
    OfStorage     a view of memory that the call allocates
    Empty         a tensor without bytes

Regions are numbered: the tensor inputs, the storages that are allocated one by one, the slab of those that are saved
for the backward, and the scratch slab. A layout holds no address, so two captures of one program have equal layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING, TypeAlias

import torch


if TYPE_CHECKING:
    from collections.abc import Sequence

SLAB_ALIGNMENT = 512  # as the caching allocator aligns


def align(size: int) -> int:
    return -(-size // SLAB_ALIGNMENT) * SLAB_ALIGNMENT


@dataclass(frozen=True)
class View:
    """How a tensor lies in its memory; `offset` counts bytes from the first one of the region."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def extent(self) -> int:
        """Bytes from the first element to behind the last one."""
        if 0 in self.size:
            return 0
        return (sum((n - 1) * s for n, s in zip(self.size, self.stride)) + 1) * self.dtype.itemsize


def view_of(tensor: torch.Tensor, offset: int = 0) -> View:
    return View(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, offset)


@dataclass(frozen=True, eq=False)
class Given:
    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Given) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, torch.Tensor):
            same_place = self.value.data_ptr() == other.value.data_ptr() and self.value.device == other.value.device
            return same_place and view_of(self.value) == view_of(other.value)
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True)
class Repeated:
    output: int


@dataclass(frozen=True)
class SameInput:
    input: int


@dataclass(frozen=True)
class OfInput:
    input: int
    view: View


@dataclass(frozen=True)
class OfStorage:
    storage: int
    view: View


@dataclass(frozen=True)
class Empty:
    view: View


Recipe: TypeAlias = Given | Repeated | SameInput | OfInput | OfStorage | Empty


@dataclass(frozen=True)
class Storage:
    size: int
    saved: bool = False
    offset: int = 0  # in the slab, if saved


@dataclass(frozen=True)
class Layout:
    inputs: tuple[int, ...]  # positions of the inputs that are regions
    storages: tuple[Storage, ...]
    recipes: tuple[Recipe, ...]
    scratch: tuple[int, ...]  # sizes of the pieces of the scratch slab

    @property
    def own(self) -> tuple[int, ...]:
        """Numbers of the storages that are regions by themselves."""
        return tuple(i for i, s in enumerate(self.storages) if not s.saved)

    @property
    def saved_region(self) -> int:
        return len(self.inputs) + len(self.own)

    @property
    def scratch_region(self) -> int:
        return self.saved_region + 1

    @property
    def saved_size(self) -> int:
        return max((s.offset + align(s.size) for s in self.storages if s.saved), default=0)

    @property
    def scratch_size(self) -> int:
        return sum(map(align, self.scratch))

    def outputs_of(self, storage: int) -> list[int]:
        return [i for i, r in enumerate(self.recipes) if isinstance(r, OfStorage) and r.storage == storage]

    def names(self) -> dict[int, str]:
        """By region, for tables and messages."""
        names = {region: f"input {position}" for region, position in enumerate(self.inputs)}
        for region, number in enumerate(self.own, start=len(self.inputs)):
            names[region] = "output " + ", ".join(map(str, self.outputs_of(number)))
        return names | {self.saved_region: "saved", self.scratch_region: "scratch"}


def storages_of(recipes: Sequence[Recipe], sizes: Sequence[int], saved: frozenset[int]) -> tuple[Storage, ...]:
    """A storage that saved outputs alone use goes to the slab, if there is another one."""
    users: list[list[int]] = [[] for _ in sizes]
    for output, recipe in enumerate(recipes):
        if isinstance(recipe, OfStorage):
            users[recipe.storage].append(output)
        elif isinstance(recipe, Repeated) and isinstance(first := recipes[recipe.output], OfStorage):
            users[first.storage].append(output)
    in_slab = [saved.issuperset(outputs) for outputs in users]
    if sum(in_slab) < 2:
        return tuple(map(Storage, sizes))
    storages, offset = [], 0
    for size, slab in zip(sizes, in_slab):
        storages.append(Storage(size, slab, offset if slab else 0))
        offset += align(size) if slab else 0
    return tuple(storages)
