# Owner(s): ["module: inductor"]

import importlib.util
import unittest
import unittest.mock

from torch._inductor.cudagraph_relaunch import driver as cu
from torch._inductor.cudagraph_relaunch.nodes import CopyNode
from torch.testing._internal.common_utils import run_tests, TestCase


HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)
PLAIN, PROGRAMMATIC = (0, 0, 0), (1, 1, 0)


class Api:
    """cuda.bindings.driver for graphs in dictionaries. Structs and handles are real."""

    def __init__(self):
        from cuda.bindings import driver

        self.real = driver
        self.nodes = {1: {11: cu.KERNEL, 12: cu.MEMCPY, 13: cu.EMPTY}}  # by graph
        self.links = {1: {(11, 12): PLAIN, (12, 13): PROGRAMMATIC}}
        self.params = {}  # by node
        self.executables = {}  # by handle: the nodes of the graph
        self.enqueued = []
        self.failing = ""

    def __getattr__(self, name):
        return getattr(self.real, name)

    def ok(self, *values):
        return (self.real.CUresult.CUDA_SUCCESS, *values)

    def invalid(self, *values):
        return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE, *values)

    def cuGraphGetNodes(self, graph, count):
        nodes = self.nodes[int(graph)]
        return self.ok([self.real.CUgraphNode(n) for n in nodes][:count], len(nodes))

    def cuGraphGetEdges(self, graph, count):
        links = self.links[int(graph)]
        ends = [
            [self.real.CUgraphNode(link[i]) for link in links][:count] for i in (0, 1)
        ]
        data = [self.data(kind) for kind in links.values()][:count]
        return self.ok(*ends, data, len(links))

    def data(self, kind):
        data = self.real.CUgraphEdgeData()
        data.type, data.from_port, data.to_port = kind
        return data

    def kind_of(self, node):
        (kind,) = (
            nodes[int(node)] for nodes in self.nodes.values() if int(node) in nodes
        )
        return kind

    def cuGraphNodeGetType(self, node):
        return self.ok(self.real.CUgraphNodeType(self.kind_of(node)))

    def cuGraphAddDependencies(self, graph, before, after, data, count):
        assert data is None and len(before) == len(after) == count
        self.links[int(graph)] |= dict.fromkeys(
            zip(map(int, before), map(int, after)), PLAIN
        )
        return self.ok()

    def cuGraphRemoveDependencies(self, graph, before, after, data, count):
        links, data = self.links[int(graph)], data or [self.data(PLAIN)] * count
        for u, v, kind in zip(before, after, data):
            if links.get((int(u), int(v))) != cu.kind_of(kind):
                return self.invalid()
            del links[int(u), int(v)]
        return self.ok()

    def cuGraphClone(self, graph):
        self.nodes[100] = {n + 100: kind for n, kind in self.nodes[int(graph)].items()}
        self.links[100] = {}
        return self.ok(self.real.CUgraph(100))

    def cuGraphNodeFindInClone(self, node, clone):
        return self.ok(self.real.CUgraphNode(int(node) + int(clone)))

    def cuGraphDestroyNode(self, node):
        if self.failing == "cuGraphDestroyNode":
            return self.invalid()
        for nodes in self.nodes.values():
            nodes.pop(int(node), None)
        return self.ok()

    def cuGraphDestroy(self, graph):
        del self.nodes[int(graph)], self.links[int(graph)]
        return self.ok()

    def cuGraphMemcpyNodeSetParams(self, node, params):
        self.params[int(node)] = params
        return self.ok()

    def get_params(self, node, kind):
        if self.kind_of(node) != kind:
            return self.invalid(None)
        return self.ok(self.params[int(node)])

    def cuGraphKernelNodeGetParams(self, node):
        return self.get_params(node, cu.KERNEL)

    def cuGraphMemsetNodeGetParams(self, node):
        return self.get_params(node, cu.MEMSET)

    def cuGraphMemcpyNodeGetParams(self, node):
        return self.get_params(node, cu.MEMCPY)

    def cuGraphAddKernelNode(self, graph, before, count, params):
        assert len(before) == count
        node = 1 + max(self.nodes[int(graph)])
        self.nodes[int(graph)][node] = cu.KERNEL
        self.links[int(graph)] |= {(int(n), node): PLAIN for n in before}
        self.params[node] = params
        return self.ok(self.real.CUgraphNode(node))

    def cuGraphInstantiate(self, graph, flags):
        assert flags == 0
        handle = 500 + len(self.executables)
        self.executables[handle] = list(self.nodes[int(graph)])
        return self.ok(self.real.CUgraphExec(handle))

    def enqueue(self, what, executable, stream):
        if int(executable) not in self.executables:
            return self.invalid()
        self.enqueued.append((what, int(executable), int(stream)))
        return self.ok()

    def cuGraphUpload(self, executable, stream):
        return self.enqueue("upload", executable, stream)

    def cuGraphLaunch(self, executable, stream):
        return self.enqueue("launch", executable, stream)

    def cuGraphExecDestroy(self, executable):
        del self.executables[int(executable)]
        return self.ok()

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, func, threads, shared_bytes):
        assert int(func) == 7
        return self.ok(min(2048 // threads, (228 << 10) // shared_bytes))

    def cuFuncGetName(self, func):
        return self.ok(b"add")

    def cuFuncGetParamInfo(self, func, index):
        return self.ok(8 * index, 8 - 4 * index) if index < 2 else self.invalid(0, 0)

    def cuKernelGetFunction(self, kernel):
        return self.invalid(None)

    def cuPointerGetAttribute(self, attribute, pointer):
        known = {64: 1, 72: 2}.get(int(pointer))
        return self.ok(self.real.CUmemorytype(known)) if known else self.invalid(None)

    def cuStreamIsCapturing(self, stream):
        return self.ok(self.real.CUstreamCaptureStatus(int(stream)))

    def cuStreamGetCaptureInfo(self, stream):
        graph = self.real.CUgraph(1) if int(stream) else None
        return self.ok(self.real.CUstreamCaptureStatus(1), 1, graph, None, None, 0)


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestDriver(TestCase):
    def setUp(self):
        super().setUp()
        self.api = Api()
        self.driver = cu.Driver(self.api)

    def test_structure(self):
        edges = [cu.Edge(11, 12, True), cu.Edge(12, 13, False)]
        kinds = [cu.KERNEL, cu.MEMCPY, cu.EMPTY]
        self.assertEqual(
            self.driver.structure(1), cu.Structure([11, 12, 13], kinds, edges)
        )
        self.assertEqual(self.driver.count(1), 3)
        self.api.nodes[2], self.api.links[2] = {}, {}
        self.assertEqual(self.driver.structure(2), cu.Structure([], [], []))

    def test_kind_that_the_bindings_do_not_know(self):
        self.api.nodes[1][11] = 99
        self.assertEqual(self.driver.kind(11), cu.UNKNOWN)

    def test_handle(self):
        graph = unittest.mock.Mock(raw_cuda_graph=lambda: 1)
        self.assertEqual((cu.handle_of(graph), cu.handle_of(1)), (1, 1))

    def test_functions(self):
        self.assertEqual(self.driver.name(7), "add")
        self.assertEqual(self.driver.layout(7), ((0, 8), (8, 4)))
        limits = [
            self.driver.blocks_at_once(7, 256, size) for size in (1 << 10, 1 << 16)
        ]
        self.assertEqual(limits, [8, 3])  # of threads, and of shared memory

    def test_errors(self):
        text = r"error in cuKernelGetFunction: CUDA_ERROR_INVALID_VALUE \(1\)"
        with self.assertRaisesRegex(cu.DriverError, text) as caught:
            self.driver.function_of(1)
        self.assertEqual(caught.exception.function, "cuKernelGetFunction")
        self.api.cuFuncGetParamInfo = lambda func, index: (
            self.api.real.CUresult.CUDA_ERROR_DEINITIALIZED,
            0,
            0,
        )
        with self.assertRaisesRegex(cu.DriverError, "DEINITIALIZED"):
            self.driver.layout(7)

    def test_memory(self):
        kinds = [self.driver.memory_kind(address) for address in (64, 72, 80)]
        self.assertEqual(kinds, [cu.MEMORY_HOST, cu.MEMORY_DEVICE, 0])

    def test_capture(self):
        self.assertEqual([self.driver.captured_into(s) for s in (0, 5)], [0, 1])
        self.assertEqual(
            [self.driver.is_broken(s) for s in (0, 1, 2)], [False, False, True]
        )

    def test_edges(self):
        self.driver.add_edges(1, [(11, 13)])
        self.assertEqual(self.api.links[1][11, 13], PLAIN)
        self.driver.remove_edges(1, [(11, 12)])
        with self.assertRaises(cu.DriverError):
            self.driver.remove_edges(1, [(12, 13)])
        self.driver.remove_edges(1, [(12, 13)], self.driver.edge_data(1))
        self.assertEqual(list(self.api.links[1]), [(11, 13)])
        self.driver.remove_edges(1, [])

    def test_part(self):
        clone, handles = self.driver.part(1, {11, 13})
        self.assertEqual(handles, {11: 111, 13: 113})
        self.assertEqual(list(self.api.nodes[clone]), [111, 113])
        self.assertEqual(list(self.api.nodes[1]), [11, 12, 13])

    def test_part_that_fails_leaves_no_clone(self):
        self.api.failing = "cuGraphDestroyNode"
        with self.assertRaises(cu.DriverError):
            self.driver.part(1, {11})
        self.assertEqual(list(self.api.nodes), [1])

    def test_copy(self):
        copy = CopyNode(
            0, 12, 0x1000, 0x2000, 64, 3, 1, 128, 3, 256, 3, src_on_host=True
        )
        self.driver.set_memcpy(12, copy)
        params, kind = self.api.params[12], self.api.real.CUmemorytype
        self.assertEqual((int(params.dstDevice), params.srcHost), (0x1000, 0x2000))
        self.assertEqual(params.dstMemoryType, kind.CU_MEMORYTYPE_DEVICE)
        self.assertEqual(params.srcMemoryType, kind.CU_MEMORYTYPE_HOST)
        size = (params.WidthInBytes, params.Height, params.dstPitch, params.srcPitch)
        self.assertEqual(size, (64, 3, 128, 256))

        self.assertIs(self.driver.memcpy(12), params)

    def test_added_kernel(self):
        params = self.api.real.CUDA_KERNEL_NODE_PARAMS()
        params.gridDimX = 5
        node = self.driver.add_kernel(1, [11, 13], params)
        self.assertEqual(self.driver.nodes(1), [11, 12, 13, node])
        self.assertEqual(self.driver.kind(node), cu.KERNEL)
        edges = {(edge.before, edge.after) for edge in self.driver.edges(1)}
        self.assertEqual(edges, {(11, 12), (12, 13), (11, node), (13, node)})
        self.assertEqual(self.driver.kernel(node).gridDimX, 5)
        for read in (self.driver.memset, self.driver.memcpy):
            with self.assertRaises(cu.DriverError):
                read(node)
        self.assertEqual(self.driver.kernels([11, node]), [None, None])

    def test_memset(self):
        params = self.api.real.CUDA_MEMSET_NODE_PARAMS()
        params.value, params.elementSize, params.width = 3, 2, 100
        self.api.nodes[1][14], self.api.params[14] = cu.MEMSET, params
        found = self.driver.memset(14)
        self.assertEqual((found.value, found.elementSize, found.width), (3, 2, 100))
        with self.assertRaises(cu.DriverError):
            self.driver.kernel(14)

    def test_launch(self):
        executable = self.driver.instantiate(1)
        self.assertEqual(self.api.executables, {executable: [11, 12, 13]})
        self.driver.upload(executable, 3)
        self.driver.launch(executable, 5)
        wanted = [("upload", executable, 3), ("launch", executable, 5)]
        self.assertEqual(self.api.enqueued, wanted)
        self.driver.destroy_executable(executable)
        self.assertEqual(self.api.executables, {})
        with self.assertRaisesRegex(cu.DriverError, "cuGraphLaunch"):
            self.driver.launch(executable, 5)


if __name__ == "__main__":
    run_tests()
