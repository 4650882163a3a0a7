/* The memory of a launch: storages of outputs, a slab of saved outputs, and scratch, the largest first. */

#include "launch_memory.h"
#include "data_ptr.h"
#include "results.h"

static int read_derived(Layout *self, PyObject *derived, Py_ssize_t results) {
    Py_ssize_t regions = (Py_ssize_t)slab_region(self) + 2;
    self->deriveds = derived ? PyTuple_GET_SIZE(derived) : 0;
    if (!(self->derived = PyMem_Calloc(self->deriveds + 1, sizeof *self->derived))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->deriveds; i++) {
        Derived *each = &self->derived[i];
        if (!is_tuple(PyTuple_GET_ITEM(derived, i), "derived region", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(derived, i), "nn;a derived region is (region, result)", &each->parent,
                                 &each->result))
            return -1;
        if (each->parent < 0 || each->parent >= regions || each->result < 0 || each->result >= results) {
            PyErr_SetString(PyExc_ValueError, "a derived region lies in none, or begins at no result");
            return -1;
        }
    }
    if (self->scratch_result < results) return 0;
    PyErr_SetString(PyExc_ValueError, "the scratch is as large as no result");
    return -1;
}

/* Each allocated region has to be in the order once: the storages, and the slab and the scratch if there are any. */
static int read_order(Layout *self, PyObject *order) {
    Py_ssize_t made = PyTuple_GET_SIZE(self->storages), slab = self->slab != Py_None;
    self->allocated = made + slab + (self->scratch != Py_None);
    if (PyTuple_GET_SIZE(order) != self->allocated) {
        PyErr_SetString(PyExc_ValueError, "so many regions are not allocated");
        return -1;
    }
    if (!(self->order = PyMem_Calloc(self->allocated + 1, sizeof made))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->allocated; i++) {
        Py_ssize_t k = PyLong_AsSsize_t(PyTuple_GET_ITEM(order, i));
        int known = k >= 0 && (k < made || (k == made && slab) || (k == made + 1 && self->scratch != Py_None));
        for (Py_ssize_t j = 0; j < i; j++) known &= self->order[j] != k;
        if (!known) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the order names a region twice, or none that is");
            return -1;
        }
        self->order[i] = k;
    }
    return 0;
}

int layout_init(Layout *self, PyObject *order, PyObject *derived, Py_ssize_t results) {
    if ((self->slab != Py_None && !is_tuple(self->slab, "the slab", -1))
        || (self->scratch != Py_None && !is_tuple(self->scratch, "the scratch", -1)))
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->storages); i++)
        if (!is_tuple(PyTuple_GET_ITEM(self->storages, i), "allocation", i)) return -1;
    if (!has_results(self->storages, results)) return -1;
    return read_derived(self, derived, results) || read_order(self, order) ? -1 : 0;
}

void layout_clear(Layout *self) {
    PyMem_Free(self->order);
    PyMem_Free(self->derived);
}

/* Returns a new tensor, whose size and stride may name results. */
static PyObject *allocate(const Layout *self, PyObject *arguments, const uint64_t *values) {
    PyObject *made, *plain;
    if (!self->is_sized) return PyObject_Call(self->empty, arguments, NULL);
    if (!(plain = with_values(arguments, values))) return NULL;
    made = PyObject_Call(self->empty, plain, NULL);
    Py_DECREF(plain);
    return made;
}

static int allocate_scratch(const Layout *self, Handle stream, Memory *memory, const uint64_t *values, uint64_t *base) {
    size_t size = self->scratch_result < 0 ? self->raw.size : (size_t)values[self->scratch_result];
    if (self->raw.raw_alloc == Py_None) {
        memory->scratch = allocate(self, self->scratch, values);
        return memory->scratch && !address_of(memory->scratch, base) ? 0 : -1;
    }
    if (take_scratch(&self->raw, size, stream, &memory->raw)) return -1;
    *base = (uint64_t)(uintptr_t)memory->raw;
    return 0;
}

int allocate_memory(const Layout *self, Handle stream, Memory *memory, const uint64_t *values, uint64_t *base) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->storages);
    uint64_t *all = base;
    base += self->inputs;
    base[count] = base[count + 1] = 0;
    if (!(memory->storages = PyTuple_New(count))) return -1;
    for (Py_ssize_t i = 0; i < self->allocated; i++) {
        Py_ssize_t k = self->order[i];
        PyObject *made;
        if (k == count + 1) {
            if (allocate_scratch(self, stream, memory, values, base + k)) return -1;
            continue;
        }
        made = allocate(self, k == count ? self->slab : PyTuple_GET_ITEM(self->storages, k), values);
        if (!made) return -1;
        if (k == count)
            memory->slab = made;
        else
            PyTuple_SET_ITEM(memory->storages, k, made);
        if (address_of(made, base + k)) return -1;
    }
    for (Py_ssize_t i = 0; i < self->deriveds; i++)
        base[count + 2 + i] = all[self->derived[i].parent] + values[self->derived[i].result];
    return 0;
}
