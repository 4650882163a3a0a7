"""Makes the key of a call: the values that a graph keeps from the inputs that are not tensors on the device.

A graph keeps the numbers of its capture, so two calls share a graph only if no program could tell their numbers apart
(`exact`). An integer, which most keys are made of, is in the key as it is.

A small tensor in host memory is in the key by its values, one in memory that lives as long as the graph
(`host_memory`) by the identity of that.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch import host_memory
from torch_overlay._inductor.relaunch.exact import exact


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

LARGEST_HOST_TENSOR = 8  # values; up to here they become a part of the key
LARGE = object()  # in a key: a tensor in host memory with more values, so there can be no graph


def key_of(numbers: Sequence[int], scalars: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a key of the inputs at these positions; `scalars` are tensors in host memory."""
    if not numbers and not scalars:
        return lambda inputs: ()
    if not scalars:
        return lambda inputs: tuple([v if type(v := inputs[k]) is int else exact(v) for k in numbers])
    return lambda inputs: (*[exact(inputs[k]) for k in numbers], *[host_value(inputs[k]) for k in scalars])


def host_value(tensor: torch.Tensor) -> Any:
    if not tensor.dim():
        return tensor.dtype, exact(tensor.item())
    if tensor.numel() > LARGEST_HOST_TENSOR:
        found = host_memory.identity(tensor)
        return LARGE if found is None else found
    return (tensor.dtype, *map(exact, tensor.flatten().tolist()))
