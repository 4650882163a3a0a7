/* Declarations that the files of a relaunch share: addresses of tensors, the patching of executables, scratch
   memory, and whole calls. */

#pragma once

#include "driver_api.h"

/* ---- data_ptr.c ---- */

typedef struct {
    void *table;
    uint64_t references;
    void *data, *other[4];
    uint8_t flags[3], asks;
} Storage;

typedef struct {
    void *table;
    uint64_t references;
    Storage *storage;
    void *other[15];
    int64_t offset, length;
    uint16_t dtype;
} Tensor;

typedef struct {
    PyObject_HEAD
    Tensor *tensor;
} Holder;

#define DTYPES 128
extern PyTypeObject *tensor_type, *usual_type; /* usual_type: one of its subtypes */
extern uint8_t item_sizes[DTYPES];

/* Reads the address from the tensor's fields. Returns 0 if they don't hold it. */
static inline int field_address(PyObject *object, uint64_t *address) {
    PyTypeObject *type = Py_TYPE(object);
    Tensor *tensor;
    Storage *storage;
    if (type != usual_type && type != tensor_type && (!tensor_type || !PyType_IsSubtype(type, tensor_type))) return 0;
    tensor = ((Holder *)object)->tensor;
    if (!tensor || !(storage = tensor->storage) || tensor->length <= 0 || tensor->dtype >= DTYPES
        || !item_sizes[tensor->dtype] || storage->asks)
        return 0;
    *address = (uint64_t)(uintptr_t)storage->data + tensor->offset * item_sizes[tensor->dtype];
    return 1;
}

/* Calls the object's `data_ptr()`. Returns -1 with an error if it has none. */
int asked_address(PyObject *object, uint64_t *address);

static inline int address_of(PyObject *object, uint64_t *address) {
    return field_address(object, address) ? 0 : asked_address(object, address);
}

PyObject *aligned(PyObject *tensors, PyObject *indices, PyObject *masks);

/* ---- patch.c ---- */

typedef struct {
    Handle handle, context;
    unsigned char *block;
    size_t size; /* of the block, without the array that points into it */
    char *label;
    int kind;
} Node;

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

/* A number slot: a parameter that a launch computes. `held` is what it holds. */
typedef struct {
    unsigned char *where;
    size_t node;
    int type;
    uint64_t held;
} Word;

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

Py_ssize_t set_moved(Blocks *self, const uint64_t *base, size_t regions);
Py_ssize_t set_nodes(Blocks *self);
int get_context(Handle *now);
int have_context(Blocks *self, Handle now);

/* ---- numbers.c ---- */

typedef union {
    int64_t i;
    double d;
} Number;

typedef struct {
    int operation, a, b;
} Step;

/* Computes the values of words from the numbers among the inputs. Registers: inputs, constants, steps. */
typedef struct {
    Py_ssize_t inputs, constants, steps, results, least; /* least: so many inputs a call has at the least */
    Py_ssize_t *position;                                /* of each input */
    unsigned char *is_float;                             /* of each register */
    Number *start;                                       /* the registers before a run: constants are in place */
    Step *step;
    int *result; /* registers */
} Program;

size_t size_of_word(int type);
int program_init(Program *self, PyObject *numbers);
void program_clear(Program *self);
/* Makes the values of `count` words, then the results after these as integers of 64 bits, in `value`. 1: done. 0: the
   numbers are unfit. -1: an error. */
int program_run(const Program *self, PyObject *inputs, const Word *words, size_t count, uint64_t *value);

/* ---- scratch.c ---- */

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

/* ---- call.c ---- */

PyObject *blocks_call(Blocks *blocks, PyObject *args, PyObject *kwargs);
