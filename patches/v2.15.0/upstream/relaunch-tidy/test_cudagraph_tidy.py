# Owner(s): ["module: inductor"]

import ctypes
import importlib.util
import random
import unittest

from torch._inductor.cudagraph_relaunch import driver as cu
from torch._inductor.cudagraph_relaunch.edit import Launch
from torch._inductor.cudagraph_relaunch.tidy import set_edges, tidy, TidyReport
from torch.testing._internal.common_utils import run_tests, TestCase


FILL, COPY, OTHER = 0xF1, 0xC0, 7
PLAIN, PROGRAMMATIC, LAUNCH_ORDER = (0, 0, 0), (1, 1, 0), (0, 2, 0)
HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)


class Api:
    """cuda.bindings.driver with one graph. Structs and handles are the real ones."""

    def __init__(self):
        from cuda.bindings import driver

        self.real = driver
        self.nodes, self.links = {}, {}  # handle -> (kind, struct); edge -> its kind
        self.made = 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def add(self, kind, struct=None, after=()):
        self.made += 1
        self.nodes[self.made] = kind, struct
        self.links |= {(node, self.made): PLAIN for node in after}
        return self.made

    def memset(self, dst, after=(), **fields):
        struct = self.real.CUDA_MEMSET_NODE_PARAMS()
        struct.dst, struct.value = self.real.CUdeviceptr(dst), 3
        struct.elementSize, struct.width, struct.height = 4, 16, 1
        for name, value in fields.items():
            setattr(struct, name, value)
        return self.add(cu.MEMSET, struct, after)

    def memcpy(self, dst, src, after=(), kind=2, **fields):
        struct = self.real.CUDA_MEMCPY3D()
        struct.dstMemoryType, struct.srcMemoryType = map(
            self.real.CUmemorytype, (2, kind)
        )
        struct.dstDevice, struct.srcDevice = map(self.real.CUdeviceptr, (dst, src))
        struct.WidthInBytes, struct.Height, struct.Depth = 64, 1, 1
        for name, value in fields.items():
            setattr(struct, name, value)
        return self.add(cu.MEMCPY, struct, after)

    def ok(self, *values):
        return (self.real.CUresult.CUDA_SUCCESS, *values)

    def cuGraphGetNodes(self, graph, count):
        return self.ok(
            [self.real.CUgraphNode(n) for n in self.nodes][:count], len(self.nodes)
        )

    def cuGraphGetEdges(self, graph, count):
        ends = [
            [self.real.CUgraphNode(e[i]) for e in self.links][:count] for i in (0, 1)
        ]
        data = [self.real.CUgraphEdgeData() for _ in self.links][:count]
        for edge, kind in zip(data, self.links.values()):
            edge.type, edge.from_port, edge.to_port = kind
        return self.ok(*ends, data, len(self.links))

    def cuGraphNodeGetType(self, node):
        return self.ok(self.real.CUgraphNodeType(self.nodes[int(node)][0]))

    def struct_of(self, node):
        return self.ok(self.nodes[int(node)][1])

    cuGraphMemsetNodeGetParams = cuGraphMemcpyNodeGetParams = struct_of

    def cuFuncGetParamInfo(self, func, index):
        if index == 3:
            return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0)
        return self.ok(8 * index, 8)

    def cuGraphAddKernelNode(self, graph, before, count, params):
        array = (ctypes.c_void_p * 3).from_address(params.kernelParams)
        values = [
            int.from_bytes(ctypes.string_at(address, 8), "little") for address in array
        ]
        return self.ok(
            self.add(cu.KERNEL, (int(params.func), *values), map(int, before))
        )

    def cuGraphAddDependencies(self, graph, before, after, data, count):
        self.links |= dict.fromkeys(zip(map(int, before), map(int, after)), PLAIN)
        return self.ok()

    def cuGraphRemoveDependencies(self, graph, before, after, data, count):
        for edge in zip(map(int, before), map(int, after)):
            del self.links[edge]
        return self.ok()

    def cuGraphDestroyNode(self, node):
        del self.nodes[int(node)]
        self.links = {e: kind for e, kind in self.links.items() if int(node) not in e}
        return self.ok()


class Kernels:
    """Kernels that take what they are asked for."""

    def launch(self, func, *values):
        arguments = tuple(value.to_bytes(8, "little") for value in values)
        return Launch(func, (1, 1, 1), (32, 1, 1), 0, arguments)

    def fill(self, target, value, element_size, count):
        return self.launch(FILL, target, value, element_size * count)

    def copy(self, target, source, size):
        return self.launch(COPY, target, source, size)


