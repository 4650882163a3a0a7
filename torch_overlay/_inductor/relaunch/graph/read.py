"""Tidies a captured CUDA graph, and reads it, through the driver.

`tidy` has to run on every capture: memset nodes and device-to-device memcpy nodes become kernel nodes
(`graph.fill_copy_kernels`), and edges that other edges imply are removed. It treats equal graphs equally, so two
captures stay comparable. It keeps a node that it can't replace.

`read` turns the graph into the plain data that `prove.prove` compares: the launch of every kernel node with its
parameters (cut out of the packed block by the layout that the driver reports), the addresses of memset and memcpy
nodes, and the edges. Nodes that can't be patched from outside (host callbacks, copies from host memory, child graphs,
...) are refused by name. A copy between the device and host memory that never moves is not refused, if the caller knows
the memory: its address is a constant of the graph.

Note [Which edges are implied]
An edge u -> v is implied if another path leads from u to v on which every edge means full completion. Programmatic
edges (a kernel may start while its predecessor is still running) imply nothing and are never removed.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.offload import runtime
from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.graph.driver import handle_of
from torch_overlay._inductor.relaunch.proof.nodes import (
    CapturedGraph,
    Conditional,
    CopyNode,
    CopySide,
    EmptyNode,
    FillNode,
    KernelNode,
    Node,
    Segment,
    Unprovable,
)
from torch_overlay.csrc import DriverError
from torch_overlay.orders import directly_after, implied_edges


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch_overlay._inductor.relaunch.graph.driver import Driver, KernelLaunch


NOT_PATCHED = "nodes of this kind can't be patched"
# The name of each kind of nodes, and how a region got one that there is no way to patch.
KINDS = {
    cu.KERNEL: ("kernel", ""),
    cu.MEMCPY: ("memcpy", ""),
    cu.MEMSET: ("memset", ""),
    cu.HOST: ("host callback", "a host function was called in the region"),
    cu.CHILD_GRAPH: ("child graph", "a library launched a CUDA graph of its own"),
    cu.EMPTY: ("empty", ""),
    cu.WAIT_EVENT: ("wait for an event", "the region waits for an event of the code around it"),
    cu.RECORD_EVENT: ("record of an event", "the region records an event that code around it can see"),
    8: ("semaphore signal", NOT_PATCHED),
    9: ("semaphore wait", NOT_PATCHED),
    10: ("memory allocation", "a library allocated memory in the stream"),
    11: ("memory free", "a library freed memory in the stream"),
    12: ("batch of memory operations", NOT_PATCHED),
    cu.CONDITIONAL: ("conditional", "control flow on the device"),
}


def read(
    graph: Any,
    segments: Iterable[Segment],
    low: int,
    high: int,
    *,
    driver: Driver,
    conditionals: Iterable[Conditional] = (),
) -> CapturedGraph:
    """Return the graph as plain data. `graph` is a torch.cuda.CUDAGraph(keep_graph=True) after its capture, or its
    handle; `conditionals` have handles of its nodes."""
    graph_nodes, kinds, graph_edges = driver.structure(handle_of(graph))
    kernels = iter(driver.kernels([node for node, kind in zip(graph_nodes, kinds) if kind == cu.KERNEL]))
    nodes: list[Node] = []
    for index, (node, kind) in enumerate(zip(graph_nodes, kinds)):
        if kind != cu.KERNEL:
            nodes.append(_other_node(driver, index, node, kind))
            continue
        match next(kernels):
            case (name, message):
                where = f"{index} ({name})" if name is not None else str(index)
                raise Unprovable("layout", message, node=where)
            case (func, kern, ctx, grid, block, shared_bytes, name, values):
                nodes.append(KernelNode(index, node, name, func, kern, ctx, grid, block, shared_bytes, values))
    number = {node: index for index, node in enumerate(graph_nodes)}
    edges = tuple(sorted([(number[before], number[after]) for before, after, _ in graph_edges]))
    found = tuple([each.renamed(number.__getitem__) for each in conditionals])
    for index in itertools.chain.from_iterable(branch for each in found for branch in each.branches):
        if not isinstance(node := nodes[index], KernelNode):
            raise Unprovable("condition", "a branch has work that is no kernel", node=f"{index} ({node.name})")
    return CapturedGraph(tuple(nodes), edges, tuple(segments), low, high, found)


def freed_memory(snapshot: Callable[[], Iterable[dict[str, Any]]]) -> Callable[[int], bool]:
    """Return a predicate for `prove.prove(foreign=...)`: is the address in a free block of the caching allocator?
    `snapshot` is torch.cuda.memory_snapshot, which is called only if there is an address to ask about: seldom."""

    @functools.cache
    def freed() -> tuple[list[int], list[int]]:
        blocks = sorted(
            (block["address"], block["address"] + block["size"])
            for segment in snapshot()
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )
        return [start for start, _ in blocks], [end for _, end in blocks]

    def inside(address: int) -> bool:
        starts, ends = freed()
        at = bisect.bisect_right(starts, address) - 1
        return at >= 0 and address < ends[at]

    return inside


def _other_node(driver: Driver, index: int, handle: int, kind: int) -> Node:
    """Read a node that is not a kernel's."""
    if kind == cu.MEMSET:
        p = driver.memset(handle)
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
        return _copy_node(driver, index, handle)
    if kind == cu.EMPTY:
        return EmptyNode(index=index, handle=handle)
    what, why = KINDS.get(kind, ("unknown kind", NOT_PATCHED))
    raise Unprovable("node-kind", why, node=f"{index} ({what})")


