"""`csrc/launch_memory.c`: allocations of a launch, and errors that leave nothing behind."""

import ctypes
import gc
import sys
import tempfile
import unittest
import weakref

import torch
from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401


# Allocates, calls `launch` with the bases of all regions, frees the scratch, and
# returns the storages and the slab.
PART = """
#include "launch_memory.h"
#include "module.h"

static PyObject *run(PyObject *module, PyObject *args) {
  PyObject *order, *derived, *inputs, *values, *launch, *found = NULL;
  Layout layout = {0};
  Memory memory = {0};
  Scratch *raw = &layout.raw;
  uint64_t base[32], value[8];
  unsigned long long alloc, release;
  if (!PyArg_ParseTuple(args, "OO!OO(OOnKK)O!O!nO!O!O", &layout.empty, &PyTuple_Type,
                        &layout.storages, &layout.slab, &layout.scratch,
                        &raw->raw_alloc, &raw->raw_delete, &raw->size, &alloc,
                        &release, &PyTuple_Type, &order, &PyTuple_Type, &derived,
                        &layout.scratch_result, &PyTuple_Type, &inputs,
                        &PyTuple_Type, &values, &launch))
    return NULL;
  raw->torch.alloc = (int (*)(uint64_t, Handle *))(uintptr_t)alloc;
  raw->torch.release = (int (*)(Handle))(uintptr_t)release;
  layout.inputs = PyTuple_GET_SIZE(inputs);
  layout.is_sized = PyTuple_GET_SIZE(values) > 0;
  for (Py_ssize_t i = 0; i < layout.inputs; i++)
    base[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(inputs, i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
    value[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(values, i));
  if (!layout_init(&layout, order, derived, PyTuple_GET_SIZE(values)) &&
      !allocate_memory(&layout, (Handle)7, &memory, value, base)) {
    PyObject *done = NULL, *bases = PyTuple_New((Py_ssize_t)layout_regions(&layout));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); i++)
      PyTuple_SET_ITEM(bases, i, PyLong_FromUnsignedLongLong(base[i]));
    done = PyObject_CallOneArg(launch, bases);
    Py_DECREF(bases);
    if (done && !free_after_launch(&layout, &memory))
      found = Py_BuildValue("OO", memory.storages, memory.slab ? memory.slab : Py_None);
    Py_XDECREF(done);
  }
  free_memory(&layout, &memory);
  layout_clear(&layout);
  return found;
}
static PyMethodDef methods[] = {{"run", run, METH_VARARGS}, {NULL}};
PART(.module = "test", .methods = methods)
"""
STREAM = 7


class Result(int):
    """A size that a launch computes."""


def tensor(*size):
    """The arguments of empty() for a contiguous tensor."""
    return size, torch.empty(size, device="meta").stride(), torch.float32


