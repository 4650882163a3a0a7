"""The C source of `native`: the aliased allocator and the patching of executables. `native` tells their story.

cuda.h is not needed, and nothing links against the driver: it is opened when the module is imported. `@driver@` stands
for its name.
"""

SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define ARENA ((size_t)4 << 40)
#define LOWEST ((Address)1 << 32)     /* Note [Addresses of captures], 5 and 6 */
#define WISH ((Address)0x2b75a600000)
typedef uint64_t Address;
typedef void *Handle;

/* As cuda.h declares them; the layout is the driver's ABI. */
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } BlockKind;
typedef struct { Location location; int flags; } Access;
typedef struct {
    Handle func; unsigned grid[3], block[3], shared_bytes; void **arguments, **extra; Handle kern, ctx;
} KernelParams;
_Static_assert(sizeof(BlockKind) == 32 && sizeof(Access) == 12 && sizeof(KernelParams) == 72, "cuda.h");

static struct {
    int (*granularity)(size_t *, const BlockKind *, int);
    int (*reserve)(Address *, size_t, size_t, Address, unsigned long long), (*unreserve)(Address, size_t);
    int (*create)(uint64_t *, size_t, const BlockKind *, unsigned long long), (*destroy)(uint64_t);
    int (*map)(Address, size_t, size_t, uint64_t, unsigned long long), (*unmap)(Address, size_t);
    int (*access)(Address, size_t, const Access *, size_t), (*mode)(int *), (*text)(int, const char **);
    int (*context)(Handle *), (*set_kernel)(Handle, Handle, const void *);
    int (*set_fill)(Handle, Handle, const void *, Handle), (*set_copy)(Handle, Handle, const void *, Handle);
} cu;

static const char *text_of(int code) {
    const char *text = NULL;
    cu.text(code, &text);
    return text ? text : "unknown error";
}

/* ---- aliased memory: everything below is guarded by `lock` ---- */

