"""Describes a region's outputs: where their bytes lie, and how a call makes the tensors.

    Given         the same object at every call: a number, None, or a tensor that the compiled module owns
    Computed      a number that is computed from numbers among the inputs
    Repeated      the same object as an earlier output
    SameInput     an input itself
    OfInput       a view of an input's memory
    OfStorage     a view of memory that the call allocates
    Empty         a tensor without bytes

Regions are numbered in this order: the tensor inputs, the storages, and the scratch slab. A storage of the layout may
hold several of the capture (`memory.chunks`). A layout contains no address, so two captures of one program have equal
layouts.

Note [The largest first]
The memory of one launch is allocated all at once, so it can be allocated in any order. The caching allocator takes the
smallest block that is large enough, and splits it. Small allocations, if they came first, would split the blocks that
alone are large enough for the large ones.
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
