/* The memory of a launch. */

#pragma once

#include "driver_api.h"

/* How the memory of a graph is allocated. Regions are, in order: inputs, storages of outputs, scratch. The objects
   belong to whoever has the layout. */
typedef struct {
    PyObject *empty;                  /* makes a tensor of (size, stride, dtype) */
    PyObject *storages;               /* its arguments for each storage */
    size_t scratch;                   /* bytes, which are no tensor */
    PyObject *raw_alloc, *raw_delete; /* torch's Python functions for the scratch, */
    int (*alloc)(uint64_t, Handle *); /* and its C functions, which return 0 on success; or NULL */
    int (*release)(Handle);
    Py_ssize_t inputs, allocated, *order; /* order: of what is allocated, as regions after the inputs */
} Layout;

/* What one launch has allocated. */
typedef struct {
    PyObject *storages;
    Handle scratch;
} Memory;

/* Checks a layout whose objects and numbers are set, and reads the order, a tuple. Returns 0, or -1 with an error; it
   is to be cleared either way. */
int layout_init(Layout *self, PyObject *order);
void layout_clear(Layout *self);
/* Allocates, and writes the addresses of the regions after the inputs into `base`, where those of the inputs are. What
   is allocated when it fails is in `memory`. Returns 0, or -1 with an error. */
int allocate_memory(const Layout *self, Handle stream, Memory *memory, uint64_t *base);
/* Frees the scratch, if there is any. Returns 0, or -1 with an error; an error that is set already is kept. */
int free_scratch(const Layout *self, Memory *memory);

static inline void free_memory(const Layout *self, Memory *memory) {
    free_scratch(self, memory);
    Py_CLEAR(memory->storages);
}

static inline size_t scratch_region(const Layout *self) {
    return (size_t)(self->inputs + PyTuple_GET_SIZE(self->storages));
}