typedef struct Block { int device; long ranges; size_t granule; uint64_t handle; struct Block *next; } Block;
typedef struct Arena { Address base, top, end; int device; long ranges, held; struct Arena *next; } Arena;
typedef struct { Address address; size_t size; } Allocation;
typedef struct Range {
    uint64_t id;
    Arena *arena;
    Block *block;
    Address low, top, high;
    size_t gap, count, capacity;
    Allocation *list;
    long users;
    int sealed;
    char error[200];
    struct Range *next;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static Arena *arenas;
static Range *ranges;
static uint64_t last_id;
static __thread uint64_t current;

/* Memory calls are no part of a capture, but a capture in the strict mode forbids them. */
static int relax(void) { int mode = 2; return cu.mode(&mode) ? -1 : mode; }
static void restrain(int mode) { if (mode >= 0) cu.mode(&mode); }

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static Range *range_of(uint64_t id) {
    Range *range = ranges;
    while (range && range->id != id) range = range->next;
    return range;
}
static Range *range_of_thread(int device) {
    Range *found = NULL;
    if (current) return range_of(current);
    for (Range *range = ranges; range; range = range->next)
        if (range->users && range->arena->device == device) {
            if (found) return NULL;
            found = range;
        }
    return found;
}
static void drop_block(Block *block) {
    if (block->ranges) return;
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if (*at == block) { *at = block->next; break; }
    cu.destroy(block->handle);
    free(block);
}
static void drop_arena(Arena *arena) {
    int mode;
    if (arena->ranges || arena->held) return;
    for (Arena **at = &arenas; *at; at = &(*at)->next)
        if (*at == arena) { *at = arena->next; break; }
    mode = relax();
    cu.unreserve(arena->base, arena->end - arena->base);
    restrain(mode);
    free(arena);
}
static int find_block(int device, Block **result, const char **what) {
    BlockKind kind = {1 /* pinned */, 0, {1 /* device */, device}, NULL, {0}};
    size_t granule = 0;
    Block *block;
    int code;
    for (*result = blocks; *result; *result = (*result)->next)
        if ((*result)->device == device) return 0;
    *what = "cuMemGetAllocationGranularity";
    if ((code = cu.granularity(&granule, &kind, 0))) return code;
    if (!(block = calloc(1, sizeof *block))) return 2;
    block->device = device;
    block->granule = granule;
    *what = "cuMemCreate";
    if ((code = cu.create(&block->handle, granule, &kind, 0))) { free(block); return code; }
    block->next = blocks;
    *result = blocks = block;
    return 0;
}
static int reserve(Address *base, size_t size, size_t granule) {
    int code = cu.reserve(base, size, granule, WISH, 0);
    return code ? cu.reserve(base, size, granule, 0, 0) : 0;
}
static int find_arena(int device, size_t bytes, size_t granule, Arena **result, const char **what) {
    Arena *arena;
    size_t size = round_up(bytes > ARENA ? bytes : ARENA, granule);
    Address base = 0;
    int code;
    for (*result = arenas; *result; *result = (*result)->next)
        if ((*result)->device == device && (*result)->end - (*result)->top >= bytes) return 0;
    *what = "cuMemAddressReserve";
    while ((code = reserve(&base, size, granule))) {
        if (size == bytes) return code;
        size = size / 2 > bytes ? round_up(size / 2, granule) : bytes;
    }
    if (base < LOWEST) {
        *what = "cuMemAddressReserve, which gave addresses below 4 GiB";
        cu.unreserve(base, size);
        return 2;
    }
    if (!(arena = calloc(1, sizeof *arena))) { cu.unreserve(base, size); return 2; }
    arena->base = arena->top = base;
    arena->end = base + size;
    arena->device = device;
    arena->next = arenas;
    *result = arenas = arena;
    return 0;
}
static int unmap(Range *range, Address address, size_t size) {
    int code = cu.unmap(address, size), one;
    if (!code || size <= range->block->granule) return code;
    code = 0; /* a driver that wants each mapping by itself */
    for (size_t at = 0; at < size; at += range->block->granule)
        if ((one = cu.unmap(address + at, range->block->granule))) code = one;
    return code;
}
/* Why an allocation failed: torch only says that it did. A code of 0 is a reason of ours. */
static void *refuse(Range *range, size_t size, const char *what, int code) {
    if (code) snprintf(range->error, sizeof range->error, "CUDA driver error in %s: %s (%d), for an allocation of %zu "
                       "bytes", what, text_of(code), code, size);
    else snprintf(range->error, sizeof range->error, "%s, for an allocation of %zu bytes", what, size);
    return NULL;
}
static void *allocate(Range *range, size_t size) {
    size_t granule = range->block->granule, whole = round_up(size ? size : 1, granule), mapped = 0;
    Address address = range->top + range->gap * granule;
    Access access = {{1 /* device */, range->block->device}, 3 /* read and write */};
    const char *what = "cuMemMap";
    int code = 0;
    if (range->sealed) return refuse(range, size, "the range is sealed", 0);
    if (whole < size || address > range->high || range->high - address < whole + range->gap * granule)
        return refuse(range, size, "the range is too small", 0);
    if (range->count == range->capacity) {
        size_t capacity = range->capacity ? 2 * range->capacity : 64;
        Allocation *list = realloc(range->list, capacity * sizeof *list);
        if (!list) return refuse(range, size, "the host has no memory left", 0);
        range->list = list;
        range->capacity = capacity;
    }
    while (!code && mapped < whole)
        if (!(code = cu.map(address + mapped, granule, 0, range->block->handle, 0))) mapped += granule;
    if (!code) { what = "cuMemSetAccess"; code = cu.access(address, whole, &access, 1); }
    if (code) {
        if (mapped) unmap(range, address, mapped);
        return refuse(range, size, what, code);
    }
    range->list[range->count++] = (Allocation){address, size};
    range->top = address + whole;
    return (void *)address;
}

EXPORT void *overlay_alloc(ssize_t size, int device, void *stream) {
    void *result = NULL;
    Range *range;
    (void)stream;
    pthread_mutex_lock(&lock);
    range = range_of_thread(device);
    if (range && range->arena->device != device) refuse(range, (size_t)size, "another device than the range's", 0);
    else if (range && size >= 0) {
        int mode = relax();
        if ((result = allocate(range, (size_t)size))) range->arena->held++;
        restrain(mode);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
EXPORT void overlay_free(void *pointer, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    for (Arena *arena = arenas; arena; arena = arena->next)
        if (arena->base <= (Address)pointer && (Address)pointer < arena->end) {
            arena->held--;
            drop_arena(arena);
            break;
        }
    pthread_mutex_unlock(&lock);
}

static PyObject *fail(int code, const char *what) {
    return PyErr_Format(PyExc_RuntimeError, "CUDA driver error in %s: %s (%d)", what, text_of(code), code);
}
static PyObject *no_range(uint64_t id) {
    return PyErr_Format(PyExc_ValueError, "there is no range %llu", (unsigned long long)id);
}
static PyObject *py_reserve(PyObject *module, PyObject *args) {
    int device, code, mode;
    Py_ssize_t bytes, gap = 1;
    Block *block = NULL;
    Range *range;
    const char *what = "";
    uint64_t id = 0;
    if (!PyArg_ParseTuple(args, "in|n", &device, &bytes, &gap)) return NULL;
    if (bytes <= 0 || gap < 1) return PyErr_Format(PyExc_ValueError, "reserve() wants bytes > 0 and gap > 0");
    if (!(range = calloc(1, sizeof *range))) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lock);
    mode = relax();
    if (!(code = find_block(device, &block, &what))) {
        size_t whole = round_up(bytes, block->granule);
        if (!(code = find_arena(device, whole, block->granule, &range->arena, &what))) {
            range->block = block;
            range->gap = gap;
            range->low = range->top = range->arena->top;
            range->high = range->arena->top = range->low + whole;
            range->arena->ranges++;
            block->ranges++;
            range->id = id = ++last_id;
            range->next = ranges;
            ranges = range;
        } else drop_block(block);
    }
    restrain(mode);
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS
    if (code) { free(range); return fail(code, what); }
    return PyLong_FromUnsignedLongLong(id);
}
/* No allocation any more: what lies behind the last one goes back to the arena. */
static void seal(Range *range) {
    Address high = range->top + (range->count ? range->gap * range->block->granule : 0);
    if (range->sealed) return;
    range->sealed = 1;
    if (range->arena->top == range->high) range->arena->top = high;
    range->high = high;
}
static PyObject *py_seal(PyObject *module, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    Range *range;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    if ((range = range_of(id))) seal(range);
    pthread_mutex_unlock(&lock);
    if (!range) return no_range(id);
    Py_RETURN_NONE;
}
static PyObject *py_release(PyObject *module, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    Range *range;
    int code = 0, one, used = 0, mode;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lock);
    if ((range = range_of(id)) && !(used = range->users != 0)) {
        mode = relax();
        seal(range);
        for (Range **at = &ranges; *at; at = &(*at)->next)
            if (*at == range) { *at = range->next; break; }
        for (size_t i = 0; i < range->count; i++) {
            Allocation *each = &range->list[i];
            if ((one = unmap(range, each->address, round_up(each->size ? each->size : 1, range->block->granule))))
                code = one;
        }
        range->block->ranges--;
        drop_block(range->block);
        range->arena->ranges--;
        drop_arena(range->arena);
        free(range->list);
        free(range);
        restrain(mode);
    }
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS
    if (!range) return no_range(id);
    if (used) return PyErr_Format(PyExc_RuntimeError, "range %llu is in use", (unsigned long long)id);
    if (code) return fail(code, "cuMemUnmap");
    Py_RETURN_NONE;
}
static PyObject *py_take(PyObject *module, PyObject *args) {
    unsigned long long id;
    Py_ssize_t bytes;
    void *address = NULL;
    char error[sizeof ((Range *)0)->error];
    Range *range;
    if (!PyArg_ParseTuple(args, "Kn", &id, &bytes)) return NULL;
    if (bytes < 0) return PyErr_Format(PyExc_ValueError, "take() wants bytes >= 0");
    pthread_mutex_lock(&lock);
    if ((range = range_of(id))) {
        int mode = relax();
        address = allocate(range, (size_t)bytes);
        restrain(mode);
        memcpy(error, range->error, sizeof error);
    }
    pthread_mutex_unlock(&lock);
    if (!range) return no_range(id);
    if (!address) return PyErr_Format(PyExc_RuntimeError, "%s", error);
    return PyLong_FromVoidPtr(address);
}
static PyObject *py_use(PyObject *module, PyObject *arg) {
    uint64_t id = arg == Py_None ? 0 : PyLong_AsUnsignedLongLong(arg), before = current;
    Range *range, *old;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    range = range_of(id);
    if (range || !id) {
        if ((old = range_of(before))) old->users--;
        if (range) range->users++;
        current = id;
    }
    pthread_mutex_unlock(&lock);
    if (id && !range) return no_range(id);
    if (!before) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(before);
}
static PyObject *py_allocations(PyObject *module, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    Allocation *copy = NULL;
    size_t count = 0;
    PyObject *result = NULL;
    Range *range;
    int short_of_memory = 0;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    if ((range = range_of(id)) && (count = range->count)) {
        if ((copy = malloc(count * sizeof *copy))) memcpy(copy, range->list, count * sizeof *copy);
        else short_of_memory = 1;
    }
    pthread_mutex_unlock(&lock);
    if (!range) return no_range(id);
    if (short_of_memory) return PyErr_NoMemory();
    if ((result = PyList_New((Py_ssize_t)count)))
        for (size_t i = 0; i < count; i++) {
            PyObject *pair = Py_BuildValue("KK", (unsigned long long)copy[i].address,
                                           (unsigned long long)copy[i].size);
            if (!pair) { Py_CLEAR(result); break; }
            PyList_SET_ITEM(result, (Py_ssize_t)i, pair);
        }
    free(copy);
    return result;
}
static PyObject *py_bounds(PyObject *module, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    unsigned long long low = 0, high = 0;
    Range *range;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    if ((range = range_of(id))) { low = range->low; high = range->high; }
    pthread_mutex_unlock(&lock);
    return range ? Py_BuildValue("KK", low, high) : no_range(id);
}
static PyObject *py_error(PyObject *module, PyObject *arg) {
    uint64_t id = PyLong_AsUnsignedLongLong(arg);
    char copy[sizeof ((Range *)0)->error] = "";
    Range *range;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    if ((range = range_of(id))) memcpy(copy, range->error, sizeof copy);
    pthread_mutex_unlock(&lock);
    if (!range) return no_range(id);
    if (!*copy) Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(copy, (Py_ssize_t)strlen(copy), "replace");
}
static PyObject *py_counts(PyObject *module, PyObject *unused) {
    long r = 0, b = 0, a = 0, held = 0;
    pthread_mutex_lock(&lock);
    for (Range *each = ranges; each; each = each->next) r++;
    for (Block *each = blocks; each; each = each->next) b++;
    for (Arena *each = arenas; each; each = each->next) { a++; held += each->held; }
    pthread_mutex_unlock(&lock);
    return Py_BuildValue("{slslslsl}", "ranges", r, "blocks", b, "arenas", a, "held", held);
}

/* ---- patching ---- */

typedef struct { Handle handle, context; unsigned char *block; char *label; int kind; } Node;
typedef struct { unsigned char *where; uint64_t delta; size_t node; } Word;
typedef struct {
    PyObject_HEAD
    Handle exec;
    size_t nodes, words, regions;
    Node *node;
    Word *word;              /* sorted by region: those of region r are [first[r], first[r + 1]) */
    size_t *first, *dirty;   /* dirty: nodes to set, at most all */
    uint64_t *base, *fresh;  /* of each region: as given last, and as given in this call */
    unsigned char *known, *given;
    uint64_t *turn_of, turn; /* node -> the turn in which it was last put on the list */
    int stale, busy;         /* stale: what the executable holds is unknown */
} Blocks;

static PyObject *name_data_ptr;

static void blocks_dealloc(Blocks *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; self->node && i < self->nodes; i++) {
        free(self->node[i].block);
        PyMem_Free(self->node[i].label);
    }
    PyMem_Free(self->node); PyMem_Free(self->word); PyMem_Free(self->first); PyMem_Free(self->dirty);
    PyMem_Free(self->base); PyMem_Free(self->fresh); PyMem_Free(self->known); PyMem_Free(self->given);
    PyMem_Free(self->turn_of);
    type->tp_free(self);
    Py_DECREF(type);
}
/* (kind, handle, context, label, block, arguments): a block is the driver's struct and what its arguments point to. */
static int read_node(Node *node, PyObject *item, size_t *size) {
    unsigned long long handle, context;
    const char *label, *block;
    Py_ssize_t length, label_length;
    PyObject *arguments;
    size_t bytes, count, at, i;
    if (!PyArg_ParseTuple(item, "iKKs#y#O!", &node->kind, &handle, &context, &label, &label_length, &block, &length,
                          &PyTuple_Type, &arguments)) return -1;
    count = (size_t)PyTuple_GET_SIZE(arguments);
    at = round_up((size_t)length, 64);
    bytes = round_up(at + count * sizeof(void *), 64);
    if (node->kind < 0 || node->kind > 2 || (!node->kind && (size_t)length < sizeof(KernelParams))) {
        PyErr_SetString(PyExc_ValueError, "not a node that can be patched");
        return -1;
    }
    node->handle = (Handle)(uintptr_t)handle;
    node->context = (Handle)(uintptr_t)context;
    if (!(node->label = PyMem_Malloc((size_t)label_length + 1)) || !(node->block = aligned_alloc(64, bytes))) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(node->label, label, (size_t)label_length + 1);
    memset(node->block, 0, bytes);
    memcpy(node->block, block, (size_t)length);
    for (i = 0; i < count; i++) {
        size_t offset = PyLong_AsSize_t(PyTuple_GET_ITEM(arguments, i));
        if (PyErr_Occurred()) return -1;
        if (offset > (size_t)length) {
            PyErr_SetString(PyExc_ValueError, "an argument lies outside of its block");
            return -1;
        }
        ((void **)(node->block + at))[i] = node->block + offset;
    }
    if (!node->kind) {
        KernelParams *params = (KernelParams *)node->block;
        params->arguments = count ? (void **)(node->block + at) : NULL;
        params->extra = NULL;
    }
    *size = (size_t)length;
    return 0;
}
static int read_words(Blocks *self, PyObject *words, const size_t *size) {
    unsigned long long node, offset, region, delta;
    size_t before = 0;
    for (size_t i = 0; i < self->words; i++) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(words, i), "KKKK", &node, &offset, &region, &delta)) return -1;
        if (node >= self->nodes || region >= self->regions || region < before || size[node] < 8
            || offset > size[node] - 8) {
            PyErr_SetString(PyExc_ValueError, "a word lies outside of its node or region, or is out of order");
            return -1;
        }
        self->word[i] = (Word){self->node[node].block + offset, delta, (size_t)node};
        self->first[region + 1] = i + 1;
        before = region;
    }
    for (size_t r = 0; r < self->regions; r++) /* regions without words */
        if (self->first[r + 1] < self->first[r]) self->first[r + 1] = self->first[r];
    return 0;
}
static PyObject *blocks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long exec;
    Py_ssize_t regions;
    PyObject *nodes, *words;
    size_t *size = NULL, i;
    Blocks *self;
    if (!PyArg_ParseTuple(args, "KO!O!n", &exec, &PyTuple_Type, &nodes, &PyTuple_Type, &words, &regions)) return NULL;
    if (regions < 0) return PyErr_Format(PyExc_ValueError, "a negative number of regions");
    if (!(self = (Blocks *)type->tp_alloc(type, 0))) return NULL;
    self->exec = (Handle)(uintptr_t)exec;
    self->nodes = (size_t)PyTuple_GET_SIZE(nodes);
    self->words = (size_t)PyTuple_GET_SIZE(words);
    self->regions = (size_t)regions;
    self->stale = 1;
    if (!(size = PyMem_Calloc(self->nodes + 1, sizeof *size))
        || !(self->node = PyMem_Calloc(self->nodes + 1, sizeof *self->node))
        || !(self->word = PyMem_Calloc(self->words + 1, sizeof *self->word))
        || !(self->first = PyMem_Calloc(self->regions + 1, sizeof *self->first))
        || !(self->dirty = PyMem_Calloc(self->nodes + 1, sizeof *self->dirty))
        || !(self->turn_of = PyMem_Calloc(self->nodes + 1, sizeof *self->turn_of))
        || !(self->base = PyMem_Calloc(self->regions + 1, sizeof *self->base))
        || !(self->fresh = PyMem_Calloc(self->regions + 1, sizeof *self->fresh))
        || !(self->known = PyMem_Calloc(self->regions + 1, 1))
        || !(self->given = PyMem_Calloc(self->regions + 1, 1))) {
        PyErr_NoMemory();
        goto failed;
    }
    for (i = 0; i < self->nodes; i++)
        if (read_node(&self->node[i], PyTuple_GET_ITEM(nodes, i), &size[i])) goto failed;
    if (read_words(self, words, size)) goto failed;
    PyMem_Free(size);
    return (PyObject *)self;
