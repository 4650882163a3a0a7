"""Reads the addresses of many tensors at once.

    same(tensors, addresses, indices)   is tensors[i].data_ptr() == addresses[i] for all i of indices?
    addresses(tensors, indices)         (tensors[i].data_ptr(), ...)
    aligned(tensors, indices, masks)    has no address a bit in common with its mask?

The functions here call torch. By every public way, from C too, an address takes 60 ns, which is 10 us for the 149
parameters of a model with 16 layers: more than the rest of a relaunch. So the C module (`csrc/data_ptr.c`) reads the
fields of the tensor in memory instead.

Note [Fields of a tensor]
A Python tensor holds a pointer to a TensorImpl; the TensorImpl holds a pointer to a StorageImpl, an offset, a length
and the number of a dtype; the StorageImpl holds the address. Where these fields lie is fixed for a build of torch, and
promised nowhere: before the module reads anything, `teach` compares what it would read with `data_ptr()` for tensors of
each dtype, views, parameters and others. If one differs, the module forgets the dtypes. For a tensor that has no
storage, no elements or an unknown dtype, the module calls `data_ptr()`. As a part of libtorch_python it would be a
C++ function of ten lines.

A flag of a storage says that its address must be asked for before anybody writes: a storage that is copied on write
(`torch._lazy_clone`) shares its address with another one until then. `data_ptr()` gives it memory of its own, so the
module calls it for those tensors, too, whether the graph writes there or not; the launcher of a kernel does the same.

The module caches no field: `p.data = x` exchanges the storage in the same TensorImpl, a storage that is resized moves,
and torch.utils.swap_tensors exchanges the TensorImpl of the same Python object.
"""

from __future__ import annotations

import logging
from operator import and_
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


def same(tensors: Sequence[Any], addresses: Sequence[int], indices: Sequence[int]) -> bool:
    equal: Any = torch._C._tensors_data_ptrs_at_indices_equal
    return equal(list(tensors), list(addresses), list(indices))


def addresses(tensors: Sequence[Any], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple([tensors[i].data_ptr() for i in indices])


def aligned(tensors: Sequence[Any], indices: Sequence[int], masks: Sequence[int]) -> bool:
    return not any(map(and_, addresses(tensors, indices), masks))


def teach(native: Any) -> bool:
    """Teach the C module the item size of each dtype. True if it then reads the right address of every probe; else it
    calls `data_ptr()` of each tensor."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for dtype, size in item_sizes().items():
                native.learn(torch.Tensor, torch.empty(1, dtype=dtype), size)
            native.learn(torch.Tensor, torch.nn.Parameter(torch.ones(1)), torch.ones(1).itemsize)
            with torch.enable_grad():
                found = probes()
        if native.addresses(found) != tuple([t.data_ptr() for t in found]):
            raise RuntimeError("a tensor's fields lie elsewhere than the C module looks for them")
    except Exception as error:
        native.learn(torch.Tensor, None, 0)
        log.info("addresses of tensors are asked for, some 60 ns each: %s", error)
        return False
    return True


def probes() -> list[torch.Tensor]:
    """Return tensors of many kinds, in host memory: Note [Fields of a tensor]."""
    shared = torch.ones(5)
    made = [torch._lazy_clone(shared), torch._lazy_clone(shared)[1:], shared]
    for dtype in item_sizes():
        for size in ((7,), (3, 5), ()):
            whole = torch.empty(size, dtype=dtype)
            made.append(whole)
            if size:
                made += [whole[1:], whole[-1], whole[1:].detach()]
    base = torch.ones(4, 6)
    grown = torch.empty(0).resize_(11)
    made += [torch.nn.Parameter(base), torch.nn.Parameter(base[1:, 2:], requires_grad=False), base.t(), base[2:].T]
    made += [base.clone().requires_grad_().exp(), base.expand(3, 4, 6), grown, grown[3:], torch.empty(0), base[4:]]
    other = torch.nn.Parameter(torch.ones(3))
    other.data = base[1]
    return [*made, other, torch.ones(8).view(torch.int16)[5:], torch.ones(3, dtype=torch.complex64).conj().imag]


def item_sizes() -> dict[torch.dtype, int]:
    """Return dtype -> bytes of an element, for the dtypes that compiled code uses."""
    names = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    names += " complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    return {dtype: dtype.itemsize for name in names.split() if (dtype := getattr(torch, name, None)) is not None}
