/* The outputs of a launch. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* The objects are those of a tuple of `recipes`. */
typedef struct {
    int kind;
    Py_ssize_t number;
    PyObject *object, *size, *stride, *offset;
} Recipe;

/* How outputs are made of the inputs and of the memory that was allocated. The objects belong to whoever has the
   outputs. */
typedef struct {
    PyObject *recipes; /* (kind, number, object, size, stride, offset) of each output */
    Recipe *recipe;
    PyObject *typed;               /* (storage, dtype) of views of storages, which come after these */
    Py_ssize_t *viewed;            /* the storage of each */
    PyObject *empty, *reinterpret; /* make a tensor, and a view of one */
} Outputs;

/* Reads the recipes, and what is typed, both tuples, for so many storages. Raises `least` so that a list of that many
   inputs has each that is an output. Returns 0, or -1 with an error; they are to be cleared either way. */
int outputs_init(Outputs *self, Py_ssize_t storages, Py_ssize_t *least);
void outputs_clear(Outputs *self);
/* Returns a new tuple of the outputs, or NULL with an error. `source`: the inputs. */
PyObject *make_outputs(const Outputs *self, PyObject *source, PyObject *storages);
