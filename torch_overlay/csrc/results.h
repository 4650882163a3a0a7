/* Results of a program of numbers among the arguments of torch's functions. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Returns 1 if each result that the object names, itself or in a tuple, is one of so many; else 0, with an error. */
int has_results(PyObject *object, Py_ssize_t results);
/* Returns a new reference to the object with the values of the results in place of these. */
PyObject *with_values(PyObject *object, const uint64_t *values);
