"""Captures a region once, at placeholder addresses.

    stand-ins   every tensor input is replaced by one of its shape at a fresh address; kernel launchers can't notice
    capture     the region runs, and its kernels are recorded instead of launched. An allocation that becomes an output
                has an address range of its own; all other allocations are scratch
    layout      where each output's bytes come from

During the capture, each allocation of generated code has addresses of its own, and its life is noted (`Lives`).

Note [Outputs of a capture]
An output's memory must hold nothing but that output, or a relaunch would write other data into a tensor that the caller
holds. Storage that generated code allocates is recognized by the number of the allocation. Storage that an operator
allocates inside is isolated by giving that call a memory pool of its own; the operator's other allocations in the pool
may have used the same address before, so the storage is made as large as all of them together, unless the operator used
each address once. A run before has shown which allocations these are. If an output lies in the scratch all the same,
the region is captured again with the plan that this capture has learned (`Astray`).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.allocations import (
    AllocationPlan,
    namespace_of,
    observed,
    Placing,
    Watch,
)
from torch_overlay._inductor.relaunch.capture.branches import Branches
from torch_overlay._inductor.relaunch.memory.outputs import (
    Computed,
    Empty,
    Given,
    OfInput,
    OfStorage,
    OutputLayout,
    place,
    Recipe,
    Repeated,
    SameInput,
    view_of,
)
from torch_overlay._inductor.relaunch.numbers.traced import Launches, noted, Traced
from torch_overlay._inductor.relaunch.proof.nodes import FIXED, Segment, Unprovable


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.memory.packing import Life


class CaptureRequest(NamedTuple):
    """A region that is to be captured, and the call that captures it. `alignments`: to how many bytes each input is
    aligned. `numbers`: values of the inputs that a launch is to compute with, by position."""

    device: Cuda
    model: Callable[[list[Any]], Any]
    inputs: Sequence[Any]
    alignments: Sequence[int]
    plan: AllocationPlan
    code: CodeFacts
    numbers: Mapping[int, Any] = MappingProxyType({})

    @property
    def namespace(self) -> dict[str, Any]:
        return namespace_of(self.model)


class Astray(Exception):
    """Outputs of a capture lie in its scratch. `plan`: what the next one should place."""

    def __init__(self, plan: AllocationPlan) -> None:
        super().__init__()
        self.plan = plan


class Capture:
    """One capture of a region. `holes`: sizes of the free blocks of the device's allocator. `with_uses`: note which
    memory matrix products read and write. `numbers`: values that are traced, if others than those of the request. The
    fields that have no values before `run` are what it shows."""

    layout: OutputLayout
    segments: list[Segment]  # a region for each input, storage and scratch allocation
    places: tuple[tuple[int, int], ...]  # (region, delta) in the layout of the inputs and storages
    lives: list[Life]  # of all regions

    def __init__(
        self,
        request: CaptureRequest,
        recording: Any,
        holes: Sequence[int] = (),
        with_uses: bool = False,
        numbers: Mapping[int, Any] | None = None,
    ) -> None:
        self.request, self.recording, self.holes, self.with_uses = request, recording, holes, with_uses
        self.inputs, self.plan = request.inputs, (plan := request.plan)
        self.numbers = request.numbers if numbers is None else numbers
        self.launches = Launches(recording.nodes)  # with the uses of these numbers
        self.input_at: dict[int, int] = {}  # address -> position
        self.observer = Placing(plan, recording, with_uses)
        self.placed = self.observer.placed  # address of a storage that may be an output -> bytes
        self.branches = Branches(recording, self.observer)

    def run(self) -> Self:
        code = self.request.code
        with self.recording:
            stand_ins = [self._stand_in(position, value) for position, value in enumerate(self.inputs)]
            # The region must hold the only references: when it drops one, it won't use that input again.
            known = [weakref.ref(v) if isinstance(v, torch.Tensor) else None for v in stand_ins]
            watching = self.with_uses or self.observer.has_pools
            watch = Watch(self.observer) if watching else contextlib.nullcontext()
            with self.recording.capturing(self.inputs, self.plan.random), self.branches.captured():
                self.recording.clear_stack()
                namespace = self.request.namespace
                tracing = noted(namespace, self.launches) if self.numbers else contextlib.nullcontext()
                lines = self.recording.noting_lines(namespace)
                with observed(namespace, self.observer), tracing, watch, lines, self.observer:
                    given, stand_ins = stand_ins, []
                    outputs = self.request.model(given)
                    del given
                outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
                self.observer.end_group()
            if astray := self._astray(outputs):
                raise Astray(self.observer.learned(astray, self.plan))
            recipes, addresses = self._recipes(outputs, [ref and ref() for ref in known])
            del outputs
            self._check_kept()
        lives = self.observer.lives
        inputs = {position: address for address, position in self.input_at.items()}
        positions = tuple(sorted(inputs))
        sizes = [self.placed[address] for address in addresses]
        made = [lives.made.get(address, 0) for address in addresses]
        moved, storages, parts = place(
            recipes, sizes, code.saved_outputs, made, gradients=code.is_backward, holes=self.holes
        )
        among = self.observer.scratch | self.placed  # the requested sizes; the allocator's segments are larger
        allocated = dict(self.recording.segments())
        same = self.branches.same
        others = self.input_at.keys() | set(addresses) | same.keys()
        scratch = [(address, among.get(address, size)) for address, size in allocated.items() if address not in others]
        self.layout = OutputLayout(positions, storages, moved, tuple(s for _, s in scratch))
        given = [(inputs[k], allocated[inputs[k]]) for k in positions]
        regions = [*given, *zip(addresses, sizes, strict=True), *scratch]
        self.segments = [Segment(address, size, region) for region, (address, size) in enumerate(regions)]
        number = {address: region for region, (address, _) in enumerate(regions)}
        self.segments += [Segment(a, among[a], number[self.branches.stands_for(a)]) for a in same]
        self.segments += [Segment(address, 8, FIXED, 8 * i) for i, address in enumerate(self.recording.fixed)]
        self.lives = [lives.life(address, max(size, 1)) for address, size in regions]  # a node may hold any address
        self.places = *[(k, 0) for k in range(len(positions))], *[(len(positions) + n, at) for n, at in parts]
        return self

    def _check_kept(self) -> None:
        """Refuse if memory of the capture is still in use after it: its addresses will be invalid. The holder may be a
        cache, or a generator of random numbers that the region hadn't used before."""
        kept = list(self.recording.kept())
        scratch = self.observer.scratch
        if not scratch.keys().isdisjoint(self.observer.lives.remaining()):
            gc.collect()  # they may be garbage, since the collector was off during the capture
            kept += [scratch[address] for address in self.observer.lives.remaining() if address in scratch]
        if kept:
            many = f"{sum(kept)} bytes that it allocated are" if len(kept) > 1 else f"{kept[0]} bytes are"
            raise Unprovable("kept", f"{many} still in use when it has ended, and would be used again at the next call")

    def _stand_in(self, position: int, value: Any) -> Any:
        if position in self.numbers:
            return Traced.input(position, self.numbers[position])
        if not is_region(value):
            return value
        if not _is_plain(value):
            raise Unprovable("input", f"input {position} is not a plain tensor: {value.layout}, {value.dtype}")
        if value.device != self.recording.device:
            raise Unprovable("device", f"input {position} is on {value.device}")
        made = self.recording.place(view_of(value), self.request.alignments[position])
        if made.data_ptr():
            self.input_at[made.data_ptr()] = position
            self.observer.lives.begin(made)
        return made

    def _astray(self, outputs: Sequence[Any]) -> list[int]:
        """Return the addresses of outputs that lie in the scratch."""
        plain = [out for out in outputs if isinstance(out, torch.Tensor) and _is_plain(out)]
        known = self.input_at.keys() | self.placed.keys()
        addresses = dict.fromkeys([out.untyped_storage().data_ptr() for out in plain])
        return [a for a in addresses if a and self.recording.covers(a) and a not in known]

    def _recipes(self, outputs: list[Any], stand_ins: list[Any]) -> tuple[list[Recipe], list[int]]:
        """Return the recipes of the outputs, and the addresses of the storages that the recipes use."""
        recipes: list[Recipe] = []
        addresses: dict[int, int] = {}  # in the order of their numbers
        inputs = {id(v): k for k, v in reversed(list(enumerate(stand_ins))) if isinstance(v, torch.Tensor)}
        seen: dict[int, int] = {}
        for number, out in enumerate(outputs):
            if isinstance(out, Traced):
                recipes.append(Computed(out.expression))
            elif not isinstance(out, torch.Tensor):
                recipes.append(Given(out))
            elif id(out) in inputs:
                recipes.append(SameInput(inputs[id(out)]))
            elif id(out) in seen:
                recipes.append(Repeated(seen[id(out)]))
            else:
                seen[id(out)] = number
                recipes.append(self._recipe(number, out, addresses))
        return recipes, list(addresses)

    def _recipe(self, number: int, out: torch.Tensor, addresses: dict[int, int]) -> Recipe:
        if not _is_plain(out) or type(out) not in (torch.Tensor, torch.nn.Parameter):
            what = f"{type(out).__name__}, {out.layout}, {out.dtype}"
            raise Unprovable("output", f"output {number} is not a plain tensor: {what}")
        address = out.untyped_storage().data_ptr()
        if not address and out.device == self.recording.device:
            return Empty(view_of(out))
        offset = int(out.storage_offset()) * out.dtype.itemsize
        if address in self.input_at:
            return OfInput(self.input_at[address], view_of(out, offset))
        if address not in self.placed:
            if out.device != self.recording.device:
                raise Unprovable("output", f"output {number} is on {out.device}")
            return Given(out)
        return OfStorage(addresses.setdefault(address, len(addresses)), view_of(out, offset))


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor's values are those in its memory, at its strides."""
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return tensor.layout is torch.strided and not (tensor.is_quantized or is_lazy)


def is_region(value: Any) -> bool:
    """True if this input is a tensor whose address the graph's nodes hold. A tensor on the host is not."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"
