"""`csrc/outputs.c`: makes each kind of result."""

import sys
import tempfile
import unittest

import torch
from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401


# Makes the outputs; returns them, and how many inputs a list of them has at the least.
PART = """
#include "module.h"
#include "outputs.h"

static PyObject *run(PyObject *module, PyObject *args) {
  PyObject *recipes, *source, *storages, *slab, *values, *made = NULL, *found = NULL;
  Outputs outputs = {0};
  Py_ssize_t least = 0;
  uint64_t value[8];
  if (!PyArg_ParseTuple(args, "O!O!OOOOO!OO!", &PyTuple_Type, &recipes, &PyTuple_Type,
                        &outputs.types, &outputs.empty, &outputs.reinterpret,
                        &outputs.make, &source, &PyTuple_Type, &storages, &slab,
                        &PyTuple_Type, &values))
    return NULL;
  if (slab == Py_None) slab = NULL;
  outputs.is_sized = PyTuple_GET_SIZE(values) > 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
    value[i] = (uint64_t)PyLong_AsLongLong(PyTuple_GET_ITEM(values, i));
  if (!outputs_init(&outputs, recipes, PyTuple_GET_SIZE(storages), slab != NULL,
                    PyTuple_GET_SIZE(values), &least) &&
      (made = make_outputs(&outputs, source, storages, slab, value)))
    found = Py_BuildValue("On", made, least);
  Py_XDECREF(made);
  outputs_clear(&outputs);
  return found;
}
static PyMethodDef methods[] = {{"run", run, METH_VARARGS}, {NULL}};
PART(.module = "test", .methods = methods)
"""
GIVEN, REPEATED, SAME, WHOLE, PART_OF, SAVED, EMPTY, NUMBER = range(8)


class Result(int):
    """A number that a launch computes."""


