"""Makes the key of a call: the values that a graph keeps from the inputs that are not tensors on the device.

A graph keeps the numbers of its capture, so two calls share a graph only if no program could tell their numbers apart
(`bit_key`). An integer, which most keys are made of, is in the key as it is.

A small tensor in host memory is in the key by its values, one in memory that lives as long as the graph (`Keeper`) by
the identity of that.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import torch


bits_of = struct.Struct("<d").pack


def bit_key(value: Any) -> Any:
    """Return an object that equals that of another value if and only if both have the same type and the same bits: True
    is not 1, 1 is not 1.0, 0.0 is not -0.0, and a NaN is itself."""
    kind = type(value)
    if kind is int:
        return value
    if isinstance(value, float):
        return kind, bits_of(value)
    if isinstance(value, complex):
        return kind, bits_of(value.real), bits_of(value.imag)
    if isinstance(value, (tuple, list)):
        return kind, tuple(map(bit_key, value))
    return kind, value


class Keeper(NamedTuple):
    """An owner of host memory that lives as long as the graphs that hold its address, so that they may copy to and from
    it. `identity(tensor)` tells the tensor's memory from all that may later have its address;
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


LARGEST_HOST_TENSOR = 8  # values; up to here they become a part of the key
LARGE = object()  # in a key: a tensor in host memory with more values, so there can be no graph


def key_of(numbers: Sequence[int], scalars: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a key of the inputs at these positions; `scalars` are tensors in host memory. Each
    call makes a key, and a display of all its values takes a third of the time of a loop over the positions."""
    values = [f"v if type(v := inputs[{k}]) is int else bit_key(v), " for k in numbers]
    values += [f"host_value(inputs[{k}]), " for k in scalars]
    return eval(f"lambda inputs: ({''.join(values)})", {"bit_key": bit_key, "host_value": host_value})


def host_value(tensor: torch.Tensor) -> Any:
    if not tensor.dim():
        return tensor.dtype, bit_key(tensor.item())
    if tensor.numel() > LARGEST_HOST_TENSOR:
        found = identity(tensor)
        return LARGE if found is None else found
    return (tensor.dtype, *map(bit_key, tensor.flatten().tolist()))
