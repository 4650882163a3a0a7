"""Records a capture into an address space of its own, on streams of its own, without side effects on the process.

    space = AddressSpace(device)
    with space:                                         # this thread's pools of the space take memory from here
        address = space.allocate(1000)                  # a segment of its own, that torch's allocator doesn't know
        with torch.cuda.graph(graph, pool=space.pool()):
            ...
    space.allocations(), space.low, space.high          # sealed: every address that the capture can have seen
    space.close()                                       # after this the addresses are unmapped

A capture runs no kernel, so any memory will do. A space is a range of addresses that maps the same small physical block
over and over (`csrc/aliased_memory.c`), however many GiB are allocated in it. Each block's worth of addresses takes the
driver some 60 us, so a region with more than 100 MiB of inputs gets a larger block than the usual 12 MiB. Two captures
that are to be compared use different gaps.

Life: 1. A space allocates only while it is entered, and never after that. 2. Its pools belong to it: close() drops
them. A graph that was captured with a pool retains the pool, and torch counts the pool's segments as reserved memory
until the graph is reset, though they map no memory. 3. close() must be called outside of a capture, like any release of
a pool.

Note [Memory pools of a capture]
A graph retains the pool that it is captured into, with every segment in it, and the allocator's statistics would show
address space as reserved memory for as long as the graph lives. So the graph is begun with an empty pool; this pool is
removed from the allocator's list of active pools at once, and a pool of the address space is selected for the thread
instead. So only one filter of the allocator matches at a time, whatever its rule for several. Before the capture ends,
the empty pool is put back into the list, because the end of a capture removes its pool from the list.

Note [Random numbers]
Kernels of a graph read a generator's seed and offset from memory that each launch of the graph fills first. A generator
allocates that memory when it is first used in a capture, by an ordinary allocation, which would lie in the address
space. So the generators that the region draws from, as a run before has shown, are made to allocate it before our pool
is selected. That memory lives as long as the graph. Any other generator that is used leaves an allocation in use
(`kept`), and there is no graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import struct
import sys
import weakref
from typing import Any, Self, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_overlay._inductor.relaunch.capture.streams import capture_stream, exchanged_streams
from torch_overlay._inductor.relaunch.launch.executable import implementation
from torch_overlay._inductor.relaunch.memory.outputs import TensorView


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import Conditional


# Address space costs nothing until it is mapped, and the unused rest is freed when the space is sealed.
SIZE = 1 << 40
BLOCKS = 8  # so many blocks should do for the inputs,
LARGEST = 64 << 20  # unless one would have more bytes

pools_made: set[tuple[int, int]] = set()  # ids of the pools of all spaces: torch's statistics list them for ever


@functools.cache
def _allocator(module: Any) -> Any:
    """Return the allocator that all spaces share: it allocates in the space that the thread has entered."""
    return torch._C._cuda_customAllocator(module.alloc_address, module.free_address)


class AddressSpace:
    def __init__(
        self, device: int | torch.device, *, gap: int = 1, size: int = SIZE, inputs: int = 0, module: Any = None
    ) -> None:
        """Reserve the address space. `gap`: distance between two allocations, in units of 64 KiB. `size`: more bytes of
        address space than the capture can ask for. `inputs`: how many bytes its inputs have."""
        index = device if isinstance(device, int) else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._module = module or implementation()
        self._range: int | None = self._module.reserve(self.device.index, size, gap, min(inputs // BLOCKS, LARGEST))
        self._pools: list[torch.cuda.MemPool] = []
        self._before: list[int | None] = []

    def __enter__(self) -> Self:
        if self._range is None:
            raise RuntimeError("this address space is closed")
        self._before.append(self._module.use(self._range))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._module.use(self._before.pop())
        if not self._before:
            self._module.seal(self._range)

    def begin(self) -> int | None:
        """Have this thread's pools of the space take memory from here, until `end` with what this returns. The space
        isn't sealed then."""
        return self._module.use(self._range)

    def end(self, before: int | None) -> None:
        self._module.use(before)

    def pool(self, no_split: bool = False) -> torch.cuda.MemPool:
        """Return a new pool that allocates in the space. `no_split`: each allocation has a segment of its own."""
        pool = torch.cuda.MemPool(_allocator(self._module), no_split=no_split)
        self._pools.append(pool)
        pools_made.add(pool.id)
        return pool

    def allocate(self, bytes: int) -> int:
        """Allocate a segment that torch's allocator doesn't know, and return its address: the size is not rounded to 2
        or 20 MiB, no capture and no statistics contain it, and it needs no free."""
        if self._range is None:
            raise RuntimeError("this address space is closed")
        return self._module.take(self._range, bytes)

    def clear_stack(self) -> None:
        """Zero the part of this thread's stack that the functions it calls next will use, so that a launcher's
        uninitialised fields hold only remains of this capture: `proof.prove`, Note [What a word can hide]."""
        self._module.clear_stack()

    @property
    def _state(self) -> tuple[int, int, int, str | None]:
        return self._module.state(self._range)

    @property
    def is_open(self) -> bool:
        return self._range is not None

    @property
    def low(self) -> int:
        return self._state[0]

    @property
    def high(self) -> int:
        return self._state[1]

    def allocations(self, first: int = 0) -> list[tuple[int, int]]:
        """Return (address, requested size) of each segment in order of allocation, from number `first` on."""
        return list(struct.iter_unpack("QQ", self.packed_allocations(first)))

    def packed_allocations(self, first: int = 0) -> bytes:
        """Return the same as 64-bit numbers."""
        return self._module.allocations(self._range, first)

    def allocations_made(self) -> int:
        """Return the number of segments."""
        return self._state[2]

    def close(self) -> None:
        """Free the device's memory."""
        if self._range is None:
            return
        self._pools.clear()
        closing, self._range = self._range, None
        self._module.release(closing)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # After an exception before close(), the block must be freed, too; nobody could handle an error of the driver.
        # When the process ends, modules are gone already, and it frees all.
        if getattr(self, "_range", None) is not None and not is_finalizing():
            with contextlib.suppress(Exception):
                self.close()


