/* The device that launches are for, as a thread finds it. */

#include "device.h"
#include "read.h"

static int get_context(Handle *now) { return driver_check(cu.CtxGetCurrent(now), "cuCtxGetCurrent", ""); }

/* Asks torch. 1: the device is the thread's. 0: another one is. -1: an error. */
static int is_current(const Device *self) {
    PyObject *answer = PyObject_CallNoArgs(self->current);
    long index = answer ? PyLong_AsLong(answer) : -1;
    Py_XDECREF(answer);
    return PyErr_Occurred() ? -1 : index == self->index;
}

int device_init(Device *self, PyObject *given) {
    unsigned long long stream;
    int code;
    if (!is_tuple(given, "the device", -1)
        || !PyArg_ParseTuple(given, "OOOK;a device is (index, current, stream_of, stream)", &self->number,
                             &self->current, &self->stream_of, &stream))
        return -1;
    self->given = Py_NewRef(given);
    self->stream = (int (*)(int, Handle *))(uintptr_t)stream;
    self->index = PyLong_AsLong(self->number);
    if (PyErr_Occurred() || (code = is_current(self)) < 0) return -1;
    if (!code || cu.CtxGetCurrent(&self->context)) self->context = NULL;
    return 0;
}

void device_clear(Device *self) { Py_CLEAR(self->given); }

int have_context(const Device *self) {
    Handle now;
    if (get_context(&now)) return -1;
    return now || !self->context ? 0 : driver_check(cu.CtxSetCurrent(self->context), "cuCtxSetCurrent", "");
}

int current_stream(const Device *self, Handle *stream) {
    PyObject *answer;
    if (self->stream && !self->stream((int)self->index, stream)) return 0;
    if (!(answer = PyObject_CallOneArg(self->stream_of, self->number))) return -1;
    *stream = PyLong_AsVoidPtr(answer);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* If the thread's context is the device's, the device is right. Otherwise torch is asked for the current device before
   the thread gets a context, so that a thread with another device keeps that. */
int find_stream(const Device *self, Handle *stream) {
    Handle now;
    int code;
    if (get_context(&now)) return -1;
    if (!now || now != self->context) {
        if ((code = is_current(self)) <= 0) return code;
        if (!now && !self->context) return 0; /* torch makes one at its first call in a thread */
        if (have_context(self)) return -1;
    }
    return current_stream(self, stream) ? -1 : 1;
}
