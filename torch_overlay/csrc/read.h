/* Reads what Python passes. Each function that fails sets an error. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Returns memory of zeros for `count` elements, and for one more, so that it is never empty; NULL if there is none. */
void *zeros(Py_ssize_t count, size_t size);

/* Memory that an object has until it is freed itself. */
typedef struct Piece {
    struct Piece *next;
} *Pool;

/* Returns such memory, as `zeros` does, that begins at a line of the processor's cache. */
void *pool_zeros(Pool *pool, Py_ssize_t count, size_t size);
void pool_free(Pool *pool);
/* Puts an item, which may be NULL with an error, into a new tuple, which is cleared then. Steals the item. */
void set_item(PyObject **tuple, Py_ssize_t i, PyObject *item);
/* Sets a ValueError, and returns -1. */
int refuse(const char *why);
/* Returns 1 if the item is a tuple; else 0, with a TypeError that names item `i` (`i` < 0: it has no number).
   PyArg_ParseTuple and PyObject_Call don't check this. */
int is_tuple(PyObject *item, const char *what, Py_ssize_t i);
/* Reads a tuple of integers, each from `begin` on and below `end`. Returns NULL if it can't. */
Py_ssize_t *read_row(Pool *pool, PyObject *items, const char *what, Py_ssize_t begin, Py_ssize_t end,
                     Py_ssize_t *count);
/* Reads item `i` of `items`, a tuple of `count` integers, each at least 0 and below its end. Returns 0 or -1. */
int read_record(PyObject *items, Py_ssize_t i, const char *what, int count, const Py_ssize_t *ends, Py_ssize_t *to);
