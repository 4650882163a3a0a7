"""Launches one captured region: all that a call needs is bound beforehand.

    call = bind(relaunch)                 the C module's `Call`
    call.launch(inputs, originals=None)   the outputs; raises Misaligned
    call.try_launch(inputs)               the outputs, or None where the graph can't be launched: on another device, in
                                          a capture by the caller, with a misaligned input, with a copy that the
                                          driver refuses, or with no list
    call.aligned(inputs, pairs)           has no address a bit in common with its mask? pairs: (position, mask)
    call.launches, call.patched           number of launches, and of nodes set in all of them

Note [A relaunch]
1. Everything that doesn't depend on the call is computed beforehand and bound into one C object (`bind`). Between two
   calls, the caller's code evicts the data of a launch from the CPU's caches, so the layout is stored in arrays, and a
   call only reads the address of each input, which it compares with that in the executable.
2. Patching and launching are one step under a lock, for all threads share the executable. The driver orders the
   launches of one executable, and a patch affects only later launches. Where Python runs in that step, the garbage
   collector may run, too, and a finalizer may call compiled code. A thread that holds the lock of a launch doesn't wait
   for another one (`launching`): regions that are called in a launch run as compiled.
3. Outputs and scratch are allocated on the stream that the graph is launched on, the largest first, the scratch without
   a tensor. It is freed right after the launch: the next user of the memory comes later on that stream. Saved outputs
   are views of a slab and of a few chunks; each lives as long as one of its views.
4. The list of inputs is cleared after the launch, as compiled code clears it. A call that raises leaves it unchanged.
5. A graph that draws no random numbers is launched by the driver (`Executable.direct`); other graphs by torch's
   `replay`, which advances the generators first.

A region in stages (`memory.arrange`, Note [Stages]) is launched by `Split`, with the interface of a `Relaunch`. Each
stage is a relaunch by itself, with a list of inputs that it clears. A stage takes its inputs from a table of slots and
puts its results there, outputs of the region among them; tensors that no later stage needs are removed from the table.
The caller's list is cleared before the first launch, or it would keep alive tensors that are to be freed: a call that
fails after that has consumed its inputs, like one that fails in compiled code.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TYPE_CHECKING

from torch._dynamo.utils import counters

from torch_overlay._inductor.relaunch.launch.executable import call_maker, emptied, implementation, moving
from torch_overlay._inductor.relaunch.memory.outputs import (
    Given,
    maker_of,
    OfInput,
    OfStorage,
    Recipe,
    reinterpret,
    Repeated,
    SameInput,
)
from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, RegisterProgram, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import values_of


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.launch.executable import Executable
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement
    from torch_overlay._inductor.relaunch.memory.outputs import OutputLayout
    from torch_overlay._inductor.relaunch.verify import Launchable


# As in the C source.
GIVEN, REPEATED, SAME, WHOLE, PART, MADE = range(6)


class Misaligned(Exception):
    """An input is less aligned than the one that the graph was captured with, or is a number that the graph can't
    take."""


def bind(relaunch: Relaunch) -> Any:
    layout, device, template = relaunch.layout, relaunch.device, relaunch.template
    make_call = call_maker(implementation(), relaunch.graph.raw_cuda_graph_exec(), template)
    typed: dict[tuple[int, torch.dtype], int] = {}
    recipes = [_recipe(relaunch, i, recipe, typed) for i, recipe in enumerate(layout.recipes)]
    expressions = [slot.expression for slot in template.numbers]
    stream, alloc, release = device.functions
    return make_call(
        inputs=masks_of(layout, relaunch.alignments),
        allocations=tuple(map(layout.allocation, range(len(layout.storages)))),
        typed=tuple(typed),
        scratch=layout.scratch_size,
        numbers=RegisterProgram.of(expressions, layout.computed),
        order=layout.order,
        recipes=tuple(recipes),
        empty=device.empty,
        reinterpret=reinterpret,
        replay=relaunch.replay,
        direct=relaunch.direct,
        raw=(device.raw_alloc, device.raw_delete, alloc, release),
        device=(device.index, device.current, device.stream_of, stream),
        misaligned=Misaligned,
        counters=counters,
        group="torch_overlay",
        counter="cudagraph_relaunches",
    )


def masks_of(layout: OutputLayout, alignments: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (position, bits that its address must not have) of each input that is a region."""
    return tuple([(k, alignments[k] - 1) for k in layout.inputs])


def _recipe(
    relaunch: Relaunch, output: int, recipe: Recipe, typed: dict[tuple[int, torch.dtype], int]
) -> tuple[Any, ...]:
    """Return (kind, number, object, size, stride, offset) for the C module. `typed`: (storage, dtype) of the views that
    outputs are views of, after the storages themselves."""
    layout = relaunch.layout
    match recipe:
        case Given(value):
            return GIVEN, 0, value, None, None, None
        case Repeated(first):
            return REPEATED, first, None, None, None, None
        case SameInput(position):
            return SAME, position, None, None, None, None
        case OfStorage(number, view):
            if view == layout.primary(number) and layout.outputs_of(number)[0] == output:
                return WHOLE, number, None, None, None, None
            offset, odd = divmod(view.offset, view.dtype.itemsize)
            if odd:
                raise ValueError(f"output {output} lies between elements of its storage, for {view.dtype}")
            if view.dtype != layout.allocation(number)[2]:
                number = len(layout.storages) + typed.setdefault((number, view.dtype), len(typed))
            return PART, number, None, view.size, view.stride, offset
    return MADE, 0, maker_of(recipe, relaunch.device.empty), None, None, None


