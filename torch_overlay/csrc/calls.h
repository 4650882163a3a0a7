/* Calls of library functions as launches of kernels. */

#pragma once

#include "driver_api.h"

/* Launches what the call launches, if it is an entry, or becomes one, and returns its result. NULL: it is to be called,
   or with an error. `names`: of the last arguments; one object for the same names. `modes`: what else decides what the
   function launches. `site`: the place of the call in code. */
PyObject *launch_call(PyObject *calls, long modes, PyObject *function, PyObject *names, PyObject *const *arguments,
                      Py_ssize_t count, const void *site, Handle stream);
/* Returns the modes, a number; negative if calls mustn't be entries now, or with an error. */
long modes_of_calls(PyObject *calls);
/* Returns 0; or -1 with a TypeError if the object isn't `calls`. */
int check_calls(PyObject *calls);
