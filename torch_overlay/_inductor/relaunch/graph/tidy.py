"""Tidies a captured CUDA graph before it is read and instantiated.

`tidy` has to run on every capture: memset nodes and device-to-device memcpy nodes become kernel nodes (see
`graph.fill_copy_kernels`), and edges that other edges imply are removed. It treats equal graphs equally, so two
captures stay comparable. It keeps a node that it can't replace.

Note [Which edges are implied]
An edge u -> v is implied if another path leads from u to v on which every edge means full completion. Programmatic
edges (a kernel may start while its predecessor is still running) imply nothing and are never removed.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.graph.driver import handle_of
from torch_overlay._inductor.relaunch.graph.read import copy_node
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay.csrc import DriverError
from torch_overlay.orders import directly_after, implied_edges


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_overlay._inductor.relaunch.graph.driver import Driver, KernelLaunch


def tidy(graph: Any, *, driver: Driver, made: dict[int, int] | None = None) -> list[str]:
    """Replace memset and memcpy nodes and remove implied edges, in the cudaGraph_t itself. Return which nodes of these
    kinds are left as they are, and why. `made` gets node -> the one in its place."""
    made = {} if made is None else made
    handle = handle_of(graph)
    structure = driver.structure(handle)
    foreign = {kind for kind in structure.kinds if kind not in (cu.KERNEL, cu.MEMCPY, cu.MEMSET, cu.EMPTY)}
    if foreign:
        # `read` will refuse the graph, and the driver forbids edits of graphs with allocation nodes.
        return [f"graph with {cu.KIND_NAMES.get(kind, str(kind))} nodes" for kind in foreign]
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
            launch = _replacement(driver, index, node, kind)
            if node in special:
                raise Unprovable("edges", "it has programmatic dependencies")
            made[node] = _replaced(driver, handle, node, launch, now(before[node]), now(after[node]))
        except Exception as error:  # also Triton's; the node is kept
            kept.append(f"{cu.KIND_NAMES[kind]} node {index}: {error}")
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


def _replacement(driver: Driver, index: int, handle: int, kind: int) -> KernelLaunch:
    from torch_overlay._inductor.relaunch.graph import fill_copy_kernels as kernels

    if kind == cu.MEMSET:
        p = driver.memset(handle)
        size, width, height = int(p.elementSize), int(p.width), int(p.height)
        if height > 1 and int(p.pitch) != width * size:
            raise Unprovable("shape", "its rows are not adjacent")
        launch = kernels.fill(int(p.dst), int(p.value), size, width * height)
    else:
        node = copy_node(driver, index, handle)
        to, source = node.sides
        if to.on_host or source.on_host:
            raise Unprovable("host-memory", "a copy engine moves saved activations beside the kernels")
        lines = node.height * node.depth
        adjacent = node.depth <= 1 and to.pitch == source.pitch == node.width
        if lines > 1 and not adjacent:
            raise Unprovable("shape", "its rows are not adjacent")
        launch = kernels.copy(to.address, source.address, node.width * lines)
    layout = [size for _, size in driver.layout(launch.func)]
    if layout != [len(value) for value in launch.arguments]:
        sizes = [len(value) for value in launch.arguments]
        raise Unprovable("layout", f"the kernel for it takes parameters of {layout} bytes, not {sizes}")
    if not 0 < launch.grid[0] < 1 << 31:
        raise Unprovable("shape", f"{launch.grid[0]} blocks")
    return launch
