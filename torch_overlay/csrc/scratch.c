/* Scratch memory of a launch that is no tensor: torch's C functions allocate and free it, or where they fail its Python
   functions, which raise torch's errors. */

#include "scratch.h"

void scratch_clear(Scratch *self) {
    Py_CLEAR(self->raw_alloc);
    Py_CLEAR(self->raw_delete);
}

/* Allocates so many bytes on the stream. Returns 0, or -1 and an error. */
int take_scratch(Scratch *self, size_t size, Handle stream, Handle *address) {
    PyObject *made;
    if (self->torch.alloc && !self->torch.alloc(size, address)) return 0;
    *address = NULL;
    if (!(made = PyObject_CallFunction(self->raw_alloc, "nN", (Py_ssize_t)size, PyLong_FromVoidPtr(stream)))) return -1;
    *address = PyLong_AsVoidPtr(made);
    Py_DECREF(made);
    return PyErr_Occurred() ? -1 : 0;
}

static int release(Scratch *self, Handle address) {
    PyObject *number, *done;
    if (self->torch.release && !self->torch.release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(self->raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Frees the scratch after a launch, or after its failure. Returns 0, or -1 and an error; an error that is set already
   is kept. */
int free_scratch(Scratch *self, Handle *address) {
    PyObject *type, *value, *trace;
    Handle was = *address;
    int code;
    *address = NULL;
    if (!was) return 0;
    PyErr_Fetch(&type, &value, &trace);
    code = release(self, was);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return code;
}
