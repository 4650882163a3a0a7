"""Wraps the CUDA driver's graph functions as plain Python: handles are integers, and an error is an exception.

The C module `graph` reads the nodes and edges of a captured graph, or removes nodes, in one call instead of several for
each node:

    structure(graph)    ([node], [its kind], [(before, after, is it a full dependency?)])
    kernels(nodes)      of kernel nodes: [(func, kern, ctx, grid, block, shared bytes, name, ((offset, value), ...))]
    nodes(graph)        [node]
    cut(graph, clone, wanted)   {node: its handle in the clone} of the wanted ones; removes the others

`kernels` has (name or None, message) for a node that it can't describe. The driver is asked for a function's parameters
once a call, not once a node. If `cut` fails, its clone must be destroyed. The C source is `csrc/graph_reader.c`.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay import csrc
from torch_overlay.csrc import DriverError


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_overlay._inductor.relaunch.proof.nodes import CopyNode


KERNEL, MEMCPY, MEMSET, HOST, CHILD_GRAPH, EMPTY, WAIT_EVENT, RECORD_EVENT = range(8)
CONDITIONAL = 13
INVALID_VALUE = 1
CAPTURE_INVALIDATED = 2
PLAIN, PROGRAMMATIC = (0, 0, 0), (1, 1, 0)  # (type, from port, to port) of edges
MEMORY_HOST, MEMORY_DEVICE, MEMORY_UNIFIED = 1, 2, 4


class KernelLaunch(NamedTuple):
    """A kernel and its arguments, one per parameter that the function declares."""

    func: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[bytes, ...]


class Structure(NamedTuple):
    nodes: list[int]
    kinds: list[int]  # of the nodes, in the same order
    edges: list[tuple[int, int, bool]]  # plain ones mean full completion, others are programmatic or launch-order


def handle_of(graph: Any) -> int:
    """Return the handle of a torch.cuda.CUDAGraph, or of what has one; a handle is its own."""
    return graph if isinstance(graph, int) else int(graph.raw_cuda_graph())


def kind_of(data: Any) -> tuple[int, int, int]:
    """Return (type, from port, to port) of an edge."""
    return int(data.type), int(data.from_port), int(data.to_port)


class Driver:
    """The driver: `api` is the module cuda.bindings.driver, and `fast` the C module, or a test's replacements. Raises
    `csrc.NotBuiltError` if that can't be built."""

    def __init__(self, api: Any = None, fast: Any = None) -> None:
        self.api = api or importlib.import_module("cuda.bindings.driver")
        self.fast = fast or csrc.extension().graph

    def structure(self, graph: int) -> Structure:
        return Structure(*self.fast.structure(graph))

    def kernels(self, nodes: Sequence[int]) -> Sequence[tuple[Any, ...]]:
        return self.fast.kernels(nodes)

    def call(self, function: str, *args: Any) -> Any:
        """Call a driver function, and return its values without the error code: None, one value, or a tuple of
        several."""
        code, *values = getattr(self.api, function)(*args)
        if int(code):
            raise DriverError(function, int(code), getattr(code, "name", "unknown error"))
        return tuple(values) if len(values) > 1 else (values or [None])[0]

    def upload(self, executable: int, stream: int) -> None:
        self.call("cuGraphUpload", self.api.CUgraphExec(executable), self.api.CUstream(stream))

    def nodes(self, graph: int) -> list[int]:
        return self.fast.nodes(graph)

    def captured_into(self, stream: int) -> int:
        """Return the graph that a stream is captured into; 0 if it isn't captured."""
        return int(self.call("cuStreamGetCaptureInfo", self.api.CUstream(stream))[2] or 0)

    def is_broken(self, stream: int) -> bool:
        """True if the stream's capture has failed."""
        status = self.call("cuStreamIsCapturing", self.api.CUstream(stream))
        return int(status) == CAPTURE_INVALIDATED

    def edge_data(self, graph: int) -> dict[tuple[int, int], Any]:
        """Return (before, after) -> the driver's data of the edge, which say what kind of dependency it is."""
        handle = self.api.CUgraph(graph)
        count = self.call("cuGraphGetEdges", handle, 0)[-1]
        if not count:
            return {}
        before, after, data, _ = self.call("cuGraphGetEdges", handle, count)
        return {(int(u), int(v)): d for u, v, d in zip(before, after, data, strict=True)}

    def memset(self, node: int) -> Any:
        return self.call("cuGraphMemsetNodeGetParams", self.api.CUgraphNode(node))

    def memcpy(self, node: int) -> Any:
        return self.call("cuGraphMemcpyNodeGetParams", self.api.CUgraphNode(node))

    def point_memcpy(self, node: CopyNode, addresses: Mapping[int, int]) -> None:
        """Have a node in a graph, not in an executable, copy at these addresses, by parameter, in place of its own."""
        params = self.api.CUDA_MEMCPY3D()
        for number, (end, side) in enumerate(zip(("dst", "src"), node.sides, strict=True)):
            address = addresses.get(number, side.address)
            kind, value = ("Host", address) if side.on_host else ("Device", self.api.CUdeviceptr(address))
            setattr(params, f"{end}MemoryType", getattr(self.api.CUmemorytype, f"CU_MEMORYTYPE_{kind.upper()}"))
            setattr(params, f"{end}{kind}", value)
            setattr(params, f"{end}Pitch", side.pitch)
            setattr(params, f"{end}Height", side.rows)
        params.WidthInBytes, params.Height, params.Depth = node.width, node.height, node.depth
        self.call("cuGraphMemcpyNodeSetParams", self.api.CUgraphNode(node.handle), params)

    def layout(self, func: int) -> tuple[tuple[int, int], ...]:
        """Return (offset, size) of each of the function's parameters in its packed block."""
        found = []
        while True:
            try:
                offset, size = self.call("cuFuncGetParamInfo", self.api.CUfunction(func), len(found))
            except DriverError as error:
                if error.code == INVALID_VALUE:
                    return tuple(found)
                raise
            found.append((int(offset), int(size)))

    def memory_kind(self, address: int) -> int:
        """Return MEMORY_HOST, MEMORY_DEVICE or another kind; 0 for an address that the driver doesn't know."""
        attribute = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        try:
            return int(self.call("cuPointerGetAttribute", attribute, self.api.CUdeviceptr(address)))
        except DriverError:
            return 0

    def is_device_memory(self, address: int) -> bool:
        """True if the driver knows the address as device memory. That includes the state of random generators, which a
        capture has outside of its range."""
        return self.memory_kind(address) == MEMORY_DEVICE

    def _arguments(self, launch: KernelLaunch) -> tuple[Any, Any]:
        """Return an array of the addresses of the arguments, and what has to live until the driver has copied them."""
        values = [ctypes.create_string_buffer(value, len(value)) for value in launch.arguments]
        return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)), values

    def add_kernel(self, graph: int, before: list[int], launch: KernelLaunch) -> int:
        array, _held = self._arguments(launch)
        params = self.api.CUDA_KERNEL_NODE_PARAMS()
        params.func = self.api.CUfunction(launch.func)
        params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
        params.sharedMemBytes = launch.shared_bytes
        params.kernelParams = ctypes.addressof(array)
        nodes = [self.api.CUgraphNode(n) for n in before]
        return int(self.call("cuGraphAddKernelNode", self.api.CUgraph(graph), nodes, len(nodes), params))

    def copy_kernel(self, graph: int, node: int) -> int:
        """Add a kernel node of a graph to a different graph, or to one in it."""
        params = self.call("cuGraphKernelNodeGetParams", self.api.CUgraphNode(node))
        new = self.call("cuGraphAddKernelNode", self.api.CUgraph(graph), [], 0, params)
        self.call("cuGraphKernelNodeCopyAttributes", new, self.api.CUgraphNode(node))
        return int(new)

    def launch_kernel(self, launch: KernelLaunch, stream: int) -> None:
        array, _held = self._arguments(launch)
        shape = (*launch.grid, *launch.block, launch.shared_bytes, self.api.CUstream(stream))
        self.call("cuLaunchKernel", self.api.CUfunction(launch.func), *shape, ctypes.addressof(array), 0)

    def add_conditional(self, graph: int) -> tuple[int, int, list[int]]:
        """Add a node with two graphs of its own, of which it runs the first if its condition is true, else the second.
        Return the handle of the condition, the node, and the graphs."""
        context, kinds = self.call("cuCtxGetCurrent"), self.api.CUgraphConditionalNodeType
        handle = self.call("cuGraphConditionalHandleCreate", self.api.CUgraph(graph), context, 0, 0)
        params = self.api.CUgraphNodeParams()
        params.type = self.api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle, params.conditional.type = handle, kinds.CU_GRAPH_COND_TYPE_IF
        params.conditional.size, params.conditional.ctx = 2, context
        node = self.call("cuGraphAddNode", self.api.CUgraph(graph), [], None, 0, params)
        return int(handle), int(node), [int(each) for each in params.conditional.phGraph_out]

    def add_edges(self, graph: int, edges: list[tuple[int, int]]) -> None:
        """Add plain edges."""
        self._change_edges("cuGraphAddDependencies", graph, edges)

    def remove_edges(self, graph: int, edges: list[tuple[int, int]], data: Mapping[Any, Any] | None = None) -> None:
        """Remove the edges. If they aren't all plain, `data` must have the driver's data of each."""
        self._change_edges("cuGraphRemoveDependencies", graph, edges, data and [data[edge] for edge in edges])

    def _change_edges(self, function: str, graph: int, edges: list[tuple[int, int]], data: Any = None) -> None:
        if edges:
            before, after = ([self.api.CUgraphNode(n) for n in column] for column in zip(*edges))
            self.call(function, self.api.CUgraph(graph), before, after, data, len(edges))

    def blocks_at_once(self, func: int, threads: int, shared_bytes: int) -> int:
        """Return how many blocks of a kernel one multiprocessor holds."""
        function = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self.call(function, self.api.CUfunction(func), threads, shared_bytes))

    def destroy(self, node: int) -> None:
        self.call("cuGraphDestroyNode", self.api.CUgraphNode(node))

    # -- parts of graphs

    def clone(self, graph: int) -> int:
        return int(self.call("cuGraphClone", self.api.CUgraph(graph)))

    def part(self, graph: int, wanted: set[int]) -> tuple[int, dict[int, int]]:
        """Return a clone that has only the wanted nodes, and node -> its handle in the clone."""
        clone = self.clone(graph)
        try:
            return clone, self.fast.cut(graph, clone, wanted)
        except BaseException:
            self.destroy_graph(clone)
            raise

    def instantiate(self, graph: int) -> int:
        return int(self.call("cuGraphInstantiate", self.api.CUgraph(graph), 0))

    def launch(self, executable: int, stream: int) -> None:
        self.call("cuGraphLaunch", self.api.CUgraphExec(executable), self.api.CUstream(stream))

    def destroy_executable(self, executable: int) -> None:
        self.call("cuGraphExecDestroy", self.api.CUgraphExec(executable))

    def destroy_graph(self, graph: int) -> None:
        self.call("cuGraphDestroy", self.api.CUgraph(graph))
