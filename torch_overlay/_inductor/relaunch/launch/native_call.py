"""A relaunch as one call into C: `bind(relaunch)` gives the C module's `Call`, or None.

    call.launch(inputs, originals=None)   the outputs; raises Misaligned
    call.attempt(inputs)                  the outputs, or None where the graph can't be launched: on another device, in
                                          a capture of the caller's, with an input that is misaligned, or no list
    call.aligned(inputs, positions, masks)  as in `launch.data_ptrs`
    call.launches, call.patched           how often, and how many nodes were set for that

What a call costs is mostly what it touches: code that compiled its caller, guards and the interpreter come between two
calls, and throw it out of the caches. So the layout is laid down in arrays, each input is an address that is read and
compared with what the executable has, and outputs are made by a list of recipes. Python is entered for what torch has
in C alone: allocation, views, the current device and stream.

Scratch memory is no tensor if the device has `raw_alloc` and `raw_delete`. A graph that draws no random numbers is
launched by the driver (`launcher.direct`); for others torch's `replay` advances the generators first.

Note [Scratch cache]
To allocate scratch memory and to free it is a good part of what the host does for a short launch (of Llama's with 16
layers 2.5 us of 23, on a machine with an H200), so an inference graph that is launched for the second time leaves its
scratch allocated for the next launch on the same stream, of whatever graph. There is one block for a stream, of the
largest scratch that asked for it, and all blocks of a device together take no more than
`config.cudagraph_scratch_cache_mib`; what doesn't fit is freed after each launch. A block goes with the last graph that
used it, at `torch._dynamo.reset()`, and when a launch finds no memory. Memory of a pool that the caller has selected
isn't kept, for it is to go with that pool.

Launches that use a block follow each other on its stream, as launches do that allocate it one after the other. A
launch lets other threads in before it has reached the stream, so a block counts who is about to use it, and isn't given
back before they have.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.memory.outputs import Empty, Given, OfStorage, Recipe, Repeated, SameInput


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch

reinterpret: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009

# As in the C source.
GIVEN, REPEATED, SAME, WHOLE, PART, SAVED, EMPTY = range(7)


class Misaligned(Exception):
    """An input is less aligned than the one that the graph was captured with."""


def raw(size: int) -> tuple[Any, ...]:
    """Arguments of an allocation of bytes."""
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
    return make(
        positions=layout.inputs,
        masks=tuple([relaunch.alignments[k] - 1 for k in layout.inputs]),
        allocations=tuple(map(relaunch.allocation, layout.own)),
        slab=raw(layout.saved_size) if layout.saved_size else None,
        types=tuple(types) if simple else (),
        scratch=raw(size) if size else None,
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
            getattr(device, "is_ordinary", None),
            relaunch.scratch_cache,
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
    """(kind, number, object, size, stride, offset), as the C source has it; None if that is beyond it."""
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
