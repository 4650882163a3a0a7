/* The memory of a launch. */

#pragma once

#include "scratch.h"

/* How the memory of a graph is allocated. Regions are, in order: inputs, storages of outputs, the slab of saved
   outputs, scratch. The objects belong to whoever has the layout. */
typedef struct {
    PyObject *empty;                      /* makes a tensor of (size, stride, dtype) */
    PyObject *storages, *slab, *scratch;  /* its arguments: for each storage, and for the others or None */
    Scratch raw;                          /* allocates the scratch without a tensor, if raw_alloc is not None */
    Py_ssize_t inputs, allocated, *order; /* order: of what is allocated, as regions after the inputs */
} Layout;

/* What one launch has allocated: the scratch is in `scratch` if it is a tensor, else at `raw`. */
typedef struct {
    PyObject *storages, *slab, *scratch;
    Handle raw;
} Memory;

/* Checks a layout whose objects and numbers are set, and reads the order, a tuple. Returns 0, or -1 with an error; it
   is to be cleared either way. */
int layout_init(Layout *self, PyObject *order);
void layout_clear(Layout *self);
/* Allocates, and writes the addresses of the regions after the inputs into `base`, where those of the inputs are. What
   is allocated when it fails is in `memory`. Returns 0, or -1 with an error. */
int allocate_memory(const Layout *self, Handle stream, Memory *memory, uint64_t *base);

/* Frees the scratch. Returns 0, or -1 with an error; an error that is set already is kept. */
static inline int free_after_launch(const Layout *self, Memory *memory) {
    Py_CLEAR(memory->scratch);
    return free_scratch(&self->raw, &memory->raw);
}

static inline void free_memory(const Layout *self, Memory *memory) {
    free_after_launch(self, memory);
    Py_CLEAR(memory->storages);
    Py_CLEAR(memory->slab);
}

static inline size_t slab_region(const Layout *self) {
    return (size_t)(self->inputs + PyTuple_GET_SIZE(self->storages));
}

static inline size_t layout_regions(const Layout *self) { return slab_region(self) + 2; }
