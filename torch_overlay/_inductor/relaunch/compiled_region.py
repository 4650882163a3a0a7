"""Runs a region of generated code: as compiled, or by a graph, with aligned copies of inputs where it needs them."""

from __future__ import annotations

from collections import Counter
from typing import Any, TYPE_CHECKING, TypeAlias

from torch_overlay._inductor.relaunch.alignment import address_of, clone_flat, copy_back, LEAST


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torch_overlay._inductor.relaunch.compiled_code import Code

    Clones: TypeAlias = "list[tuple[int, torch.Tensor, torch.Tensor]]"


class CompiledRegion:
    """A compiled function (`model`) with its description, and the device that it runs on. `outside`: calls that ran as
    compiled, by the code of the cause."""

    def __init__(self, model: Callable[[list[Any]], Any], code: Code, device: Any) -> None:
        self.model, self.code, self.device = model, code, device
        self.outside: Counter[str] = Counter()

    def run(self, cause: str, inputs: list[Any]) -> Any:
        """Run the region as compiled, and count the cause."""
        self.outside[cause] += 1
        return self.plain(inputs)

    def plain(self, inputs: list[Any]) -> Any:
        """Run the region as compiled. Compiled code aligns the inputs that it only reads; the ones that it writes are
        aligned here. A partition returns the inputs that later ones use, which may write to them: these are no copies.
        """
        clones = self.align(inputs, self.code.mutated_inputs)
        result = self.model(inputs)
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
        clones = []
        for k in range(len(inputs)) if positions is None else positions:
            value = inputs[k]
            if k not in self.code.static_inputs and address_of(value) % LEAST:
                inputs[k] = clone_flat(value)
                clones.append((k, value, inputs[k]))
        return clones
