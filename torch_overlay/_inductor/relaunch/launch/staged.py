"""Launches a region in stages, with the interface of a `Relaunch`; `arrange`, Note [Stages], says why.

Each stage is a relaunch by itself, with a list of inputs that it clears. A stage takes its inputs from a table of slots
and puts its results there, outputs of the region among them; tensors that no later stage needs are removed from the
table. The caller's list is cleared before the first launch, or it would keep alive tensors that are to be freed: a call
that fails after that has consumed its inputs, like one that fails in compiled code.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay._inductor.relaunch.launch.executable import emptied
from torch_overlay._inductor.relaunch.launch.relaunch import masks_of, Misaligned, Relaunch
from torch_overlay._inductor.relaunch.memory.outputs import Given, maker_of, OfInput, SameInput
from torch_overlay._inductor.relaunch.numbers.expressions import inputs_of, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import values_of


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.launch.executable import Executable
    from torch_overlay._inductor.relaunch.memory.arrange import Arrangement
    from torch_overlay._inductor.relaunch.verify import Launchable


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
