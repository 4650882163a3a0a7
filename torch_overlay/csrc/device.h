/* The device that launches are for, as a thread finds it. */

#pragma once

#include "driver_api.h"

typedef struct {
    long index;
    Handle context;  /* in which this was made, if the device was the current one then */
    PyObject *given; /* keeps the others: the index, and torch's functions for the thread's device and stream */
    PyObject *number, *current, *stream_of;
    int (*stream)(int, Handle *); /* torch's C function, which returns 0 on success; or NULL */
} Device;

/* Reads (index, current, stream_of, address of torch's C function for the stream, or 0),
   into a device of zeros. Returns 0, or -1 with an error; it is to be cleared either way. */
int device_init(Device *self, PyObject *given);
void device_clear(Device *self);
/* Gives a thread that has not called CUDA's runtime the device's context, and so the device as the current one: the
   driver would read through a missing context unchecked. Returns 0, or -1 with an error. */
int have_context(const Device *self);
/* Finds this thread's stream of the device. Returns 0, or -1 with an error. */
int current_stream(const Device *self, Handle *stream);
/* 1: this is the thread's device, and has a context; `stream` is the current one. 0: another one is. -1: an error. */
int find_stream(const Device *self, Handle *stream);
