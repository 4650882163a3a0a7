"""Launches one captured region: all that a call needs is bound beforehand.

    call = bind(relaunch)                 the C module's `Call`, or None
    call.launch(inputs, originals=None)   the outputs; raises Misaligned
    call.try_launch(inputs)               the outputs, or None where the graph can't be launched: on another device, in
                                          a capture by the caller, with a misaligned input, or with no list
    call.aligned(inputs, positions, masks)  as in `launch.executable`
    call.launches, call.patched           number of launches, and of nodes set in all of them

Note [A relaunch]
1. Everything that doesn't depend on the call is computed beforehand and bound into one C object (`bind`), or into one
   closure where the launcher's nodes are patched in Python. Between two calls, the caller's code evicts the data of a
   launch from the CPU's caches, so the layout is stored in arrays, and a call only reads the address of each input.
2. The C object compares each input's address with that in the executable. The closure compares the addresses of static
   inputs with their last ones by one call into torch, and patches them when they differ. A static input that keeps
   moving is no longer treated as static: the closure is made again.
3. Patching and launching are one step under a lock, for all threads share the executable. The driver orders the
   launches of one executable, and a patch affects only later launches. Where Python runs in that step, the garbage
   collector may run, too, and a finalizer may call compiled code. A thread that holds the lock of a launch doesn't wait
   for another one (`launching`): regions that are called in a launch run as compiled.
4. Outputs and scratch are allocated on the stream that the graph is launched on, the largest first, the scratch without
   a tensor if the device has `raw_alloc`. It is freed right after the launch: the next user of the memory comes later
   on that stream. Saved outputs are views of one slab, or of a few chunks; each lives as long as one of its views.
5. The list of inputs is cleared after the launch, as compiled code clears it. A call that raises leaves it unchanged.
6. A graph that draws no random numbers is launched by the driver (`executable.direct`); other graphs by torch's
   `replay`, which advances the generators first. A graph for any size has results of the program of numbers (`Result`)
   in sizes, strides and offsets, and `derived` regions, which begin at a result's bytes in another region: Note [Graphs
   for any size].
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from operator import and_
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.memory.outputs import (
    Computed,
    Empty,
    Given,
    OfStorage,
    output_maker,
    Recipe,
    reinterpret,
    Repeated,
    SameInput,
)
from torch_overlay._inductor.relaunch.numbers.expressions import RegisterProgram, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped, values_of


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.memory.outputs import OutputLayout, Outputs, Sized, TensorView
    from torch_overlay._inductor.relaunch.proof.nodes import Template


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
    program = RegisterProgram.of(expressions, layout.computed)
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


MOVES = 2  # an input that moved so often is not static
NOWHERE = 1  # the address of no tensor

live_relaunches: weakref.WeakSet[Relaunch] = weakref.WeakSet()


class _Thread(threading.local):
    launching = False


_thread = _Thread()


def launching() -> bool:
    """True if this thread is in the middle of a launch: Note [A relaunch], 3."""
    return _thread.launching or executable.launching()


class Relaunch:
    """A captured region that can be launched. `launch(inputs, originals)` is bound to the layout; `originals` are the
    caller's tensors where inputs are copies. `try_launch(inputs)`, if there is one, returns None if the graph can't be
    launched.

    Neither function refers to its `Relaunch`, so that the executable is freed with the last reference to that.
    """

    launch: Callable[..., tuple[Any, ...]]
    try_launch: Callable[[list[Any]], tuple[Any, ...] | None] | None = None

    def __init__(
        self,
        device: Any,
        layout: OutputLayout,
        launcher: Any,
        static: Sequence[int],
        alignments: Sequence[int],
        sized: Sized | None = None,
    ) -> None:
        """`sized`: what a launch computes from the region's sizes; then only the C module can launch the graph, and
        `NumberEscaped` is raised if it doesn't."""
        self.device, self.layout, self.launcher, self.alignments = device, layout, launcher, alignments
        self.sized = sized
        self.region = {position: region for region, position in enumerate(layout.inputs)}
        self.static = [k for k in static if k in self.region]
        self.addresses: list[int] = []  # of static inputs, by position
        self.moves: Counter[int] = Counter()
        self.lock = threading.Lock()
        self.counts = [0, 0]
        self.wrap: Callable[[Any], Any] = lambda function: function
        self.call = bind(self)
        if self.call is None and sized is not None:
            raise NumberEscaped(frozenset(), "the graph is not launched by the C module")
        if self.call is None:
            self.bind()
        else:
            self.launch, self.try_launch = self.call.launch, self.call.try_launch
        live_relaunches.add(self)

    @property
    def template(self) -> Template:
        return self.launcher.template

    def forget(self) -> None:
        """Drop what no launch needs."""
        self.launcher.forget()

    @property
    def totals(self) -> tuple[int, int]:
        """The number of launches, and of nodes patched."""
        if self.call is not None:
            return self.call.launches, self.call.patched
        return self.counts[0], self.counts[1]

    def bind(self) -> None:
        """Make the closure, with the inputs that still count as static. An earlier closure, which another thread may be
        about to call, finds that every static input has moved."""
        self.addresses[:] = [NOWHERE] * len(self.addresses)
        self.static = [k for k in self.static if self.moves[k] < MOVES]
        self.addresses = [NOWHERE] * (1 + max(self.static, default=-1))
        self.launch = self.wrap(self._bound())

    def show(self, wrap: Callable[[Any], Any]) -> None:
        """Have profilers show each launch: `wrap` puts what they show around a function."""
        self.wrap, self.launch = wrap, wrap(self.launch)
        self.try_launch = wrap(self.try_launch) if self.try_launch is not None else None

    def note_moves(self, static: Sequence[int], addresses: list[int], now: Sequence[int]) -> None:
        if addresses is not self.addresses:  # called by an earlier closure
            self.addresses[:] = [NOWHERE] * len(self.addresses)
            return
        for k, address in zip(static, now):
            self.moves[k] += addresses[k] not in (address, NOWHERE)
            addresses[k] = address
        if any(self.moves[k] >= MOVES for k in static):
            self.bind()

    def _bound(self) -> Callable[..., tuple[Any, ...]]:
        layout, totals, lock, empty = self.layout, self.counts, self.lock, self.device.empty
        patch, replay = self.launcher.patch, self.launcher.replay
        static, addresses = self.static, self.addresses
        moving = [k for k in layout.inputs if k not in static]
        same, addresses_of = executable.same, executable.addresses
        masks = tuple(self.alignments[k] - 1 for k in moving)
        numbers, write = self.template.numbers, getattr(self.launcher, "write", None)
        own, order = len(layout.own), layout.order
        arguments = [*map(self.allocation, layout.own), raw(layout.saved_size), raw(layout.scratch_size)]
        allocations = [(k, arguments[k]) for k in order]
        regions = [self.region[k] for k in moving] + [len(layout.inputs) + k for k in order]
        all_regions = regions + [self.region[k] for k in static]
        static_masks = tuple(self.alignments[k] - 1 for k in static)
        me, finish, thread = weakref.ref(self), self.outputs(), _thread

        def patch_all(inputs: Sequence[Any], bases: list[Any]) -> int:
            """Patch all regions, since a static input has moved."""
            now = addresses_of(inputs, static)
            if any(map(and_, now, static_masks)):
                raise Misaligned
            before, addresses[:] = list(addresses), [NOWHERE] * len(addresses)  # as long as it isn't known
            count = patch([*bases, *now], all_regions)
            addresses[:] = before
            if (relaunch := me()) is not None:
                relaunch.note_moves(static, addresses, now)
            return count

        def launch(inputs: list[Any], originals: Sequence[Any] | None = None) -> tuple[Any, ...]:
            given = addresses_of(inputs, moving)
            if any(map(and_, given, masks)):
                raise Misaligned
            try:
                values = values_of(numbers, inputs, layout.computed)
            except Unfit as error:
                raise Misaligned from error
            made = {k: empty(*size_stride_dtype) for k, size_stride_dtype in allocations}
            bases = [*given, *made.values()]
            with lock:
                thread.launching = True
                try:
                    if not static or same(inputs, addresses, static):
                        totals[1] += patch(bases, regions)
                    else:
                        totals[1] += patch_all(inputs, bases)
                    if write is not None:
                        write(values)
                    replay()
                finally:
                    thread.launching = False
                totals[0] += 1
            result = finish(originals or inputs, [made[k] for k in range(own)], made.get(own))
            counters["torch_overlay"]["cudagraph_relaunches"] += 1
            inputs.clear()
            return result

        return launch

    # -- outputs

    def primary(self, storage: int) -> TensorView | None:
        return self.layout.primary(storage)

    def allocation(self, storage: int) -> tuple[Any, ...]:
        return self.layout.allocation(storage)

    def outputs(self) -> Outputs:
        return output_maker(self.layout, self.device.empty)
