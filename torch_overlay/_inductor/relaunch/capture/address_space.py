"""Provides the address space of one capture: a region may allocate any amount in it, on little memory of the device.

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
"""

from __future__ import annotations

import contextlib
import functools
import struct
import sys
from typing import Any, Self, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.launch.executable import implementation


if TYPE_CHECKING:
    from collections.abc import Callable


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


def drop_empty_pools(stats: dict[str, Any]) -> None:
    """Remove the pools that hold nothing any more from what `torch.cuda.memory.memory_stats_as_nested_dict` returns: it
    lists each pool that there ever was, and to read it takes longer with each (on a machine with an H200, 28 ms with
    1070 pools, after 40 captures of the training of a Llama). `torch.cuda.memory_allocated` and others read it, too."""
    pools = stats.get("reserved_bytes_by_private_pools", {})
    for pool in pools_made.intersection(pools):
        if not pools[pool]["all"]["current"]:
            del pools[pool]
