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

A graph for any size has results of the program of numbers (`Result`) in sizes, strides and offsets, and `derived`
regions, which begin at a result's bytes in another region: Note [Graphs for any size].

Scratch memory is allocated without a tensor if the device has `raw_alloc` and `raw_delete`. A graph that draws no
random numbers is launched by the driver (`launcher.direct`); other graphs by torch's `replay`, which advances the
generators first.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.memory.make_outputs import reinterpret
from torch_overlay._inductor.relaunch.memory.outputs import (
    Computed,
    Empty,
    Given,
    OfStorage,
    Recipe,
    Repeated,
    SameInput,
)
from torch_overlay._inductor.relaunch.numbers.program import Program


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch

# As in the C source.
GIVEN, REPEATED, SAME, WHOLE, PART, SAVED, EMPTY, NUMBER = range(8)


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
    layout, device, launcher, sized = relaunch.layout, relaunch.device, relaunch.launcher, relaunch.sized
    types: dict[torch.dtype, int] = {}
    own = {number: i for i, number in enumerate(layout.own)}
    recipes = [_recipe(relaunch, own, i, recipe, types) for i, recipe in enumerate(layout.recipes)]
    simple = None not in recipes
    size = layout.scratch_size
    allocations, scratch = tuple(map(relaunch.allocation, layout.own)), raw(size) if size else None
    expressions = [slot.expression for slot in relaunch.template.numbers]
    if sized is not None:
        allocations, scratch = sized.allocations, raw(sized.scratch) if sized.scratch is not None else scratch
        expressions += sized.expressions
    program = Program.of(expressions, layout.computed)
    return make(
        positions=layout.inputs,
        masks=tuple([relaunch.alignments[k] - 1 for k in layout.inputs]),
        allocations=allocations,
        slab=raw(layout.saved_size) if layout.saved_size else None,
        types=tuple(types) if simple else (),
        scratch=scratch,
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
        derived=() if sized is None else sized.derived,
        scratch_result=-1 if sized is None or sized.scratch is None else int(sized.scratch),
    )


def _recipe(
    relaunch: Relaunch, own: Mapping[int, int], output: int, recipe: Recipe, types: dict[torch.dtype, int]
) -> tuple[Any, ...] | None:
    """Return (kind, number, object, size, stride, offset) for the C module; None if it can't make this output."""
    layout, sized = relaunch.layout, relaunch.sized
    match recipe:
        case Computed(_) if sized is not None:
            return NUMBER, int(sized.outputs[output]), None, None, None, None
        case OfStorage(number, view) if sized is not None:
            size, stride, offset = sized.outputs[output]
            is_first = layout.outputs_of(number)[0] == output
            if is_first and offset == 0 and (size, stride) == sized.allocations[own[number]][:2]:
                return WHOLE, own[number], None, None, None, None
            return PART, own[number], None, size, stride, offset
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
