"""Edits a cudaGraph_t before it is instantiated: replaces nodes by kernel nodes, and removes implied edges.

Note [Which edges are implied]
An edge u -> v is implied if another path leads from u to v on which every edge means full completion. Programmatic
edges (a kernel may start while its predecessor is still running) imply nothing and are never removed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay.csrc import DriverError
from torch_overlay.orders import implied_edges


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.graph.driver import Driver, Structure


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel and its arguments, one per parameter that the function declares."""

    func: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[bytes, ...]


class Editor:
    """A graph under edit, with its current edges."""

    def __init__(self, driver: Driver, graph: int, structure: Structure) -> None:
        self.driver, self.graph = driver, graph
        # Edges that mean full completion, by their ends; a dictionary of nodes is an ordered set.
        self.before: dict[int, dict[int, None]] = {node: {} for node in structure.nodes}
        self.after: dict[int, dict[int, None]] = {node: {} for node in structure.nodes}
        self.special: set[int] = set()
        for before, after, plain in structure.edges:
            if plain:
                self.before[after][before] = self.after[before][after] = None
            else:
                self.special |= {before, after}

    def replace(self, node: int, launch: KernelLaunch) -> None:
        if node in self.special:
            raise Unprovable("edges", "it has programmatic dependencies")
        before, after = list(self.before[node]), list(self.after[node])
        values = [ctypes.create_string_buffer(value, len(value)) for value in launch.arguments]
        array = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        new = self.driver.add_kernel(self.graph, before, kernel_params(self.driver.api, launch, array))
        try:
            self.driver.add_edges(self.graph, [(new, v) for v in after])
            self.driver.destroy(node)
        except DriverError:
            self.driver.destroy(new)
            raise
        self.before[new], self.after[new] = self.before.pop(node), self.after.pop(node)
        for other in before:
            del self.after[other][node]
            self.after[other][new] = None
        for other in after:
            del self.before[other][node]
            self.before[other][new] = None

    def remove_implied_edges(self) -> None:
        self.driver.remove_edges(self.graph, implied_edges(self.after))


def kernel_params(api: Any, launch: KernelLaunch, array: ctypes.Array[ctypes.c_void_p]) -> Any:
    params = api.CUDA_KERNEL_NODE_PARAMS()
    params.func = api.CUfunction(launch.func)
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.shared_bytes
    params.kernelParams = ctypes.addressof(array)  # the driver copies the arguments
    return params
