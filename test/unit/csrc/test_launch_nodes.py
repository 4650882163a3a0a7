"""`csrc/launch_nodes.c`: kernels and copies of a launch, as the graph has them."""

import tempfile
import unittest

from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
from node_stand_in import DRIVER, kernel, noted, SHAPE, VALUES


LAUNCHES = """
typedef struct { int id, unused; uint64_t value[8]; } Attribute;
typedef struct {
  unsigned shape[7];
  uint64_t stream;
  const Attribute *attributes;
  unsigned count;
} Config;
int cuGraphLaunch(uint64_t exec, uint64_t stream) { return note(3, exec, 0, 0, stream); }
int cuLaunchKernelEx(const Config *config, uint64_t function, uint64_t **arguments,
                     void **extra) {
  uint64_t seen = config->count ? config->attributes->id : 0;
  if (config->shape[0] != 1 || config->shape[3] != 4 || config->shape[6] != 48) return 1;
  return extra ? 1 : note(4, function, arguments[0][0], (void *)seen, config->stream);
}
"""

# Launches blocks at a base, which is that of all regions.
PART = """
#include "launch_nodes.h"
#include "module.h"

static PyObject *launch(PyObject *module, PyObject *args) {
  Blocks *blocks;
  unsigned long long base, stream;
  Launched counts = {0};
  PyObject *replay = NULL;
  Py_ssize_t own;
  if (!PyArg_ParseTuple(args, "OKK|O", &blocks, &base, &stream, &replay)) return NULL;
  for (size_t r = 0; r < blocks->regions; r++) {
    blocks->fresh[r] = base;
    blocks->given[r] = 1;
  }
  if ((own = write_given(blocks)) < 0) return NULL;
  if (launch_nodes(blocks, (size_t)own, (Handle)(uintptr_t)stream, replay, &counts))
    return NULL;
  return Py_BuildValue("KK", counts.patched, counts.by_node);
}
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS}, {NULL}};
PART(.module = "test", .methods = methods)
"""
EXECUTABLE, STREAM = 0xE0, 7
SETS, LAUNCHED, RUNS = ["set", "set", "launch"], ["launch"], ["run", "run"]
KINDS = {0: "set", 3: "launch", 4: "run"}


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestLaunchNodes(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, cls.library = driver_stand_in.build_module(DRIVER + LAUNCHES, folder, part=PART)
        cls.module, cls.launch = module.relaunch, staticmethod(module.test.launch)

    def setUp(self):
        super().setUp()
        self.library.reset(0)

    def kinds(self):
        return [KINDS[row[0]] for row in noted(self.library)]

    def shared(self, *attributes):
        """Of an executable whose node 1 runs before node 0."""
        first, second = attributes or (b"", b"")
        return self.module.Shared(2, ((1, second), (0, first)))

    def blocks(self, shared, *more):
        """Node 1 and node 0, in the order of launch, each with a pointer."""
        nodes = kernel(11, 1, *more), kernel(10, 2, *more)
        slots = (0, VALUES, 0, 0x10), (1, VALUES, 0, 0x20)
        return self.module.Blocks(EXECUTABLE, nodes, slots, 1, (), (shared, (1, 0)))

    def test_kernels_are_launched_in_their_order(self):
        cluster = bytearray(9 * 64)
        cluster[64] = 2  # the second of the attributes
        blocks = self.blocks(self.shared(bytes(cluster), b""))
        self.assertEqual(self.launch(blocks, 0x7000, STREAM), (0, 1))
        first, second = noted(self.library)
        self.assertEqual(first, (4, SHAPE[0], 0x7010, 0, STREAM))
        self.assertEqual(second, (4, SHAPE[0], 0x7020, 4, STREAM))

    def test_same_launch_again_and_again(self):
        blocks = self.blocks(self.shared())
        seen = []
        for _ in range(5):
            self.launch(blocks, 0x7000, STREAM)
            seen.append(self.kinds())
        self.assertEqual(seen, [RUNS, RUNS, SETS, LAUNCHED, LAUNCHED])
        self.launch(blocks, 0x8000, STREAM)
        self.assertEqual(self.kinds(), RUNS)

    def test_graphs_that_take_turns(self):
        shared = self.shared()
        one, other = self.blocks(shared), self.blocks(shared, 5)
        for _ in range(4):
            for blocks in (one, other):
                self.launch(blocks, 0x7000, STREAM)
                self.assertEqual(self.kinds(), RUNS)
        for _ in range(4):
            self.launch(one, 0x7000, STREAM)
        noted(self.library)
        self.launch(other, 0x7000, STREAM)
        self.assertEqual(self.kinds(), RUNS)
        self.launch(one, 0x7000, STREAM)
        self.assertEqual(self.kinds(), LAUNCHED)  # the executable stayed as it was

    def test_kernels_apart(self):
        """The executable is neither set nor launched, however often they are."""
        blocks = self.blocks(self.module.Shared(2, ((1, b""), (0, b"")), True))
        for _ in range(6):
            self.assertEqual(self.launch(blocks, 0x7000, STREAM), (0, 1))
            self.assertEqual(self.kinds(), RUNS)

    def test_order_that_is_not_known(self):
        blocks = self.blocks(self.module.Shared(2))
        self.assertEqual(self.launch(blocks, 0x7000, STREAM), (2, 0))
        self.assertEqual(self.kinds(), SETS)

    def test_graph_that_torch_launches(self):
        calls = []
        blocks = self.blocks(self.shared())
        self.launch(blocks, 0x7000, STREAM, lambda: calls.append(1))
        self.assertEqual((self.kinds(), calls), (["set", "set"], [1]))

    def test_node_that_the_driver_refuses(self):
        blocks = self.blocks(self.shared())
        for _ in range(2):
            self.launch(blocks, 0x7000, STREAM)
        self.library.reset(2)
        self.assertEqual(self.launch(blocks, 0x7000, STREAM), (0, 1))
        self.assertEqual(self.kinds(), ["set", *RUNS])
        for _ in range(5):
            self.launch(blocks, 0x7000, STREAM)
            self.assertEqual(self.kinds(), RUNS)

    def test_kernel_that_can_not_be_launched(self):
        blocks = self.blocks(self.shared())
        self.library.reset(2)
        with self.assertRaisesRegex(RuntimeError, r"cuLaunchKernelEx: refused \(1\), at node 10"):
            self.launch(blocks, 0x7000, STREAM)
        noted(self.library)
        self.launch(blocks, 0x7000, STREAM)
        self.assertEqual(self.kinds(), RUNS)
