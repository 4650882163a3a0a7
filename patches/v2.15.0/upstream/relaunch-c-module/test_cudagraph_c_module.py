# Owner(s): ["module: inductor"]

import functools
import os
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from torch._inductor.cudagraph_relaunch import csrc
from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


DRIVER = """
int cuGetErrorString(int code, const char **text) {
  *text = code == 1 ? "invalid argument" : 0;
  return !*text;
}
int cuStreamQuery(void *stream) { return stream ? 600 : 0; }
"""
PART = """
#include "driver_api.h"
#include "module.h"

static PyObject *query(PyObject *module, PyObject *stream) {
  return PyLong_FromLong(cu.StreamQuery(PyLong_AsVoidPtr(stream)));
}
static PyObject *fail(PyObject *module, PyObject *code) {
  return driver_error((int)PyLong_AsLong(code), "cuNothing");
}
static PyObject *check(PyObject *module, PyObject *items) {
  if (!is_tuple(items, "the items", -1)) return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++)
    if (!is_tuple(PyTuple_GET_ITEM(items, i), "item", i)) return NULL;
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {
    {"query", query, METH_O}, {"fail", fail, METH_O}, {"check", check, METH_O}, {NULL}};
PART(.module = "%s", .methods = methods)
"""
INIT = """
#include "module.h"

static int init(PyObject *module) {
  return PyModule_AddIntConstant(module, "seven", 7);
}
PART(.module = "both", .init = init)
"""
BROKEN = """
#include "module.h"

static int init(PyObject *module) {
  PyErr_SetString(PyExc_ValueError, "no such luck");
  return -1;
}
PART(.module = "broken", .init = init)
"""


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestModule(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        cache = {"TRITON_CACHE_DIR": self.folder}
        self.enterContext(mock.patch.dict(os.environ, cache))

    def build(self, **parts):
        return cuda_driver_stand_in.build_module(DRIVER, self.folder, **parts)[0]

    def test_parts(self):
        module = self.build(one=PART % "both", two=INIT, three=PART % "other")
        self.assertEqual([module.both.query(stream) for stream in (0, 5)], [0, 600])
        self.assertEqual(module.other.query(0), 0)
        self.assertEqual(
            (module.both.seven, hasattr(module.other, "seven")), (7, False)
        )

    def test_part_that_fails(self):
        with self.assertRaisesRegex(ValueError, "no such luck"):
            self.build(one=PART % "one", broken=BROKEN)

    def test_errors(self):
        module = self.build(one=PART % "one").one
        for code, text in ((1, "invalid argument"), (2, "unknown error")):
            text = rf"CUDA driver error in cuNothing: {text} \({code}\)"
            with self.assertRaisesRegex(RuntimeError, text):
                module.fail(code)

    def test_items_that_are_no_tuples(self):
        module = self.build(one=PART % "one").one
        self.assertIsNone(module.check(((), ())))
        with self.assertRaisesRegex(TypeError, "item 1 must be a tuple, not int"):
            module.check(((), 5))
        with self.assertRaisesRegex(TypeError, "the items must be a tuple, not list"):
            module.check([])

    def test_driver_that_is_missing(self):
        with self.assertRaisesRegex(ImportError, r"libnone\.so can't be loaded"):
            csrc.build("libnone.so")

    def test_driver_that_is_too_old(self):
        with self.assertRaisesRegex(ImportError, r"libm\.so\.6 has no cu\w+"):
            csrc.build("libm.so.6")

    def test_change_of_any_file_builds_anew(self):
        folder = Path(shutil.copytree(csrc.FOLDER, Path(self.folder, "csrc")))
        self.enterContext(mock.patch.object(csrc, "FOLDER", folder))
        for path in sorted(folder.glob("*.[ch]")):
            if path.name == csrc.MAIN:  # Triton reads it
                continue
            before = csrc.arguments()
            path.write_text(path.read_text() + "\n")
            self.assertNotEqual(csrc.arguments(), before, path.name)

    def test_failed_build_is_not_tried_again(self):
        build = mock.Mock(side_effect=RuntimeError("no compiler"))
        attempt = functools.cache(csrc._attempt.__wrapped__)
        self.enterContext(mock.patch.object(csrc, "_attempt", attempt))
        self.enterContext(mock.patch.object(csrc, "build", build))
        for _ in range(2):
            text = r"no compiler\. It takes what Triton takes: a C compiler \(gcc,"
            with self.assertRaisesRegex(csrc.NotBuiltError, text):
                csrc.extension()
        build.assert_called_once_with()


if __name__ == "__main__":
    run_tests()
