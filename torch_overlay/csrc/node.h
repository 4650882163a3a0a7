/* The parameters of a node of an executable, as the driver reads them. */

#pragma once

#include "driver_api.h"

/* Its block is the driver's struct, then the arguments' values, then the array that points to them. */
typedef struct {
    Handle handle, context;
    unsigned char *block;
    size_t size; /* of the block, without the array that points into it */
    char *label;
    int kind; /* KERNEL, FILL or COPY */
} Node;

enum { KERNEL, FILL, COPY };

/* Reads (kind, handle, context, label, block, offsets of the arguments in the block), node `number` of a list, into a
   node of zeros. Returns 0, or -1 with a Python error; the node is to be cleared either way. */
int node_read(Node *node, PyObject *item, Py_ssize_t number);
void node_clear(Node *node);
/* Sets the node in the executable. Returns 0, or -1 with an error that names it. */
int node_set(const Node *node, Handle exec);
/* Sets a memcpy node in the graph that it was captured into. Returns as `node_set`. */
int node_set_in_graph(const Node *node);
