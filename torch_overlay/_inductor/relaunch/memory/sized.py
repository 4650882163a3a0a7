"""Describes what a launch of a graph for any size computes from the region's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from torch_overlay._inductor.relaunch.numbers.expressions import Expression
    from torch_overlay._inductor.relaunch.numbers.program import Result


@dataclass(frozen=True)
class Sized:
    """What a launch computes besides number slots. `expressions`: the results after those of the number slots. Where
    one of them stands in a size, a stride or an offset, there is a `Result`."""

    expressions: tuple[Expression, ...]
    allocations: tuple[tuple[Any, Any, torch.dtype], ...]  # (size, stride, dtype) of the layout's own storages
    outputs: Mapping[int, Any]  # (size, stride, offset) of an output in its storage; a Result for a number
    scratch: Result | None  # bytes, if they depend on the sizes
    derived: tuple[tuple[int, Result], ...]  # (region, bytes) where each derived region begins
