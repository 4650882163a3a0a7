/* Calls of library functions as launches of kernels. */

#pragma once

#include "data_ptr.h"
#include "driver_api.h"

enum { MOST_ARGUMENTS = 16 }; /* of a call that may be an entry */

/* An argument: a tensor's fields and address, or an object without them, or both. */
typedef struct {
    PyObject *object;
    const Tensor *tensor;
    uint64_t address;
} Argument;

/* Launches what the call launches, if it is an entry, and returns its result. NULL: it isn't, or with an error.
   `names`: of the last arguments; one object for the same names. `modes`: what else decides what the function
   launches. A result that is an argument without an object is None. */
PyObject *launch_call(PyObject *calls, long modes, PyObject *function, PyObject *names, const Argument *argument,
                      Py_ssize_t count, Handle stream);
/* Notes a call that is no entry, with all its objects. 1: it has become one. 0: it is to be called. -1: an error. */
int note_call(PyObject *calls, long modes, PyObject *function, PyObject *names, const Argument *argument,
              PyObject *const *object, Py_ssize_t count);
/* Returns the modes, a number; negative if calls mustn't be entries now, or with an error. */
long modes_of_calls(PyObject *calls);
/* Returns 0; or -1 with a TypeError if the object isn't `calls`. */
int check_calls(PyObject *calls);