def _copy_node(driver: Driver, index: int, handle: int) -> CopyNode:
    """Read a memcpy node. Refuses what is neither in device memory nor in host memory that lives as long as graphs."""
    p = driver.memcpy(handle)

    def side(end: str) -> CopySide:
        try:
            kind = int(getattr(p, f"{end}MemoryType"))
        except ValueError:  # cuda.bindings: the driver left the field unset
            kind = 0
        address = int(getattr(p, f"{end}Device"))
        if kind == cu.MEMORY_UNIFIED:
            kind = driver.memory_kind(address)
        elif kind == cu.MEMORY_HOST:
            address = int(getattr(p, f"{end}Host"))
        on_host = kind == cu.MEMORY_HOST and runtime.holds(address)
        if kind != cu.MEMORY_DEVICE and not on_host:
            where = "host memory" if kind in (0, cu.MEMORY_HOST) else "an array"
            text = f"it copies {'to' if end == 'dst' else 'from'} {where}"
            raise Unprovable("host-memory", text, node=f"{index} (memcpy)")
        pitch, rows = int(getattr(p, f"{end}Pitch")), int(getattr(p, f"{end}Height"))
        x, y, z = (int(getattr(p, f"{end}{n}")) for n in ("XInBytes", "Y", "Z"))
        return CopySide(address + x + pitch * (y + rows * z), pitch, rows, on_host)

    sides = side("dst"), side("src")
    return CopyNode(index, handle, sides, width=int(p.WidthInBytes), height=int(p.Height), depth=int(p.Depth))


