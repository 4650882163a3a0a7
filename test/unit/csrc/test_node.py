"""`csrc/node.c`: nodes that are set, compared and refused."""

import ctypes
import struct
import tempfile
import unittest

from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
from node_stand_in import DRIVER, kernel, noted, SHAPE, VALUES


# set(executable, item) keeps the node until the next one; equal(item, item).
PART = """
#include "module.h"
#include "node.h"

static Node kept;

static PyObject *set(PyObject *module, PyObject *args) {
  unsigned long long exec;
  PyObject *item;
  if (!PyArg_ParseTuple(args, "KO", &exec, &item)) return NULL;
  node_clear(&kept);
  memset(&kept, 0, sizeof kept);
  if (node_read(&kept, item, 3) || node_set(&kept, (Handle)(uintptr_t)exec)) return NULL;
  return PyLong_FromSize_t(kept.size);
}
static PyObject *equal(PyObject *module, PyObject *args) {
  PyObject *one, *two, *result = NULL;
  Node a = {0}, b = {0};
  if (!PyArg_ParseTuple(args, "OO", &one, &two)) return NULL;
  if (!node_read(&a, one, 0) && !node_read(&b, two, 1))
    result = PyBool_FromLong(node_is_equal(&a, &b));
  node_clear(&a);
  node_clear(&b);
  return result;
}
static PyMethodDef methods[] = {
    {"set", set, METH_VARARGS}, {"equal", equal, METH_VARARGS}, {NULL}};
PART(.module = "node_test", .methods = methods)
"""


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestNode(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, cls.library = driver_stand_in.build_module(DRIVER, folder, part=PART)
        cls.c = module.node_test

    def setUp(self):
        super().setUp()
        self.library.reset(0)

    def noted(self):
        """What was set: (kind, executable, node, params, context)."""
        (row,) = noted(self.library)
        return row

    def test_kernel(self):
        node = kernel(10, 0xAAAA, 0xBBBB)
        self.assertEqual(self.c.set(0xE0, node), VALUES + 16)
        *row, params, _ = self.noted()
        self.assertEqual((row, params % 64), ([0, 0xE0, 10], 0))
        fields = struct.unpack("<Q7I4x4Q", ctypes.string_at(params, 72))
        self.assertEqual((fields[:8], fields[9:]), (SHAPE, (0, 0x77, 0x88)))
        places = list((ctypes.c_void_p * 2).from_address(fields[8]))
        self.assertEqual(places, [params + VALUES, params + VALUES + 8])
        self.assertEqual(ctypes.string_at(places[0], 16), node[4][VALUES:])

    def test_kernel_without_arguments(self):
        self.c.set(0xE0, kernel(10))
        fields = struct.unpack("<Q7I4x4Q", ctypes.string_at(self.noted()[3], 72))
        self.assertEqual(fields[8:10], (0, 0))

    def test_memset_and_memcpy(self):
        for kind, size in ((1, 40), (2, 200)):
            self.library.reset(0)
            block = bytes(range(size))
            self.c.set(0xE0, (kind, 20, 0xC1, "a node", block, ()))
            found, exec, node, params, context = self.noted()
            self.assertEqual((found, exec, node, context), (kind, 0xE0, 20, 0xC1))
            self.assertEqual(ctypes.string_at(params, size), block)

    def test_errors_name_the_node(self):
        items = (
            kernel(10, 1),
            (1, 20, 0, "b", bytes(40), ()),
            (2, 21, 0, "c", bytes(200), ()),
        )
        for item, name in zip(items, ("Kernel", "Memset", "Memcpy")):
            self.library.reset(1)
            text = rf"cuGraphExec{name}NodeSetParams: refused \(1\), at {item[3]}$"
            with self.assertRaisesRegex(RuntimeError, text):
                self.c.set(0xE0, item)

    def test_equal(self):
        node, fill = kernel(10, 1, 2), (1, 20, 0, "fill", bytes(40), ())
        head, values = node[4][:VALUES], node[4][VALUES:]
        for other, equal in (
            (kernel(11, 1, 2), True),  # another handle: the same place elsewhere
            (kernel(10, 1, 3), False),
            (kernel(10, 1), False),
            ((*node[:4], b"\1" + head[1:] + values, node[5]), False),  # function
            (
                (*node[:4], head[:56] + b"\1" + head[57:] + values, node[5]),
                False,
            ),  # kern
            (fill, False),
        ):
            self.assertIs(self.c.equal(node, other), equal)
        self.assertTrue(self.c.equal(fill, (1, 5, 0, "other", bytes(40), ())))
        self.assertFalse(self.c.equal(fill, (*fill[:4], b"\1" + bytes(39), ())))

    def test_nodes_that_make_no_sense(self):
        node = kernel(10, 1)
        for error, text, item in (
            (TypeError, "node 3 must be a tuple, not int", 5),
            (TypeError, "a node is", (0, 1, 2)),
            (ValueError, "not a node that can be patched", (3, *node[1:])),
            (ValueError, "not a node that can be patched", (-1, *node[1:])),
            (
                ValueError,
                "not a node that can be patched",
                (0, 1, 0, "", bytes(71), ()),
            ),
            (
                ValueError,
                "not a node that can be patched",
                (2, 1, 0, "", bytes(199), ()),
            ),
            (ValueError, "an argument lies outside of its block", (*node[:5], (137,))),
            (TypeError, "", (*node[:5], ("x",))),
        ):
            with self.assertRaisesRegex(error, text):
                self.c.set(0xE0, item)