live_relaunches: weakref.WeakSet[Relaunch] = weakref.WeakSet()


class Relaunch:
    """A captured region that can be launched. `launch(inputs, originals)` is bound to the layout; `originals` are the
    caller's tensors where inputs are copies. `try_launch(inputs)` returns None if the graph can't be launched.

    Neither function refers to its `Relaunch`, so that the executable is freed with the last reference to that.
    """

    launch: Callable[..., tuple[Any, ...]]
    try_launch: Callable[[list[Any]], tuple[Any, ...] | None] | None

    def __init__(
        self,
        device: Cuda,
        layout: OutputLayout,
        executable: Executable,
        alignments: Sequence[int],
    ) -> None:
        self.device, self.layout, self.alignments = device, layout, alignments
        self.graph, self.template, self.replay, self.direct = executable
        self.nodes = len(self.template.nodes)
        self.has_copies = bool(moving(self.template))
        self.call = bind(self)
        self.launch, self.try_launch = self.call.launch, self.call.try_launch
        live_relaunches.add(self)

    @property
    def stages(self) -> Sequence[Relaunch]:
        return (self,)

    def forget(self) -> None:
        """Drop what no launch needs."""
        self.template = emptied(self.template)

    @property
    def totals(self) -> tuple[int, int]:
        """The number of launches, and of nodes patched."""
        return self.call.launches, self.call.patched

    def show(self, wrap: Callable[[Any], Any]) -> None:
        """Have profilers show each launch: `wrap` puts what they show around a function."""
        self.launch, self.try_launch = wrap(self.launch), wrap(self.try_launch)


class Split:
    try_launch = None

    def __init__(
        self,
        device: Cuda,
        arrangement: Arrangement,
        executables: Sequence[Executable],
        alignments: Sequence[int],
    ) -> None:
        self.device, self.layout, self.template = device, arrangement.layout, arrangement.template
        layout = self.layout
        regions = frozenset(layout.inputs)
        self.steps = []
        self.stages: list[Relaunch] = []
        for stage, executable in zip(arrangement.stages, executables, strict=True):
            aligned = [alignments[slot] if slot in regions else 1 for slot in stage.takes]
            relaunch = Relaunch(device, stage.layout, executable, aligned)
            self.stages.append(relaunch)
            self.steps.append((relaunch, stage.takes, stage.gives, stage.drops))
        self.masks = masks_of(layout, alignments)
        self.aligned = self.stages[0].call.aligned
        self.returned = [r.input for r in layout.recipes if isinstance(r, (SameInput, OfInput))]
        self.returned += inputs_of(layout.computed)
        self.numbers = arrangement.numbers
        self.words = tuple({(slot.letter, slot.expression): slot for slot in self.template.numbers}.values())
        self.first = 1 + max(layout.inputs, default=-1)
        self.slots = arrangement.slots
        self.results = arrangement.results
        # Make the other outputs, with None in the places of those that come from the stages.
        made = {output for output, _ in self.results}
        rest = [Given(None) if i in made else r for i, r in enumerate(layout.recipes)]
        self.makers = [maker_of(recipe, device.empty) for recipe in rest]

    def forget(self) -> None:
        for stage in self.stages:
            stage.forget()
        self.template = emptied(self.template)

    def launch(self, inputs: list[Any], originals: Sequence[Any] | None = None) -> tuple[Any, ...]:
        if not self.aligned(inputs, self.masks):
            raise Misaligned
        try:
            values_of(self.words, inputs, self.layout.computed)
        except Unfit as error:
            raise Misaligned from error
        source = {k: (originals or inputs)[k] for k in self.returned}
        slots = inputs[: self.first] + [None] * (self.slots - self.first)
        numbers = [inputs[k] for k in self.numbers]
        inputs.clear()
        for stage, takes, gives, drops in self.steps:
            made = stage.launch([*[slots[k] for k in takes], *numbers])
            for k, tensor in zip(gives, made, strict=True):
                slots[k] = tensor
            del made
            for k in drops:
                slots[k] = None
        result: list[Any] = []
        for make in self.makers:
            result.append(make(source, result))
        for output, slot in self.results:
            result[output] = slots[slot]
        return tuple(result)


class Graph(NamedTuple):
    """Facts of a graph: launches by the host for one call, nodes, and bytes of scratch memory at a time."""

    launches: int
    nodes: int
    scratch: int


def graph_of(relaunch: Launchable) -> Graph:
    stages = relaunch.stages
    nodes = sum(stage.nodes for stage in stages)
    return Graph(len(stages), nodes, max(stage.layout.scratch_size for stage in stages))
