"""Makes a call's outputs from its inputs and the memory that was allocated for it, as a layout says."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.memory.outputs import (
    Computed,
    Empty,
    Given,
    OfInput,
    OfStorage,
    Repeated,
    SameInput,
)
from torch_overlay._inductor.relaunch.numbers.expressions import evaluate


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.memory.outputs import Layout, View

Outputs: TypeAlias = "Callable[[Any, Sequence[torch.Tensor], torch.Tensor | None], tuple[Any, ...]]"

reinterpret: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009


def output_maker(layout: Layout, empty: Callable[..., torch.Tensor]) -> Outputs:
    """Return a function that makes the outputs of a call from its inputs, the storages and the slab of saved outputs.
    `empty(size, stride, dtype)` makes a tensor."""
    recipes = layout.recipes
    own = {number: i for i, number in enumerate(layout.own)}
    fixed: list[Any] = [None] * len(recipes)
    whole, of_made, of_slab, of_inputs, same, repeated, empties, computed = [], [], [], [], [], [], [], []
    seen: set[int] = set()
    for i, recipe in enumerate(recipes):
        match recipe:
            case Given(value):
                fixed[i] = value
            case Repeated(output):
                repeated.append((i, output))
            case SameInput(position):
                same.append((i, position))
            case OfInput(position, view):
                of_inputs.append((i, position, view))
            case Computed(expression):
                computed.append((i, expression))
            case Empty(view):
                empties.append((i, (view.size, view.stride, view.dtype)))
            case OfStorage(number, view) if number in own:
                primary = layout.primary(number)
                if view == primary and number not in seen:
                    whole.append((i, own[number]))
                else:
                    of_made.append((i, own[number], view, primary.dtype if primary else None))
                seen.add(number)
            case OfStorage(number, view):
                offset = layout.storages[number].offset + view.offset
                if offset % view.dtype.itemsize:
                    raise ValueError(f"output {i} lies at byte {offset} of the slab, for {view.dtype}")
                of_slab.append((i, view.dtype, view.size, view.stride, offset // view.dtype.itemsize))
    if whole == [(i, i) for i in range(len(recipes))]:
        return lambda source, made, slab: tuple(made[: len(whole)])  # the slabs come after the outputs
    types = tuple(dict.fromkeys(entry[1] for entry in of_slab))

    def make(source: Any, made: Sequence[torch.Tensor], slab: torch.Tensor | None) -> tuple[Any, ...]:
        result = list(fixed)
        for i, number in whole:
            result[i] = made[number]
        for i, number, view, dtype in of_made:
            result[i] = view_of_storage(made[number], view, dtype)
        if slab is not None:
            typed = {dtype: slab.view(dtype) for dtype in types}
            for i, dtype, size, stride, offset in of_slab:
                result[i] = reinterpret(typed[dtype], size, stride, offset)
        for i, position in same:
            result[i] = source[position]
        for i, position, view in of_inputs:
            result[i] = view_of_input(source[position], view)
        for i, expression in computed:
            result[i] = evaluate(expression, source)
        for i, arguments in empties:
            result[i] = empty(*arguments)
        for i, output in repeated:
            result[i] = result[output]
        return tuple(result)

    return make


def view_of_storage(made: torch.Tensor, view: View, dtype: torch.dtype | None) -> torch.Tensor:
    if view.dtype == dtype and not view.offset % view.dtype.itemsize:
        return reinterpret(made, view.size, view.stride, view.offset // view.dtype.itemsize)
    return _typed(made, view, view.offset)


def view_of_input(source: torch.Tensor, view: View) -> torch.Tensor:
    if view.dtype == source.dtype and not view.offset % view.dtype.itemsize:
        return reinterpret(source, view.size, view.stride, view.offset // view.dtype.itemsize)
    return _typed(source, view, int(source.storage_offset()) * source.dtype.itemsize + view.offset)


def _typed(source: torch.Tensor, view: View, offset: int) -> torch.Tensor:
    """Return a view with the dtype of `view`, at byte `offset` of the source's storage."""
    empty = torch.empty(0, dtype=view.dtype, device=source.device)
    return empty.set_(source.untyped_storage(), offset // view.dtype.itemsize, view.size, view.stride)
