"""The address space of one capture: whatever a region allocates, however large, on a few MiB of the device.

    space = AddressSpace(device)
    with space:                                         # this thread's pools of the space take memory from here
        address = space.allocate(1000)                  # a segment of its own, that torch's allocator doesn't know
        with torch.cuda.graph(graph, pool=space.pool()):
            ...
    space.allocations(), space.low, space.high          # sealed: every address that the capture can have seen
    space.close()                                       # after this the addresses name nothing

All addresses map the same physical block, so nothing may run on them that is meant to compute. Note [Addresses of
captures] in `native` says what the addresses promise; two captures that are to be compared take different gaps.

Life: 1. A space allocates while it is entered, and never again after. 2. Its pools belong to it: close() drops them.
A graph that was captured with a pool retains it, and torch then counts the pool's segments as reserved memory until
the graph is reset, though no memory is behind them. 3. close() is for outside of a capture, like any release of a
pool.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from torch_overlay._inductor.relaunch.launch import native


# Address space costs nothing until it is mapped, and what is left over goes back when the space is sealed.
SIZE = 1 << 40


@functools.cache
def _allocator(module: Any) -> Any:
    """One for all spaces: the thread says which space it fills."""
    return torch._C._cuda_customAllocator(module.alloc_address, module.free_address)


class AddressSpace:
    def __init__(self, device: int | torch.device, *, gap: int = 1, size: int = SIZE, module: Any = None) -> None:
        """`gap`: between two allocations, in 64 KiB. `size`: more address space than the capture can ask for."""
        index = device if isinstance(device, int) else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._module = module or native.implementation()
        self._range: int | None = self._module.reserve(self.device.index, size, gap)
        self._pools: list[torch.cuda.MemPool] = []
        self._before: list[int | None] = []
        self._last: tuple[tuple[int, int], list[tuple[int, int]], str | None]  # what is known after close()

    def __enter__(self) -> AddressSpace:
        if self._range is None:
            raise RuntimeError("this address space is closed")
        self._before.append(self._module.use(self._range))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._module.use(self._before.pop())
        if not self._before:
            self._module.seal(self._range)

    def pool(self, no_split: bool = False) -> torch.cuda.MemPool:
        """A new pool over the space. `no_split`: each allocation has a segment of its own."""
        pool = torch.cuda.MemPool(_allocator(self._module), no_split=no_split)
        self._pools.append(pool)
        return pool

    def allocate(self, bytes: int) -> int:
        """An address, with a segment of its own, that no allocator of torch's knows of: no rounding to 2 or 20 MiB, no
        part in a capture, no accounts, and nothing to free."""
        if self._range is None:
            raise RuntimeError("this address space is closed")
        return self._module.take(self._range, bytes)

    def clear_stack(self) -> None:
        """Sets the part of this thread's stack to zero that the functions it calls next will use."""
        self._module.clear_stack()

    @property
    def bounds(self) -> tuple[int, int]:
        return self._last[0] if self._range is None else self._module.bounds(self._range)

    @property
    def low(self) -> int:
        return self.bounds[0]

    @property
    def high(self) -> int:
        return self.bounds[1]

    def allocations(self, first: int = 0) -> list[tuple[int, int]]:
        """(address, requested size) of each segment, in the order in which they were asked for, from that one on."""
        return self._last[1][first:] if self._range is None else self._module.allocations(self._range, first)

    def count(self) -> int:
        """How many segments there are."""
        return len(self._last[1]) if self._range is None else self._module.count(self._range)

    def error(self) -> str | None:
        """Why the last allocation failed, if one did; torch only says that there is no memory."""
        return self._last[2] if self._range is None else self._module.error(self._range)

    def close(self) -> None:
        """Gives the device's memory back. What was allocated stays known, and stays no memory."""
        if self._range is None:
            return
        self._last = self.bounds, self.allocations(), self.error()
        self._pools.clear()
        closing, self._range = self._range, None
        self._module.release(closing)

    def __del__(self) -> None:
        # An exception on the way to close() must not keep the block; one of the driver's has nobody to tell.
        if getattr(self, "_range", None) is not None:
            with contextlib.suppress(Exception):
                self.close()
