/* A count in a dictionary of dictionaries. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Stands for counters[group][name]. The objects belong to whoever has the counter. */
typedef struct {
    PyObject *counters, *group, *name;
    const void *seen[5]; /* where it was: to prefetch, never to read */
} Counter;

/* Adds one. Returns 0, or -1 with an error. */
int counter_add(Counter *self);

/* Prefetches the five objects on the way to the count, long before they are needed. */
static inline void counter_fetch(const Counter *self) {
    for (size_t i = 0; i < sizeof self->seen / sizeof *self->seen; i++) __builtin_prefetch(self->seen[i]);
}
