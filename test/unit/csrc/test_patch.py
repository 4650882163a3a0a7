"""`csrc/patch.c`: only nodes that changed are set, and all after an error."""

import ctypes
import struct
import tempfile
import unittest

from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
from node_stand_in import DRIVER, kernel, noted, SHAPE, VALUES


class Moved:
    """Something with an address."""

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestPatch(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, cls.library = driver_stand_in.build_module(DRIVER, folder)
        cls.module = module.relaunch

    def setUp(self):
        super().setUp()
        self.library.reset(0)

    def set(self):
        """{node: its arguments}, of kernel nodes that were set."""
        found = {}
        for _, _, node, params, _ in noted(self.library):
            arguments = ctypes.c_void_p.from_address(params + 40).value
            count = 1 if node == 11 else 2
            places = (ctypes.c_void_p * count).from_address(arguments)
            found[node] = [ctypes.c_uint64.from_address(at).value for at in places]
        return found

    def pair(self, shared=None):
        """Node 10 has pointers to regions 0 and 1, node 11 has one to region 1."""
        nodes = kernel(10, 1, 2), kernel(11, 3)
        slots = (0, VALUES, 0, 0x10), (0, VALUES + 8, 1, 0), (1, VALUES, 1, 0x20)
        return self.module.Blocks(0xE0, nodes, slots, 2, (), shared)

    def test_what_the_driver_gets(self):
        blocks = self.pair()
        self.assertEqual((blocks.nodes, blocks.patch([0x7000, 0x9000])), (2, 2))
        rows = noted(self.library)
        self.assertEqual([row[:3] for row in rows], [(0, 0xE0, 10), (0, 0xE0, 11)])
        for _, _, _, params, _ in rows:
            head = struct.unpack("<Q7I4x4Q", ctypes.string_at(params, 72))
            self.assertEqual((head[:8], head[9:]), (SHAPE, (0, 0x77, 0x88)))
            self.assertEqual(params % 64, 0)  # so is a tensor map in the block

    def test_only_nodes_of_what_moved(self):
        blocks = self.pair()
        blocks.patch([0x7000, 0x9000])
        self.assertEqual(self.set(), {10: [0x7010, 0x9000], 11: [0x9020]})
        self.assertEqual(blocks.patch([0x7000, 0x9000]), 0)
        self.assertEqual(blocks.patch([Moved(0x7100), 0x9000]), 1)
        self.assertEqual(self.set(), {10: [0x7110, 0x9000]})
        self.assertEqual(blocks.patch([None, Moved(0x9100)]), 2)
        self.assertEqual(self.set(), {10: [0x7110, 0x9100], 11: [0x9120]})
        self.assertEqual(blocks.patch([0x9200, 0x7200], (1, 0)), 2)
        self.assertEqual(blocks.patch([], []), 0)
        self.assertEqual(self.set(), {10: [0x7210, 0x9200], 11: [0x9220]})

    def test_first_call_needs_every_base(self):
        blocks = self.pair()
        with self.assertRaisesRegex(ValueError, "region 1 has no base yet"):
            blocks.patch([0x7000, None])
        self.assertEqual(noted(self.library), [])

    def test_after_an_error_every_node_is_set(self):
        blocks = self.pair()
        blocks.patch([0x7000, 0x9000])
        self.library.reset(2)
        text = r"in cuGraphExecKernelNodeSetParams: refused \(1\), at node 11"
        with self.assertRaisesRegex(RuntimeError, text):
            blocks.patch([None, 0x9100])
        self.assertTrue(blocks.stale)
        self.set()
        self.assertEqual((blocks.patch([0x7000, None]), blocks.stale), (2, False))
        self.assertEqual(self.set(), {10: [0x7010, 0x9100], 11: [0x9120]})

    def test_shared_executable(self):
        shared = self.module.Shared(2)
        first, second = (self.pair((shared, (0, 1))) for _ in range(2))
        first.patch([0x7000, 0x9000])
        self.set()
        self.assertEqual(second.patch([0x7000, 0x9100]), 2)
        self.assertEqual(second.patch([0x7000, 0x9000]), 2)
        self.set()
        self.assertEqual(first.patch([0x7000, 0x9000]), 0)  # it holds the same
        second.patch([0x7100, 0x9000])
        self.assertEqual(self.set(), {10: [0x7110, 0x9000]})
        del second
        self.assertEqual(first.patch([0x7000, 0x9000]), 2)  # it isn't known what it holds

    def test_thread_without_a_context(self):
        blocks = self.pair()
        self.library.forget_context()
        blocks.patch([0x7000, 0x9000])
        self.assertEqual({row[4] for row in noted(self.library)}, {0xC0})
        self.assertEqual(self.module.context(), 0xC0)

    def test_bases_that_make_no_sense(self):
        blocks = self.pair()
        for error, bases in (
            (ValueError, ([1],)),
            (ValueError, ([1, 2], [0])),
            (ValueError, ([1], [2])),
            (TypeError, (5,)),
            (TypeError, ()),
            (AttributeError, (["x", 1],)),
            (OverflowError, ([-1, 1],)),
        ):
            with self.assertRaises(error):
                blocks.patch(*bases)

    def test_blocks_that_make_no_sense(self):
        node, shared = kernel(10, 1), self.module.Shared(1)
        for error, text, arguments in (
            (TypeError, "node 0 must be a tuple", ((5,), (), 0)),
            (ValueError, "pointer slot lies outside", ((node,), ((0, 129, 0, 0),), 1)),
            (
                ValueError,
                "out of order",
                ((node,), ((0, 128, 1, 0), (0, 128, 0, 0)), 2),
            ),
            (ValueError, "number slot lies outside", ((node,), (), 0, ((0, 133, 2),))),
            (ValueError, "negative number of regions", ((), (), -1)),
            (
                ValueError,
                "each node needs a number",
                ((node,), (), 0, (), (shared, ())),
            ),
            (ValueError, "doesn't have", ((node,), (), 0, (), (shared, (1,)))),
        ):
            with self.assertRaisesRegex(error, text):
                self.module.Blocks(0xE0, *arguments)
