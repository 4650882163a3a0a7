"""Describes compiled code that asks for a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Code:
    """A compiled region as its compiler describes it: properties that are the same at each call."""

    name: str
    device: int
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()  # that it may write to
    saved_outputs: frozenset[int] = frozenset()  # saved tensors for the backward, which the user doesn't see
    is_backward: bool = False
    source: str = ""  # the first line of the user's program that the region was compiled from
    compile_id: Any = None  # Dynamo's, of the frame that it was compiled for, if that could be cut at an operator
    # Positions of numbers that no tensor's size or stride depends on; negative ones count from the end.
    numbers: frozenset[int] = frozenset()

    @property
    def is_training(self) -> bool:
        return self.is_backward or bool(self.saved_outputs)
