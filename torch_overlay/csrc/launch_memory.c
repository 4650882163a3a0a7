/* The memory of a launch: storages of outputs, and scratch, the largest first. The scratch is no tensor: torch's C
   functions allocate and free it, or where they fail its Python functions, which raise torch's errors. */

#include "launch_memory.h"
#include "data_ptr.h"
#include "read.h"

/* Each allocated region has to be in the order once: the storages, and the scratch if there is any. */
int layout_init(Layout *self, PyObject *order) {
    Py_ssize_t made = PyTuple_GET_SIZE(self->storages), all = made + (self->scratch != 0);
    for (Py_ssize_t i = 0; i < made; i++)
        if (!is_tuple(PyTuple_GET_ITEM(self->storages, i), "allocation", i)) return -1;
    if (!(self->order = read_row(order, "the order", 0, all, &self->allocated))) return -1;
    if (self->allocated != all) return refuse("so many regions are not allocated");
    for (Py_ssize_t i = 0; i < all; i++)
        for (Py_ssize_t j = 0; j < i; j++)
            if (self->order[j] == self->order[i]) return refuse("the order names a region twice");
    return 0;
}

void layout_clear(Layout *self) { PyMem_Free(self->order); }

static int allocate_scratch(const Layout *self, Handle stream, Handle *address) {
    PyObject *made;
    if (self->alloc && !self->alloc(self->scratch, address)) return 0;
    *address = NULL;
    made = PyObject_CallFunction(self->raw_alloc, "nN", (Py_ssize_t)self->scratch, PyLong_FromVoidPtr(stream));
    if (!made) return -1;
    *address = PyLong_AsVoidPtr(made);
    Py_DECREF(made);
    return PyErr_Occurred() ? -1 : 0;
}

static int release(const Layout *self, Handle address) {
    PyObject *number, *done;
    if (self->release && !self->release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(self->raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int free_scratch(const Layout *self, Memory *memory) {
    PyObject *type, *value, *trace;
    Handle was = memory->scratch;
    int code;
    if (!was) return 0;
    memory->scratch = NULL;
    PyErr_Fetch(&type, &value, &trace);
    code = release(self, was);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return code;
}

int allocate_memory(const Layout *self, Handle stream, Memory *memory, uint64_t *base) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->storages);
    base += self->inputs;
    base[count] = 0;
    if (!(memory->storages = PyTuple_New(count))) return -1;
    for (Py_ssize_t i = 0; i < self->allocated; i++) {
        Py_ssize_t k = self->order[i];
        PyObject *made;
        if (k == count) {
            if (allocate_scratch(self, stream, &memory->scratch)) return -1;
            base[k] = (uint64_t)(uintptr_t)memory->scratch;
            continue;
        }
        if (!(made = PyObject_Call(self->empty, PyTuple_GET_ITEM(self->storages, k), NULL))) return -1;
        PyTuple_SET_ITEM(memory->storages, k, made);
        if (address_of(made, base + k)) return -1;
    }
    return 0;
}