def raw(size):
    return (size,), (1,), torch.uint8


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestAllocate(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.module = driver_stand_in.build_module("", folder, part=PART)[0].test

    def setUp(self):
        super().setUp()
        self.made, self.room = (
            [],
            99,
        )  # (size, tensor) of each of at most 99 allocations
        self.held, self.calls, self.failing = {}, [], set()  # raw memory, by address
        function = ctypes.CFUNCTYPE
        out = ctypes.POINTER(ctypes.c_void_p)
        self.functions = (
            function(ctypes.c_int, ctypes.c_uint64, out)(self.c_alloc),
            function(ctypes.c_int, ctypes.c_void_p)(self.c_release),
        )

    def tearDown(self):
        self.assertEqual(self.held, {})  # raw memory never outlives a launch
        super().tearDown()

    def empty(self, size, stride, dtype):
        if self.room == len(self.made):
            raise torch.OutOfMemoryError("no memory")
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.made.append((size, weakref.ref(made)))
        return made

    def alloc(self, size, stream):
        self.calls.append("alloc")
        self.assertEqual(stream, STREAM)
        if not self.room:
            raise torch.OutOfMemoryError("no raw memory")
        made = torch.empty(size, dtype=torch.uint8)
        self.held[made.data_ptr()] = made
        return made.data_ptr()

    def delete(self, address):
        self.calls.append("delete")
        del self.held[address]
        if "delete" in self.failing:
            raise ValueError("not freed")

    def c_alloc(self, size, out):
        self.calls.append("C alloc")
        if "C alloc" in self.failing:
            return 1
        out[0] = self.alloc(size, STREAM)
        self.calls.pop()
        return 0

    def c_release(self, address):
        self.calls.append("C release")
        if "C release" in self.failing:
            return 1
        del self.held[address]
        return 0

    def run_once(self, storages=(), slab=None, scratch=None, order=None, **kwargs):
        """Return (bases during the launch, storages, slab)."""
        bases = []
        launch = kwargs.pop("launch", bases.extend)
        count = len(storages)
        if order is None:
            order = [*range(count), *[count] * bool(slab), *[count + 1] * bool(scratch)]
        by = kwargs.pop("by", (None, None, 0, 0, 0))
        derived = kwargs.pop("derived", ())
        rest = [kwargs.pop(*p) for p in (("scratch_result", -1), ("inputs", ()), ("values", ()))]
        self.assertEqual(kwargs, {})
        given = self.empty, storages, slab, scratch, by, tuple(order), derived
        return bases, *self.module.run(*given, *rest, launch)

    def by_python(self, size=64):
        return self.alloc, self.delete, size, 0, 0

    def by_torch(self, size=64):
        alloc, release = (ctypes.cast(f, ctypes.c_void_p).value for f in self.functions)
        return self.alloc, self.delete, size, alloc, release

    def test_regions(self):
        bases, storages, slab = self.run_once(
            (tensor(2, 3), tensor(5)),
            raw(40),
            raw(80),
            order=(3, 1, 2, 0),
            inputs=(8, 9),
        )
        self.assertEqual([size for size, _ in self.made], [(80,), (5,), (40,), (2, 3)])
        self.assertEqual([t.shape for t in storages], [(2, 3), (5,)])
        self.assertEqual((slab.shape, slab.dtype), ((40,), torch.uint8))
        addresses = [t.data_ptr() for t in (*storages, slab)]
        self.assertEqual(bases[:5], [8, 9, *addresses])
        self.assertEqual(len(bases), 6)

    def test_regions_that_are_not_there(self):
        bases, storages, slab = self.run_once((tensor(3),), inputs=(8,))
        self.assertEqual((bases[1:], slab), ([storages[0].data_ptr(), 0, 0], None))

    def test_scratch_is_freed_after_the_launch(self):
        seen = []

        def launch(bases):
            seen.append((bases[-1], self.made[0][1]().data_ptr()))

        self.run_once((), None, raw(80), launch=launch)
        self.assertEqual(seen[0][0], seen[0][1])
        self.assertIsNone(self.made[0][1]())

    def test_raw_scratch(self):
        for by, calls in (
            (self.by_python(), ["alloc", "delete"]),
            (self.by_torch(), ["C alloc", "C release"]),
        ):
            seen, self.calls = [], []

            def launch(bases, seen=seen):
                seen += bases[-1], *self.held

            self.run_once((), None, raw(64), by=by, launch=launch)
            self.assertEqual((self.calls, self.made), (calls, []))
            self.assertEqual(seen[:1], seen[1:])

    def test_python_is_asked_where_torch_fails(self):
        self.failing = {"C alloc", "C release"}
        self.run_once((), None, raw(64), by=self.by_torch())
        self.assertEqual(self.calls, ["C alloc", "alloc", "C release", "delete"])
        self.room = 0
        with self.assertRaisesRegex(torch.OutOfMemoryError, "no raw memory"):
            self.run_once((), None, raw(64), by=self.by_torch())

    def test_error_of_the_launch_is_kept(self):
        for self.failing in (set(), {"delete"}):
            with self.assertRaisesRegex(ZeroDivisionError, "division"):
                self.run_once(
                    (tensor(3),),
                    None,
                    raw(64),
                    by=self.by_python(),
                    launch=lambda bases: 1 / 0,
                )
        gc.collect()
        self.assertEqual([made() for _, made in self.made], [None, None])

    def test_scratch_that_is_not_freed(self):
        self.failing = {"delete"}
        with self.assertRaisesRegex(ValueError, "not freed"):
            self.run_once((), None, raw(64), by=self.by_python())

    def test_no_memory(self):
        self.room = 1
        with self.assertRaisesRegex(torch.OutOfMemoryError, "no memory"):
            self.run_once((tensor(3), tensor(4)), raw(8), None)
        self.assertEqual(len(self.made), 1)
        self.assertIsNone(self.made[0][1]())

    def test_sizes_that_a_launch_computes(self):
        n, row = Result(0), Result(1)
        bases, storages, _ = self.run_once(
            (((n, 3), (row, 1), torch.float32),),
            None,
            ((n,), (1,), torch.uint8),
            derived=((0, 2), (2, 2)),
            inputs=(0x1000,),
            values=(5, 4, 0x30),
        )
        self.assertEqual((storages[0].shape, storages[0].stride()), ((5, 3), (4, 1)))
        self.assertEqual([size for size, _ in self.made], [(5, 3), (5,)])
        self.assertEqual(bases[4:], [0x1030, bases[2] + 0x30])

    def test_raw_scratch_of_a_computed_size(self):
        sizes = []
        self.run_once(
            (),
            None,
            raw(1),
            by=self.by_python(),
            scratch_result=1,
            values=(3, 96),
            launch=lambda bases: sizes.extend(len(t) for t in self.held.values()),
        )
        self.assertEqual(sizes, [96])

    def test_layouts_that_make_no_sense(self):
        one = (tensor(3),)
        sized = (((Result(2),), (1,), torch.float32),)
        for error, text, *args in (
            (ValueError, "so many regions are not allocated", one, None, None, (0, 1)),
            (ValueError, "names a region twice", one, raw(8), None, (0, 0)),
            (ValueError, "or none that is", one, raw(8), None, (0, 2)),
            (TypeError, "the slab must be a tuple", one, [8]),
            (TypeError, "the scratch must be a tuple", one, None, [8]),
            (TypeError, "allocation 1 must be a tuple", (*one, 5)),
            (ValueError, "a size names a result", sized),
        ):
            with self.assertRaisesRegex(error, text):
                self.run_once(*args, values=(1, 2))
        for derived in (((4, 0),), ((-1, 0),), ((0, 1),), ((0, -1),)):
            with self.assertRaisesRegex(ValueError, "a derived region lies in none"):
                self.run_once(one, derived=derived, inputs=(8,), values=(1,))
        with self.assertRaisesRegex(TypeError, "derived region 0 must be a tuple"):
            self.run_once(one, derived=(5,), values=(1,))
        with self.assertRaisesRegex(ValueError, "the scratch is as large as no result"):
            self.run_once((), None, raw(8), scratch_result=1, values=(1,))
        self.assertEqual(self.made, [])

    def test_no_reference_is_lost_or_gained(self):
        storages = (tensor(3), ((Result(0), 300), (300, 1), torch.float32))
        kept = storages, *storages, storages[1][0]
        before = [sys.getrefcount(each) for each in kept]
        for _ in range(20):
            self.run_once(storages, raw(8), raw(8), values=(3, 1000))
        self.assertEqual([sys.getrefcount(each) for each in kept], before)
