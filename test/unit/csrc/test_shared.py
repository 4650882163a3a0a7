"""`csrc/shared.c`: one executable graph for several, node by node."""

import sys
import tempfile
import unittest

from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401


# Says with how many attributes a node launches its kernel, and the first of them;
# and whether the kernels can only be launched one by one.
PART = """
#include "module.h"
#include "shared.h"

static PyObject *seen(PyObject *module, PyObject *args) {
  Shared *shared;
  Py_ssize_t node;
  const Attributes *of;
  if (!PyArg_ParseTuple(args, "On", &shared, &node)) return NULL;
  if (!shared->attributes) Py_RETURN_NONE;
  of = &shared->attributes[node];
  return Py_BuildValue("IiK", of->count, of->attribute->id, of->attribute->value[0]);
}
static PyObject *refused(PyObject *module, PyObject *shared) {
  return PyBool_FromLong(((Shared *)shared)->refused);
}
static PyMethodDef methods[] = {
    {"seen", seen, METH_VARARGS}, {"refused", refused, METH_O}, {NULL}};
PART(.module = "test", .methods = methods)
"""
COUNT, SIZE = 9, 64  # attributes, and bytes of one


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestShared(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, _ = driver_stand_in.build_module("", folder, part=PART)
        cls.Shared, cls.seen = module.relaunch.Shared, staticmethod(module.test.seen)
        cls.refused = staticmethod(module.test.refused)

    def test_only_attributes_that_are_set_are_passed_on(self):
        values = [0, 0x200000001, 0, 5, 0, 0, 0xFF, 0, 0]
        attributes = b"".join(value.to_bytes(SIZE, "little") for value in values)
        shared = self.Shared(3, ((2, attributes), (0, b""), (1, bytes(COUNT * SIZE))))
        self.assertEqual(self.seen(shared, 2), (3, 4, 0x200000001))  # clusters
        self.assertEqual([self.seen(shared, k)[0] for k in (0, 1)], [0, 0])

    def test_launches(self):
        launches = ((1, b""), (0, b""))
        before = sys.getrefcount(launches)
        shared = self.Shared(2, launches)
        self.assertIs(shared.launches, launches)
        del shared
        self.assertEqual(sys.getrefcount(launches), before)
        for none in (self.Shared(2), self.Shared(2, None)):
            self.assertIsNone(none.launches)
            self.assertIsNone(self.seen(none, 0))

    def test_apart(self):
        for apart in (False, True):
            shared = self.Shared(2, ((1, b""), (0, b"")), apart)
            self.assertEqual(self.refused(shared), apart)
            self.assertEqual(shared.launches, ((1, b""), (0, b"")))
        self.assertFalse(self.refused(self.Shared(2)))
        with self.assertRaises(TypeError):
            self.Shared(1, None, True, 0)

    def test_errors(self):
        for error, text, launches in (
            (TypeError, "a tuple, or None", [(0, b"")]),
            (TypeError, "launch 0 must be a tuple, not int", (3,)),
            (TypeError, r"a launch is \(node, attributes\)", ((1,),)),
            (ValueError, "not a launch of a node", ((2, b""),)),
            (ValueError, "not a launch of a node", ((-1, b""),)),
            (ValueError, "not a launch of a node", ((0, b"short"),)),
        ):
            with self.assertRaisesRegex(error, text):
                self.Shared(2, launches)
        with self.assertRaisesRegex(ValueError, "negative"):
            self.Shared(-1)
