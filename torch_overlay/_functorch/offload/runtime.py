"""Provides pinned slabs, copy streams and copies to generated code with offloaded activations.

    buf0 = take_slab(nbytes, device_index, strict)
    copy_out(buf0, buf7, offset)
    note_use(primals_0)
    copy_in(buf3, primals_0, offset)

Note [Lifetime of a slab]
1. A slab is host memory that is pinned once and cached by the process. A call of a forward takes a free slab that fits;
   several forwards that are alive at once have one each.
2. The forward saves a tensor over the slab. When the last reference to the tensor's storage is dropped (autograd has
   freed what it saved, the backward has ended), the slab returns to the pool. `retain_graph=True` keeps the reference.
3. By then the host has launched every copy from the slab, but the device may not have run them all. All of them were
   joined into the stream that the backward ran on, before the backward returned (`note_use` remembers that stream). So
   the next use of the slab comes after them if it is on the same stream; another stream waits for that one first, on
   the device.
4. A slab that was taken in a user's capture has its address in the user's graph: it never returns to the pool. Earlier
   copies of it are no part of the graph, and a wait for them would end the capture: they come before the capture, for
   which `torch.cuda.graph` waits for the device.

The host never waits, except in `release_free`, and for copies of slabs that could not be pinned.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import weakref
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.offload import pinned_memory
from torch_overlay._functorch.offload.pinned_memory import gigabytes, size_text
from torch_overlay._functorch.streams.ids import copy_device, index_now
from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

log = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes, of each tensor in a slab; the copy engines like it, and any dtype is aligned


class OffloadError(RuntimeError):
    """Activations can't be offloaded as the option `activation_offload` asks."""


# ---- copy streams


_captured: ThreadValue[Callable[[int], Any] | None] = ThreadValue(None)
_streams: dict[tuple[int, bool], torch.cuda.Stream] = {}  # by device, and whether it copies from the host


def copy_stream(number: int) -> Any:
    """Return the copy stream with that number: there is one per direction and device, for all graphs. In a capture of
    ours, return one that only captures use."""
    if _captured.value is not None:
        return _captured.value(number)
    written, is_in = copy_device(number)
    key = index_now(written), is_in
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.cuda.Stream(key[0], priority=-1)
    return found


def exchanged(stream: Callable[[int], Any]) -> contextlib.AbstractContextManager[Any]:
    """Replace this thread's copy streams by those that `stream` returns, for the time of a capture."""
    return _captured.within(stream)


# ---- slabs


class _Slab:
    """Host memory of `nbytes` bytes; `used_on` is the stream that is ordered after its last copies, or will be."""

    numbers = itertools.count()

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.number = nbytes, next(self.numbers)
        self.memory = pinned_memory.allocate(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        pinned_memory.populate(self.address, nbytes)
        self.pinned = False
        self.used_on: Any = None
        self.device_index = 0

    def tensor(self, nbytes: int, on_release: Callable[[_Slab], None] | None) -> torch.Tensor:
        """Return a tensor over the first bytes of the memory. `on_release` is called when its storage is freed."""
        view = (ctypes.c_char * nbytes).from_address(self.address)
        if on_release is not None:
            finalizer: Any = weakref.finalize(view, on_release, self)
            finalizer.atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)


_lock = threading.RLock()
_free: list[_Slab] = []
_all: dict[int, _Slab] = {}  # by address
_kept: list[_Slab] = []
LARGEST_WASTE = 1.5  # a slab may be this many times as large as a call needs


def _fitting(nbytes: int) -> _Slab | None:
    """Return the smallest free slab that is large enough, and not much larger; None if there is none."""
    fit = [slab for slab in _free if nbytes <= slab.nbytes <= LARGEST_WASTE * nbytes]
    return min(fit, key=lambda slab: slab.nbytes) if fit else None


def check_host_memory(nbytes: int) -> None:
    """Raise OffloadError if no slab of that size is free or can be allocated."""
    with _lock:
        if _fitting(nbytes) is not None:
            return
        free = sum(slab.nbytes for slab in _free)
    available = pinned_memory.available_bytes()
    room = int(0.9 * (available + free)) if available is not None else nbytes
    if nbytes > room:
        raise OffloadError(
            f"activation_offload keeps {size_text(nbytes)} of saved activations in pinned host memory, and "
            f"{size_text(room)} would fit into what the host has left. Raise its budget_gb by "
            f"{gigabytes(nbytes - room)} or more, or free host memory."
        )


