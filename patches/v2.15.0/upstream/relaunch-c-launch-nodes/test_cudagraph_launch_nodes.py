# Owner(s): ["module: inductor"]

import ctypes
import functools
import tempfile
import unittest

from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.cuda_node_stand_in import DRIVER, kernel, SHAPE, VALUES
from torch.utils._triton import has_triton_package


# A kernel that is launched is noted with its first argument and its attributes.
LAUNCHES = """
typedef struct { unsigned shape[7]; uint64_t stream; int *attributes; unsigned count; }
    Config;
int cuGraphLaunch(uint64_t exec, uint64_t stream) { return note(3, exec, 0, 0, stream); }
int cuLaunchKernelEx(const Config *config, uint64_t function, void **arguments,
                     void **extra) {
  uint64_t first = *(uint64_t *)arguments[0];
  int attribute = config->count ? config->attributes[0] : 0;
  if (config->shape[0] != 1 || config->shape[3] != 4 || config->shape[6] != 48) return 2;
  return note(4, function, first, 0, config->stream * 100 + attribute);
}
"""
# launch(blocks, bases, stream, replay): writes the bases and launches.
PART = """
#include "launch_nodes.h"
#include "module.h"

static PyObject *launch(PyObject *module, PyObject *args) {
  static Launched counts;
  Blocks *blocks;
  PyObject *bases, *replay;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "O!O!O", blocks_type(), &blocks, &PyTuple_Type, &bases,
                        &replay))
    return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); i++) {
    blocks->fresh[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(bases, i));
    blocks->given[i] = 1;
  }
  counts = (Launched){0};
  if ((count = write_given(blocks)) < 0 ||
      launch_nodes(blocks, (size_t)count, (Handle)7, replay == Py_None ? NULL : replay,
                   &counts))
    return NULL;
  return Py_BuildValue("KK", counts.patched, counts.by_node);
}
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS}, {NULL}};
PART(.module = "test", .methods = methods)
"""
CLUSTER = 4  # the second of the attributes that the graph reader asks for
NODES = 4


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestLaunchNodes(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        driver = DRIVER + LAUNCHES
        module, cls.library = cuda_driver_stand_in.build_module(
            driver, folder, part=PART
        )
        cls.module, cls.launch = module.relaunch, module.test.launch
        cls.library.notes.restype = ctypes.POINTER(ctypes.c_uint64)

    def setUp(self):
        super().setUp()
        self.library.reset(0)

    def noted(self):
        """What was done since the last look, in words."""
        count, found = ctypes.c_int(), []
        rows = self.library.notes(ctypes.byref(count))
        for i in range(count.value):
            kind, _, node, _, on = rows[5 * i : 5 * i + 5]
            word = {0: f"set {node}", 3: f"graph {on}", 4: f"kernel {node:#x} {on}"}
            found.append(word[kind])
        self.library.reset(0)
        return found

    def shared(self, attributes=b""):
        return self.module.Shared(NODES, tuple((i, attributes) for i in range(NODES)))

    def blocks(self, shared):
        """A pointer in each of four nodes, to a region of its own."""
        nodes = tuple(kernel(10 + i, 1) for i in range(NODES))
        slots = tuple((i, VALUES, i, 0) for i in range(NODES))
        others = None if shared is None else (shared, tuple(range(NODES)))
        return self.module.Blocks(0xE0, nodes, slots, NODES, (), others)

    def bases(self, first, moved=NODES):
        """Bases of which the first `moved` are others than those of 0."""
        return tuple(0x1000 * (i + 1) + first * (i < moved) for i in range(NODES))

    SET, GRAPH = [f"set {10 + i}" for i in range(NODES)], ["graph 7"]

    def kernels(self, first, attribute=0):
        return [f"kernel {base:#x} {700 + attribute}" for base in self.bases(first)]

    def test_executable_of_its_own(self):
        blocks = self.blocks(None)
        for first in (0, 1):
            self.assertEqual(self.launch(blocks, self.bases(first), None), (NODES, 0))
            self.assertEqual(self.noted(), self.SET + self.GRAPH)
        self.assertEqual(self.launch(blocks, self.bases(1), None), (0, 0))
        self.assertEqual(self.noted(), self.GRAPH)

    def test_launch_by_torch(self):
        blocks, calls = self.blocks(self.shared()), []
        for first in (0, 1):
            replay = functools.partial(calls.append, first)
            found = self.launch(blocks, self.bases(first), replay)
            self.assertEqual(found, (NODES, 0))  # what torch launches has to be set
        self.assertEqual((self.noted(), calls), (self.SET * 2, [0, 1]))
        with self.assertRaises(ZeroDivisionError):
            self.launch(blocks, self.bases(0), lambda: 1 // 0)

    def test_most_nodes_differ(self):
        blocks = self.blocks(self.shared())
        for first in (0, 1, 2):
            self.assertEqual(self.launch(blocks, self.bases(first), None), (0, 1))
            self.assertEqual(self.noted(), self.kernels(first))

    def test_same_values_again_and_again(self):
        blocks = self.blocks(self.shared())
        found = [self.launch(blocks, self.bases(1), None) for _ in range(4)]
        # After two launches the executable is set, and then it is launched.
        self.assertEqual(found, [(0, 1), (0, 1), (NODES, 0), (0, 0)])
        wanted = self.kernels(1) * 2 + self.SET + self.GRAPH * 2
        self.assertEqual(self.noted(), wanted)

    def test_few_nodes_differ(self):
        blocks = self.blocks(self.shared())
        for _ in range(3):
            self.launch(blocks, self.bases(1), None)
        self.noted()
        found = self.launch(blocks, self.bases(0, 4)[:1] + self.bases(1)[1:], None)
        self.assertEqual((found, self.noted()), ((1, 0), ["set 10", *self.GRAPH]))

    def test_graphs_that_take_turns(self):
        shared = self.shared()
        first, second = (self.blocks(shared) for _ in "ab")
        for _ in range(4):
            for blocks, value in ((first, 1), (second, 2)):
                self.assertEqual(self.launch(blocks, self.bases(value), None), (0, 1))
                self.assertEqual(self.noted(), self.kernels(value))

    def test_several_orders(self):
        blocks = self.blocks(self.module.Shared(NODES))
        for first in (0, 1):
            self.assertEqual(self.launch(blocks, self.bases(first), None), (NODES, 0))
        self.assertEqual(self.noted(), (self.SET + self.GRAPH) * 2)

    def test_attributes_of_nodes(self):
        attributes = bytes(64) + b"\1" + bytes(7 * 64 - 65)
        blocks = self.blocks(self.shared(attributes))
        self.launch(blocks, self.bases(1), None)
        self.assertEqual(self.noted(), self.kernels(1, CLUSTER))
        self.assertEqual(SHAPE[1:], (1, 2, 3, 4, 5, 6, 48))  # which the driver checks

    def test_executable_that_the_driver_refuses_to_set(self):
        blocks = self.blocks(self.shared())
        for _ in range(2):
            self.launch(blocks, self.bases(1), None)
        self.noted()
        self.library.reset(2)  # the second node isn't set
        self.assertEqual(self.launch(blocks, self.bases(1), None), (0, 1))
        self.assertEqual(self.noted(), ["set 10", *self.kernels(1)])
        for _ in range(4):  # it isn't tried again
            self.assertEqual(self.launch(blocks, self.bases(1), None), (0, 1))
        self.assertEqual(self.noted(), self.kernels(1) * 4)

    def test_errors_of_the_driver(self):
        blocks = self.blocks(self.shared())
        self.library.reset(3)
        text = r"in cuLaunchKernelEx: refused \(1\), at node 12"
        with self.assertRaisesRegex(RuntimeError, text):
            self.launch(blocks, self.bases(1), None)
        own = self.blocks(None)
        for failing, text in ((1, "NodeSetParams.*node 10"), (5, "in cuGraphLaunch")):
            self.library.reset(failing)
            with self.assertRaisesRegex(RuntimeError, text):
                self.launch(own, self.bases(1), None)


if __name__ == "__main__":
    run_tests()
