/* Scratch memory of a launch. */

#pragma once

#include "driver_api.h"

/* Torch's C functions, which return 0 on success. NULL: torch's Python functions are called instead. */
typedef struct {
    int (*stream)(int, Handle *), (*alloc)(uint64_t, Handle *), (*release)(Handle);
} Torch;

/* How the scratch of a graph is allocated. The objects belong to whoever has it. */
typedef struct {
    PyObject *raw_alloc, *raw_delete;
    Torch torch;
    size_t size;
} Scratch;

/* Allocates so many bytes on the stream. Returns 0, or -1 and an error. */
int take_scratch(const Scratch *self, size_t size, Handle stream, Handle *address);
/* Frees what is there, and sets the address to NULL. Returns 0, or -1 and an error; an error that is set already is
   kept. */
int release_scratch(const Scratch *self, Handle *address);

/* The same, after a launch or its failure; the address may be NULL. */
static inline int free_scratch(const Scratch *self, Handle *address) {
    return *address ? release_scratch(self, address) : 0;
}
