/* Events for generated code: `streams.runtime` describes them. */

#include "events.h"
#include "module.h"

PyTypeObject *event_type;

/* The null stream and the creation of events depend on the current context. */
int enter(Handle context, int *pushed) {
    Handle now = NULL;
    int code = cu.CtxGetCurrent(&now);
    *pushed = 0;
    if (!code && now != context && !(code = cu.CtxPushCurrent(context))) *pushed = 1;
    return code;
}

void leave(int pushed) {
    Handle old;
    if (pushed) cu.CtxPopCurrent(&old);
}

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int index, pushed, code;
    Event *self;
    if (!PyArg_ParseTuple(args, "i", &index)) return NULL;
    if (!(self = (Event *)type->tp_alloc(type, 0))) return NULL;
    if (!(code = cu.DeviceGet(&self->device, index))
        && (code = cu.DevicePrimaryCtxRetain(&self->context, self->device)))
        self->context = NULL;
    if (!code && !(code = enter(self->context, &pushed))) {
        if ((code = cu.EventCreate(&self->event, 2 /* no timing */))) self->event = NULL;
        leave(pushed);
    }
    if (code) {
        Py_DECREF(self);
        return driver_error(code, "Event()");
    }
    return (PyObject *)self;
}

static void event_dealloc(Event *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->event) cu.EventDestroy(self->event);
    if (self->context) cu.DevicePrimaryCtxRelease(self->device);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *order(Event *self, PyObject *stream, int waits) {
    Handle raw = PyLong_AsVoidPtr(stream);
    int pushed, code;
    if (!raw && PyErr_Occurred()) return NULL;
    if (waits && self->idle) Py_RETURN_NONE;
    if (!(code = enter(self->context, &pushed))) {
        code = waits ? cu.StreamWaitEvent(raw, self->event, 0) : cu.EventRecord(self->event, raw);
        leave(pushed);
    }
    if (!waits) self->idle = 0;
    if (code) return driver_error(code, waits ? "Event.wait" : "Event.record");
    Py_RETURN_NONE;
}

static PyObject *event_record(Event *self, PyObject *stream) { return order(self, stream, 0); }

static PyObject *event_wait(Event *self, PyObject *stream) { return order(self, stream, 1); }

int is_capturing(Handle stream) {
    int status = 0;
    return !cu.StreamIsCapturing(stream, &status) && status;
}

static PyObject *event_wait_entry(Event *self, PyObject *stream) {
    Handle raw = PyLong_AsVoidPtr(stream);
    if (!PyErr_Occurred() && !self->captured && is_capturing(raw)) Py_RETURN_NONE;
    return event_wait(self, stream);
}

int holds_nothing(Handle stream, Mode *mode) {
    if (is_capturing(stream)) return 0;
    if (!mode->relaxed) {
        mode->before = 2 /* relaxed */;
        if (cu.ThreadExchangeStreamCaptureMode(&mode->before)) return 0;
        mode->relaxed = 1;
    }
    return !cu.StreamQuery(stream);
}

void restore(Mode *mode) {
    if (mode->relaxed) cu.ThreadExchangeStreamCaptureMode(&mode->before);
}

int wait_exit(Event *self, Handle stream, Handle caller) {
    Handle back = NULL;
    int join = !is_capturing(stream), code = cu.StreamWaitEvent(stream, self->event, 0);
    if (code || !join) return code;
    if (!(code = cu.EventCreate(&back, 2)) && !(code = cu.EventRecord(back, stream)))
        code = cu.StreamWaitEvent(caller, back, 0);
    if (back) cu.EventDestroy(back);
    return code;
}

static PyObject *event_synchronize(Event *self, PyObject *unused) {
    int code;
    Py_BEGIN_ALLOW_THREADS code = cu.EventSynchronize(self->event);
    Py_END_ALLOW_THREADS if (code) return driver_error(code, "Event.synchronize");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"record", (PyCFunction)event_record, METH_O, "record(raw_stream)"},
    {"wait", (PyCFunction)event_wait, METH_O, "wait(raw_stream): make the stream wait for this event"},
    {"wait_entry", (PyCFunction)event_wait_entry, METH_O, "wait(raw_stream) for what the caller had on a stream"},
    {"synchronize", (PyCFunction)event_synchronize, METH_NOARGS, "synchronize(): make the host wait for this event"},
    {NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, event_new}, {Py_tp_dealloc, event_dealloc}, {Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"cuda_driver_c.Event", sizeof(Event), 0, Py_TPFLAGS_DEFAULT, slots};

static int init(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (!type) return -1;
    event_type = (PyTypeObject *)Py_NewRef(type);
    return PyModule_AddObject(module, "Event", type);
}

PART(.module = "events", .init = init)
