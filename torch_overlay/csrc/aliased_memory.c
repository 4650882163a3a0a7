/* Memory for captures: a range of addresses that maps one small physical block over and over.

   A capture runs no kernel, so any memory will do. A range is mapped as it fills, a physical block at a time, for the
   driver maps only whole blocks. Mapping costs the host the same for a block of any size (on a machine with an H200
   36 us to map it and grant access, 22 us to unmap it, and no less per block if many are mapped at once). A block has
   12 MiB, or more if the range is for much memory and the device has it. Allocations lie 64 KiB times the gap apart,
   and are aligned as the caching allocator aligns.

   `aliased_alloc` and `aliased_free` are the functions of a pluggable allocator: torch calls them from any thread, with
   or without the GIL, so they touch no Python object and take one lock of their own. `use(range)` selects the range
   that a thread allocates from; a thread that never called it shares the range of its device that is in use, if there
   is exactly one.

   Note [Addresses of captures]
   1. Within a range no address is allocated twice, so one address stands for one allocation.
   2. Unused addresses lie before, between and after the allocations, inside the range's bounds: a word that points a
   little outside of its allocation is in the range but in no allocation, so the proof can refuse it.
   3. Ranges with a different `gap` keep their allocations at different distances. A word that holds one region's
   address plus a constant, and by chance points into another region, points elsewhere in a capture with another gap.
   4. `release` unmaps the range; its addresses are freed when torch has freed every segment in their arena (it keeps
   the segments of a pool as long as a captured graph retains the pool). Until then the driver reserves them for nobody
   else, so torch's allocator never has an address twice.
   5. All addresses are above 4 GiB, so the upper half of a pointer is not zero: a word that looks like the lower half
   of a pointer is none (`proof.prove`, Note [What a word can hide]).
   6. The second of two adjacent 32-bit numbers could pass for the upper half of an address. By default the driver
   begins at 1 TiB, where the upper half is 256, a size that many kernels take. So the driver is asked for addresses
   with an upper half of 705 or more, since tensor descriptors, which matrix products take, begin with 704. The driver
   may refuse; then a number may pass for an address, which costs no more than a refused capture, and the next capture
   is at other addresses. */

#include "driver_api.h"
#include "module.h"
#include "stack.h"

#include <pthread.h>

#define EXPORT __attribute__((visibility("default")))
#define ARENA ((size_t)4 << 40)
#define LOWEST ((Address)1 << 32) /* Note [Addresses of captures], 5 and 6 */
#define WISH ((Address)0x2c15a600000)
#define BLOCK ((size_t)12 << 20)
#define AHEAD 4
#define GAP ((size_t)64 << 10)
#define ALIGNMENT 512
#define SHALLOW ((size_t)64 << 10) /* of the stack: what the driver uses to map a block */
#define OURS ((size_t)2 << 10)     /* what functions here use */

/* Everything below is guarded by `lock`. */

typedef struct Block {
    int device;
    long ranges;
    size_t unit, size;
    uint64_t handle;
    struct Block *next;
} Block;

typedef struct Arena {
    Address base, top, end;
    int device;
    long ranges, held;
    struct Arena *next;
} Arena;

typedef struct {
    Address address;
    size_t size;
} Allocation;

typedef struct Range {
    uint64_t id;
    Arena *arena;
    Block *block;
    Address low, top, mapped, high; /* [low, mapped) is mapped */
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

/* The driver's memory functions are not captured, but a capture in a stricter mode than relaxed forbids them. */
static int relax(void) {
    int mode = 2;
    return cu.ThreadExchangeStreamCaptureMode(&mode) ? -1 : mode;
}

static void restrain(int mode) {
    if (mode >= 0) cu.ThreadExchangeStreamCaptureMode(&mode);
}

/* Takes an item out of a list, in which it is. */
#define UNLINK(list, item)                                                                                             \
    for (__typeof__(&list) at = &list; *at; at = &(*at)->next)                                                         \
        if (*at == item) {                                                                                             \
            *at = item->next;                                                                                          \
            break;                                                                                                     \
        }

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
    UNLINK(blocks, block)
    cu.MemRelease(block->handle);
    free(block);
}

static void drop_arena(Arena *arena) {
    int mode;
    if (arena->ranges || arena->held) return;
    UNLINK(arenas, arena)
    mode = relax();
    cu.MemAddressFree(arena->base, arena->end - arena->base);
    restrain(mode);
    free(arena);
}

