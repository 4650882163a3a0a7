"""Does a relaunch in one call into C: `bind(relaunch)` returns the C module's `Call`, or None.

    call.launch(inputs, originals=None)   the outputs; raises Misaligned
    call.attempt(inputs)                  the outputs, or None where the graph can't be launched: on another device, in
                                          a capture by the caller, with a misaligned input, or with no list
    call.aligned(inputs, positions, masks)  as in `launch.data_ptrs`
    call.launches, call.patched           number of launches, and of nodes set in all of them

A call costs mostly cache misses: between two calls, the caller's compiled code, guards and the interpreter evict its
data from the CPU's caches. So the layout is stored in arrays, the address of each input is read and compared with that
in the executable, and outputs are made from a list of recipes. The call enters Python only for torch's own functions:
allocation, views, the current device and stream.

Scratch memory is allocated without a tensor if the device has `raw_alloc` and `raw_delete`. A graph that draws no
random numbers is launched by the driver (`launcher.direct`); other graphs by torch's `replay`, which advances the
generators first.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.memory.outputs import Empty, Given, OfStorage, Recipe, Repeated, SameInput
from torch_overlay._inductor.relaunch.numbers.program import Program


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch

reinterpret: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009

# As in the C source.
GIVEN, REPEATED, SAME, WHOLE, PART, SAVED, EMPTY = range(7)


class Misaligned(Exception):
    """An input is less aligned than the one that the graph was captured with, or is a number that the graph can't
    take."""


def raw(size: int) -> tuple[Any, ...]:
    """Return the arguments of `empty` for an allocation of `size` bytes."""
    return (size,), (1,), torch.uint8


def bind(relaunch: Relaunch) -> Any:
    make = getattr(getattr(relaunch.launcher, "exec", None), "call", None)
    if make is None:
        return None
    layout, device, launcher = relaunch.layout, relaunch.device, relaunch.launcher
    types: dict[torch.dtype, int] = {}
    own = {number: i for i, number in enumerate(layout.own)}
    recipes = [_recipe(relaunch, own, i, recipe, types) for i, recipe in enumerate(layout.recipes)]
    simple = None not in recipes
    size = layout.scratch_size
    program = Program.of([slot.expression for slot in relaunch.template.numbers])
    return make(
        positions=layout.inputs,
        masks=tuple([relaunch.alignments[k] - 1 for k in layout.inputs]),
        allocations=tuple(map(relaunch.allocation, layout.own)),
        slab=raw(layout.saved_size) if layout.saved_size else None,
        types=tuple(types) if simple else (),
        scratch=raw(size) if size else None,
        numbers=(program.inputs, program.constants, program.code, program.results),
        order=layout.order,
        recipes=tuple(recipes) if simple else (),
        empty=device.empty,
        reinterpret=reinterpret,
        outputs=None if simple else relaunch.outputs(),
        replay=launcher.replay,
        direct=launcher.direct,
        raw=(
            getattr(device, "raw_alloc", None),
            getattr(device, "raw_delete", None),
            size,
            getattr(device, "functions", (0, 0, 0)),
        ),
        current=device.current,
        index=device.index,
        stream_of=getattr(device, "stream_of", None),
        is_capturing=device.is_capturing,
        misaligned=Misaligned,
        counters=counters,
        group="torch_overlay",
        counter="cudagraph_relaunches",
    )


def _recipe(
    relaunch: Relaunch, own: Mapping[int, int], output: int, recipe: Recipe, types: dict[torch.dtype, int]
) -> tuple[Any, ...] | None:
    """Return (kind, number, object, size, stride, offset) for the C module; None if it can't make this output."""
    layout = relaunch.layout
    match recipe:
        case Given(value):
            return GIVEN, 0, value, None, None, None
        case Repeated(first):
            return REPEATED, first, None, None, None, None
        case SameInput(position):
            return SAME, position, None, None, None, None
        case Empty(view):
            return EMPTY, 0, (view.size, view.stride, view.dtype), None, None, None
        case OfStorage(number, view) if layout.storages[number].saved:
            offset, odd = divmod(layout.storages[number].offset + view.offset, view.dtype.itemsize)
            if odd:
                raise ValueError(f"output {output} lies between elements of the slab, for {view.dtype}")
            return SAVED, types.setdefault(view.dtype, len(types)), None, view.size, view.stride, offset
        case OfStorage(number, view):
            made, primary = own[number], relaunch.primary(number)
            if view == primary and layout.outputs_of(number)[0] == output:
                return WHOLE, made, None, None, None, None
            if primary is not None and primary.dtype == view.dtype and not view.offset % view.dtype.itemsize:
                return PART, made, None, view.size, view.stride, view.offset // view.dtype.itemsize
    return None
