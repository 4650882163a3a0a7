"""Reads a captured CUDA graph through the driver.

`read` turns the graph into the plain data that `prove.prove` compares: the launch of every kernel node with its
parameters (cut out of the packed block by the layout that the driver reports), the addresses of memset and memcpy
nodes, and the edges. Nodes that can't be patched from outside (host callbacks, copies from host memory, child graphs,
...) are refused by name. A copy between the device and host memory that never moves is not refused, if the caller knows
the memory: its address is a constant of the graph.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.graph.driver import handle_of
from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    CopyNode,
    EmptyNode,
    FillNode,
    KernelNode,
    Node,
    Segment,
    Unprovable,
)
from torch_overlay.csrc import DriverError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_overlay._inductor.relaunch.graph.driver import Driver

# Keys of the `extra` array of a launch: pairs of key and value.
PARAM_END, PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE = 0, 1, 2

ADVICE = {
    cu.HOST: "a host function was called in the region",
    cu.CHILD_GRAPH: "a library launched a CUDA graph of its own",
    cu.WAIT_EVENT: "the region waits for an event of the code around it",
    cu.RECORD_EVENT: "the region records an event that code around it can see",
    10: "a library allocated memory in the stream",
    11: "a library freed memory in the stream",
    13: "control flow on the device",
}


def never(address: int) -> bool:
    return False


def read(
    graph: Any,
    segments: Iterable[Segment],
    low: int,
    high: int,
    *,
    driver: Driver,
    keeps: Callable[[int], bool] = never,
) -> CapturedGraph:
    """Return the graph as plain data. `graph` is a torch.cuda.CUDAGraph(keep_graph=True) after its capture, or its
    handle. `keeps(address)` says whether host memory stays where it is for as long as there are graphs."""
    graph_nodes, kinds, graph_edges = driver.structure(handle_of(graph))
    reader = _GraphReader(driver, keeps)
    kernels = iter(driver.kernels([node for node, kind in zip(graph_nodes, kinds) if kind == cu.KERNEL]))
    nodes: list[Node] = []
    for index, (node, kind) in enumerate(zip(graph_nodes, kinds)):
        if kind == cu.KERNEL and (known := next(kernels)) is not None:
            func, kern, ctx, grid, block, shared_bytes, name, values = known
            nodes.append(KernelNode(index, node, name, func, kern, ctx, grid, block, shared_bytes, values))
        else:
            nodes.append(reader.node(index, node, kind))
    number = {node: index for index, node in enumerate(graph_nodes)}
    edges = tuple(sorted([(number[edge.before], number[edge.after]) for edge in graph_edges]))
    return CapturedGraph(tuple(nodes), edges, tuple(segments), low, high)


def is_device_memory(address: int, *, driver: Driver) -> bool:
    """True if the driver knows the address as device memory, for `prove.prove(on_device=...)`. That includes the state
    of random generators, which a capture has outside of its range."""
    return driver.memory_kind(address) == cu.MEMORY_DEVICE


def freed_memory(
    snapshot: Callable[[], Iterable[dict[str, Any]]] | Iterable[dict[str, Any]],
) -> Callable[[int], bool]:
    """Return a predicate for `prove.prove(foreign=...)`: is the address in a free block of the caching allocator?
    `snapshot` is torch.cuda.memory_snapshot() after both captures, or better a function that returns it, which is
    called only if there is an address to ask about: seldom."""

    @functools.cache
    def freed() -> tuple[list[int], list[int]]:
        blocks = sorted(
            (block["address"], block["address"] + block["size"])
            for segment in (snapshot() if callable(snapshot) else snapshot)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )
        return [start for start, _ in blocks], [end for _, end in blocks]

    def inside(address: int) -> bool:
        starts, ends = freed()
        at = bisect.bisect_right(starts, address) - 1
        return at >= 0 and address < ends[at]

    return inside


class _GraphReader:
    def __init__(self, driver: Driver, keeps: Callable[[int], bool]) -> None:
        self.driver, self.keeps = driver, keeps
        self.functions: dict[tuple[int, int], tuple[str, tuple[tuple[int, int], ...]]] = {}

    def node(self, index: int, handle: int, kind: int) -> Node:
        if kind == cu.KERNEL:
            return self.kernel(index, handle)
        if kind == cu.MEMSET:
            p = self.driver.memset(handle)
            return FillNode(
                index=index,
                handle=handle,
                dst=int(p.dst),
                value=int(p.value),
                element_size=int(p.elementSize),
                width=int(p.width),
                height=int(p.height),
                pitch=int(p.pitch),
            )
        if kind == cu.MEMCPY:
            return copy_node(self.driver, index, handle, self.keeps)
        if kind == cu.EMPTY:
            return EmptyNode(index=index, handle=handle)
        what = cu.KIND_NAMES.get(kind, cu.KIND_NAMES[cu.UNKNOWN])
        raise Unprovable("node-kind", ADVICE.get(kind, "nodes of this kind can't be patched"), node=f"{index} ({what})")

    def kernel(self, index: int, handle: int) -> KernelNode:
        p = self.driver.kernel(handle)
        func, kern = int(p.func), int(p.kern)
        name, layout = self._function(index, func, kern)
        parameters = _parameters(p, layout, f"{index} ({name})")
        return KernelNode(
            index=index,
            handle=handle,
            name=name,
            func=func,
            kern=kern,
            ctx=int(p.ctx),
            grid=(int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ)),
            block=(int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ)),
            shared_bytes=int(p.sharedMemBytes),
            parameters=parameters,
        )

    def _function(self, index: int, func: int, kern: int) -> tuple[str, tuple[tuple[int, int], ...]]:
        found = self.functions.get((func, kern))
        if found is None:
            try:
                function = func or self.driver.function_of(kern)
                found = self.driver.name(function), self.driver.layout(function)
            except DriverError as error:
                raise Unprovable(
                    "layout", f"the driver doesn't describe the kernel: {error}", node=str(index)
                ) from None
            self.functions[func, kern] = found
        return found


def _parameters(p: Any, layout: tuple[tuple[int, int], ...], node: str) -> tuple[tuple[int, bytes], ...]:
    if not layout:
        block = _extra_block(int(p.extra), node)[1] if p.extra else 0
        if block:
            raise Unprovable("layout", f"{block} bytes of parameters, but the driver reports no layout", node=node)
        return ()
    if p.kernelParams:
        addresses = list((ctypes.c_void_p * len(layout)).from_address(int(p.kernelParams)))
    elif p.extra:
        base, size = _extra_block(int(p.extra), node)
        if (end := max(offset + length for offset, length in layout)) > size:
            raise Unprovable("layout", f"a block of {size} bytes for parameters that end at {end}", node=node)
        addresses = [base + offset for offset, _ in layout]
    else:
        raise Unprovable("layout", f"{len(layout)} parameters, but the node holds none", node=node)
    values = []
    for number, ((offset, size), address) in enumerate(zip(layout, addresses)):
        if not address:
            raise Unprovable("layout", "no value", node=node, parameter=number)
        values.append((offset, ctypes.string_at(address, size)))
    return tuple(values)


def _extra_block(extra: int, node: str) -> tuple[int, int]:
    """Return (address, size) of the packed block that an `extra` array names."""
    array = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
    base = size = 0
    at = 0
    while key := array[at] or PARAM_END:
        value = array[at + 1] or 0
        if key == PARAM_BUFFER_POINTER:
            base = value
        elif key == PARAM_BUFFER_SIZE:
            size = ctypes.c_size_t.from_address(value).value if value else 0
        else:
            raise Unprovable("layout", f"launch option {key:#x} is not known", node=node)
        at += 2
    return base, size


def copy_node(driver: Driver, index: int, handle: int, keeps: Callable[[int], bool]) -> CopyNode:
    """Read a memcpy node. Refuses what is neither in device memory nor in host memory that `keeps` its place."""
    p = driver.memcpy(handle)
    sides = []
    for side in ("dst", "src"):
        try:
            kind = int(getattr(p, f"{side}MemoryType"))
        except ValueError:  # cuda.bindings: the driver left the field unset
            kind = 0
        address = int(getattr(p, f"{side}Device"))
        if kind == cu.MEMORY_UNIFIED:
            kind = driver.memory_kind(address)
        elif kind == cu.MEMORY_HOST:
            address = int(getattr(p, f"{side}Host"))
        on_host = kind == cu.MEMORY_HOST and keeps(address)
        if kind != cu.MEMORY_DEVICE and not on_host:
            where = "host memory" if kind in (0, cu.MEMORY_HOST) else "an array"
            text = f"it copies {'to' if side == 'dst' else 'from'} {where}"
            raise Unprovable("host-memory", text, node=f"{index} (memcpy)")
        pitch, rows = int(getattr(p, f"{side}Pitch")), int(getattr(p, f"{side}Height"))
        x, y, z = (int(getattr(p, f"{side}{n}")) for n in ("XInBytes", "Y", "Z"))
        sides.append((address + x + pitch * (y + rows * z), pitch, rows, on_host))
    (dst, dst_pitch, dst_height, dst_on_host), (src, src_pitch, src_height, src_on_host) = sides
    return CopyNode(
        index=index,
        handle=handle,
        dst=dst,
        src=src,
        width=int(p.WidthInBytes),
        height=int(p.Height),
        depth=int(p.Depth),
        dst_pitch=dst_pitch,
        dst_height=dst_height,
        src_pitch=src_pitch,
        src_height=src_height,
        dst_on_host=dst_on_host,
        src_on_host=src_on_host,
    )
