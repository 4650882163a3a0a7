"""Makes the key of a call: the values that a graph keeps from the inputs that are not tensors on the device.

A graph keeps the numbers of its capture, so two calls share a graph only if no program could tell their numbers apart
(`bit_key`). An integer, which most keys are made of, is in the key as it is.

A small tensor in host memory is in the key by its values, one in a slab, which lives as long as the graphs that hold
its address, by the identity of the slab.
"""

from __future__ import annotations

import struct
from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.offload import runtime


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        return runtime.identity(tensor) if runtime.is_slab(tensor) else LARGE
    return (tensor.dtype, *map(bit_key, tensor.flatten().tolist()))
