# Owner(s): ["module: inductor"]

import ctypes
import importlib.util
import tempfile
import unittest

from torch._inductor.cudagraph_relaunch.blocks import make_blocks
from torch._inductor.cudagraph_relaunch.nodes import (
    CopyNode,
    EmptyNode,
    FillNode,
    KernelNode,
    NumberSlot,
    PointerSlot,
)
from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.cuda_node_stand_in import DRIVER, noted
from torch.utils._triton import has_triton_package


HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)
EXECUTABLE = 0xE0


def kernel(index, *parameters):
    return KernelNode(
        index, 10 + index, "add", 7, 0x77, 0x88, (1, 2, 3), (4, 5, 6), 48, parameters
    )


def word(value):
    return value.to_bytes(8, "little")


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestBlocks(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, cls.library = cuda_driver_stand_in.build_module(DRIVER, folder)
        cls.module = module.relaunch

    def setUp(self):
        super().setUp()
        self.library.reset(0)
        self.kept = []  # what the driver got lives as long as the blocks

    def make(self, nodes, slots, regions, *args, **kwargs):
        blocks = make_blocks(
            self.module, EXECUTABLE, nodes, slots, regions, *args, **kwargs
        )
        self.kept.append(blocks)
        return blocks

    def noted(self):
        """The structs that the driver got since the last look, by node."""
        from cuda.bindings import driver

        kinds = (
            driver.CUDA_KERNEL_NODE_PARAMS,
            driver.CUDA_MEMSET_NODE_PARAMS,
            driver.CUDA_MEMCPY3D,
        )
        found = {}
        for kind, executable, node, params, context in noted(self.library):
            self.assertEqual((executable, context), (EXECUTABLE, 0xC0))
            found[node] = kinds[kind](params)
        return found

    def arguments(self, params, *sizes):
        places = (ctypes.c_void_p * len(sizes)).from_address(int(params.kernelParams))
        return [ctypes.string_at(at, size) for at, size in zip(places, sizes)]

    def test_kernel(self):
        # The last is a tensor map, with an address in its middle.
        parameters = (0, word(1)), (8, b"\5\0\0\0"), (64, bytes(range(128)))
        slots = PointerSlot(0, 0, 0, 1, 16), PointerSlot(0, 2, 24, 0, 0)
        blocks = self.make([kernel(0, *parameters)], slots, 2)
        self.assertEqual(blocks.patch([0x7000, 0x9000]), 1)
        params = self.noted()[10]
        grid = params.gridDimX, params.gridDimY, params.gridDimZ
        block = params.blockDimX, params.blockDimY, params.blockDimZ
        self.assertEqual(
            (grid, block, params.sharedMemBytes), ((1, 2, 3), (4, 5, 6), 48)
        )
        handles = int(params.func), int(params.kern), int(params.ctx)
        self.assertEqual(handles, (7, 0x77, 0x88))
        tensor_map = bytes(range(24)) + word(0x7000) + bytes(range(32, 128))
        values = self.arguments(params, 8, 4, 128)
        self.assertEqual(values, [word(0x9010), b"\5\0\0\0", tensor_map])
        places = (ctypes.c_void_p * 3).from_address(int(params.kernelParams))
        self.assertEqual(places[2] % 64, 0)

    def test_memset(self):
        node = FillNode(0, 20, 0xAAAA, 3, 4, 16, 2, 128)
        self.make([node], [PointerSlot(0, 0, 0, 0, 8)], 1).patch([0x7000])
        params = self.noted()[20]
        self.assertEqual((int(params.dst), params.value), (0x7008, 3))
        size = params.elementSize, params.width, params.height, params.pitch
        self.assertEqual(size, (4, 16, 2, 128))

    def test_memcpy(self):
        from cuda.bindings.driver import CUmemorytype

        node = CopyNode(0, 21, 0xAAAA, 0xBBBB, 64, 3, 2, 128, 5, 256, 7)
        slots = PointerSlot(0, 0, 0, 0, 8), PointerSlot(0, 1, 0, 1, 0)
        self.make([node], slots, 2).patch([0x7000, 0x9000])
        params = self.noted()[21]
        ends = int(params.dstDevice), int(params.srcDevice)
        self.assertEqual(ends, (0x7008, 0x9000))
        kinds = {params.dstMemoryType, params.srcMemoryType}
        self.assertEqual(kinds, {CUmemorytype.CU_MEMORYTYPE_DEVICE})
        self.assertEqual((params.WidthInBytes, params.Height, params.Depth), (64, 3, 2))
        pitches = params.dstPitch, params.dstHeight, params.srcPitch, params.srcHeight
        self.assertEqual(pitches, (128, 5, 256, 7))

    def test_memcpy_to_and_from_the_host(self):
        from cuda.bindings.driver import CUmemorytype

        host, device = (
            getattr(CUmemorytype, f"CU_MEMORYTYPE_{s}") for s in ("HOST", "DEVICE")
        )
        shape = 64, 1, 1, 64, 1, 64, 1
        nodes = (
            CopyNode(0, 21, 0xAAAA, 0xBBBB, *shape, src_on_host=True),
            CopyNode(1, 22, 0xAAAA, 0xBBBB, *shape, dst_on_host=True),
        )
        slots = PointerSlot(0, 0, 0, 0, 0), PointerSlot(1, 1, 0, 0, 4)
        self.make(nodes, slots, 1).patch([0x7000])
        found = self.noted()
        up, down = found[21], found[22]
        self.assertEqual((int(up.dstDevice), int(up.srcHost)), (0x7000, 0xBBBB))
        self.assertEqual((up.dstMemoryType, up.srcMemoryType), (device, host))
        self.assertEqual((int(down.dstHost), int(down.srcDevice)), (0xAAAA, 0x7004))
        self.assertEqual((down.dstMemoryType, down.srcMemoryType), (host, device))

    def test_nodes_without_a_slot(self):
        nodes = kernel(0, (0, word(1))), EmptyNode(1, 11), kernel(2, (0, word(2)))
        blocks = self.make(nodes, [PointerSlot(2, 0, 0, 0, 0)], 1)
        self.assertEqual((blocks.nodes, blocks.patch([0x7000])), (1, 1))
        self.assertEqual(list(self.noted()), [12])

    def test_shared_executable(self):
        shared, made = self.module.Shared(3), []
        for value in (1, 2):
            nodes = (
                kernel(0, (0, word(value))),
                EmptyNode(1, 11),
                kernel(2, (0, word(0))),
            )
            slot = PointerSlot(2, 0, 0, 0, 0)
            made.append(self.make(nodes, [slot], 1, shared=shared))
        self.assertEqual([blocks.patch([0x7000]) for blocks in made], [2, 2])
        self.noted()
        self.assertEqual(made[0].patch([0x7000]), 1)  # node 2 holds the same
        self.assertEqual(self.arguments(self.noted()[10], 8), [word(1)])

    def test_blocks_in_the_order_of_launch(self):
        nodes = kernel(0, (0, word(1))), kernel(2, (0, word(2)))
        shared, slot = (
            self.module.Shared(3, ((2, b""), (0, b""))),
            PointerSlot(0, 0, 0, 0, 0),
        )
        blocks = self.make(nodes, [slot], 1, shared=shared)
        self.assertEqual(blocks.patch([0x7000]), 2)
        found = self.noted()
        self.assertEqual([*found], [10, 12])  # what moved comes first
        values = [self.arguments(found[node], 8) for node in (10, 12)]
        self.assertEqual(values, [[word(0x7000)], [word(2)]])

    def test_places_of_numbers(self):
        node = kernel(0, (0, word(1)), (8, word(2)))
        numbers = NumberSlot(0, 1, "l", ()), NumberSlot(0, -2, "i", ())
        given = []

        class Module:
            def Blocks(self, *args):
                given.extend(args)

        slots = [PointerSlot(0, 0, 0, 0, 0)]
        make_blocks(Module(), EXECUTABLE, [node], slots, 1, numbers)
        head, letters = given[1][0][4][:128], "bhilBHIKfd"
        wanted = (0, 136, letters.index("l")), (0, 12, letters.index("i"))
        self.assertEqual(given[4], wanted)
        self.assertEqual(head[8:20], b"\1\0\0\0\2\0\0\0\3\0\0\0")  # the grid
        blocks = self.make([node], slots, 1, numbers)
        self.assertEqual(blocks.patch([0x7000]), 1)
        values = self.arguments(self.noted()[10], 8, 8)
        self.assertEqual(values, [word(0x7000), word(2)])  # until a launch computes it

    def test_what_cannot_be_patched(self):
        for error, text, node, slot in (
            (
                ValueError,
                "no pointer slot at 1",
                kernel(0, (0, word(1))),
                (0, 0, 1, 0, 0),
            ),
            (ValueError, "no pointer slot", kernel(0, (0, b"\5")), (0, 0, 0, 0, 0)),
            (TypeError, "holds no parameter", EmptyNode(0, 11), (0, 0, 0, 0, 0)),
        ):
            with self.assertRaisesRegex(error, text):
                self.make([node], [PointerSlot(*slot)], 1)


if __name__ == "__main__":
    run_tests()