def recipe(kind, number=0, object=None, size=None, stride=None, offset=None):
    return kind, number, object, size, stride, offset


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestOutputs(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.module = driver_stand_in.build_module("", folder, part=PART)[0].test

    def setUp(self):
        super().setUp()
        self.calls = []

    def empty(self, size, stride, dtype):
        self.calls.append("empty")
        return torch.empty_strided(size, stride, dtype=dtype)

    def reinterpret(self, of, size, stride, offset):
        self.calls.append("view")
        return of.as_strided(size, stride, offset)

    def make(self, *recipes, source=(), storages=(), slab=None, types=(), by=None, values=()):
        """Return (the outputs, how many inputs there are at the least)."""
        functions = self.empty, self.reinterpret, by
        given = source, storages, slab, values
        return self.module.run(recipes, types, *functions, *given)

    def test_each_kind(self):
        x, y = torch.randn(3), torch.randn(4)
        first, second = torch.randn(2, 3), torch.randn(6)
        outputs, least = self.make(
            recipe(GIVEN, object=None),
            recipe(GIVEN, object=2.5),
            recipe(WHOLE, 1),
            recipe(REPEATED, 2),
            recipe(SAME, 1),
            recipe(PART_OF, 0, None, (2,), (3,), 1),
            recipe(EMPTY, 0, ((0, 4), (4, 1), torch.float16)),
            source=[x, y],
            storages=(first, second),
        )
        self.assertEqual(outputs[:2], (None, 2.5))
        for output, wanted in zip(outputs[2:5], (second, second, y)):
            self.assertIs(output, wanted)
        self.assertEqual(outputs[5], first[:, 1])
        self.assertEqual(outputs[5].data_ptr(), first.data_ptr() + 4)
        self.assertEqual((outputs[6].shape, outputs[6].dtype), ((0, 4), torch.float16))
        self.assertEqual((least, self.calls), (2, ["view", "empty"]))

    def test_views_of_the_slab(self):
        slab = torch.zeros(64, dtype=torch.uint8)
        slab[16:32] = torch.randn(4).view(torch.uint8)
        outputs, least = self.make(
            recipe(SAVED, 1, None, (2, 2), (2, 1), 4),
            recipe(SAVED, 0, None, (3,), (1,), 40),
            recipe(SAVED, 1, None, (4,), (1,), 4),
            slab=slab,
            types=(torch.int8, torch.float32),
        )
        kinds = [output.dtype for output in outputs]
        self.assertEqual(kinds, [torch.float32, torch.int8, torch.float32])
        self.assertEqual(outputs[0].flatten(), slab[16:32].view(torch.float32))
        self.assertEqual(outputs[1].data_ptr() - slab.data_ptr(), 40)
        self.assertIs(outputs[0]._base, outputs[2]._base)  # one tensor of each dtype
        self.assertEqual(least, 0)

    def test_outputs_that_are_inputs(self):
        x = torch.randn(3)
        outputs, least = self.make(recipe(SAME, 2), source=(0, 1, x))
        self.assertIs(outputs[0], x)
        self.assertEqual(least, 3)
        with self.assertRaises(IndexError):
            self.make(recipe(SAME, 2), source=(0, 1))

    def test_what_a_launch_computes(self):
        n, row, skip = Result(0), Result(1), Result(2)
        storage = torch.arange(20.0)
        outputs, _ = self.make(
            recipe(PART_OF, 0, None, (n, 2), (row, 1), skip),
            recipe(PART_OF, 0, None, (3,), (1,), 5),
            recipe(NUMBER, 3),
            storages=(storage,),
            values=(4, 3, 2, -7),
        )
        self.assertEqual(outputs[0], storage.as_strided((4, 2), (3, 1), 2))
        self.assertEqual(outputs[1], storage[5:8])
        self.assertEqual(outputs[2], -7)
        self.assertIs(type(outputs[2]), int)

    def test_function_that_makes_all(self):
        given = []

        def make(source, storages, slab):
            given.append((source, storages, slab))
            return 5, 6

        storages = (torch.randn(2),)
        self.assertEqual(self.make(storages=storages, by=make)[0], (5, 6))
        slab = torch.zeros(8, dtype=torch.uint8)
        self.make(source=[1], slab=slab, by=make)
        self.assertEqual(given[0][::2], ((), None))
        self.assertIs(given[0][1], storages)
        self.assertIs(given[1][2], slab)

    def test_errors_of_torch(self):
        storages = (torch.randn(2),)
        far = recipe(PART_OF, 0, None, (3,), (1,), 5)
        with self.assertRaisesRegex(RuntimeError, "out of bounds"):
            self.make(recipe(WHOLE, 0), far, recipe(WHOLE, 0), storages=storages)
        slab = torch.zeros(7, dtype=torch.uint8)
        with self.assertRaisesRegex(RuntimeError, "divisible"):
            view = recipe(SAVED, 0, None, (1,), (1,), 0)
            self.make(view, slab=slab, types=(torch.float32,))

    def test_recipes_that_make_no_sense(self):
        missing = "a recipe of an output names what isn't there"
        for text, each in (
            (missing, recipe(-1)),
            (missing, recipe(8)),
            (missing, recipe(WHOLE, 1)),
            (missing, recipe(PART_OF, -1)),
            (missing, recipe(REPEATED, 1)),
            (missing, recipe(NUMBER, 2)),
            (missing, recipe(SAVED, 0)),  # there is no slab
            ("a size names a result", recipe(PART_OF, 0, None, (Result(2),), (1,), 0)),
            ("a size names a result", recipe(PART_OF, 0, None, (1,), (1,), Result(-1))),
        ):
            given = {"storages": (torch.randn(2),), "types": (torch.int8,)}
            with self.assertRaisesRegex(ValueError, text):
                self.make(recipe(WHOLE, 0), each, values=(1, 1), **given)
        with self.assertRaisesRegex(ValueError, missing):
            slab = torch.zeros(8, dtype=torch.uint8)
            self.make(recipe(SAVED, 1), slab=slab, types=(torch.int8,))
        for text, each in (
            ("recipe 0 must be a tuple", [GIVEN, 0, None, None, None, None]),
            ("a recipe is", (GIVEN, 0)),
            ("what is allocated for recipe 0 must be a tuple", recipe(EMPTY, 0, 5)),
        ):
            with self.assertRaisesRegex(TypeError, text):
                self.make(each)

    def test_no_reference_is_lost_or_gained(self):
        storage, given = torch.randn(64), object()
        size, stride = (Result(0), 2), (4, 1)
        recipes = (
            recipe(GIVEN, object=given),
            recipe(WHOLE, 0),
            recipe(REPEATED, 0),
            recipe(PART_OF, 0, None, size, stride, 3),
        )
        kept = storage, given, size, stride, size[0], *recipes
        before = [sys.getrefcount(each) for each in kept]
        for _ in range(50):
            self.make(*recipes, storages=(storage,), values=(5,))
            with self.assertRaises(ValueError):
                self.make(*recipes, recipe(WHOLE, 1), storages=(storage,), values=(5,))
        self.assertEqual([sys.getrefcount(each) for each in kept], before)
