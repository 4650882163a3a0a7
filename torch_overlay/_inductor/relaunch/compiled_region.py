"""Runs a region of generated code: as compiled, or by a graph, with aligned copies of inputs where it needs them.

Note [Alignment of inputs]
Compiled code and libraries choose kernels by the alignment of what they read, so a graph is valid for inputs that are
aligned like those it was captured with, or better. A newly allocated tensor has a higher alignment than any kernel
checks for. At the first input that is less aligned, but to 16 bytes, the region is captured again, for inputs that are
all aligned to 16 bytes. An input that is not aligned to 16 bytes is copied, and copied back if the region writes it:
compiled code couldn't use it at its own address. Inputs in one memory, such as the views of an input that an earlier
partition made, stay in one memory if one of them is written: a graph has the address of any of them in its nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, TYPE_CHECKING, TypeAlias

import torch

from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.allocations import FULL
from torch_overlay._inductor.relaunch.governor import Governor
from torch_overlay._inductor.relaunch.steps import Steps


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.states import State

    Clones: TypeAlias = "list[tuple[int, torch.Tensor, torch.Tensor]]"


LEAST = 16


def address_of(value: Any) -> int:
    """Return the address of a plain tensor on the device, and 0 for anything else."""
    return value.data_ptr() if capture.is_region(value) and value.layout is torch.strided else 0


def alignment_of(address: int) -> int:
    """Return the largest power of two, up to `FULL`, that the address is a multiple of."""
    return min(address & -address, FULL) if address else FULL


def clone_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of the original, including the elements in memory between those of the tensor."""
    return torch.as_strided(_flat(tensor).clone(), tensor.size(), tensor.stride(), 0)


def clone_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in one memory, at the same distances as the originals, which are in one memory."""
    starts = [address_of(t) for t in tensors]
    first, end = min(starts), max(start + _flat(t).nbytes for start, t in zip(starts, tensors))
    storage = tensors[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    whole = whole.set_(storage, first - storage.data_ptr(), (end - first,), (1,)).clone()
    copies = []
    for start, tensor in zip(starts, tensors):
        copy, offset = torch.empty(0, dtype=tensor.dtype, device=storage.device), (start - first) // tensor.itemsize
        copies.append(copy.set_(whole.untyped_storage(), offset, tensor.size(), tensor.stride()))
    return copies


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors overlap, and lie in the same way on bytes that compiled code takes for aligned."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (start, end), (begin, stop) = ((address_of(t), address_of(t) + _flat(t).nbytes) for t in (one, other))
    return start < stop and begin < end and (start - begin) % LEAST == 0


def copy_back(original: torch.Tensor, clone: torch.Tensor) -> None:
    """Copy the elements of the clone, each once. Those in memory between them may be another input's."""
    _once(original).copy_(_once(clone))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    size = [n if stride else min(n, 1) for n, stride in zip(tensor.size(), tensor.stride())]
    return torch.as_strided(tensor.detach(), size, tensor.stride())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    length = 0 if 0 in tensor.size() else 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride()))
    return torch.as_strided(tensor, (length,), (1,))


class CompiledRegion:
    """A compiled function (`model`) with its description, and the device that it runs on. `outside`: calls that ran as
    compiled, by the code of the cause; `governor`: the time that they took, and that of graphs."""

    def __init__(self, model: Callable[[list[Any]], Any], code: CodeFacts, device: Cuda) -> None:
        self.model, self.code, self.device = model, code, device
        self.steps = Steps(model, device)
        self.outside: Counter[str] = Counter()
        self.governor = Governor()

    def run(self, cause: str, inputs: list[Any], waiting: State | None = None, code: Any = None) -> Any:
        """Run the region without a graph, and count the cause: as steps, if `code` isn't given. `waiting`: the state
        that waits for a capture meanwhile."""
        self.outside[cause] += 1
        if cause == "warm-up":
            return self.plain(inputs, code or self.steps.run)
        start = time.perf_counter()
        result = self.plain(inputs, self.model if cause == "callers-capture" else self.steps.run)
        seconds = time.perf_counter() - start
        self.governor.note_call(seconds)
        if waiting is not None:
            waiting.waited += seconds
        return result

    def plain(self, inputs: list[Any], code: Callable[[list[Any]], Any] | None = None) -> Any:
        """Run the region as compiled, or its code in another form. It aligns the inputs that it only reads; those that
        it writes are aligned here. A partition returns the inputs that later ones use, which may write to them: these
        are no copies.
        """
        clones = self.align(inputs, self.code.mutated_inputs) if self.code.mutated_inputs else ()
        result = (code or self.model)(inputs)
        for _, original, clone in clones:
            copy_back(original, clone)
        if not clones or not isinstance(result, (list, tuple)):
            return result
        originals = {id(clone): original for _, original, clone in clones}
        return tuple([originals.get(id(value), value) for value in result])

    def launch(self, relaunch: Any, inputs: list[Any], originals: Sequence[Any], clones: Clones) -> tuple[Any, ...]:
        """Launch a graph on aligned inputs, and copy those back that it writes. `originals`: the inputs before they
        were aligned; empty if they are the same."""
        result = relaunch.launch(inputs, originals or None)
        for k, original, clone in clones:
            if k in self.code.mutated_inputs:
                copy_back(original, clone)
        return result

    def align(self, inputs: list[Any], positions: Sequence[int] | None = None) -> Clones:
        """Replace each input, or each at `positions`, that isn't aligned to 16 bytes by a copy, since compiled code
        can't use it. Static inputs stay: the region was compiled for their alignment. Return (position, original, copy)
        of each."""
        given = range(len(inputs)) if positions is None else positions
        moved = [k for k in given if k not in self.code.static_inputs and address_of(inputs[k]) % LEAST]
        clones: Clones = []
        while moved:
            together = self._together(moved, inputs)
            originals = [inputs[k] for k in together]
            copies = clone_together(originals) if len(together) > 1 else map(clone_flat, originals)
            for k, original, copy in zip(together, originals, copies):
                inputs[k] = copy
                clones.append((k, original, copy))
            moved = [k for k in moved if k not in together]
        return clones

    def _together(self, moved: Sequence[int], inputs: Sequence[Any]) -> list[int]:
        """Return the first of these positions, and others whose inputs must have their copies in one memory with it."""
        together = [moved[0]]
        for k in together:
            together += [j for j in moved if j not in together and share_memory(inputs[j], inputs[k])]
        return together if any(k in self.code.mutated_inputs for k in together) else together[:1]
