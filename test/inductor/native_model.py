"""A model of the C module in Python: the same functions, the same errors, through ctypes. Tests run both.

It is good for tests only. The allocator's functions are Python here, and torch calls them while it holds its own
lock: a thread that has the interpreter's lock and waits for torch's allocator would wait for ever. So while a capture
allocates, other threads must not.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
import threading
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ARENA = 4 << 40
# Note [Addresses of captures] in `csrc/aliased_memory.c`, 5 and 6.
LOWEST = 1 << 32
WISH = 0x2C15A600000
BLOCK, AHEAD = 12 << 20, 4
GAP, ADDRESS_ALIGNMENT = 64 << 10, 512
ALIGNMENT = 64
OUT_OF_MEMORY = 2

Address, Size, Handle, Int = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
ALLOC = ctypes.CFUNCTYPE(Handle, ctypes.c_ssize_t, Int, Handle)
FREE = ctypes.CFUNCTYPE(None, Handle, ctypes.c_ssize_t, Int, Handle)


class Location(ctypes.Structure):
    _fields_ = [("type", Int), ("id", Int)]


class BlockKind(ctypes.Structure):
    _fields_ = [
        ("type", Int),
        ("handle_types", Int),
        ("location", Location),
        ("win32", Handle),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", Int)]


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (Handle, Handle, Int),
    "cuMemAddressReserve": (Handle, Size, Size, Address, ctypes.c_ulonglong),
    "cuMemAddressFree": (Address, Size),
    "cuMemCreate": (Handle, Size, Handle, ctypes.c_ulonglong),
    "cuMemRelease": (Address,),
    "cuMemMap": (Address, Size, Size, Address, ctypes.c_ulonglong),
    "cuMemUnmap": (Address, Size),
    "cuMemSetAccess": (Address, Size, Handle, Size),
    "cuThreadExchangeStreamCaptureMode": (Handle,),
    "cuGetErrorString": (Int, Handle),
    "cuCtxGetCurrent": (Handle,),
    "cuCtxSetCurrent": (Handle,),
    "cuGraphExecKernelNodeSetParams_v2": (Handle, Handle, Handle),
    "cuGraphExecMemsetNodeSetParams": (Handle, Handle, Handle, Handle),
    "cuGraphExecMemcpyNodeSetParams": (Handle, Handle, Handle, Handle),
}


class Driver:
    def __init__(self, name: str) -> None:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            raise ImportError(f"{name} can't be loaded") from error
        for function, arguments in SIGNATURES.items():
            try:
                call = getattr(library, function)
            except AttributeError as error:
                raise ImportError(f"{name} has no {function}") from error
            call.restype, call.argtypes = (Int, arguments)
            setattr(self, function, call)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.cuGetErrorString(code, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown error"

    def error(self, what: str, code: int) -> str:
        return f"CUDA driver error in {what}: {self.text(code)} ({code})"

    def context(self) -> int:
        context = Handle()
        if code := self.cuCtxGetCurrent(ctypes.byref(context)):
            raise RuntimeError(self.error("cuCtxGetCurrent", code))
        return context.value or 0

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        mode = Int(2)
        failed = self.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            if not failed:
                self.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(eq=False)
class Block:
    device: int
    unit: int
    size: int
    handle: int
    ranges: int = 0


@dataclass(eq=False)
class Arena:
    device: int
    base: int
    top: int
    end: int
    ranges: int = 0
    held: int = 0


@dataclass(eq=False)
class Range:
    arena: Arena
    block: Block
    low: int
    top: int
    mapped: int  # [low, mapped) is mapped
    high: int
    gap: int
    allocations: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    users: int = 0
    sealed: bool = False
    error: str | None = None


class Module:
    """What the C module has, as an object."""

    Exec: Any  # `native` adds it, as it does to the C module

    def __init__(self, driver: str) -> None:
        self.driver = Driver(driver)
        self.lock = threading.RLock()
        self.thread = threading.local()
        self.blocks: list[Block] = []
        self.arenas: list[Arena] = []
        self.ranges: dict[int, Range] = {}
        self.last_id = 0
        self.alloc, self.free = ALLOC(self._alloc), FREE(self._free)
        self.alloc_address = ctypes.cast(self.alloc, Handle).value
        self.free_address = ctypes.cast(self.free, Handle).value

    def Shared(self, nodes: int) -> PythonShared:
        return PythonShared(nodes)

    def Blocks(self, *arguments: Any) -> PythonBlocks:
        return PythonBlocks(self.driver, *arguments)

    def context(self) -> int:
        return self.driver.context()

    def reserve(self, device: int, bytes: int, gap: int = 1, block: int = 0) -> int:
        if bytes <= 0 or gap < 1 or block < 0:
            raise ValueError("reserve() wants bytes > 0 and gap > 0, and block >= 0")
        with self.lock, self.driver.relaxed():
            block = self._block(device, max(block, BLOCK))
            whole = _round_up(bytes, block.size)
            try:
                arena = self._arena(block, whole)
            except RuntimeError:
                self._drop_block(block)
                raise
            block.ranges += 1
            arena.ranges += 1
            self.last_id += 1
            self.ranges[self.last_id] = Range(arena, block, arena.top, arena.top, arena.top, arena.top + whole, gap)
            arena.top += whole
            return self.last_id

    def use(self, range: int | None) -> int | None:
        with self.lock:
            new = None if range is None else self._range(range)
            before = getattr(self.thread, "current", None)
            if before in self.ranges:
                self.ranges[before].users -= 1
            if new is not None:
                new.users += 1
            self.thread.current = range
            return before

    def take(self, range: int, bytes: int) -> int:
        if bytes < 0:
            raise ValueError("take() wants bytes >= 0")
        with self.lock:
            each = self._range(range)
            if (address := self._allocate(each, bytes, each.arena.device)) is None:
                raise RuntimeError(each.error)
            return address

    def clear_stack(self) -> None:
        """Python can't. Remains of other captures are refused more often then."""

    def seal(self, range: int) -> None:
        with self.lock:
            self._seal(self._range(range))

    def release(self, range: int) -> None:
        with self.lock, self.driver.relaxed():
            each = self._range(range)
            if each.users:
                raise RuntimeError(f"range {range} is in use")
            self._seal(each)
            del self.ranges[range]
            code = self._unmap(each.block, each.low, each.mapped - each.low)
            each.block.ranges -= 1
            self._drop_block(each.block)
            each.arena.ranges -= 1
            self._drop_arena(each.arena)
            if code:
                raise RuntimeError(self.driver.error("cuMemUnmap", code))

    def allocations(self, range: int, first: int = 0) -> list[tuple[int, int]]:
        return self._range(range).allocations[first:]

    def count(self, range: int) -> int:
        return len(self._range(range).allocations)

    def bounds(self, range: int) -> tuple[int, int]:
        each = self._range(range)
        return each.low, each.high

    def error(self, range: int) -> str | None:
        return self._range(range).error

    def launching(self) -> bool:
        """Is this thread in the middle of a launch by C?"""
        return False

    def counts(self) -> dict[str, int]:
        with self.lock:
            held = sum(arena.held for arena in self.arenas)
            return {
                "ranges": len(self.ranges),
                "blocks": len(self.blocks),
                "arenas": len(self.arenas),
                "held": held,
            }

    def _range(self, id: int) -> Range:
        try:
            return self.ranges[id]
        except KeyError:
            raise ValueError(f"there is no range {id}") from None

    def _range_of_thread(self, device: int) -> Range | None:
        if (current := getattr(self.thread, "current", None)) is not None:
            return self.ranges.get(current)
        used = [each for each in self.ranges.values() if each.users and each.arena.device == device]
        return used[0] if len(used) == 1 else None

    def _block(self, device: int, least: int) -> Block:
        for block in reversed(self.blocks):
            if block.device == device and block.size >= least:
                return block
        kind = BlockKind(1, 0, Location(1, device))
        unit, handle = Size(), Address()
        if code := self.driver.cuMemGetAllocationGranularity(ctypes.byref(unit), ctypes.byref(kind), 0):
            raise RuntimeError(self.driver.error("cuMemGetAllocationGranularity", code))
        size = _round_up(least, unit.value)
        if code := self.driver.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(kind), 0):
            if least > BLOCK:
                return self._block(device, BLOCK)
            raise RuntimeError(self.driver.error("cuMemCreate", code))
        self.blocks.append(Block(device, unit.value, size, handle.value))
        return self.blocks[-1]

    def _arena(self, block: Block, whole: int) -> Arena:
        device, unit = block.device, block.unit
        for arena in reversed(self.arenas):
            if arena.device == device and arena.end - arena.top >= whole:
                return arena
        base, size = Address(), _round_up(max(whole, ARENA), block.size)

        def reserve() -> int:
            code = self.driver.cuMemAddressReserve(ctypes.byref(base), size, unit, WISH, 0)
            return code and self.driver.cuMemAddressReserve(ctypes.byref(base), size, unit, 0, 0)

        while code := reserve():
            if size == whole:
                raise RuntimeError(self.driver.error("cuMemAddressReserve", code))
            size = max(_round_up(size // 2, block.size), whole) if size // 2 > whole else whole
        if base.value < LOWEST:
            self.driver.cuMemAddressFree(base.value, size)
            what = "cuMemAddressReserve, which gave addresses below 4 GiB"
            raise RuntimeError(self.driver.error(what, OUT_OF_MEMORY))
        self.arenas.append(Arena(device, base.value, base.value, base.value + size))
        return self.arenas[-1]

    def _drop_block(self, block: Block) -> None:
        if not block.ranges:
            self.blocks.remove(block)
            self.driver.cuMemRelease(block.handle)

    def _drop_arena(self, arena: Arena) -> None:
        if not arena.ranges and not arena.held:
            self.arenas.remove(arena)
            with self.driver.relaxed():
                self.driver.cuMemAddressFree(arena.base, arena.end - arena.base)

    def _seal(self, range: Range) -> None:
        if range.sealed:
            return
        range.sealed = True
        high = range.top + (range.gap * GAP if range.allocations else 0)
        if range.arena.top == range.high:
            range.arena.top = max(range.mapped, range.low + _round_up(high - range.low, range.block.size))
        range.high = high

    def _unmap(self, block: Block, address: int, size: int) -> int:
        code = self.driver.cuMemUnmap(address, size) if size else 0
        if not code or size <= block.size:
            return code
        code = 0
        for at in range(0, size, block.size):
            code = self.driver.cuMemUnmap(address + at, block.size) or code
        return code

    def _alloc(self, size: int, device: int, stream: int | None) -> int | None:
        with self.lock:
            range = self._range_of_thread(device)
            if range is None or size < 0:
                return None
            address = self._allocate(range, size, device)
            range.arena.held += address is not None
            return address

    def _allocate(self, range: Range, size: int, device: int) -> int | None:
        with self.driver.relaxed():
            result = self._place(range, size, device)
        if isinstance(result, str):
            range.error = f"{result}, for an allocation of {size} bytes"
            return None
        return result

    def _place(self, range: Range, size: int, device: int) -> int | str:
        """The address, or why there is none."""
        gap, whole = range.gap * GAP, _round_up(max(size, 1), ADDRESS_ALIGNMENT)
        address = range.top + gap
        if device != range.arena.device:
            return "another device than the range's"
        if range.sealed:
            return "the range is sealed"
        if address + whole + gap > range.high:
            return "the range is too small"
        if address + whole > range.mapped and (failure := self._map(range, address + whole)):
            return failure
        range.allocations.append((address, size))
        range.top = address + whole
        return address

    def _map(self, range: Range, end: int) -> str | None:
        """Maps as far as `end`, and ahead: as much again as there is, up to AHEAD blocks. Why it failed, or None."""
        block, mapped = range.block, 0
        ahead = min(range.mapped - range.low, AHEAD * block.size, range.high - range.mapped)
        size = max(_round_up(end - range.mapped, block.size), ahead)
        what, code = "cuMemMap", 0
        while not code and mapped < size:
            code = self.driver.cuMemMap(range.mapped + mapped, block.size, 0, block.handle, 0)
            mapped += 0 if code else block.size
        if not code:
            access = Access(Location(1, block.device), 3)
            what, code = "cuMemSetAccess", self.driver.cuMemSetAccess(range.mapped, size, ctypes.byref(access), 1)
        if code:
            self._unmap(block, range.mapped, mapped)
            return self.driver.error(what, code)
        range.mapped += size
        return None

    def _free(self, pointer: int | None, size: int, device: int, stream: int | None) -> None:
        with self.lock:
            for arena in self.arenas:
                if arena.base <= (pointer or 0) < arena.end:
                    arena.held -= 1
                    self._drop_arena(arena)
                    break


class PythonBlocks:
    def __init__(
        self,
        driver: Driver,
        exec_handle: int,
        nodes: tuple[Any, ...],
        slots: tuple[Any, ...],
        regions: int,
        words: tuple[Any, ...] = (),
        shared: tuple[PythonShared, tuple[int, ...]] | None = None,
    ) -> None:
        self.driver = driver
        self.exec_handle = exec_handle
        self.context = driver.context()
        self.stale = True
        self._busy = False
        self._regions = regions
        self._base: list[int | None] = [None] * regions
        self._nodes = [_Node(*node) for node in nodes]
        self._shared = shared
        self._words = [node for node, *_ in words]  # a `Call` writes them; patch() sets their nodes with all others
        self._slots: list[list[tuple[int, int, int]]] = [[] for _ in range(regions)]
        for node, offset, region, delta in slots:
            if not (0 <= node < len(nodes) and 0 <= region < regions and 0 <= offset <= self._nodes[node].size - 8):
                raise ValueError("a pointer slot lies outside of its node or region, or is out of order")
            self._slots[region].append((node, offset, delta))

    @property
    def nodes(self) -> int:
        return len(self._nodes)

    def patch(self, bases: Sequence[Any], regions: Sequence[int] | None = None) -> int:
        if self._busy:
            raise RuntimeError("patch() is running already")
        self._have_context()
        self._busy = True
        try:
            return self._set(self._read(bases, regions))
        finally:
            self._busy = False

    def _have_context(self) -> None:
        """See `have_context` in the C source."""
        lost = self.context and not self.driver.context()
        if lost and (code := self.driver.cuCtxSetCurrent(self.context)):
            raise RuntimeError(self.driver.error("cuCtxSetCurrent", code))

    def _read(self, bases: Sequence[Any], regions: Sequence[int] | None) -> list[int | None]:
        """The base of each region after this call. Nothing of the object changes until every base has been read."""
        count, expected = len(bases), self._regions if regions is None else len(regions)
        if count != expected:
            raise ValueError(f"patch() got {count} bases for {expected} regions")
        fresh = list(self._base)
        for i in range(count):
            if i >= len(bases) or (regions is not None and i >= len(regions)):
                raise RuntimeError("the list of bases changed while it was read")
            region, item = i if regions is None else regions[i], bases[i]
            if not 0 <= region < self._regions:
                raise ValueError(f"there is no region {region}")
            if item is not None:
                fresh[region] = address = item if isinstance(item, int) else item.data_ptr()
                if not 0 <= address < 1 << 64:
                    raise OverflowError(f"{address} is no address")
        for region, base in enumerate(fresh):
            if self._slots[region] and base is None:
                raise ValueError(f"region {region} has no base yet")
        return fresh

    def _set(self, fresh: list[int | None]) -> int:
        dirty: dict[int, None] = {}
        for region, base in enumerate(fresh):
            if base is None or (base == self._base[region] and not self.stale):
                continue
            for node, offset, delta in self._slots[region]:
                block = self._nodes[node]
                struct.pack_into("<Q", block.memory, block.skip + offset, (base + delta) % (1 << 64))
                dirty[node] = None
        if self.stale:
            dirty.update(dict.fromkeys(self._words))
        self._base = fresh
        if self._shared is not None:
            self._list_others(dirty)
        self.stale = True
        for node in dirty:
            self._nodes[node].set(self.driver, self.exec_handle)
            if self._shared is not None:
                held, numbers = self._shared
                held.holder[numbers[node]] = self._nodes[node].text()
        self.stale = False
        return len(dirty)

    def _list_others(self, dirty: dict[int, None]) -> None:
        """Add the nodes that the executable holds otherwise; it is unknown what it holds of a node that isn't set."""
        held, numbers = self._shared  # type: ignore[misc]
        for node, number in enumerate(numbers):
            if held.holder[number] != self._nodes[node].text():
                dirty[node] = None
        for node in dirty:
            held.holder[numbers[node]] = None


class PythonShared:
    launches = None

    def __init__(self, nodes: int) -> None:
        self.holder: list[Any] = [None] * nodes


class _Node:
    """A node's block and the array of pointers into it, at an address that stays."""

    def __init__(
        self, kind: int, handle: int, context: int, label: str, block: bytes, arguments: tuple[int, ...]
    ) -> None:
        self.kind, self.handle, self.context, self.label, self.size = kind, handle, context, label, len(block)
        self.memory = ctypes.create_string_buffer(len(block) + ALIGNMENT)
        self.skip = -ctypes.addressof(self.memory) % ALIGNMENT
        self.address = ctypes.addressof(self.memory) + self.skip
        ctypes.memmove(self.address, block, len(block))
        self.arguments = (Handle * len(arguments))(*(self.address + offset for offset in arguments))
        if kind == 0:  # kernelParams of CUDA_KERNEL_NODE_PARAMS_v2
            struct.pack_into("<Q", self.memory, self.skip + 40, ctypes.addressof(self.arguments) if arguments else 0)

    def text(self) -> tuple[int, bytes]:
        """What the driver is given, without the array of pointers."""
        block = ctypes.string_at(self.address, self.size)
        return self.kind, block[:40] + block[56:] if self.kind == 0 else block

    def set(self, driver: Driver, exec_handle: int) -> None:
        if self.kind == 0:
            what = "cuGraphExecKernelNodeSetParams"
            code = driver.cuGraphExecKernelNodeSetParams_v2(exec_handle, self.handle, self.address)
        elif self.kind == 1:
            what = "cuGraphExecMemsetNodeSetParams"
            code = driver.cuGraphExecMemsetNodeSetParams(exec_handle, self.handle, self.address, self.context)
        else:
            what = "cuGraphExecMemcpyNodeSetParams"
            code = driver.cuGraphExecMemcpyNodeSetParams(exec_handle, self.handle, self.address, self.context)
        if code:
            raise RuntimeError(f"{driver.error(what, code)}, at {self.label}")
