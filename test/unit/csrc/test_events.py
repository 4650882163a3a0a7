"""`csrc/events.c`: events of regions, also in captures of other threads."""

import ctypes

from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins import c_module
from stand_ins.stream_driver import DRIVER


# What region.c is to call, as functions of Python.
PART = r"""
#include "events.h"
#include "module.h"

static PyObject *call_wait_exit(PyObject *self, PyObject *args) {
    PyObject *event;
    Py_ssize_t stream, caller;
    if (!PyArg_ParseTuple(args, "O!nn", event_type, &event, &stream, &caller)) return NULL;
    return PyLong_FromLong(wait_exit((Event *)event, (Handle)stream, (Handle)caller));
}

/* How many of the streams hold nothing; leaves the capture mode as it is. */
static PyObject *count_idle(PyObject *self, PyObject *streams) {
    Mode mode = {0, 0};
    long found = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(streams); i++)
        found += holds_nothing(PyLong_AsVoidPtr(PyTuple_GetItem(streams, i)), &mode);
    restore(&mode);
    return PyLong_FromLong(found);
}

static PyObject *set_fields(PyObject *self, PyObject *args) {
    PyObject *event;
    int captured, idle;
    if (!PyArg_ParseTuple(args, "O!ii", event_type, &event, &captured, &idle)) return NULL;
    ((Event *)event)->captured = captured;
    ((Event *)event)->idle = idle;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"wait_exit", call_wait_exit, METH_VARARGS, ""},
    {"count_idle", count_idle, METH_O, ""},
    {"set_fields", set_fields, METH_VARARGS, ""},
    {NULL}};
PART(.module = "borders", .methods = methods)
"""


@c_module.needs_compiler
class TestEvents(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        module, cls.driver = c_module.build_module(DRIVER, borders=PART)
        cls.driver.noted_calls.restype = ctypes.c_char_p
        cls.make, cls.borders = module.events.Event, module.borders

    def setUp(self):
        super().setUp()
        self.addCleanup(self.calls)
        for undo in ("set_failing", "set_failing_creation", "set_idle"):
            self.addCleanup(getattr(self.driver, undo), 0)
        self.event = self.make(0)
        self.number = int(self.calls().removeprefix("create"))

    def capture(self, stream):
        self.driver.set_capturing(stream, 1)
        self.addCleanup(self.driver.set_capturing, stream, 0)

    def calls(self):
        """The driver's calls since the last one; of this test's event without number."""
        found = self.driver.noted_calls().decode().strip()
        return found.replace(f"{getattr(self, 'number', '')}@", "@")

    def test_record_and_wait(self):
        self.event.record(11)
        self.event.wait(12)
        self.event.wait(0)
        self.event.synchronize()
        wanted = f"record@11 wait@12 wait@0 synchronize{self.number}"
        self.assertEqual(self.calls(), wanted)

    def test_context_of_the_device(self):
        self.driver.set_elsewhere(1)
        self.addCleanup(self.driver.set_elsewhere, 0)
        other = self.make(0)
        self.assertEqual(self.calls(), f"push create{self.number + 1} pop")
        self.event.record(0)
        self.event.wait(0)
        self.assertEqual(self.calls(), "push record@0 pop push wait@0 pop")
        del other

    def test_stream_that_is_no_handle(self):
        """Also while the null stream, for which it would pass, is captured."""
        for capture in (lambda: None, lambda: self.capture(0)):
            capture()
            for method in (self.event.record, self.event.wait, self.event.wait_entry):
                with self.assertRaises(TypeError):
                    method("stream")
        self.assertEqual(self.calls(), "")

    def test_errors_of_the_driver(self):
        self.driver.set_failing(700)
        for name, args in (("record", (11,)), ("wait", (11,)), ("synchronize", ())):
            wanted = rf"Event\.{name}: stand-in \(700\)"
            with self.assertRaisesRegex(RuntimeError, wanted):
                getattr(self.event, name)(*args)

    def test_contexts_are_released(self):
        """Also where no event could be made; what was not retained is not released."""
        before = self.driver.retains()
        events = [self.make(1) for _ in range(3)]
        self.assertEqual(self.driver.retains(), before + 3)
        self.driver.set_failing_creation(2)
        with self.assertRaisesRegex(RuntimeError, r"Event\(\): stand-in \(2\)"):
            self.make(1)
        self.driver.set_failing_creation(0)
        self.assertEqual(self.driver.retains(), before + 3)
        del events
        self.assertEqual(self.driver.retains(), before)
        with self.assertRaisesRegex(RuntimeError, r"stand-in \(101\)"):
            self.make(2)
        self.assertEqual(self.driver.retains(), before)
        self.assertEqual(self.calls().count("destroy"), 3)

    def test_wait_for_what_a_stream_held(self):
        self.event.wait_entry(12)
        self.capture(12)
        self.event.wait_entry(12)
        self.event.wait_entry(11)
        self.assertEqual(self.calls(), "wait@12 wait@11")
        self.borders.set_fields(self.event, 1, 0)  # what it was recorded on is captured
        self.event.wait_entry(12)
        self.assertEqual(self.calls(), "wait@12")

    def test_event_of_a_stream_that_held_nothing(self):
        self.borders.set_fields(self.event, 0, 1)
        self.event.wait(12)
        self.assertEqual(self.calls(), "")
        self.event.record(11)
        self.event.wait(12)
        self.assertEqual(self.calls(), "record@11 wait@12")

    def test_streams_that_hold_nothing(self):
        self.assertEqual(self.borders.count_idle((11, 12)), 0)
        self.driver.set_idle(1)
        self.assertEqual(self.borders.count_idle((11, 12)), 2)
        self.assertEqual(self.calls(), " ".join(["query@11 query@12"] * 2))
        self.capture(12)
        self.assertEqual(self.borders.count_idle((11, 12)), 1)
        self.assertEqual(self.calls(), "query@11")

    def test_capture_of_another_thread(self):
        """It would be ended by a query in another mode than the relaxed one."""
        mode = ctypes.c_int(1)
        exchange = self.driver.cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(mode))
        self.borders.count_idle((11, 12))
        exchange(ctypes.byref(mode))
        self.assertEqual(mode.value, 1)

    def test_wait_at_the_exit(self):
        self.assertEqual(self.borders.wait_exit(self.event, 12, 9), 0)
        joined = self.number + 1
        wanted = f"wait@12 create{joined} record{joined}@12 wait{joined}@9"
        self.assertEqual(self.calls(), f"{wanted} destroy{joined}")
        self.driver.set_failing(700)
        self.assertEqual(self.borders.wait_exit(self.event, 12, 9), 700)

    def test_wait_of_a_captured_stream_at_the_exit(self):
        """It is part of the capture, and joined by whoever forked it."""
        self.capture(12)
        self.assertEqual(self.borders.wait_exit(self.event, 12, 9), 0)
        self.assertEqual(self.calls(), "wait@12")
