"""Events for generated code: a few driver calls, without what torch.Event adds around them.

`torch.Event.record` costs 0.55 us of host time, of which the driver's share is a third; a fork and a join of eight
streams is 25 such calls. `Event` here takes the raw handle of a stream, which generated code has anyway. It is built
at first use by the compiler that Triton needs and cached by Triton; without a compiler, or without the driver, a
Python class of the same behaviour takes its place. An event belongs to one device and orders streams of that device:
an event that crosses devices is a torch.Event.

Note [Boundary events under the caller's capture]
When the caller captures a CUDA graph, a stream is part of the capture from the moment at which it waits for a stream
that is. What another stream held before that is no part of the graph, and waiting for it would end the capture: such
a wait is skipped (`record_entry`, `wait_entry`). And a stream that is made to wait for the ambient stream when the
region is left would be part of the capture and never joined: it is joined at once (`wait_exit`), so that it stands as
eager leaves a stream that was forked and joined.
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
    int (*synchronize)(Handle), (*text)(int, const char **), (*capturing)(Handle, int *);
} cu;

typedef struct { PyObject_HEAD Handle event, context; int captured; } Event;

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
static int is_capturing(Handle stream) {
    int status = 0;
    return !cu.capturing(stream, &status) && status;
}
static PyObject *event_record_entry(Event *self, PyObject *stream) {
    PyObject *result = event_record(self, stream);
    if (result) self->captured = is_capturing(PyLong_AsVoidPtr(stream));
    return result;
}
static PyObject *event_wait_entry(Event *self, PyObject *stream) {
    if (!self->captured && is_capturing(PyLong_AsVoidPtr(stream))) Py_RETURN_NONE;
    return event_wait(self, stream);
}
static PyObject *event_wait_exit(Event *self, PyObject *const *args, Py_ssize_t count) {
    Handle stream, ambient, back = NULL;
    PyObject *result;
    int join, pushed, code;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "wait_exit(raw_stream, raw_ambient) takes 2 arguments");
    stream = PyLong_AsVoidPtr(args[0]);
    ambient = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred()) return NULL;
    join = is_capturing(ambient) && !is_capturing(stream);
    if (!(result = event_wait(self, args[0])) || !join) return result;
    Py_DECREF(result);
    if (!(code = enter(self->context, &pushed))) {
        if (!(code = cu.create(&back, 2)) && !(code = cu.record(back, stream))) code = cu.wait(ambient, back, 0);
        if (back) cu.destroy(back);
        leave(pushed);
    }
    if (code) return fail(code, "Event.wait_exit");
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
    {"record_entry", (PyCFunction)event_record_entry, METH_O, "record(raw_stream) at the entry of a region"},
    {"wait_entry", (PyCFunction)event_wait_entry, METH_O, "wait(raw_stream) for what the caller had on a stream"},
    {"wait_exit", (PyCFunction)(void (*)(void))event_wait_exit, METH_FASTCALL,
     "wait_exit(raw_stream, raw_ambient): the stream waits when the region is left"},
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
        {(void **)&cu.text, "cuGetErrorString"}, {(void **)&cu.capturing, "cuStreamIsCapturing"}};
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
        self.captured = False

    def record(self, raw_stream: int) -> None:
        self.event.record(_stream(raw_stream, self.device.index))

    def wait(self, raw_stream: int) -> None:
        self.event.wait(_stream(raw_stream, self.device.index))

    def record_entry(self, raw_stream: int) -> None:
        self.record(raw_stream)
        self.captured = self._is_capturing(raw_stream)

    def wait_entry(self, raw_stream: int) -> None:
        if self.captured or not self._is_capturing(raw_stream):
            self.wait(raw_stream)

    def wait_exit(self, raw_stream: int, raw_ambient: int) -> None:
        join = self._is_capturing(raw_ambient) and not self._is_capturing(raw_stream)
        self.wait(raw_stream)
        if join:
            back = torch.Event(device=self.device)
            back.record(_stream(raw_stream, self.device.index))
            back.wait(_stream(raw_ambient, self.device.index))

    def _is_capturing(self, raw_stream: int) -> bool:
        with torch.cuda.stream(_stream(raw_stream, self.device.index)):  # type: ignore[arg-type]
            return torch.cuda.is_current_stream_capturing()

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
