# Owner(s): ["module: inductor"]

import ctypes
import importlib.util
import unittest

from torch._inductor.cudagraph_relaunch import driver as cu, read as graphs
from torch._inductor.cudagraph_relaunch.nodes import (
    CopyNode,
    EmptyNode,
    FillNode,
    KernelNode,
    Refusal,
    Segment,
)
from torch._inductor.cudagraph_relaunch.prove import prove
from torch.testing._internal.common_utils import run_tests, TestCase


GRAPH, FUNCTION = 0x77, 7
HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4
HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)


def u64(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


class Api:
    """cuda.bindings.driver with one graph. Structs and handles are the real ones."""

    def __init__(self):
        from cuda.bindings import driver

        self.real, self.keep = driver, []
        self.nodes, self.list_of_edges = {}, []  # handle -> (kind, struct)
        self.functions = {FUNCTION: ("add", ((0, 8), (8, 4), (16, 8)))}
        self.libraries, self.memory = {}, {}

    def __getattr__(self, name):
        return getattr(self.real, name)

    def add(self, kind, struct=None, after=()):
        handle = 0x5000 + 16 * len(self.nodes)
        self.nodes[handle] = kind, struct
        self.list_of_edges += [(node, handle, (0, 0, 0)) for node in after]
        return handle

    def bytes_at(self, value):
        self.keep.append(
            buffer := ctypes.create_string_buffer(value, max(1, len(value)))
        )
        return ctypes.addressof(buffer)

    def array_of(self, *addresses):
        self.keep.append(array := (ctypes.c_void_p * len(addresses))(*addresses))
        return ctypes.addressof(array)

    def kernel(self, *values, packed=None, func=FUNCTION, kern=0, after=()):
        struct = self.real.CUDA_KERNEL_NODE_PARAMS()
        struct.func, struct.kern = self.real.CUfunction(func), self.real.CUkernel(kern)
        struct.gridDimX, struct.gridDimY, struct.gridDimZ = 2, 3, 4
        struct.blockDimX, struct.blockDimY, struct.blockDimZ = 32, 2, 1
        struct.sharedMemBytes = 48
        if packed is not None:
            size = self.bytes_at(u64(len(packed)))
            struct.extra = self.array_of(2, size, 1, self.bytes_at(packed), 0)
        elif values:
            struct.kernelParams = self.array_of(*map(self.bytes_at, values))
        return self.add(cu.KERNEL, struct, after)

    def memcpy(self, dst, src, kinds=(DEVICE, DEVICE), **fields):
        struct = self.real.CUDA_MEMCPY3D()
        for side, address, kind in zip(("dst", "src"), (dst, src), kinds):
            setattr(struct, f"{side}MemoryType", self.real.CUmemorytype(kind))
            if kind == HOST:
                setattr(struct, f"{side}Host", address)
            else:
                setattr(struct, f"{side}Device", self.real.CUdeviceptr(address))
        struct.WidthInBytes, struct.Height, struct.Depth = 64, 1, 1
        for name, value in fields.items():
            setattr(struct, name, value)
        return self.add(cu.MEMCPY, struct)

    # The driver's functions.

    def ok(self, *values):
        return (self.real.CUresult.CUDA_SUCCESS, *values)

    def invalid(self, *values):
        return (self.real.CUresult.CUDA_ERROR_INVALID_VALUE, *values)

    def cuGraphGetNodes(self, graph, count):
        assert int(graph) == GRAPH
        return self.ok(
            [self.real.CUgraphNode(n) for n in self.nodes][:count], len(self.nodes)
        )

    def cuGraphGetEdges(self, graph, count):
        rows = self.list_of_edges[:count]
        ends = [[self.real.CUgraphNode(row[i]) for row in rows] for i in (0, 1)]
        data = [self.real.CUgraphEdgeData() for _ in rows]
        for edge, (_, _, kind) in zip(data, rows):
            edge.type, edge.from_port, edge.to_port = kind
        return self.ok(*ends, data, len(self.list_of_edges))

    def cuGraphNodeGetType(self, node):
        return self.ok(self.real.CUgraphNodeType(self.nodes[int(node)][0]))

    def struct_of(self, node):
        return self.ok(self.nodes[int(node)][1])

    cuGraphKernelNodeGetParams = cuGraphMemsetNodeGetParams = struct_of
    cuGraphMemcpyNodeGetParams = struct_of

    def cuKernelGetFunction(self, kernel):
        func = self.libraries.get(int(kernel))
        return self.ok(self.real.CUfunction(func)) if func else self.invalid(None)

    def cuFuncGetName(self, func):
        return self.ok(self.functions[int(func)][0].encode())

    def cuFuncGetParamInfo(self, func, index):
        layout = self.functions[int(func)][1]
        return self.ok(*layout[index]) if index < len(layout) else self.invalid(0, 0)

    def cuPointerGetAttribute(self, attribute, pointer):
        kind = self.memory.get(int(pointer))
        return self.ok(self.real.CUmemorytype(kind)) if kind else self.invalid(None)


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestRead(TestCase):
    def setUp(self):
        super().setUp()
        self.api = Api()
        self.driver = cu.Driver(self.api)

    def read(self, **options):
        return graphs.read(GRAPH, (), 0, 1 << 20, driver=self.driver, **options)

    def check_refused(self, reason, text, **options):
        with self.assertRaisesRegex(Refusal, text) as caught:
            self.read(**options)
        self.assertEqual(caught.exception.reason, reason)

    def test_kernel(self):
        values = u64(0xAAAA), b"\5\0\0\0", u64(0xBBBB)
        handle = self.api.kernel(*values)
        parameters = tuple(zip((0, 8, 16), values))
        launch = (2, 3, 4), (32, 2, 1), 48
        wanted = KernelNode(0, handle, "add", FUNCTION, 0, 0, *launch, parameters)
        self.assertEqual(self.read().nodes, (wanted,))
        # The same in one block, with padding.
        self.api.kernel(packed=values[0] + values[1] + b"\xff" * 4 + values[2])
        self.assertEqual(self.read().nodes[1].parameters, parameters)

    def test_kernel_of_a_library(self):
        self.api.libraries[0x33] = FUNCTION
        self.api.kernel(u64(1), b"\0" * 4, u64(2), func=0, kern=0x33)
        (node,) = self.read().nodes
        self.assertEqual((node.name, node.func, node.kern), ("add", 0, 0x33))

    def test_kernels_that_are_not_understood(self):
        cases = (
            (
                {"func": 0, "kern": 0x34},
                "doesn't describe the kernel: .*cuKernelGetFunction",
            ),
            ({}, "3 parameters, but the node holds none"),
            (
                {"packed": bytes(12)},
                "a block of 12 bytes for parameters that end at 24",
            ),
        )
        for options, text in cases:
            self.api.nodes.clear()
            self.api.kernel(**options)
            self.check_refused("layout", text)
        self.api.nodes.clear()
        self.api.functions[FUNCTION] = "opaque", ()
        self.api.kernel(packed=bytes(64))
        self.check_refused(
            "layout", "64 bytes of parameters, but the driver reports no"
        )

    def test_memset(self):
        struct = self.api.real.CUDA_MEMSET_NODE_PARAMS()
        struct.dst, struct.value = self.api.real.CUdeviceptr(0xAAAA), 3
        struct.elementSize, struct.width, struct.height, struct.pitch = 4, 16, 2, 128
        handle = self.api.add(cu.MEMSET, struct)
        wanted = FillNode(0, handle, 0xAAAA, 3, 4, width=16, height=2, pitch=128)
        self.assertEqual(self.read().nodes, (wanted,))

    def test_memcpy(self):
        offsets = {"dstXInBytes": 4, "srcY": 2, "srcPitch": 256, "Height": 3}
        self.api.memcpy(0x1000, 0x2000, **offsets)
        (node,) = self.read().nodes
        self.assertIsInstance(node, CopyNode)
        self.assertEqual((node.dst, node.src), (0x1004, 0x2000 + 2 * 256))
        self.assertEqual((node.width, node.height, node.src_pitch), (64, 3, 256))

    def test_memcpy_of_host_memory(self):
        self.api.memcpy(0x1000, 0x2000, kinds=(DEVICE, HOST))
        self.check_refused(
            "host-memory", r"node 0 \(memcpy\): it copies from host memory"
        )
        (node,) = self.read(keeps=lambda address: address == 0x2000).nodes
        self.assertEqual(
            (node.src, node.src_on_host, node.dst_on_host), (0x2000, True, False)
        )
        self.check_refused("host-memory", "from host", keeps=lambda address: False)

    def test_memcpy_of_unified_addresses(self):
        self.api.memcpy(0x1000, 0x2000, kinds=(UNIFIED, UNIFIED))
        self.api.memory = {0x1000: DEVICE, 0x2000: HOST}
        self.check_refused("host-memory", "it copies from host memory")
        self.api.memory[0x2000] = DEVICE
        self.assertEqual(self.read().nodes[0].src, 0x2000)

    def test_memcpy_of_an_array(self):
        self.api.memcpy(0x1000, 0x2000, kinds=(ARRAY, DEVICE))
        self.check_refused("host-memory", "it copies to an array")

    def test_nodes_that_cannot_be_patched(self):
        for kind, advice in (
            (cu.HOST, "host function"),
            (cu.CHILD_GRAPH, "CUDA graph"),
            (10, "allocated"),
        ):
            self.api.nodes.clear()
            self.api.add(kind)
            self.check_refused(
                "node-kind", rf"node 0 \({cu.KIND_NAMES[kind]}\): .*{advice}"
            )

    def test_edges(self):
        first, second = self.api.add(cu.EMPTY), self.api.add(cu.EMPTY)
        third = self.api.add(cu.EMPTY, after=[second, first])
        self.api.list_of_edges.append((first, second, (1, 1, 0)))
        graph = self.read()
        self.assertEqual(
            graph.nodes,
            tuple(EmptyNode(i, h) for i, h in enumerate((first, second, third))),
        )
        self.assertEqual(graph.edges, ((0, 1), (0, 2), (1, 2)))
        self.assertEqual(graph.partial, ((0, 1),))

    def test_two_captures_are_proven(self):
        captured = []
        for low in (1 << 40, 3 << 40):
            self.api.nodes.clear()
            self.api.kernel(u64(low + 4096), b"\5\0\0\0", u64(low + 1024 + 8192))
            segments = [Segment(low + 4096, 512, 0), Segment(low + 8192, 2048, 1)]
            graph = graphs.read(
                GRAPH, segments, low, low + (1 << 20), driver=self.driver
            )
            captured.append(graph)
        slots = [slot[1:] for slot in prove(*captured).slots]
        self.assertEqual(slots, [(0, 0, 0, 0), (2, 0, 1, 1024)])

    def test_driver_error(self):
        text = r"error in cuKernelGetFunction: CUDA_ERROR_INVALID_VALUE \(1\)"
        with self.assertRaisesRegex(cu.DriverError, text):
            self.driver.function_of(1)

    def test_device_memory(self):
        self.api.memory = {64: DEVICE, 72: HOST}
        found = [
            a for a in (64, 72, 80) if graphs.is_device_memory(a, driver=self.driver)
        ]
        self.assertEqual(found, [64])


class TestFreedMemory(TestCase):
    def test_blocks(self):
        blocks = [
            {"address": 0x100, "size": 0x100, "state": "active_allocated"},
            {"address": 0x200, "size": 0x80, "state": "inactive"},
            {"address": 0x280, "size": 8, "state": "active_pending_free"},
        ]
        asked = []
        freed = graphs.freed_memory(lambda: asked.append(1) or [{"blocks": blocks}])
        self.assertEqual(asked, [])
        found = [
            a for a in (0xFF, 0x100, 0x1FF, 0x200, 0x27F, 0x280, 0x900) if freed(a)
        ]
        self.assertEqual((found, asked), ([0x200, 0x27F], [1]))


if __name__ == "__main__":
    run_tests()
