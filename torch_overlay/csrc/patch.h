/* Executables whose nodes are patched. */

#pragma once

#include "driver_api.h"
#include "numbers.h"

/* The parameters of a node, as the driver reads them. Its block is the driver's struct, then the arguments' values,
 * then the array that points to them. */
typedef struct {
    Handle handle, context;
    unsigned char *block;
    size_t size; /* of the block, without the array that points into it */
    char *label;
    int kind; /* KERNEL, FILL or COPY */
} Node;

enum { KERNEL, FILL, COPY };

/* A pointer slot. */
typedef struct {
    unsigned char *where;
    uint64_t delta;
    size_t node;
} Slot;

typedef struct {
    Handle exec;
    size_t nodes, slots, regions, words;
    Word *word;
    Node *node;
    Slot *slot;              /* sorted by region: those of region r are [first[r], first[r + 1]) */
    size_t *first, *dirty;   /* dirty: nodes to set, at most all */
    uint64_t *base;          /* of each region, as the blocks have it */
    uint64_t *turn_of, turn; /* turn_of: the last turn that listed the node */
    int stale;               /* what the executable holds is unknown */
    int refused;             /* the driver has just refused a copy: Note [The memory that a memcpy node was made for] */
    PyThread_type_lock lock; /* patching and launching are one step */
} Blocks;

/* Makes blocks, of which only `exec` is set, of tuples for nodes, pointer slots and number slots. Returns 0, or -1 with
   an error; they are to be cleared either way. */
int blocks_init(Blocks *self, Pool *pool, Py_ssize_t regions, PyObject *given, PyObject *pointers, PyObject *numbers);
void blocks_clear(Blocks *self);
/* Writes the bases of the regions and the values of the words into the blocks. Returns how many nodes are now on the
   list `dirty`: those of what is other than before, and all if the blocks are stale. */
size_t write_blocks(Blocks *self, const uint64_t *base, const uint64_t *value);
/* Sets the nodes on the list. Returns their number, or -1. */
Py_ssize_t set_listed(Blocks *self, size_t count);
