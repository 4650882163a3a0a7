# Owner(s): ["module: inductor"]

import struct
import sys
import tempfile
import unittest

from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


# attributes(shared): (id, first 8 bytes of the value) of each attribute, by node.
PART = """
#include "module.h"
#include "shared.h"

static PyObject *attributes(PyObject *module, PyObject *object) {
  Shared *shared = (Shared *)object;
  PyObject *found;
  if (!PyObject_TypeCheck(object, shared_type()) || !shared->attributes)
    return PyErr_Format(PyExc_TypeError, "it has none");
  found = PyTuple_New((Py_ssize_t)shared->nodes);
  for (size_t i = 0; i < shared->nodes; i++) {
    const Attributes *of = &shared->attributes[i];
    PyObject *each = PyTuple_New(of->count);
    for (unsigned k = 0; k < of->count; k++) {
      const Attribute *one = &of->attribute[k];
      PyTuple_SET_ITEM(each, k, Py_BuildValue("iK", one->id, one->value[0]));
    }
    PyTuple_SET_ITEM(found, (Py_ssize_t)i, each);
  }
  return found;
}
static PyMethodDef methods[] = {{"attributes", attributes, METH_O}, {NULL}};
PART(.module = "test", .methods = methods)
"""
# The CUlaunchAttributeIDs that the graph reader asks for, in its order.
COOPERATIVE, CLUSTER, PRIORITY = 2, 4, 8
IDS = (COOPERATIVE, CLUSTER, 5, PRIORITY, 10, 11, 14)
SIZE = 64


def values(**given):
    """As the graph reader gives them: a value of 64 bytes for each attribute."""
    found = {int(name[1:]): value for name, value in given.items()}
    return b"".join(struct.pack("<Q", found.get(i, 0)).ljust(SIZE, b"\0") for i in IDS)


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestShared(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module = cuda_driver_stand_in.build_module("", folder, part=PART)[0]
        cls.Shared, cls.attributes = module.relaunch.Shared, module.test.attributes

    def test_launches(self):
        launches = (2, values(_4=3, _8=5)), (0, b""), (1, values())
        shared = self.Shared(3, launches)
        self.assertIs(shared.launches, launches)
        wanted = (), (), ((CLUSTER, 3), (PRIORITY, 5))
        self.assertEqual(self.attributes(shared), wanted)

    def test_without_launches(self):
        for shared in (self.Shared(3), self.Shared(3, None), self.Shared(0)):
            self.assertIsNone(shared.launches)
            with self.assertRaisesRegex(TypeError, "it has none"):
                self.attributes(shared)

    def test_value_of_which_the_first_word_is_zero(self):
        value = bytearray(values(_2=1))
        value[SIZE + 40] = 7  # in the middle of the second attribute
        shared = self.Shared(1, ((0, bytes(value)),))
        self.assertEqual(self.attributes(shared), (((COOPERATIVE, 1), (CLUSTER, 0)),))

    def test_what_makes_no_sense(self):
        for error, text, args in (
            (ValueError, "a negative number of nodes", (-1,)),
            (TypeError, "launches are a tuple, or None", (1, [])),
            (TypeError, "launch 0 must be a tuple", (1, (5,))),
            (TypeError, "a launch is .node, attributes.", (1, ((0,),))),
            (ValueError, "not a launch of a node", (1, ((1, b""),))),
            (ValueError, "not a launch of a node", (1, ((-1, b""),))),
            (ValueError, "not a launch of a node", (1, ((0, b"short"),))),
        ):
            with self.assertRaisesRegex(error, text):
                self.Shared(*args)

    def test_no_reference_is_lost_or_gained(self):
        launches = ((0, values(_2=1)),)
        before = sys.getrefcount(launches)
        for _ in range(50):
            self.Shared(1, launches)
            with self.assertRaises(ValueError):
                self.Shared(0, launches)
        self.assertEqual(sys.getrefcount(launches), before)


if __name__ == "__main__":
    run_tests()
