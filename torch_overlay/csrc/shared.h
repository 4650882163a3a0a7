/* What an executable holds whose nodes are set to much else at many launches. */

#pragma once

#include "node.h"

/* With what a node launches its kernel, beside its parameters. */
typedef struct {
    Attribute attribute[ATTRIBUTE_COUNT];
    unsigned count;
} Attributes;

/* Several graphs share the executable, or sizes vary. `holder`: for each node the node of a `Blocks` whose block it was
   set to, or NULL if that is unknown. `last`: the `Blocks` that all nodes were set to last; `recent`: the one that was
   launched last; neither is read. The lock is for patching and launching as one step. */
typedef struct {
    PyObject_HEAD
    size_t nodes;
    const Node **holder;
    const void *last, *recent;
    PyThread_type_lock lock;
    PyObject *launches;     /* (node, attributes as the graph reader gives them) in the order of launch, or None: the
                               kernels can't be launched one by one */
    Attributes *attributes; /* of each node; NULL without `launches` */
    int patience, refused;  /* of `launch_nodes`; refused: the executable can't be set to all that its users launch */
} Shared;

/* Returns a borrowed reference to the type; NULL with a Python error. */
PyTypeObject *shared_type(void);
