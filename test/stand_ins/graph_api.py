"""The driver's functions that read and edit a graph, over a graph in Python."""

import ctypes

from torch_overlay._inductor.relaunch.graph import driver as cu


class FakeApi:
    """cuda.bindings.driver for graphs that live in dictionaries. Structs and handle classes are the real ones."""

    EDGE_KINDS = {"plain": (0, 0, 0), "programmatic": (1, 0, 1), "launch order": (0, 0, 2)}

    def __init__(self):
        from cuda.bindings import driver

        self.real = driver
        self.kind, self.params, self.edge_list, self.functions = {}, {}, [], {}
        self.host_memory, self.device_memory = set(), set()
        self.keep, self.next_handle, self.forbidden = [], 0x5000, set()
        self.home: dict[int, int] = {}  # node -> its graph, if that is in a conditional node
        self.launched: list[object] = []
        self.attributes: dict[int, int] = {}  # node -> the one whose attributes it has

    def __getattr__(self, name):
        if name.startswith("cu"):
            raise AttributeError(f"the fake has no {name}")
        return getattr(self.real, name)

    # Building a graph.

    def new(self, kind, params=None, after=()):
        self.next_handle += 0x10
        self.kind[self.next_handle], self.params[self.next_handle] = kind, params
        for node in after:
            self.edge_list.append((node, self.next_handle, "plain"))
        return self.next_handle

    def array(self, addresses):
        array = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self.keep.append(array)
        return ctypes.addressof(array)

    def bytes_at(self, value):
        buffer = ctypes.create_string_buffer(value, max(1, len(value)))
        self.keep.append(buffer)
        return ctypes.addressof(buffer)

    def declare(self, func, name, *sizes):
        layout, offset = [], 0
        for size in sizes:
            offset = -(-offset // min(8, size)) * min(8, size)
            layout.append((offset, size))
            offset += size
        self.functions[func] = (name, layout)

    def kernel(self, func, *values, after=(), grid=(2, 3, 4)):
        params = self.real.CUDA_KERNEL_NODE_PARAMS()
        params.func = self.real.CUfunction(func)
        params.gridDimX, params.gridDimY, params.gridDimZ = grid
        params.blockDimX, params.blockDimY, params.blockDimZ = 32, 2, 1
        params.sharedMemBytes = 48
        params.kernelParams = self.array([self.bytes_at(v) for v in values])
        return self.new(cu.KERNEL, params, after)

    def memset(self, dst, *, value=0, element_size=4, width=4, height=1, pitch=0, after=()):
        params = self.real.CUDA_MEMSET_NODE_PARAMS()
        params.dst = self.real.CUdeviceptr(dst)
        params.value, params.elementSize, params.width, params.height = value, element_size, width, height
        params.pitch = pitch
        return self.new(cu.MEMSET, params, after)

    def memcpy(self, dst, src, width, *, kinds=(2, 2), height=1, depth=1, after=(), **fields):
        params = self.real.CUDA_MEMCPY3D()
        params.dstDevice, params.srcDevice = self.real.CUdeviceptr(dst), self.real.CUdeviceptr(src)
        params.dstMemoryType, params.srcMemoryType = (self.real.CUmemorytype(k) for k in kinds)
        params.WidthInBytes, params.Height, params.Depth = width, height, depth
        for name, value in fields.items():
            setattr(params, name, value)
        return self.new(cu.MEMCPY, params, after)

    def edges_between(self, *handles):
        return sorted((handles.index(u), handles.index(v)) for u, v, _ in self.edge_list)

    # The driver's functions.

    def ok(self, *values):
        return (self.real.CUresult.CUDA_SUCCESS, *values)

    def invalid(self, *values):
        return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE, *values)

    # The functions of the C module that read a graph.

    def structure(self, graph):
        nodes = [node for node in self.kind if self.home.get(node, 0x77) == graph]
        edges = [(u, v, kind == "plain") for u, v, kind in self.edge_list if u in nodes]
        return nodes, [self.kind[node] for node in nodes], edges

    def kernels(self, nodes):
        return [self.described(self.params[node]) for node in nodes]

    def described(self, p):
        name, layout = self.functions[int(p.func)]
        addresses = (ctypes.c_void_p * len(layout)).from_address(p.kernelParams) if layout else ()
        values = [(at, ctypes.string_at(address, size)) for (at, size), address in zip(layout, addresses)]
        grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
        return int(p.func), int(p.kern), int(p.ctx), grid, block, p.sharedMemBytes, name, tuple(values)

    def cuStreamGetCaptureInfo(self, stream):
        active = self.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        none = self.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        return (
            self.ok(active, 1, self.real.CUgraph(0x77), [], [], 0)
            if int(stream)
            else self.ok(none, 0, None, None, None, 0)
        )

    def cuGraphGetEdges(self, graph, count):
        assert isinstance(graph, self.real.CUgraph)
        before, after, data = [], [], []
        for u, v, kind in self.edge_list[:count]:
            before.append(self.real.CUgraphNode(u))
            after.append(self.real.CUgraphNode(v))
            edge = self.real.CUgraphEdgeData()
            edge.type, edge.to_port, edge.from_port = self.EDGE_KINDS[kind]
            data.append(edge)
        return self.ok(before, after, data, len(self.edge_list))

    def get_params(self, node):
        return self.ok(self.params[int(node)])

    cuGraphMemsetNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphKernelNodeGetParams = get_params

    def cuFuncGetParamInfo(self, func, index):
        layout = self.functions[int(func)][1]
        return self.ok(*layout[index]) if index < len(layout) else self.invalid(0, 0)

    def cuPointerGetAttribute(self, attribute, pointer):
        assert attribute == self.real.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        for kind, known in ((1, self.host_memory), (2, self.device_memory)):
            if int(pointer) in known:
                return self.ok(self.real.CUmemorytype(kind))
        return self.invalid(None)

    def cuGraphAddKernelNode(self, graph, before, count, params):
        assert len(before) == count and all(isinstance(n, self.real.CUgraphNode) for n in before)
        if int(params.func) in self.forbidden:
            return self.invalid(None)
        sizes = [size for _, size in self.functions[int(params.func)][1]]
        array = (ctypes.c_void_p * len(sizes)).from_address(params.kernelParams)
        values = [ctypes.string_at(address, size) for address, size in zip(array, sizes)]
        grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
        node = self.kernel(int(params.func), *values, after=map(int, before), grid=grid)
        self.home[node] = int(graph)
        return self.ok(self.real.CUgraphNode(node))

    def cuGraphAddDependencies(self, graph, before, after, data, count):
        assert len(before) == len(after) == count
        for i, (u, v) in enumerate(zip(map(int, before), map(int, after))):
            assert self.home.get(u, 0x77) == self.home.get(v, 0x77) == int(graph)
            self.edge_list.append((u, v, self.kind_of(data[i]) if data else "plain"))
        return self.ok()

    def kind_of(self, data):
        return {kind: name for name, kind in self.EDGE_KINDS.items()}[data.type, data.to_port, data.from_port]

    # Conditional nodes.

    def cuCtxGetCurrent(self):
        return self.ok(self.real.CUcontext(0xC0))

    def cuGraphConditionalHandleCreate(self, graph, context, default, flags):
        self.next_handle += 0x10
        self.home[self.next_handle] = int(graph)
        return self.ok(self.real.CUgraphConditionalHandle(self.next_handle))

    def cuGraphAddNode(self, graph, before, data, count, params):
        assert (before, data, count) == ([], None, 0) and params.type == cu.CONDITIONAL
        assert self.home[int(params.conditional.handle)] == int(graph), "a handle belongs to the graph of its node"
        node = self.new(cu.CONDITIONAL)
        self.home[node] = int(graph)
        bodies = (ctypes.c_uint64 * 2)(node + 1, node + 2)
        self.keep.append(bodies)
        ctypes.c_uint64.from_address(params.getPtr() + 32).value = ctypes.addressof(bodies)  # phGraph_out
        return self.ok(self.real.CUgraphNode(node))

    def cuKernelGetFunction(self, kernel):
        return self.ok(self.real.CUfunction(int(kernel) + 1))

    def cuLaunchKernel(self, func, *shape):
        *sizes, stream, arguments, extra = shape
        layout = self.functions[int(func)][1]
        addresses = (ctypes.c_void_p * len(layout)).from_address(arguments)
        values = [ctypes.string_at(address, size) for (_, size), address in zip(layout, addresses)]
        self.launched.append((int(func), sizes, int(stream), values))
        return self.ok()

    def cuGraphKernelNodeCopyAttributes(self, to, source):
        self.attributes[int(to)] = int(source)
        return self.ok()

    def cuGraphRemoveDependencies(self, graph, before, after, data, count):
        assert len(before) == len(after) == count and (data is None or len(data) == count)
        for i, (u, v) in enumerate(zip(before, after)):
            self.edge_list.remove((int(u), int(v), self.kind_of(data[i]) if data else "plain"))
        return self.ok()

    def cuGraphDestroyNode(self, node):
        self.edge_list = [e for e in self.edge_list if int(node) not in e[:2]]
        del self.kind[int(node)], self.params[int(node)]
        return self.ok()
