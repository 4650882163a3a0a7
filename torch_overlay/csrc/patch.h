/* Executables whose nodes are patched. */

#pragma once

#include "node.h"
#include "numbers.h"

/* What an executable holds that several graphs share: for each of its nodes the node of a `Blocks` whose block it was
   set to, or NULL if that is unknown. `last`: the `Blocks` that was launched last, never read. The lock is for patching
   and launching as one step. */
typedef struct {
    PyObject_HEAD
    size_t nodes;
    const Node **holder;
    const void *last;
    PyThread_type_lock lock;
} Shared;

/* A pointer slot. */
typedef struct {
    unsigned char *where;
    uint64_t delta;
    size_t node;
} Slot;

typedef struct {
    PyObject_HEAD
    Handle exec, context; /* context: in which the executable was made */
    size_t nodes, slots, regions, words;
    Word *word;
    uint64_t *value; /* what each word is to hold */
    Shared *shared;  /* or NULL: the executable is the object's own */
    size_t *number;  /* of each node, in `shared` */
    Node *node;
    Slot *slot;             /* sorted by region: those of region r are [first[r], first[r + 1]) */
    size_t *first, *dirty;  /* dirty: nodes to set, at most all */
    uint64_t *base, *fresh; /* of each region: from the last call, and from this call */
    unsigned char *known, *given;
    uint64_t *turn_of, turn; /* turn_of: the last turn that listed the node */
    int stale, busy;         /* stale: what the executable holds is unknown */
} Blocks;

/* Returns a borrowed reference to the type; NULL with a Python error. */
PyTypeObject *blocks_type(void);
Py_ssize_t set_moved(Blocks *self, const uint64_t *base, size_t regions);
Py_ssize_t set_nodes(Blocks *self);
int get_context(Handle *now);
int have_context(Blocks *self, Handle now);
