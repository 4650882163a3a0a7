"""Defines the copies of saved activations to the host and back as operations of an FX graph.

    forward     slab = offload.slab(bytes, device, strict)     host memory for this call; it is saved for the backward
                offload.store(slab, x, offset)                 on the device's copy-out stream
    backward    offload.in_use(slab)                           the host notes on which stream the backward runs
                x = offload.load(slab, offset, size, stride, dtype, device)      on the copy-in stream

A slab is one tensor of bytes for all that a forward saves on the host. These operations don't wait: a store or load is
a node on a copy stream, and the stream planner orders it like any other (Note [Streams are placement, dependencies are
order]). Inductor generates direct calls for these operations (`_inductor.offload.codegen`); the bodies below serve
interpreters of the graph.

Streams are named by registry index, like the user's streams; the copy streams of a device have indices that the streams
of a frame never reach.
"""

from __future__ import annotations

import torch
from torch._library.custom_ops import custom_op
from torch.fx.node import has_side_effect


BUDGET = "offload_budget"  # in `custom` of stores and loads: bytes
OWNER = "offload_owner"  # ... of inputs of the backward that are views of one tensor: the tensor's name
VALUE = "offload_value"  # ... the name of the forward's node


@custom_op("streams_offload::slab", mutates_args=())
def slab(nbytes: int, device_index: int, strict: bool) -> torch.Tensor:
    """Return `nbytes` bytes of pinned host memory, as uint8, for the saved activations of one call. Without `strict`,
    memory that can't be pinned is accepted."""
    from torch_overlay._functorch.offload.runtime import take_slab

    return take_slab(nbytes, device_index, strict)


@slab.register_fake
def _(nbytes: int, device_index: int, strict: bool) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@custom_op("streams_offload::store", mutates_args=("slab",))
def store(slab: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    """Copy a dense tensor into the slab, `offset` bytes from its start, on the current stream."""
    from torch_overlay._functorch.offload.runtime import copy_out

    copy_out(slab, source, offset)


@store.register_fake
def _(slab: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    return None


@custom_op("streams_offload::in_use", mutates_args=())
def in_use(slab: torch.Tensor) -> None:
    """Note that the slab is about to be read on the current stream, and on streams that join it."""
    from torch_overlay._functorch.offload.runtime import note_use

    note_use(slab)


@in_use.register_fake
def _(slab: torch.Tensor) -> None:
    return None


@custom_op("streams_offload::load", mutates_args=())
def load(
    slab: torch.Tensor, offset: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor on the device with the data that `store` copied to `offset`, loaded on the current stream."""
    from torch_overlay._functorch.offload.runtime import copy_in

    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    copy_in(made, slab, offset)
    return made


@load.register_fake
def _(
    slab: torch.Tensor, offset: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


SLAB = torch.ops.streams_offload.slab.default
STORE = torch.ops.streams_offload.store.default
IN_USE = torch.ops.streams_offload.in_use.default
LOAD = torch.ops.streams_offload.load.default
OPERATIONS = (SLAB, STORE, IN_USE, LOAD)

has_side_effect(IN_USE)
