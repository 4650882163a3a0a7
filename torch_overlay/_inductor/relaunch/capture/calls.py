"""Calls of libraries as launches of their kernels, for code that runs as steps.

    table = entries(index, empty)   # of a device; `Steps` passes it to C
    table.launched, table.captured  # calls that were launched as entries; captures

Note [Library calls as entries]
A matrix product takes the host 15 to 25 us, attention 50 to 90, of which a launch is 3: the rest is torch's dispatch,
and the library's choice of a kernel. What the library launches depends on the function, its numbers, the sizes,
strides, types and alignments of its tensors, and a few modes. So a call is an entry in a table (`csrc/calls.c`), found
by these, which has its kernels. Calls of all layers, regions and sizes share entries.
1. The first call with a key runs as it is, and loads what the library loads. The second is captured alone, on its own
   tensors, and its kernels are launched from the capture; all later ones are launched, with the addresses of theirs.
   At a call site where the last new key had further calls, as in the first of several layers, a new key is captured at
   its first call: the library chooses its kernels in the capture.
2. The addresses in a kernel's parameters are a fact of its function. A function is learnt when it is first seen: the
   call is captured once more, with tensors and temporary memory at other addresses. Each word that differs has to be
   the address of one tensor, or of temporary memory, in both captures; a word that doesn't may not be an address of
   memory at all. Else a call with that function is never an entry. In each later capture the words at these places have
   to be addresses of its tensors, and all others none; if they are, the function is learnt again.
3. Temporary memory of a capture, such as the workspace of cuBLAS, has addresses of an `AddressSpace`. It is allocated
   anew for each launch, and so are results in new memory.
4. Only the functions of `FUNCTIONS` and `OPERATORS` may be entries: they have no state. A capture in which random
   numbers are drawn fails. A call stays as it is if it does more than to launch kernels, fills and copies, takes a
   tensor of the host, or returns a part of new memory; and all do where the library measures kernels.
   Tensors that overlap have their distance in the key.
5. A capture takes as long as some five launches save. Beyond a start, captures have to be earned by launches.
6. During a capture, a synchronization with the device is an error in every thread. New sizes come at any time, so no
   call is captured once a second thread of Python's runs such code. (Autograd's threads don't synchronize.)
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.make_graph import capturing
from torch_overlay._inductor.relaunch.capture.recording import AddressSpace, tensor_at
from torch_overlay._inductor.relaunch.capture.streams import capture_stream
from torch_overlay._inductor.relaunch.launch.executable import implementation
from torch_overlay._inductor.relaunch.memory.outputs import view_of


if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTIONS = torch.mm, torch.addmm, torch.bmm, torch.baddbmm  # with the keyword `out`
OUT = "out"
OPERATORS = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
)
CUDA = 1  # torch's number for devices of this kind
UNKNOWN = 1, ()  # a result at an address that no memory has
PRECISIONS = ("generic", "all"), ("cuda", "all"), ("cuda", "matmul")
MODES: tuple[Callable[[], Any], ...] = (
    *[functools.partial(torch._C._get_fp32_precision_getter, *key) for key in PRECISIONS],
    torch._C._get_cublas_allow_fp16_accumulation,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_blas_preferred_backend,
    torch._C._get_sm_carveout_experimental,
    torch._C._get_deterministic_algorithms,
    torch._C._cuda_getCublasWorkspaceSize,
    torch._C._cuda_getCublasLtWorkspaceSize,
)
GAP = 512  # bytes between tensors that are placed elsewhere

log = logging.getLogger(__name__)

_tables: dict[int, Any] = {}  # by the device's index
_names: dict[tuple[str, ...], tuple[str, ...]] = {}
_modes: dict[tuple[Any, ...], int] = {}


def may_be_entry(function: Any, names: tuple[str, ...]) -> bool:
    """True if a call with these names of its last arguments may be an entry."""
    known = FUNCTIONS if names[-1:] == (OUT,) else OPERATORS
    return any(function is each for each in known)


def shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the one tuple with these names."""
    return _names.setdefault(names, names)