static int find_block(int device, size_t size, Block **result, const char **what) {
    BlockKind kind = {1 /* pinned */, 0, {1 /* device */, device}, NULL, {0}};
    size_t unit = 0;
    Block *block;
    int code;
    for (*result = blocks; *result; *result = (*result)->next)
        if ((*result)->device == device && (*result)->size >= size) return 0;
    *what = "cuMemGetAllocationGranularity";
    if ((code = cu.MemGetAllocationGranularity(&unit, &kind, 0))) return code;
    if (!(block = calloc(1, sizeof *block))) return 2;
    block->device = device;
    block->unit = unit;
    block->size = round_up(size, unit);
    *what = "cuMemCreate";
    if ((code = cu.MemCreate(&block->handle, block->size, &kind, 0))) {
        free(block);
        return size > BLOCK ? find_block(device, BLOCK, result, what) : code;
    }
    block->next = blocks;
    *result = blocks = block;
    return 0;
}

static int reserve(Address *base, size_t size, size_t unit) {
    int code = cu.MemAddressReserve(base, size, unit, WISH, 0);
    return code ? cu.MemAddressReserve(base, size, unit, 0, 0) : 0;
}

static int find_arena(int device, size_t bytes, const Block *block, Arena **result, const char **what) {
    Arena *arena;
    size_t size = round_up(bytes > ARENA ? bytes : ARENA, block->size);
    Address base = 0;
    int code;
    for (*result = arenas; *result; *result = (*result)->next)
        if ((*result)->device == device && (*result)->end - (*result)->top >= bytes) return 0;
    *what = "cuMemAddressReserve";
    while ((code = reserve(&base, size, block->unit))) {
        if (size == bytes) return code;
        size = size / 2 > bytes ? round_up(size / 2, block->size) : bytes;
    }
    if (base < LOWEST) {
        *what = "cuMemAddressReserve, which gave addresses below 4 GiB";
        cu.MemAddressFree(base, size);
        return 2;
    }
    if (!(arena = calloc(1, sizeof *arena))) {
        cu.MemAddressFree(base, size);
        return 2;
    }
    arena->base = arena->top = base;
    arena->end = base + size;
    arena->device = device;
    arena->next = arenas;
    *result = arenas = arena;
    return 0;
}

static int unmap(Range *range, Address address, size_t size) {
    int code = size ? cu.MemUnmap(address, size) : 0, one;
    if (!code || size <= range->block->size) return code;
    code = 0; /* this driver unmaps only one mapping a call */
    for (size_t at = 0; at < size; at += range->block->size)
        if ((one = cu.MemUnmap(address + at, range->block->size))) code = one;
    return code;
}

/* Maps up to `end` at least, and otherwise as much again as is mapped already, up to AHEAD blocks. */
static int map(Range *range, Address end, const char **what) {
    size_t step = range->block->size, size = round_up(end - range->mapped, step), mapped = 0;
    size_t ahead = range->mapped - range->low < AHEAD * step ? range->mapped - range->low : AHEAD * step;
    Access access = {{1 /* device */, range->block->device}, 3 /* read and write */};
    int code = 0;
    if (size < ahead) size = ahead < range->high - range->mapped ? ahead : range->high - range->mapped;
    *what = "cuMemMap";
    while (!code && mapped < size)
        if (!(code = cu.MemMap(range->mapped + mapped, step, 0, range->block->handle, 0))) mapped += step;
    if (!code) {
        *what = "cuMemSetAccess";
        code = cu.MemSetAccess(range->mapped, size, &access, 1);
    }
    if (code)
        unmap(range, range->mapped, mapped);
    else
        range->mapped += size;
    return code;
}

/* Notes why an allocation failed, for torch only says that it did. `code` 0: no driver error. Returns NULL. */
static void *fail(Range *range, size_t size, const char *what, int code) {
    if (code)
        snprintf(range->error, sizeof range->error, "CUDA driver error in %s: %s (%d), for an allocation of %zu bytes",
                 what, text_of(code), code, size);
    else
        snprintf(range->error, sizeof range->error, "%s, for an allocation of %zu bytes", what, size);
    return NULL;
}