def tensor_at(address: int, view: TensorView, device: torch.device) -> torch.Tensor:
    """Return a tensor with this layout whose memory, which it doesn't own, begins at the address."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, view.extent)
    metadata = {"size": view.size, "stride": view.stride, "dtype": view.dtype, "storage_offset": 0}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


PART = 1 << 20  # words whose sum is taken at a time

live_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


class Recording(AddressSpace):
    """A capture of `owner`, a device, into an address space, with `gap` times as much room as usual between
    allocations. `inputs`: bytes of the region's inputs."""

    def __init__(self, owner: Any, gap: int, inputs: int = 0) -> None:
        super().__init__(owner.device, gap=gap, inputs=inputs)
        self.owner = owner
        self.graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
        self._placed: dict[int, tuple[int, int]] = {}  # address of the segment -> (address of the tensor, bytes)
        self._ignored: set[int] = set()
        self._used: list[Any] = []  # ids of pools
        self._active: Any = None
        self.lines: Any = None  # notes the lines that make nodes
        self.conditionals: list[Conditional] = []  # with handles of nodes
        self.fixed: list[int] = []  # addresses, outside of the space, of 8 bytes each that live as long as the graph
        live_recordings.add(self)

    # -- memory

    def place(self, view: TensorView, alignment: int = 256) -> torch.Tensor:
        """Return a tensor at a new address that is aligned to `alignment` bytes, and to no more if that is less than
        256."""
        size = view.extent
        if not size:
            with _no_modes():  # this operator is not one of the region's
                return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=self.device)
        skew = alignment if alignment < 256 else 0
        given = self.allocate(size + skew)
        self._placed[given] = (given + skew, size)
        return tensor_at(given + skew, view, self.device)

    def fill(self) -> None:
        """Fill the space with numbers, so that it shows whether a kernel writes to it: Note [Kernels outside of a
        capture]. Positions are of one block of memory, over and over, so as many are filled as the largest has."""
        with _no_modes():
            words = self.place(TensorView((LARGEST // 8,), (1,), torch.int64))
            self._filled = words.split(PART)
            generator = torch.Generator(self.device)
            for part in self._filled:
                part.random_(1, 128, generator=generator)
            self._sums = self._summed()

    def is_written(self) -> bool:
        """True if a kernel has written to the space since it was filled."""
        with _no_modes():
            return self._summed() != self._sums

    def _summed(self) -> list[int]:
        """Return a sum of each part in which every word has an odd weight, when all kernels have run."""
        torch.cuda.synchronize(self.device)
        weights = torch.arange(1, 2 * PART, 2, device=self.device)
        return torch.stack([(part * weights).sum() for part in self._filled]).tolist()

    def covers(self, address: int) -> bool:
        return self.low <= address < self.high

    def segments(self) -> list[tuple[int, int]]:
        """Return (address, size) of all allocations, in order."""
        used = ((address, size) for address, size in self.allocations() if address not in self._ignored)
        return [self._placed.get(address, (address, size)) for address, size in used]

    def apart(
        self, call: Callable[[], Any], asked: tuple[int, int] | None
    ) -> tuple[Any, dict[int, int], tuple[int, int]]:
        """Make a call whose allocations have a pool of their own, and each a segment. Return its result, the sizes of
        the segments by address, and how many allocations there were, and of how many bytes: `asked`, if that is known.
        """
        before, then = self.allocations_made(), self.owner.allocated() if asked is None else (0, 0)
        with self.within(self.pool(no_split=True)):
            result = call()
        if self.allocations_made() == before:
            return result, {}, (0, 0)
        if asked is None:
            # They are of the whole device: other threads' allocations are included, and make them too large at most.
            (count, requested), (count_then, requested_then) = self.owner.allocated(), then
            asked = count - count_then, requested - requested_then
        return result, dict(self.allocations(before)), asked

    def nodes(self) -> list[int]:
        """Return the handles of the nodes that the graph has so far."""
        return self.owner.driver.nodes(self._captured)

    def read_predicate(self, predicate: torch.Tensor) -> None:
        self.owner.read_predicate(predicate)

    def noting_lines(self, namespace: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Note, if profiles are to show it, which line of the module with these globals makes each node."""
        self.lines = self.owner.lines(namespace, self.nodes)
        return self.lines or contextlib.nullcontext()

    @functools.cached_property
    def _captured(self) -> int:
        """The graph while it is captured."""
        return self.owner.driver.captured_into(capture_stream(self.device.index).cuda_stream)

    def kept(self) -> list[int]:
        """Return the sizes of the allocations in pools that are still in use."""
        kept = self._in_use()
        if kept:  # they may be garbage, since the collector was off
            gc.collect()
            kept = self._in_use()
        return kept

    def _in_use(self) -> list[int]:
        used = [pool for pool in dict.fromkeys(self._used) if not self.owner.is_unused(pool)]
        segments = [segment for pool in used for segment in torch.cuda.memory_snapshot(pool, include_traces=False)]
        blocks = [b for segment in segments for b in segment["blocks"]]
        return [b["size"] for b in blocks if b["state"] == "active_allocated"]

    @contextlib.contextmanager
    def within(self, pool: Any) -> Iterator[None]:
        """Make this thread allocate from the pool, and from no other."""
        index, before = self.device.index, self._active
        if before is not None:
            torch._C._cuda_endAllocateToPool(index, before.id)
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool.id)
        self._active = pool
        self._used.append(pool.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, pool.id)
            torch._C._cuda_releasePool(index, pool.id)
            self._active = before
            if before is not None:
                # The first selection still holds a reference to the pool: release the one of this selection.
                torch._C._cuda_beginAllocateCurrentThreadToPool(index, before.id)
                torch._C._cuda_releasePool(index, before.id)

    # -- the graph

    @contextlib.contextmanager
    def capturing(self, inputs: Sequence[Any], random: bool) -> Iterator[None]:
        """Capture into the graph what this thread launches."""
        main = capture_stream(self.device.index)
        main.wait_stream(torch.cuda.current_stream(self.device))
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            torch.cuda.current_blas_handle()  # to create one later would break the capture
            torch._C._cuda_clearCublasWorkspaces()
            # Workspaces that were allocated in the capture must not be used after it.
            stack.callback(torch._C._cuda_clearCublasWorkspaces)
            stack.enter_context(no_collection())
            stack.enter_context(torch.cuda.stream(main))
            stack.enter_context(exchanged_streams(functools.partial(capture_stream, self.device.index)))
            stack.enter_context(self._graph_begun())
            if random:
                self._hold_generators(inputs)
            with self.within(self.pool()):
                self._check_pool()
            stack.enter_context(self.within(self.pool()))
            yield

    def _check_pool(self) -> None:
        """Raise if this thread's allocations don't lie in the space: then a pool that the caller selected is first."""
        before = self.allocations_made()
        # Not a tensor: torch may fill new tensors, which would add a node to the graph.
        address = torch.UntypedStorage(16, device=self.device).data_ptr()
        self._ignored |= {given for given, _ in self.allocations(before)}
        if not self.covers(address):
            raise RuntimeError("another memory pool is selected in this thread")  # perhaps not at the next call

    def _hold_generators(self, inputs: Sequence[Any]) -> None:
        """Make the generators allocate their seed and offset outside of the space. Note [Random numbers]"""
        for generator in self.owner.generators(inputs):
            seed, offset, _ = generator.philox_state(0)
            # Two generators can have one state.
            self.fixed += [t.data_ptr() for t in (seed, offset) if t.data_ptr() not in self.fixed]

    @contextlib.contextmanager
    def _graph_begun(self) -> Iterator[None]:
        """Begin the capture with an empty pool, and end it. Note [Memory pools of a capture]."""
        index, empty = self.device.index, torch.cuda.graph_pool_handle()
        self.graph.capture_begin(pool=empty, capture_error_mode="thread_local")
        torch._C._cuda_endAllocateToPool(index, empty)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is broken; report the error that broke it
                self._end_graph(empty)
            raise
        self._end_graph(empty)

    def _end_graph(self, empty: Any) -> None:
        index = self.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, empty)
        try:
            self.graph.capture_end()
        except BaseException:
            # The capture may have ended before the allocator removed the pool from its list.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, empty)
            raise
        finally:
            torch._C._cuda_releasePool(index, empty)

    def discard(self) -> None:
        """Free the graph and the addresses."""
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.reset()
        self.close()

    def close(self) -> None:
        """Free the addresses. The graph lives on if something else references it."""
        self.graph = None
        super().close()


def drop_empty_pools(stats: dict[str, Any]) -> None:
    """Remove the pools that hold nothing any more from what `torch.cuda.memory.memory_stats_as_nested_dict` returns: it
    lists each pool that there ever was, and to read it takes longer with each (on a machine with an H200, 28 ms with
    1070 pools, after 40 captures of the training of a Llama). `torch.cuda.memory_allocated` and others read it, too."""
    pools = stats.get("reserved_bytes_by_private_pools", {})
    for pool in pools_made.intersection(pools):
        if not pools[pool]["all"]["current"]:
            del pools[pool]


def _no_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable the dispatch modes. Most often none is active, which is cheap to check."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off: it could destroy objects whose destruction a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
