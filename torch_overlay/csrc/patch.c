/* Executables whose nodes are patched.

   `Blocks` own a block of parameters for each node that holds a pointer, or a number that a launch computes. A launch
   writes the pointer slots of the regions whose base changed, and passes the blocks of their nodes to the driver. It
   allocates nothing; it costs one comparison a region, and otherwise grows only with what moved. */

#include "patch.h"

/* Reads (kind, handle, label, block, offsets of the arguments in the block), node `number` of a list, into a node of
   zeros, for the current context. Returns 0, or -1 with a Python error. */
static int node_read(Node *node, Pool *pool, PyObject *item, Py_ssize_t number) {
    static const size_t least[] = {sizeof(KernelParams), 40, 200};
    unsigned long long handle;
    const char *label, *block;
    Py_ssize_t length, label_length, count, *offset;
    PyObject *arguments;
    size_t bytes, at;
    if (!is_tuple(item, "node", number)
        || !PyArg_ParseTuple(item, "iKs#y#O;a node is (kind, handle, label, block, arguments)", &node->kind, &handle,
                             &label, &label_length, &block, &length, &arguments))
        return -1;
    if (node->kind < 0 || node->kind > COPY || (size_t)length < least[node->kind])
        return refuse("not a node that can be patched");
    if (!(offset = read_row(pool, arguments, "an argument of a block", 0, length + 1, &count))) return -1;
    at = round_up((size_t)length, 64);
    bytes = round_up(at + (size_t)count * sizeof(void *), 64);
    node->handle = (Handle)(uintptr_t)handle;
    if (driver_check(cu.CtxGetCurrent(&node->context), "cuCtxGetCurrent", "")
        || !(node->label = pool_zeros(pool, label_length, 1))
        || !(node->block = pool_zeros(pool, (Py_ssize_t)bytes, 1)))
        return -1;
    memcpy(node->label, label, (size_t)label_length);
    memcpy(node->block, block, (size_t)length);
    for (Py_ssize_t i = 0; i < count; i++) ((void **)(node->block + at))[i] = node->block + offset[i];
    if (node->kind == KERNEL) {
        KernelParams *params = (KernelParams *)node->block;
        params->arguments = count ? (void **)(node->block + at) : NULL;
        params->extra = NULL;
    }
    node->size = (size_t)length;
    return 0;
}

/* Sets the node in the executable. Returns 0, or -1 with an error that names it. */
static int node_set(const Node *node, Handle exec) {
    static const char *const what[] = {"cuGraphExecKernelNodeSetParams", "cuGraphExecMemsetNodeSetParams",
                                       "cuGraphExecMemcpyNodeSetParams"};
    int code = 0;
    switch (node->kind) {
    case KERNEL: code = cu.GraphExecKernelNodeSetParams(exec, node->handle, node->block); break;
    case FILL: code = cu.GraphExecMemsetNodeSetParams(exec, node->handle, node->block, node->context); break;
    case COPY: code = cu.GraphExecMemcpyNodeSetParams(exec, node->handle, node->block, node->context); break;
    }
    return driver_check(code, what[node->kind], node->label);
}

void blocks_clear(Blocks *self) {
    if (self->lock) PyThread_free_lock(self->lock);
}

static int read_slots(Blocks *self, PyObject *slots) {
    const Py_ssize_t ends[] = {(Py_ssize_t)self->nodes, PY_SSIZE_T_MAX, (Py_ssize_t)self->regions, PY_SSIZE_T_MAX};
    size_t before = 0;
    for (size_t i = 0; i < self->slots; i++) {
        Py_ssize_t slot[4]; /* node, offset, region, delta */
        size_t node, offset, region;
        if (read_record(slots, (Py_ssize_t)i, "pointer slot", 4, ends, slot)) return -1;
        node = (size_t)slot[0], offset = (size_t)slot[1], region = (size_t)slot[2];
        if (region < before || self->node[node].size < 8 || offset > self->node[node].size - 8)
            return refuse("a pointer slot lies outside of its node, or is out of order");
        self->slot[i] = (Slot){self->node[node].block + offset, (uint64_t)slot[3], node};
        self->first[region + 1] = i + 1;
        before = region;
    }
    for (size_t r = 0; r < self->regions; r++) /* regions without pointer slots */
        if (self->first[r + 1] < self->first[r]) self->first[r + 1] = self->first[r];
    return 0;
}