failed:
    PyMem_Free(size);
    Py_DECREF(self);
    return NULL;
}
/* An integer is an address; anything else is asked for its data_ptr(). */
static int address_of(PyObject *item, uint64_t *result) {
    PyObject *number = item;
    if (PyLong_Check(item)) Py_INCREF(number);
    else if (!(number = PyObject_VectorcallMethod(name_data_ptr, &item, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL)))
        return -1;
    *result = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *result == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}
/* Nothing of the object changes until every base has been read. */
static int read_bases(Blocks *self, PyObject *bases, PyObject *regions) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(bases);
    memcpy(self->fresh, self->base, self->regions * sizeof *self->fresh);
    memcpy(self->given, self->known, self->regions);
    if (regions ? PySequence_Fast_GET_SIZE(regions) != count : (size_t)count != self->regions) {
        PyErr_Format(PyExc_ValueError, "patch() got %zd bases for %zd regions", count,
                     regions ? PySequence_Fast_GET_SIZE(regions) : (Py_ssize_t)self->regions);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t region = i;
        PyObject *item;
        int code = 0;
        if (i >= PySequence_Fast_GET_SIZE(bases) || (regions && i >= PySequence_Fast_GET_SIZE(regions))) {
            PyErr_SetString(PyExc_RuntimeError, "the list of bases changed while it was read");
            return -1;
        }
        if (regions && (region = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(regions, i))) == -1 && PyErr_Occurred())
            return -1;
        if (region < 0 || (size_t)region >= self->regions) {
            PyErr_Format(PyExc_ValueError, "there is no region %zd", region);
            return -1;
        }
        item = PySequence_Fast_GET_ITEM(bases, i);
        if (item == Py_None) continue;
        Py_INCREF(item);
        code = address_of(item, &self->fresh[region]);
        Py_DECREF(item);
        if (code) return -1;
        self->given[region] = 1;
    }
    for (size_t r = 0; self->stale && r < self->regions; r++)
        if (!self->given[r] && self->first[r] < self->first[r + 1]) {
            PyErr_Format(PyExc_ValueError, "region %zu has no base yet", r);
            return -1;
        }
    return 0;
}
static PyObject *set_nodes(Blocks *self) {
    size_t count = 0;
    self->turn++;
    for (size_t r = 0; r < self->regions; r++) {
        if (!self->stale && self->fresh[r] == self->base[r] && self->known[r]) continue;
        for (size_t i = self->first[r]; i < self->first[r + 1]; i++) {
            Word *word = &self->word[i];
            uint64_t value = self->fresh[r] + word->delta;
            memcpy(word->where, &value, sizeof value);
            if (self->turn_of[word->node] == self->turn) continue;
            self->turn_of[word->node] = self->turn;
            self->dirty[count++] = word->node;
        }
    }
    memcpy(self->base, self->fresh, self->regions * sizeof *self->base);
    memcpy(self->known, self->given, self->regions);
    self->stale = 1;
    for (size_t i = 0; i < count; i++) {
        Node *node = &self->node[self->dirty[i]];
        const char *what;
        int code;
        if (!node->kind) {
            what = "cuGraphExecKernelNodeSetParams";
            code = cu.set_kernel(self->exec, node->handle, node->block);
        } else if (node->kind == 1) {
            what = "cuGraphExecMemsetNodeSetParams";
            code = cu.set_fill(self->exec, node->handle, node->block, node->context);
        } else {
            what = "cuGraphExecMemcpyNodeSetParams";
            code = cu.set_copy(self->exec, node->handle, node->block, node->context);
        }
        if (code)
            return PyErr_Format(PyExc_RuntimeError, "CUDA driver error in %s: %s (%d), at %s", what, text_of(code),
                                code, node->label);
    }
    self->stale = 0;
    return PyLong_FromSize_t(count);
}
static PyObject *blocks_patch(Blocks *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *bases = NULL, *regions = NULL, *result = NULL;
    if (count != 1 && count != 2) return PyErr_Format(PyExc_TypeError, "patch(bases, regions=None)");
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "patch() is running already");
    self->busy = 1;
    if ((bases = PySequence_Fast(args[0], "patch() wants a sequence of bases"))
        && (count == 1 || args[1] == Py_None
            || (regions = PySequence_Fast(args[1], "patch() wants a sequence of regions")))
        && !read_bases(self, bases, regions))
        result = set_nodes(self);
    Py_XDECREF(bases);
    Py_XDECREF(regions);
    self->busy = 0;
    return result;
}
static PyObject *blocks_stale(Blocks *self, void *unused) { return PyBool_FromLong(self->stale); }
static PyObject *blocks_nodes(Blocks *self, void *unused) { return PyLong_FromSize_t(self->nodes); }
static PyObject *py_context(PyObject *module, PyObject *unused) {
    Handle context = NULL;
    int code = cu.context(&context);
    return code ? fail(code, "cuCtxGetCurrent") : PyLong_FromVoidPtr(context);
}