static void *allocate(Range *range, size_t size) {
    size_t gap = range->gap * GAP, whole = round_up(size ? size : 1, ALIGNMENT);
    Address address = range->top + gap;
    const char *what = "";
    int code = 0;
    if (range->sealed) return fail(range, size, "the range is sealed", 0);
    if (whole < size || address > range->high || range->high - address < whole + gap)
        return fail(range, size, "the range is too small", 0);
    if (range->count == range->capacity) {
        size_t capacity = range->capacity ? 2 * range->capacity : 64;
        Allocation *list = realloc(range->list, capacity * sizeof *list);
        if (!list) return fail(range, size, "the host has no memory left", 0);
        range->list = list;
        range->capacity = capacity;
    }
    if (address + whole > range->mapped) {
        int mode = relax();
        code = map(range, address + whole, &what);
        restrain(mode);
        clear_stack(SHALLOW);
        if (code) return fail(range, size, what, code);
    }
    range->list[range->count++] = (Allocation){address, size};
    range->top = address + whole;
    return (void *)address;
}

EXPORT void *aliased_alloc(ssize_t size, int device, void *stream) {
    void *result = NULL;
    Range *range;
    (void)stream;
    pthread_mutex_lock(&lock);
    range = range_of_thread(device);
    if (range && range->arena->device != device)
        fail(range, (size_t)size, "another device than the range's", 0);
    else if (range && size >= 0) {
        if ((result = allocate(range, (size_t)size))) range->arena->held++;
        clear_stack(OURS);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT void aliased_free(void *pointer, ssize_t size, int device, void *stream) {
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

/* Takes the lock, and returns the range of this id. NULL, without the lock and with an error: there is none. */
static Range *locked_range(PyObject *id) {
    uint64_t number = PyLong_AsUnsignedLongLong(id);
    Range *range;
    if (PyErr_Occurred()) return NULL;
    pthread_mutex_lock(&lock);
    if ((range = range_of(number))) return range;
    pthread_mutex_unlock(&lock);
    PyErr_Format(PyExc_ValueError, "there is no range %llu", (unsigned long long)number);
    return NULL;
}

static PyObject *py_reserve(PyObject *module, PyObject *args) {
    int device, code, mode;
    Py_ssize_t bytes, gap = 1, least = 0;
    Block *block = NULL;
    Range *range;
    const char *what = "";
    uint64_t id = 0;
    if (!PyArg_ParseTuple(args, "in|nn", &device, &bytes, &gap, &least)) return NULL;
    if (bytes <= 0 || gap < 1 || least < 0)
        return PyErr_Format(PyExc_ValueError, "reserve() wants bytes > 0 and gap > 0, and block >= 0");
    if (!(range = calloc(1, sizeof *range))) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS pthread_mutex_lock(&lock);
    mode = relax();
    if (!(code = find_block(device, (size_t)least > BLOCK ? (size_t)least : BLOCK, &block, &what))) {
        size_t whole = round_up(bytes, block->size);
        if (!(code = find_arena(device, whole, block, &range->arena, &what))) {
            range->block = block;
            range->gap = gap;
            range->low = range->top = range->mapped = range->arena->top;
            range->high = range->arena->top = range->low + whole;
            range->arena->ranges++;
            block->ranges++;
            range->id = id = ++last_id;
            range->next = ranges;
            ranges = range;
        } else
            drop_block(block);
    }
    restrain(mode);
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS if (code) {
        free(range);
        return driver_error(code, what);
    }
    return PyLong_FromUnsignedLongLong(id);
}

/* Ends allocation in the range; the addresses after the last allocation go back to the arena. */
static void seal(Range *range) {
    Address high = range->top + (range->count ? range->gap * GAP : 0);
    Address used = range->mapped > high ? range->mapped : range->low + round_up(high - range->low, range->block->size);
    if (range->sealed) return;
    range->sealed = 1;
    if (range->arena->top == range->high) range->arena->top = used;
    range->high = high;
}

static PyObject *py_seal(PyObject *module, PyObject *arg) {
    Range *range = locked_range(arg);
    if (!range) return NULL;
    seal(range);
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

static PyObject *py_release(PyObject *module, PyObject *arg) {
    Range *range = locked_range(arg);
    int code, mode;
    if (!range) return NULL;
    if (range->users) {
        pthread_mutex_unlock(&lock);
        return PyErr_Format(PyExc_RuntimeError, "range %S is in use", arg);
    }
    Py_BEGIN_ALLOW_THREADS mode = relax();
    seal(range);
    UNLINK(ranges, range)
    code = unmap(range, range->low, range->mapped - range->low);
    range->block->ranges--;
    drop_block(range->block);
    range->arena->ranges--;
    drop_arena(range->arena);
    free(range->list);
    free(range);
    restrain(mode);
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS if (code) return driver_error(code, "cuMemUnmap");
    Py_RETURN_NONE;
}

static PyObject *py_take(PyObject *module, PyObject *args) {
    Py_ssize_t bytes;
    PyObject *id;
    void *address;
    char error[sizeof((Range *)0)->error];
    Range *range;
    if (!PyArg_ParseTuple(args, "On", &id, &bytes)) return NULL;
    if (bytes < 0) return PyErr_Format(PyExc_ValueError, "take() wants bytes >= 0");
    if (!(range = locked_range(id))) return NULL;
    address = allocate(range, (size_t)bytes);
    clear_stack(OURS);
    memcpy(error, range->error, sizeof error);
    pthread_mutex_unlock(&lock);
    return address ? PyLong_FromVoidPtr(address) : PyErr_Format(PyExc_RuntimeError, "%s", error);
}

static PyObject *py_use(PyObject *module, PyObject *arg) {
    uint64_t before = current;
    Range *range = NULL, *old;
    if (arg == Py_None)
        pthread_mutex_lock(&lock);
    else if (!(range = locked_range(arg)))
        return NULL;
    if ((old = range_of(before))) old->users--;
    if (range) range->users++;
    current = range ? range->id : 0;
    pthread_mutex_unlock(&lock);
    if (!before) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(before);
}

static PyObject *py_allocations(PyObject *module, PyObject *args) {
    unsigned long long first = 0;
    PyObject *id, *result;
    Range *range;
    if (!PyArg_ParseTuple(args, "O|K", &id, &first) || !(range = locked_range(id))) return NULL;
    if (first > range->count) first = range->count;
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((range->count - first) * sizeof *range->list));
    if (result && range->list) memcpy(PyBytes_AS_STRING(result), range->list + first, (size_t)PyBytes_GET_SIZE(result));
    pthread_mutex_unlock(&lock);
    return result;
}

static PyObject *py_state(PyObject *module, PyObject *arg) {
    Range *range = locked_range(arg), copy;
    if (!range) return NULL;
    copy = *range;
    pthread_mutex_unlock(&lock);
    return Py_BuildValue("KKnz", (unsigned long long)copy.low, (unsigned long long)copy.high, (Py_ssize_t)copy.count,
                         *copy.error ? copy.error : NULL);
}

static PyObject *py_counts(PyObject *module, PyObject *unused) {
    long r = 0, b = 0, a = 0, held = 0;
    pthread_mutex_lock(&lock);
    for (Range *each = ranges; each; each = each->next) r++;
    for (Block *each = blocks; each; each = each->next) b++;
    for (Arena *each = arenas; each; each = each->next) {
        a++;
        held += each->held;
    }
    pthread_mutex_unlock(&lock);
    return Py_BuildValue("{slslslsl}", "ranges", r, "blocks", b, "arenas", a, "held", held);
}

static PyMethodDef methods[] = {
    {"reserve", py_reserve, METH_VARARGS, "reserve(device, bytes, gap=1, block=0): a new range"},
    {"use", py_use, METH_O, "use(range or None): where this thread allocates; returns what it was"},
    {"take", py_take, METH_VARARGS, "take(range, bytes): an address that no allocator knows of"},
    {"seal", py_seal, METH_O, "seal(range): no allocation any more"},
    {"release", py_release, METH_O, "release(range): unmap it"},
    {"allocations", py_allocations, METH_VARARGS,
     "allocations(range, first=0): addresses and requested sizes in order, from that one on, as bytes of 64-bit "
     "numbers"},
    {"state", py_state, METH_O, "state(range): (low, high, how many allocations, why the last one failed or None)"},
    {"counts", py_counts, METH_NOARGS, "counts(): what is held, by kind"},
    {NULL}};

static int init(PyObject *module) {
    if (PyModule_AddObject(module, "alloc_address", PyLong_FromVoidPtr((void *)aliased_alloc)) < 0) return -1;
    return PyModule_AddObject(module, "free_address", PyLong_FromVoidPtr((void *)aliased_free));
}

PART(.module = "relaunch", .methods = methods, .init = init)
