/* Launches the nodes of blocks: by the executable, or the kernels one by one. */

#pragma once

#include "patch.h"

/* Launches so far, nodes set for them, and those of which the kernels were launched one by one. */
typedef struct {
    unsigned long long launches, patched, by_node;
} Launched;

/* `own`: how many nodes are on the list `dirty`, by `write_bases`. `replay`: the function that
   launches the executable, or NULL: the driver launches it. Returns 0, or -1 with an error. */
int launch_nodes(Blocks *self, size_t own, Handle stream, PyObject *replay, Launched *counts);
