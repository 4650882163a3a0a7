/* Scratch memory of a launch. */

#pragma once

#include "driver_api.h"

/* Torch's C functions, which return 0 on success. NULL: torch's Python functions are called instead. */
typedef struct {
    int (*stream)(int, Handle *), (*alloc)(uint64_t, Handle *), (*release)(Handle);
} Torch;

/* The scratch of one graph. */
typedef struct {
    PyObject *raw_alloc, *raw_delete;
    Torch torch;
    size_t size;
} Scratch;

void scratch_clear(Scratch *self);
int take_scratch(Scratch *self, size_t size, Handle stream, Handle *address);
int free_scratch(Scratch *self, Handle *address);
