"""Tells how inputs are aligned, and copies those that compiled code can't use where they are.

Note [Alignment of inputs]
Compiled code and libraries choose kernels by the alignment of what they read, so a graph is valid for inputs that are
aligned like those it was captured with, or better. A newly allocated tensor has a higher alignment than any kernel
checks for. At the first input that is less aligned, but to 16 bytes, the region is captured again, for inputs that are
all aligned to 16 bytes. An input that is not aligned to 16 bytes is copied, and copied back if the region writes it:
compiled code couldn't use it at its own address.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.capture.operators import FULL


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
