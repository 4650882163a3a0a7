/* Scratch memory of a launch that is no tensor: torch's C functions allocate and free it, or where they fail its Python
   functions, which raise torch's errors. */

#include "scratch.h"

int take_scratch(const Scratch *self, size_t size, Handle stream, Handle *address) {
    PyObject *made;
    if (self->torch.alloc && !self->torch.alloc(size, address)) return 0;
    *address = NULL;
    if (!(made = PyObject_CallFunction(self->raw_alloc, "nN", (Py_ssize_t)size, PyLong_FromVoidPtr(stream)))) return -1;
    *address = PyLong_AsVoidPtr(made);
    Py_DECREF(made);
    return PyErr_Occurred() ? -1 : 0;
}

static int release(const Scratch *self, Handle address) {
    PyObject *number, *done;
    if (self->torch.release && !self->torch.release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(self->raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int release_scratch(const Scratch *self, Handle *address) {
    PyObject *type, *value, *trace;
    Handle was = *address;
    int code;
    *address = NULL;
    PyErr_Fetch(&type, &value, &trace);
    code = release(self, was);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return code;
}