static PyMethodDef blocks_methods[] = {
    {"patch", (PyCFunction)(void (*)(void))blocks_patch, METH_FASTCALL,
     "patch(bases, regions=None): write what moved, and return the number of nodes set"},
    {NULL}};
static PyGetSetDef blocks_getset[] = {
    {"stale", (getter)blocks_stale, NULL, "the next patch() sets every node", NULL},
    {"nodes", (getter)blocks_nodes, NULL, "how many nodes can be patched", NULL},
    {NULL}};
static PyType_Slot slots[] = {{Py_tp_new, blocks_new}, {Py_tp_dealloc, blocks_dealloc}, {Py_tp_methods, blocks_methods},
                              {Py_tp_getset, blocks_getset}, {0, NULL}};
static PyType_Spec spec = {"torch_overlay_relaunch.Blocks", sizeof(Blocks), 0, Py_TPFLAGS_DEFAULT, slots};

static PyMethodDef methods[] = {
    {"reserve", py_reserve, METH_VARARGS, "reserve(device, bytes, gap=1): a new range"},
    {"use", py_use, METH_O, "use(range or None): where this thread allocates; returns what it was"},
    {"take", py_take, METH_VARARGS, "take(range, bytes): an address that no allocator knows of"},
    {"seal", py_seal, METH_O, "seal(range): no allocation any more"},
    {"release", py_release, METH_O, "release(range): unmap it"},
    {"allocations", py_allocations, METH_O, "allocations(range): [(address, requested size)] in order"},
    {"bounds", py_bounds, METH_O, "bounds(range): (low, high)"},
    {"error", py_error, METH_O, "error(range): why the last allocation failed, or None"},
    {"context", py_context, METH_NOARGS, "context(): the current context"},
    {"counts", py_counts, METH_NOARGS, "counts(): what is held, by kind"},
    {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_overlay_relaunch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_torch_overlay_relaunch(void) {
    void *driver = dlopen("@driver@", RTLD_NOW | RTLD_LOCAL);
    PyObject *self, *type;
    struct { void **slot; const char *name; } want[] = {
        {(void **)&cu.granularity, "cuMemGetAllocationGranularity"}, {(void **)&cu.reserve, "cuMemAddressReserve"},
        {(void **)&cu.unreserve, "cuMemAddressFree"}, {(void **)&cu.create, "cuMemCreate"},
        {(void **)&cu.destroy, "cuMemRelease"}, {(void **)&cu.map, "cuMemMap"}, {(void **)&cu.unmap, "cuMemUnmap"},
        {(void **)&cu.access, "cuMemSetAccess"}, {(void **)&cu.mode, "cuThreadExchangeStreamCaptureMode"},
        {(void **)&cu.text, "cuGetErrorString"}, {(void **)&cu.context, "cuCtxGetCurrent"},
        {(void **)&cu.set_kernel, "cuGraphExecKernelNodeSetParams_v2"},
        {(void **)&cu.set_fill, "cuGraphExecMemsetNodeSetParams"},
        {(void **)&cu.set_copy, "cuGraphExecMemcpyNodeSetParams"}};
    if (!driver) { PyErr_SetString(PyExc_ImportError, "@driver@ can't be loaded"); return NULL; }
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!(*want[i].slot = dlsym(driver, want[i].name)))
            return PyErr_Format(PyExc_ImportError, "@driver@ has no %s", want[i].name);
    if (!(name_data_ptr = PyUnicode_InternFromString("data_ptr"))) return NULL;
    if (!(self = PyModule_Create(&module)) || !(type = PyType_FromSpec(&spec))) return NULL;
    if (PyModule_AddObject(self, "Blocks", type) < 0
        || PyModule_AddObject(self, "alloc_address", PyLong_FromVoidPtr((void *)overlay_alloc)) < 0
        || PyModule_AddObject(self, "free_address", PyLong_FromVoidPtr((void *)overlay_free)) < 0) return NULL;
    return self;
}
"""
