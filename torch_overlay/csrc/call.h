/* A graph that can be launched by one call. */

#pragma once

#include "counter.h"
#include "device.h"
#include "launch_memory.h"
#include "outputs.h"
#include "patch.h"

typedef struct {
    Py_ssize_t position;
    uint64_t mask;
} Input;

/* An executable bound to a layout. */
typedef struct {
    PyObject_HEAD
    Blocks blocks;
    Device device;
    Py_ssize_t inputs, least; /* least: so many inputs a call has at the least */
    Input *input;
    Program numbers;
    Layout layout;
    Outputs outputs;
    Counter counter;
    PyObject *replay; /* keeps the executable; not called if the driver launches */
    int direct;
    PyObject *misaligned;
    unsigned long long launches, patched; /* patched: nodes set for them */
} Call;

/* Launches, and returns the outputs. With `careful` it returns None if the graph can't be launched now, or an input is
   misaligned. `originals`: the caller's tensors where inputs are copies, or NULL. */
PyObject *run_call(Call *self, PyObject *inputs, PyObject *originals, int careful);
