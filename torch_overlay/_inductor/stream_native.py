"""Events for generated code: a few driver calls, without what torch.Event adds around them.

`torch.Event.record` costs 0.68 us of host time, of which the driver's share is a third; a fork and a join of eight
streams is 25 such calls. `Event` here takes the raw handle of a stream, which generated code has anyway. It is built
at first use by the compiler that Triton needs and cached by Triton; without a compiler, or without the driver, a
Python class of the same behaviour takes its place. An event belongs to one device and orders streams of that device:
an event that crosses devices is a torch.Event.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from torch_overlay import config


log = logging.getLogger(__name__)

SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>

typedef void *Handle;
static struct {
    int (*get)(Handle *), (*push)(Handle), (*pop)(Handle *), (*device)(int *, int), (*retain)(Handle *, int);
    int (*create)(Handle *, unsigned), (*destroy)(Handle), (*record)(Handle, Handle), (*wait)(Handle, Handle, unsigned);
    int (*synchronize)(Handle), (*text)(int, const char **);
} cu;

typedef struct { PyObject_HEAD Handle event, context; } Event;

static PyObject *fail(int code, const char *what) {
    const char *text = "unknown error";
    cu.text(code, &text);
    return PyErr_Format(PyExc_RuntimeError, "CUDA driver error in %s: %s (%d)", what, text ? text : "?", code);
}

/* The null stream and the creation of events depend on the current context. */
static int enter(Handle context, int *pushed) {
    Handle now = NULL;
    int code = cu.get(&now);
    *pushed = 0;
    if (!code && now != context && !(code = cu.push(context))) *pushed = 1;
    return code;
}
static void leave(int pushed) { Handle old; if (pushed) cu.pop(&old); }

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int index, device, pushed, code;
    Event *self;
    if (!PyArg_ParseTuple(args, "i", &index)) return NULL;
    if (!(self = (Event *)type->tp_alloc(type, 0))) return NULL;
    if (!(code = cu.device(&device, index)) && !(code = cu.retain(&self->context, device))
        && !(code = enter(self->context, &pushed))) {
        code = cu.create(&self->event, 2 /* no timing */);
        leave(pushed);
    }
    if (code) { Py_DECREF(self); return fail(code, "Event()"); }
    return (PyObject *)self;
}
static void event_dealloc(Event *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->event) cu.destroy(self->event);
    type->tp_free(self);
    Py_DECREF(type);
}
static PyObject *event_record(Event *self, PyObject *stream) {
    Handle raw = PyLong_AsVoidPtr(stream);
    int pushed, code;
    if (!raw && PyErr_Occurred()) return NULL;
    if (!(code = enter(self->context, &pushed))) { code = cu.record(self->event, raw); leave(pushed); }
    if (code) return fail(code, "Event.record");
    Py_RETURN_NONE;
}
static PyObject *event_wait(Event *self, PyObject *stream) {
    Handle raw = PyLong_AsVoidPtr(stream);
    int pushed, code;
    if (!raw && PyErr_Occurred()) return NULL;
    if (!(code = enter(self->context, &pushed))) { code = cu.wait(raw, self->event, 0); leave(pushed); }
    if (code) return fail(code, "Event.wait");
    Py_RETURN_NONE;
}
static PyObject *event_synchronize(Event *self, PyObject *unused) {
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = cu.synchronize(self->event);
    Py_END_ALLOW_THREADS
    if (code) return fail(code, "Event.synchronize");
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {
    {"record", (PyCFunction)event_record, METH_O, "record(raw_stream)"},
    {"wait", (PyCFunction)event_wait, METH_O, "wait(raw_stream): make the stream wait for this event"},
    {"synchronize", (PyCFunction)event_synchronize, METH_NOARGS, "synchronize(): make the host wait for this event"},
    {NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, event_new}, {Py_tp_dealloc, event_dealloc}, {Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"torch_overlay_events.Event", sizeof(Event), 0, Py_TPFLAGS_DEFAULT, slots};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_overlay_events", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_torch_overlay_events(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    PyObject *self, *type;
    struct { void **slot; const char *name; } want[] = {
        {(void **)&cu.get, "cuCtxGetCurrent"}, {(void **)&cu.push, "cuCtxPushCurrent_v2"},
        {(void **)&cu.pop, "cuCtxPopCurrent_v2"}, {(void **)&cu.device, "cuDeviceGet"},
        {(void **)&cu.retain, "cuDevicePrimaryCtxRetain"}, {(void **)&cu.create, "cuEventCreate"},
        {(void **)&cu.destroy, "cuEventDestroy_v2"}, {(void **)&cu.record, "cuEventRecord"},
        {(void **)&cu.wait, "cuStreamWaitEvent"}, {(void **)&cu.synchronize, "cuEventSynchronize"},
        {(void **)&cu.text, "cuGetErrorString"}};
    if (!driver) { PyErr_SetString(PyExc_ImportError, "libcuda.so.1 can't be loaded"); return NULL; }
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!(*want[i].slot = dlsym(driver, want[i].name)))
            return PyErr_Format(PyExc_ImportError, "libcuda.so.1 has no %s", want[i].name);
    if (!(self = PyModule_Create(&module)) || !(type = PyType_FromSpec(&spec))) return NULL;
    if (PyModule_AddObject(self, "Event", type) < 0) return NULL;
    return self;
}
"""


class PythonEvent:
    """The same by torch.Event, for hosts without a C compiler."""

    def __init__(self, device_index: int) -> None:
        self.device = torch.device("cuda", device_index)
        self.event = torch.Event(device=self.device)

    def record(self, raw_stream: int) -> None:
        self.event.record(_stream(raw_stream, self.device.index))

    def wait(self, raw_stream: int) -> None:
        self.event.wait(_stream(raw_stream, self.device.index))

    def synchronize(self) -> None:
        self.event.synchronize()


@functools.lru_cache(maxsize=256)
def _stream(raw_stream: int, device_index: int) -> torch.Stream:
    if raw_stream == 0:
        return torch.cuda.default_stream(device_index)
    return torch.cuda.ExternalStream(raw_stream, device=device_index)


@functools.cache
def event_class() -> Any:
    """The native class if it can be built and is wanted (`config.native_events`), else the Python one."""
    if not config.native_events:
        return PythonEvent
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(SOURCE, "torch_overlay_events").Event
    except Exception as error:
        log.info("events run in Python, some 0.4 us slower each: the native class was not built (%s)", error)
        return PythonEvent