static int read_words(Blocks *self, PyObject *words) {
    const Py_ssize_t ends[] = {(Py_ssize_t)self->nodes, PY_SSIZE_T_MAX, TYPES};
    for (size_t i = 0; i < self->words; i++) {
        Py_ssize_t slot[3]; /* node, offset, type */
        Word *word = &self->word[i];
        const Node *node;
        size_t length;
        if (read_record(words, (Py_ssize_t)i, "number slot", 3, ends, slot)) return -1;
        node = &self->node[slot[0]];
        length = size_of_word(slot[2]);
        if (node->kind || node->size < length || (size_t)slot[1] > node->size - length)
            return refuse("a number slot lies outside of its node");
        *word = (Word){node->block + slot[1], (size_t)slot[0], slot[2], 0};
        memcpy(&word->held, word->where, length);
    }
    return 0;
}

int blocks_init(Blocks *self, Pool *pool, Py_ssize_t regions, PyObject *given, PyObject *pointers, PyObject *numbers) {
    Py_ssize_t nodes = PyTuple_GET_SIZE(given), slots = PyTuple_GET_SIZE(pointers), words = PyTuple_GET_SIZE(numbers);
    if (regions < 0) return refuse("a negative number of regions");
    self->regions = (size_t)regions;
    self->stale = 1;
    self->nodes = (size_t)nodes;
    self->slots = (size_t)slots;
    self->words = (size_t)words;
    if (!(self->node = pool_zeros(pool, nodes, sizeof *self->node))
        || !(self->slot = pool_zeros(pool, slots, sizeof *self->slot))
        || !(self->first = pool_zeros(pool, regions, sizeof *self->first))
        || !(self->dirty = pool_zeros(pool, nodes, sizeof *self->dirty))
        || !(self->turn_of = pool_zeros(pool, nodes, sizeof *self->turn_of))
        || !(self->base = pool_zeros(pool, regions, sizeof *self->base))
        || !(self->word = pool_zeros(pool, words, sizeof *self->word)))
        return -1;
    if (!(self->lock = PyThread_allocate_lock())) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < nodes; i++)
        if (node_read(&self->node[i], pool, PyTuple_GET_ITEM(given, i), i)) return -1;
    return read_slots(self, pointers) || read_words(self, numbers) ? -1 : 0;
}

static size_t list_node(Blocks *self, size_t node, size_t count) {
    if (self->turn_of[node] == self->turn) return count;
    self->turn_of[node] = self->turn;
    self->dirty[count] = node;
    return count + 1;
}

/* Writes the pointer slots of a region, and puts their nodes on the list `dirty`. Returns the list's new length. */
static size_t write_slots(Blocks *self, size_t region, uint64_t base, size_t count) {
    for (size_t i = self->first[region]; i < self->first[region + 1]; i++) {
        Slot *slot = &self->slot[i];
        uint64_t value = base + slot->delta;
        memcpy(slot->where, &value, sizeof value);
        count = list_node(self, slot->node, count);
    }
    return count;
}

/* Writes the number slots whose value has changed, and puts their nodes on the list. */
static size_t write_words(Blocks *self, const uint64_t *value, size_t count) {
    for (size_t i = 0; i < self->words; i++) {
        Word *word = &self->word[i];
        if (!self->stale && word->held == value[i]) continue;
        word->held = value[i];
        memcpy(word->where, &word->held, size_of_word(word->type));
        count = list_node(self, word->node, count);
    }
    return count;
}

Py_ssize_t set_listed(Blocks *self, size_t count) {
    self->stale = 1;
    for (size_t i = 0; i < count; i++) {
        const Node *node = &self->node[self->dirty[i]];
        if (node_set(node, self->exec)) {
            self->refused = node->kind == COPY;
            return -1;
        }
    }
    self->stale = 0;
    return (Py_ssize_t)count;
}

size_t write_blocks(Blocks *self, const uint64_t *base, const uint64_t *value) {
    size_t count = 0;
    self->turn++;
    for (size_t r = 0; r < self->regions; r++) {
        if (base[r] == self->base[r] && !self->stale) continue;
        self->base[r] = base[r];
        count = write_slots(self, r, base[r], count);
    }
    return write_words(self, value, count);
}
