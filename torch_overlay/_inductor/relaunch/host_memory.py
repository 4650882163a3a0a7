"""Knows which memory of the host lives as long as graphs that hold its address.

A graph may copy to and from such memory, for nobody frees it meanwhile. Who has it says so in `keepers`.
"""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import torch


class Keeper(NamedTuple):
    """An owner of such memory. `identity(tensor)` tells the tensor's memory from all that may later have its address;
    None if it isn't the owner's."""

    holds: Callable[[int], bool]
    identity: Callable[[torch.Tensor], Hashable | None]


keepers: list[Keeper] = []


def holds(address: int) -> bool:
    """Return whether the address lies in such memory."""
    return any(keeper.holds(address) for keeper in keepers)


def identity(tensor: torch.Tensor) -> Hashable | None:
    """Return the identity of the tensor's memory; None if it is any memory of the host."""
    return next((found for keeper in keepers if (found := keeper.identity(tensor)) is not None), None)