def tidy(graph: Any, *, driver: Driver, made: dict[int, int] | None = None) -> list[str]:
    """Replace memset and memcpy nodes and remove implied edges, in the cudaGraph_t itself. Return which nodes of these
    kinds are left as they are, and why. `made` gets node -> the one in its place."""
    made = {} if made is None else made
    handle = handle_of(graph)
    structure = driver.structure(handle)
    foreign = {kind for kind in structure.kinds if kind not in (cu.KERNEL, cu.MEMCPY, cu.MEMSET, cu.EMPTY)}
    if foreign:
        # `read` will refuse the graph, and the driver forbids edits of graphs with allocation nodes.
        return [f"graph with {KINDS.get(kind, (str(kind),))[0]} nodes" for kind in foreign]
    plain = [(u, v) for u, v, is_plain in structure.edges if is_plain]  # edges that mean full completion
    special = {node for u, v, is_plain in structure.edges if not is_plain for node in (u, v)}
    before, after = directly_after(structure.nodes, [(v, u) for u, v in plain]), directly_after(structure.nodes, plain)
    kept = []

    def now(nodes: Iterable[int]) -> list[int]:
        return [made.get(node, node) for node in nodes]

    for index, (node, kind) in enumerate(zip(structure.nodes, structure.kinds)):
        if kind not in (cu.MEMSET, cu.MEMCPY):
            continue
        try:
            launch = _replacement(driver, _other_node(driver, index, node, kind))
            if node in special:
                raise Unprovable("edges", "it has programmatic dependencies")
            made[node] = _replaced(driver, handle, node, launch, now(before[node]), now(after[node]))
        except Exception as error:  # also Triton's; the node is kept
            kept.append(f"{KINDS[kind][0]} node {index}: {error}")
    driver.remove_edges(handle, implied_edges({made.get(u, u): now(vs) for u, vs in after.items()}))
    return kept


def _replaced(driver: Driver, graph: int, node: int, launch: KernelLaunch, before: list[int], after: list[int]) -> int:
    """Put a kernel in the place of a node, between the same others, and return it."""
    new = driver.add_kernel(graph, before, launch)
    try:
        driver.add_edges(graph, [(new, v) for v in after])
        driver.destroy(node)
    except DriverError:
        driver.destroy(new)
        raise
    return new


def set_edges(graph: Any, handles: Sequence[int], edges: Iterable[tuple[int, int]], *, driver: Driver) -> bool:
    """Replace a graph's edges by `edges`, pairs of indices into `handles`. A programmatic edge among them remains
    programmatic: its later node waits for the earlier one by itself. Return False, and change nothing, if the graph has
    edges of other kinds, which don't order their nodes."""
    handle = handle_of(graph)
    old = driver.edge_data(handle)
    if not all(cu.kind_of(data) in (cu.PLAIN, cu.PROGRAMMATIC) for data in old.values()):
        return False
    new = {(handles[u], handles[v]): None for u, v in edges}
    kept = {edge for edge, data in old.items() if edge in new and cu.kind_of(data) != cu.PLAIN}
    driver.remove_edges(handle, [edge for edge in old if edge not in kept], old)
    driver.add_edges(handle, [edge for edge in new if edge not in kept])
    return True


def _replacement(driver: Driver, node: Any) -> KernelLaunch:
    """Return what fills or copies as a node does."""
    from torch_overlay._inductor.relaunch.graph import fill_copy_kernels as kernels

    if isinstance(node, FillNode):
        lines, is_adjacent = node.height, node.pitch == node.width * node.element_size
        make = functools.partial(kernels.fill, node.dst, node.value, node.element_size)
    else:
        to, source = node.sides
        if to.on_host or source.on_host:
            raise Unprovable("host-memory", "a copy engine moves saved activations beside the kernels")
        lines, is_adjacent = node.height * node.depth, node.depth <= 1 and to.pitch == source.pitch == node.width
        make = functools.partial(kernels.copy, to.address, source.address)
    if lines > 1 and not is_adjacent:
        raise Unprovable("shape", "its rows are not adjacent")
    launch = make(node.width * lines)
    layout = [size for _, size in driver.layout(launch.func)]
    if layout != (sizes := [len(value) for value in launch.arguments]):
        raise Unprovable("layout", f"the kernel for it takes parameters of {layout} bytes, not {sizes}")
    if not 0 < launch.grid[0] < 1 << 31:
        raise Unprovable("shape", f"{launch.grid[0]} blocks")
    return launch
