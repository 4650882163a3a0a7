"""Describes a region's outputs: where their bytes lie, and how a call makes the tensors.

    Given         the same object at every call: a number, None, or a tensor that the compiled module owns
    Computed      a number that is computed from numbers among the inputs
    Repeated      the same object as an earlier output
    SameInput     an input itself
    OfInput       a view of an input's memory
    OfStorage     a view of memory that the call allocates
    Empty         a tensor without bytes

Regions are numbered in this order: the tensor inputs, the storages that are allocated one by one, the slab of the
storages that are saved for the backward, and the scratch slab. A layout contains no address, so two captures of one
program have equal layouts.

Note [The largest first]
The memory of one launch is allocated all at once, so it can be allocated in any order. The caching allocator takes the
smallest block that is large enough, and splits it. Small allocations, if they came first, would split the blocks that
alone are large enough for the large ones.

Makes a call's outputs from its inputs and the memory that was allocated for it, as a layout says.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.memory.packing import aligned
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
    saved: bool = False
    offset: int = 0  # in the slab, if saved
    dtype: torch.dtype | None = None  # of a chunk, which is allocated as a vector of this type


@dataclass(frozen=True)
class OutputLayout:
    inputs: tuple[int, ...]  # positions of the inputs that are regions
    storages: tuple[Storage, ...]
    recipes: tuple[Recipe, ...]
    scratch: tuple[int, ...]  # sizes of the sub-allocations of the scratch slab

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """Return the numbers of the storages that are regions of their own."""
        return tuple(i for i, s in enumerate(self.storages) if not s.saved)

    @functools.cached_property
    def computed(self) -> tuple[tuple[Any, ...], ...]:
        """Return the expressions of the outputs that are numbers."""
        return tuple([recipe.expression for recipe in self.recipes if isinstance(recipe, Computed)])

    @property
    def saved_region(self) -> int:
        return len(self.inputs) + len(self.own)

    @property
    def scratch_region(self) -> int:
        return self.saved_region + 1

    @property
    def saved_size(self) -> int:
        return max((s.offset + aligned(s.size) for s in self.storages if s.saved), default=0)

    @property
    def scratch_size(self) -> int:
        return sum(map(aligned, self.scratch))

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Return the regions in the order in which a call allocates them, counted from the first one after the inputs.
        Note [The largest first]"""
        sizes = [*[self.storages[i].size for i in self.own], self.saved_size, self.scratch_size]
        wanted = [k for k, size in enumerate(sizes) if size or k < len(self.own)]
        return tuple(sorted(wanted, key=lambda k: -sizes[k]))

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
        """Return the view that the storage is allocated as: a vector for a chunk, else the first output that spans all
        of the storage. None if there is no such output."""
        size, dtype = self.storages[storage].size, self.storages[storage].dtype
        if dtype is not None:
            return TensorView((size // dtype.itemsize,), (1,), dtype)
        for output in self.outputs_of(storage):
            view = cast("OfStorage", self.recipes[output]).view
            if not view.offset and view.extent >= size:
                return view
        return None

    def allocation(self, storage: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        view = self.primary(storage)
        if view is None:
            return (-(-self.storages[storage].size // 16) * 16,), (1,), torch.uint8
        return view.size, view.stride, view.dtype

    def names(self) -> dict[int, str]:
        """Return names of the regions, for tables and messages."""
        names = {region: f"input {position}" for region, position in enumerate(self.inputs)}
        for region, number in enumerate(self.own, start=len(self.inputs)):
            names[region] = "output " + ", ".join(map(str, self.outputs_of(number)))
        return names | {self.saved_region: "saved", self.scratch_region: "scratch"}


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


def part_maker(number: int, view: TensorView) -> Maker:
    """Return a function that makes a view, of any type, of the storage that is allocated as number `number`."""
    return lambda inputs, storages: _typed(storages[number], view, view.offset)


def _view_of_input(source: torch.Tensor, view: TensorView) -> torch.Tensor:
    if view.dtype == source.dtype and not view.offset % view.dtype.itemsize:
        return reinterpret(source, view.size, view.stride, view.offset // view.dtype.itemsize)
    return _typed(source, view, int(source.storage_offset()) * source.dtype.itemsize + view.offset)


def _typed(source: torch.Tensor, view: TensorView, offset: int) -> torch.Tensor:
    """Return a view with the dtype of `view`, at byte `offset` of the source's storage."""
    empty = torch.empty(0, dtype=view.dtype, device=source.device)
    return empty.set_(source.untyped_storage(), offset // view.dtype.itemsize, view.size, view.stride)