def _make_slab(nbytes: int, strict: bool) -> _Slab:
    check_host_memory(nbytes)
    available = pinned_memory.available_bytes()
    if available is not None and nbytes > 0.9 * available:
        release_free()
    slab = _Slab(nbytes)
    if code := pinned_memory.pin(slab.address, nbytes):
        text = (
            f"activation_offload: {size_text(nbytes)} of host memory for saved activations could not be pinned (CUDA "
            f"error {code}). Raise its budget_gb, or the limit of locked memory (ulimit -l)."
        )
        if strict:
            raise OffloadError(text)
        log.warning("%s Copies to memory that isn't pinned keep the host waiting.", text)
        return slab
    slab.pinned = True
    log.info("pinned a slab of %s for saved activations", size_text(nbytes))
    return slab


def take_slab(nbytes: int, device_index: int, strict: bool = True) -> torch.Tensor:
    """Return a slab for one call of a forward, with the current stream ordered after all earlier copies of the slab."""
    if _has_hooks():
        raise OffloadError(
            "saved-tensor hooks are active around a function that was compiled with activation_offload; a hook would "
            "read host memory before the device has written it. Call the function outside of the hooks, or compile it "
            "with activation_offload = None."
        )
    device_index = index_now(device_index)
    current, is_capturing = _current_stream(device_index), _is_capturing()
    with _lock:
        slab = _fitting(nbytes)
        if slab is not None:
            _free.remove(slab)
    if slab is None:
        slab = _make_slab(nbytes, strict)
        with _lock:
            _all[slab.address] = slab
    tensor = slab.tensor(nbytes, None if is_capturing else _free_slab)  # from here on the slab returns by itself
    if is_capturing:
        _kept.append(slab)
    elif slab.used_on is not None and slab.used_on != current:
        current.wait_stream(slab.used_on)
    slab.used_on, slab.device_index = current, device_index
    return tensor


def _current_stream(device_index: int) -> Any:
    return torch.cuda.current_stream(device_index)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _has_hooks() -> bool:
    """True if saved-tensor hooks are active, except checkpointing's, which don't read the tensors that they hold."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint"


def _free_slab(slab: _Slab) -> None:
    with _lock:
        _free.append(slab)


def slab_of(tensor: torch.Tensor) -> _Slab | None:
    return _all.get(tensor.data_ptr())


def is_slab(value: object) -> bool:
    """True if the value is the tensor of a slab that is in use, whose address doesn't change."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.data_ptr() in _all


def identity(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's address and the number of its slab: a graph copies from this slab, and another one may later
    have the same address."""
    found = slab_of(tensor)
    return (tensor.data_ptr(), *([found.number] if found is not None else []))


def holds(address: int) -> bool:
    """True if the address lies in pinned memory of a slab."""
    with _lock:
        return any(0 <= address - start < slab.nbytes and slab.pinned for start, slab in _all.items())


def note_use(slab: torch.Tensor) -> None:
    """Note that loads from the slab are about to be launched, and will be joined into the current stream."""
    found = slab_of(slab)
    if found is None:
        return
    current = _current_stream(found.device_index)
    if found.used_on is not None and found.used_on != current:
        current.wait_stream(found.used_on)  # the stream that wrote the slab, or used it last
    found.used_on = current


def live() -> dict[str, int]:
    """Return the number of slabs in the process, the number of those in use, and the bytes of all slabs."""
    with _lock:
        return {"slabs": len(_all), "in_use": len(_all) - len(_free), "bytes": sum(s.nbytes for s in _all.values())}


def release_free() -> None:
    """Free the pinned memory of the slabs that nobody uses. Wait for the device first."""
    with _lock:
        slabs = []
        while _free:  # a finalizer may add to it meanwhile
            slabs.append(_free.pop())
            del _all[slabs[-1].address]
    if not slabs:
        return
    torch.cuda.synchronize()
    for slab in slabs:
        if slab.pinned:
            pinned_memory.unpin(slab.address)


# ---- copies


def _lines(slab: torch.Tensor, tensor: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slab's range of bytes and the dense tensor, each as a flat view in the order of memory."""
    count = tensor.numel()
    part = slab[offset : offset + count * tensor.element_size()].view(tensor.dtype)
    return part, tensor.as_strided((count,), (1,))


def copy_out(slab: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    part, line = _lines(slab, source, offset)
    part.copy_(line, non_blocking=True)


def copy_in(target: torch.Tensor, slab: torch.Tensor, offset: int) -> None:
    part, line = _lines(slab, target, offset)
    line.copy_(part, non_blocking=True)


__all__ = ["OffloadError", "copy_in", "copy_out", "copy_stream", "note_use", "take_slab"]
