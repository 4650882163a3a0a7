/* The memory and the outputs of a launch. */

#pragma once

#include "driver_api.h"
#include "read.h"

/* The objects are those of a tuple of `recipes`. */
typedef struct {
    int kind;
    Py_ssize_t number;
    PyObject *object, *size, *stride, *offset;
} Recipe;

/* How the memory of a graph is allocated, and how outputs are made of that and of the inputs. Regions are, in order:
   inputs, storages of outputs, scratch. The objects belong to whoever has the layout. */
typedef struct {
    PyObject *empty;                  /* makes a tensor of (size, stride, dtype) */
    PyObject *storages;               /* its arguments for each storage */
    size_t scratch;                   /* bytes, which are no tensor */
    PyObject *raw_alloc, *raw_delete; /* torch's Python functions for the scratch, */
    int (*alloc)(uint64_t, Handle *); /* and its C functions, which return 0 on success; or NULL */
    int (*release)(Handle);
    Py_ssize_t inputs, allocated, *order; /* order: of what is allocated, as regions after the inputs */
    PyObject *recipes;                    /* (kind, number, object, size, stride, offset) of each output */
    Recipe *recipe;
    PyObject *typed;       /* (storage, dtype) of views of storages, which come after these */
    Py_ssize_t *viewed;    /* the storage of each */
    PyObject *reinterpret; /* makes a view of a tensor */
} Layout;

/* What one launch has allocated. */
typedef struct {
    PyObject *storages;
    Handle scratch;
} Memory;

/* Checks a layout whose objects and numbers are set, and reads the order, a tuple, and the recipes. Raises `least` so
   that a list of that many inputs has each that is an output. Returns 0, or -1 with an error. */
int layout_init(Layout *self, Pool *pool, PyObject *order, Py_ssize_t *least);
/* Allocates, and writes the addresses of the regions after the inputs into `base`, where those of the inputs are. What
   is allocated when it fails is in `memory`. Returns 0, or -1 with an error. */
int allocate_memory(const Layout *self, Handle stream, Memory *memory, uint64_t *base);
/* Frees the scratch, if there is any. Returns 0, or -1 with an error; an error that is set already is kept. */
int free_scratch(const Layout *self, Memory *memory);

/* Returns a new tuple of the outputs, or NULL with an error. `source`: the inputs. */
PyObject *make_outputs(const Layout *self, PyObject *source, PyObject *storages);

static inline void free_memory(const Layout *self, Memory *memory) {
    free_scratch(self, memory);
    Py_CLEAR(memory->storages);
}

static inline size_t scratch_region(const Layout *self) {
    return (size_t)(self->inputs + PyTuple_GET_SIZE(self->storages));
}