def ordered(edges):
    """All pairs of nodes that a path of edges connects."""
    found, todo = set(), set(edges)
    while todo:
        found |= todo
        todo = {(u, y) for u, v in todo for x, y in edges if v == x} - found
    return found


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestTidy(TestCase):
    def setUp(self):
        super().setUp()
        self.api = Api()
        self.driver = cu.Driver(self.api)

    def tidy(self, **options):
        return tidy(1, driver=self.driver, kernels=Kernels(), **options)

    def kernels(self):
        return [struct for kind, struct in self.api.nodes.values() if kind == cu.KERNEL]

    def test_drawn_graphs_keep_their_order(self):
        rng, removed = random.Random(0), 0
        for _ in range(60):
            self.api.__init__()
            work = []  # by node: what tells it from others
            for i in range(rng.randrange(2, 12)):
                after = [n for n in self.api.nodes if rng.random() < 0.4]
                kind = rng.choice(("fill", "copy", "other"))
                if kind == "fill":
                    self.api.memset(i + 1, after)
                    work.append((FILL, i + 1, 3, 64))
                elif kind == "copy":
                    self.api.memcpy(i + 1, 99, after)
                    work.append((COPY, i + 1, 99, 64))
                else:
                    self.api.add(cu.KERNEL, (OTHER, i), after)
                    work.append((OTHER, i))
            before = {(work[u - 1], work[v - 1]) for u, v in ordered(self.api.links)}
            report = self.tidy()
            self.assertEqual(report.kept, ())
            self.assertEqual(sorted(self.kernels()), sorted(work))
            name = {handle: struct for handle, (_, struct) in self.api.nodes.items()}
            after = {(name[u], name[v]) for u, v in ordered(self.api.links)}
            self.assertEqual(after, before)
            for edge in self.api.links:  # none is implied any more
                self.assertNotIn(edge, ordered(self.api.links.keys() - {edge}))
            removed += report.edges_removed
        self.assertGreater(removed, 50)

    def test_rows(self):
        self.api.memset(64, height=2, pitch=64)
        self.api.memcpy(64, 128, Height=3, dstPitch=64, srcPitch=64)
        self.assertEqual(self.tidy(), TidyReport(fills=1, copies=1))
        self.assertEqual(self.kernels(), [(FILL, 64, 3, 128), (COPY, 64, 128, 192)])

    def test_what_stays(self):
        nodes = [
            self.api.memset(64, height=2, pitch=128),
            self.api.memcpy(64, 128, Height=3, dstPitch=64, srcPitch=128),
            self.api.memcpy(64, 128, kind=1),
        ]
        report = self.tidy()
        self.assertEqual((report.fills, report.copies), (0, 0))
        reasons = (
            "memset node 0.*adjacent",
            "memcpy node 1.*adjacent",
            "node 2.*host memory",
        )
        for kept, reason in zip(report.kept, reasons, strict=True):
            self.assertRegex(kept, reason)
        self.assertEqual(list(self.api.nodes), nodes)
        # Memory that the caller knows is left to a copy engine.
        self.assertRegex(self.tidy(keeps=lambda address: True).kept[2], "copy engine")

    def test_node_with_a_programmatic_edge(self):
        first = self.api.add(cu.KERNEL, (OTHER, 0))
        second = self.api.memset(64, after=[first])
        self.api.links[first, second] = PROGRAMMATIC
        self.assertRegex(self.tidy().kept[0], "programmatic")
        self.assertEqual(self.api.links, {(first, second): PROGRAMMATIC})

    def test_programmatic_edges_imply_nothing(self):
        a, b, c = (self.api.add(cu.KERNEL, (OTHER, i)) for i in range(3))
        self.api.links = {(a, b): PROGRAMMATIC, (b, c): PLAIN, (a, c): PLAIN}
        self.assertEqual(self.tidy().edges_removed, 0)
        self.assertEqual(len(self.api.links), 3)

    def test_graph_that_the_reader_will_refuse(self):
        self.api.memset(64)
        self.api.add(cu.HOST)
        self.assertEqual(self.tidy().kept, ("graph with host callback nodes",))
        self.assertEqual(self.kernels(), [])

    def test_set_edges(self):
        a, b, c = (self.api.add(cu.KERNEL, (OTHER, i)) for i in range(3))
        self.api.links = {(a, b): PROGRAMMATIC, (b, c): PLAIN}
        new = [(0, 1), (0, 2)]
        self.assertTrue(set_edges(1, [a, b, c], new, driver=self.driver))
        self.assertEqual(self.api.links, {(a, b): PROGRAMMATIC, (a, c): PLAIN})
        self.api.links[b, c] = LAUNCH_ORDER
        self.assertFalse(set_edges(1, [a, b, c], [], driver=self.driver))
        self.assertEqual(len(self.api.links), 3)


if __name__ == "__main__":
    run_tests()
