"""`csrc/counter.c`: counters of the compiler and other mappings."""

import collections
import sys
import tempfile
import types
import unittest

from torch._dynamo.utils import counters
from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401


# Adds `times`, with a prefetch before each.
PART = """
#include "counter.h"
#include "module.h"

static PyObject *add(PyObject *module, PyObject *args) {
  Counter counter = {0};
  int times, code = 0;
  if (!PyArg_ParseTuple(args, "OOOi", &counter.counters, &counter.group, &counter.name,
                        &times))
    return NULL;
  while (!code && times--) {
    counter_fetch(&counter);
    code = counter_add(&counter);
  }
  return code ? NULL : Py_NewRef(Py_None);
}
static PyMethodDef methods[] = {{"add", add, METH_VARARGS}, {NULL}};
PART(.module = "test", .methods = methods)
"""


class Names(dict):
    """A dictionary that notes what is set."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def __setitem__(self, name, value):
        self.seen.append((name, value))
        super().__setitem__(name, value)


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestCounter(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.module = driver_stand_in.build_module("", folder, part=PART)[0].test

    def test_counters_of_the_compiler(self):
        counters["test_cudagraph_counter"].clear()
        self.module.add(counters, "test_cudagraph_counter", "launches", 3)
        self.assertEqual(counters["test_cudagraph_counter"], {"launches": 3})
        counters["test_cudagraph_counter"]["launches"] += 1
        self.module.add(counters, "test_cudagraph_counter", "launches", 2)
        self.assertEqual(counters.pop("test_cudagraph_counter"), {"launches": 6})

    def test_group_that_is_made(self):
        made = collections.defaultdict(collections.Counter)
        self.module.add(made, "a", "n", 300)
        made.clear()
        self.module.add(made, "a", "n", 2)
        self.module.add(made, "b", "n", 1)
        self.assertEqual(made, {"a": {"n": 2}, "b": {"n": 1}})

    def test_what_is_no_dictionary(self):
        inside = Names({"n": 4})
        outside = types.MappingProxyType({"a": inside})
        self.module.add(outside, "a", "n", 1)
        self.assertEqual((inside["n"], inside.seen), (5, [("n", 5)]))

        class Group:
            def __getitem__(self, name):
                return 7

            def __setitem__(self, name, value):
                self.set = name, value

        group = Group()
        self.module.add({"a": group}, "a", "n", 1)
        self.assertEqual(group.set, ("n", 8))

    def test_numbers_that_no_long_holds(self):
        most = 2**63 - 1
        counts = {"a": {"long": most - 1, "most": most, "more": 2**80, "float": 0.5}}
        for name in counts["a"]:
            self.module.add(counts, "a", name, 2)
        wanted = {"long": most + 1, "most": most + 2, "more": 2**80 + 2, "float": 2.5}
        self.assertEqual(counts["a"], wanted)

    def test_errors(self):
        for error, counts in (
            (KeyError, {}),
            (KeyError, {"a": {}}),
            (TypeError, {"a": {"n": "text"}}),
            (TypeError, {"a": 5}),
            (TypeError, 5),
        ):
            with self.assertRaises(error):
                self.module.add(counts, "a", "n", 1)
        with self.assertRaisesRegex(TypeError, "unhashable"):
            self.module.add({"a": {}}, [], "n", 1)

    def test_no_reference_is_lost_or_gained(self):
        counts = {"a": {"n": 10**9}}
        kept = counts, counts["a"]
        before = [sys.getrefcount(each) for each in kept]
        self.module.add(counts, "a", "n", 100)
        self.module.add(types.MappingProxyType(counts), "a", "n", 100)
        self.assertEqual([sys.getrefcount(each) for each in kept], before)
        self.assertEqual(sys.getrefcount(counts["a"]["n"]), 2)