def entries(index: int, empty: Callable[..., torch.Tensor]) -> Any:
    """Return the entries of a device, one table a process; None if the allocator can't be told to allocate elsewhere.
    `empty(size, stride, dtype)` allocates on the device."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    if index not in _tables:
        _tables[index] = implementation().calls(Device(index, empty), CUDA)
    return _tables[index]


def launched() -> int:
    """Return how many calls were launched as entries, on all devices."""
    return sum(table.launched for table in _tables.values())


class Device:
    """What C needs of torch to capture a call on a device, and to launch it."""

    def __init__(self, index: int, empty: Callable[..., torch.Tensor]) -> None:
        self.index, self._empty = index, empty
        self._space: AddressSpace | None = None
        self._pools: list[Any] = []
        self._elsewhere = 0, 0  # address and bytes
        self._stream, self._handle = (0, 0, 0), 0
        self._inside: Any = None  # what `leave` restores
        self._failed = False
        self._threads: set[int | None] = set()  # that have captured, or would have
        self._mine = threading.local()  # `handle`: the thread has one of cuBLAS

    def modes(self) -> int:
        """Return a number for the modes on which the choice of kernels depends; -1 if no call may be an entry."""
        if self._failed or torch._C._cuda_tunableop_is_enabled():
            return -1
        now = tuple([mode() for mode in MODES])
        return _modes.setdefault(now, len(_modes))

    def empty(
        self, size: int | tuple[int, ...], stride: tuple[int, ...] = (1,), dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        return self._empty((size,) if isinstance(size, int) else size, stride, dtype)

    def results(self, result: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what a launch returns for the result of a captured call: the number of an argument, None for what is
        no tensor, or the address of a new tensor and the arguments of `empty` for it; a list if there are several."""
        if isinstance(result, (tuple, list)):
            return [self._result(value, arguments) for value in result]
        return self._result(result, arguments)

    def _result(self, value: Any, arguments: tuple[Any, ...]) -> Any:
        for k, given in enumerate(arguments):
            if value is given:
                return k
        if not isinstance(value, torch.Tensor):
            return None
        view = view_of(value)
        if value.device.index != self.index or view.extent != value.untyped_storage().nbytes():
            return UNKNOWN  # a part of its memory, or memory of the host
        return value.data_ptr() if view.extent else 0, (view.size, view.stride, view.dtype)

    def enter(self, again: bool) -> int | None:
        """Make this thread use the stream of captures, and allocate in the space: in a second pool for the capture that
        follows another one. Return the stream; None if another capture is under way, or several threads run code."""
        if not self.is_alone() or not capturing.acquire(blocking=False):
            return None
        try:
            space = self._made_space()
            if not hasattr(self._mine, "handle"):  # to create one in the capture would break it
                self._mine.handle = torch.cuda.current_blas_handle()
            if again:  # the workspaces of the first capture lie in its pool
                torch._C._cuda_clearCublasWorkspaces()
            pool, index = self._pools[again].id, self.index
            stream = torch._C._cuda_getCurrentStream(index)
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
        except Exception as error:  # the call is made as it is
            capturing.release()
            self._failed = True
            log.warning("calls of libraries are made as they are, for none can be captured: %s", error)
            return None
        self._inside = again, pool, space.begin(), stream, gc.isenabled()
        gc.disable()  # it could destroy objects whose destruction a capture forbids
        _set_stream(self._stream)
        return self._handle

    def is_alone(self) -> bool:
        """True if no other thread of Python's that lives has asked. A thread of autograd's is listed once anything in
        it has asked for the current thread, as logging does."""
        if len(self._threads) > 1 or not hasattr(self._mine, "handle"):  # else this thread has asked before
            alive = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
            me = threading.get_ident()
            if me in alive:
                self._threads = (self._threads & alive) | {me}
        return len(self._threads) < 2

    def leave(self) -> None:
        again, pool, before, stream, collects = self._inside
        try:
            if collects:
                gc.enable()
            _set_stream(stream)
            torch._C._cuda_endAllocateToPool(self.index, pool)
            torch._C._cuda_releasePool(self.index, pool)
            if again:
                torch._C._cuda_clearCublasWorkspaces()
            assert self._space is not None
            self._space.end(before)
        finally:
            capturing.release()

    def _made_space(self) -> AddressSpace:
        if self._space is None:
            torch._C._cuda_clearCublasWorkspaces()  # that captures may have left on their stream
            space = AddressSpace(self.index)
            self._pools = [space.pool(no_split=True), space.pool(no_split=True)]
            stream = capture_stream(self.index)
            self._stream, self._handle = (stream.stream_id, stream.device_index, stream.device_type), stream.cuda_stream
            self._space = space
        return self._space

    def temporaries(self) -> bytes:
        """Return pairs of 64-bit numbers: the address and the bytes of each allocation of captures."""
        assert self._space is not None
        return self._space.packed_allocations()

    def elsewhere(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with tensors of the device at other addresses, which are as much aligned. Those that
        overlap still do."""
        tensors = [v for v in arguments if isinstance(v, torch.Tensor)]
        if any(v.is_conj() or v.is_neg() for v in tensors):
            return ()
        extents = [(v.data_ptr(), view_of(v).extent) for v in tensors if v.device.index == self.index]
        begin = self._room(sum(2 * GAP + extent for _, extent in extents))
        moved, end, shift = {}, 0, 0
        for address, extent in sorted(extents):
            if address >= end:
                shift = -(-begin // GAP) * GAP + address % GAP - address
            moved[address] = address + shift
            end = max(end, address + extent)
            begin = end + shift + GAP
        return tuple([_placed(v, moved.get(v.data_ptr())) if isinstance(v, torch.Tensor) else v for v in arguments])

    def _room(self, need: int) -> int:
        """Return the address of so many bytes of the space, the same as before if they are enough."""
        if need > self._elsewhere[1]:
            self._elsewhere = self._made_space().allocate(2 * need), 2 * need
        return self._elsewhere[0]


def _placed(tensor: torch.Tensor, address: int | None) -> torch.Tensor:
    """Return a tensor like this one at an address; itself if it has none there."""
    return tensor if address is None else tensor_at(address, view_of(tensor), tensor.device)


def _set_stream(stream: tuple[int, int, int]) -> None:
    identifier, index, kind = stream
    torch._C._cuda_setStream(stream_id=identifier, device_index=index, device_type=kind)
