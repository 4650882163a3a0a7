"""Simulates the part of a GPU that C++ sees, without a compiler, a preload or a patched library.

Note [Three pokes make C++ believe in a GPU]
--------------------------------------------
Most of a simulated device can be put into Python attributes (`_mocks.py`). Three things can't, because C++ asks C++:

1. Device guards. Autograd reads the current stream of each tensor's device when it builds a node, and c10 keeps one
   guard object per device type in an exported array. PyTorch ships `FakeGuardImpl`, with thread-local devices and
   streams, for CUDA tensors without a GPU, and installs it itself if the real guard counts no device. We put that very
   object into the array, and restore the old pointer at exit.
2. The autograd engine asks the CUDA hooks whether a device has a context (`GraphTask::stash_current_streams`), which
   goes to the driver. The hooks object is reached through an exported function; we give it a copy of its own vtable in
   which that one entry is ours. Entry 4: two destructors, isBuilt, isAvailable, hasPrimaryContext.
3. `torch.Stream` and `torch.Event` are static C types, and user code, Dynamo and isinstance checks hold them by
   identity, so they can't be replaced by subclasses. Their methods are replaced in the type itself.

Each poke is a plain data write, needs no executable memory, and is undone by writing the old value back.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_CUDA = 1  # c10::DeviceType::CUDA, the index into the guard registry
_WORD = ctypes.sizeof(ctypes.c_void_p)
_DEVICE_COUNT_ENTRY = 15  # DeviceGuardImplInterface: the entry that ensureCUDADeviceGuardSet asks
_HAS_CONTEXT_ENTRY = 4  # AcceleratorHooksInterface::hasPrimaryContext
_VTABLE_WORDS = 96  # more entries than either interface declares; those after its own are never called
_TP_FLAGS, _TP_NEW = (168, 312)  # offsets in PyTypeObject on 64-bit CPython, both checked before use
_IMMUTABLE = 1 << 8
_PY_TP_NEW = 65  # typeslots.h

_get_slot = ctypes.pythonapi.PyType_GetSlot
_get_slot.restype, _get_slot.argtypes = (ctypes.c_void_p, [ctypes.py_object, ctypes.c_int])
_NEWFUNC = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object)


class UnsupportedBuild(RuntimeError):
    """This build of PyTorch or Python lacks something that the simulated GPU relies on."""


def _word(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(address)


def _guard_registry_slot() -> ctypes.c_void_p:
    try:
        c10 = ctypes.CDLL("libc10.so")
        array = (ctypes.c_void_p * (_CUDA + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError) as e:
        raise UnsupportedBuild(f"simulated_gpu: c10's device guard registry is not reachable ({e})") from e
    return _word(ctypes.addressof(array) + _CUDA * _WORD)


@contextlib.contextmanager
def fake_device_guard() -> Iterator[None]:
    """Make c10's own FakeGuardImpl the CUDA device guard, whatever machine this is."""
    slot = _guard_registry_slot()
    real = slot.value
    no_devices = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _self: 0)
    vtable = (ctypes.c_void_p * _VTABLE_WORDS)()
    vtable[_DEVICE_COUNT_ENTRY] = ctypes.cast(no_devices, ctypes.c_void_p)
    guard_without_devices = ctypes.c_void_p(ctypes.addressof(vtable))
    try:
        slot.value = ctypes.addressof(guard_without_devices)
        torch._C._ensureCUDADeviceGuardSet()  # replaces a guard that counts no device by FakeGuardImpl
        if slot.value == ctypes.addressof(guard_without_devices):
            raise UnsupportedBuild("simulated_gpu: this torch does not install a fake CUDA device guard")
        yield
    finally:
        slot.value = real


@contextlib.contextmanager
def primary_context(has_context: Callable[[int], bool]) -> Iterator[None]:
    """Make the CUDA hooks answer hasPrimaryContext(device) through `has_context`."""
    try:
        get_hooks = ctypes.CDLL("libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
    except (OSError, AttributeError) as e:
        raise UnsupportedBuild(f"simulated_gpu: the CUDA hooks are not reachable ({e})") from e
    get_hooks.restype = ctypes.c_void_p
    pointer = _word(get_hooks())
    real = pointer.value
    if real is None:
        raise UnsupportedBuild("simulated_gpu: the CUDA hooks have no vtable")
    # An Itanium vtable is preceded by the offset to the top and the type information: copy those as well.
    copy = (ctypes.c_void_p * _VTABLE_WORDS)()
    ctypes.memmove(copy, real - 2 * _WORD, _VTABLE_WORDS * _WORD)
    entry = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda _self, device: has_context(device))
    copy[2 + _HAS_CONTEXT_ENTRY] = ctypes.cast(entry, ctypes.c_void_p)
    try:
        pointer.value = ctypes.addressof(copy) + 2 * _WORD
        yield
    finally:
        pointer.value = real


@contextlib.contextmanager
def _unlocked(cls: type) -> Iterator[None]:
    flags = ctypes.c_ulong.from_address(id(cls) + _TP_FLAGS)
    if flags.value != cls.__flags__:
        raise UnsupportedBuild("simulated_gpu: this Python lays out type objects in an unknown way")
    locked = flags.value & _IMMUTABLE
    flags.value &= ~_IMMUTABLE
    try:
        yield
    finally:
        flags.value |= locked


@contextlib.contextmanager
def type_attributes(cls: type, attributes: dict[str, object]) -> Iterator[None]:
    """Replace attributes of a static C type. `__new__` is a slot as well, and the slot is restored by hand: CPython
    would leave its generic dispatcher there, which calls the restored `__new__`, which calls the slot."""
    missing = object()
    saved = {name: cls.__dict__.get(name, missing) for name in attributes}
    new_slot = _word(id(cls) + _TP_NEW)
    native_new = new_slot.value
    if native_new != _get_slot(cls, _PY_TP_NEW):
        raise UnsupportedBuild("simulated_gpu: this Python lays out type objects in an unknown way")
    try:
        with _unlocked(cls):
            for name, value in attributes.items():
                type.__setattr__(cls, name, value)
        yield
    finally:
        with _unlocked(cls):
            for name, value in saved.items():
                if value is missing:
                    type.__delattr__(cls, name)
                else:
                    type.__setattr__(cls, name, value)
            new_slot.value = native_new


def native_new(cls: type) -> Callable[..., object]:
    """Return `cls.__new__` as C sees it: without Python's check that the subclass has no constructor of its own."""
    slot = _NEWFUNC(_get_slot(cls, _PY_TP_NEW))
    return lambda sub, *args, **kwargs: slot(sub, args, kwargs)


def write_cuda_stream(obj: object, stream_id: int, device: int) -> None:
    """Fill the c10::Stream {int8 type, int8 index, int64 id} that _CudaStreamBase holds after torch.Stream's fields."""
    at = id(obj) + torch.Stream.__basicsize__
    ctypes.c_int8.from_address(at).value = _CUDA
    ctypes.c_int8.from_address(at + 1).value = device
    ctypes.c_int64.from_address(at + 8).value = stream_id
