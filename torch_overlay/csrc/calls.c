/* Calls of library functions as launches of kernels: Note [Library calls as entries] of `capture.calls`.

   An entry is found by its key: the function, the modes, and of each argument all that may decide what is launched,
   which is all but the address. It has the kernels, fills and copies that one call launched in a capture, with the
   places of the arguments' addresses in their parameters. */

#include "calls.h"
#include "data_ptr.h"
#include "module.h"
#include "stack.h"

#include <stddef.h>
#include <structmember.h>

enum { MOST_ARGUMENTS = 16, MOST_KERNELS = 8, MOST_PARAMETERS = 64, MOST_BYTES = 4096, MOST_SLOTS = 64 };

enum { MOST_TEMPORARIES = 8, MOST_ENTRIES = 1 << 13, FULL_ALIGNMENT = 256, REMEMBERED = 1 << 12 };

enum {
    THREAD_LOCAL = 1,
    KERNEL_NODE = 0,
    COPY_NODE = 1,
    FILL_NODE = 2,
    EMPTY_NODE = 5,
    MEMORY_TYPE = 2,
    BUFFER_POINTER = 1
};

enum { BUSY = 2, PAUSE = 256, STACK = 64 << 10 }; /* PAUSE: calls without an attempt after one that came to nothing */

enum { START = 256, PAYS = 5 }; /* captures before any gain; launches that save the time of one more */

/* Attributes of a kernel that a launch needs as well: cooperative; cluster dimension, its scheduling, the preferred
   dimension; carve-out of shared memory, by default -1. */
static const int attribute_ids[] = {2, 4, 5, 11, 14};

enum { ATTRIBUTES = sizeof attribute_ids / sizeof *attribute_ids, CARVE_OUT = 14 };

typedef struct {
    uint64_t begin, end;
} Extent;

/* Word `at` of a block is the address of operand `place`, or of temporary `place - MOST_ARGUMENTS`, plus `delta`. */
typedef struct {
    size_t at;
    int place;
    uint64_t delta;
} Slot;

/* A kernel, with its parameters in one block; or a fill or copy of memory, whose parameters are addresses. */
typedef struct {
    Handle function;     /* NULL: a fill or a copy */
    MemsetParams fill;   /* of a copy: the width alone, and no size of elements */
    LaunchConfig config; /* without stream and attributes */
    LaunchAttribute attribute[ATTRIBUTES];
    size_t count, size, *offset, *width; /* parameters; bytes of the block; where each parameter lies, one allocation */
    unsigned char *block;
    Slot *slot; /* once the pointers of the function are known */
    int slots;
} Launch;

typedef struct {
    Pool pool; /* of the launches: an entry takes them */
    Launch *launch;
    int launches;
    Extent operand[MOST_ARGUMENTS];
    Py_ssize_t operands;
    PyObject *temporaries; /* bytes of (address, size) of what was ever allocated in captures */
    PyObject *results;     /* of `results` */
    const char *why;       /* why it is no entry */
} Capture;

/* Temporary memory is allocated for each launch, and the results among it are returned. */
typedef struct {
    PyObject_HEAD
    Pool pool;
    Launch *launch;
    int launches, temporaries;
    long site;                             /* of the first call with the key */
    PyObject *temporary[MOST_TEMPORARIES]; /* arguments of `empty` */
    PyObject *results;                     /* a row of them, or one: argument i; -1 - i: temporary i; None */
} Entry;

typedef struct {
    PyObject_HEAD
    /* key -> an Entry; the site of its first call; or a text: why it is no entry */
    PyObject *entries;
    /* function of a kernel -> the offsets of pointers in its block, as bytes; or a text: why they aren't known */
    PyObject *functions;
    PyObject *device; /* with `enter`, `leave`, `elsewhere`, `temporaries`, `results`, `modes`, `empty` */
    int kind;         /* of the device, as torch numbers them */
    unsigned pause;   /* calls that are not captured before the next attempt */
    unsigned char leads[REMEMBERED]; /* by site: other calls had the key that was new there last */
    uint64_t number[REMEMBERED];     /* words that were no address when the driver was asked, by their hashes */
    unsigned long long captured, launched;
} Calls;

static PyTypeObject *calls_type, *entry_type;
static PyObject *name_enter, *name_leave, *name_elsewhere, *name_temporaries, *name_modes, *name_results, *name_empty;

/* ---- keys ---- */

typedef struct {
    unsigned char bytes[1024];
    size_t used;
} Key;

static int put(Key *key, const void *bytes, size_t size) {
    if (key->used + size > sizeof key->bytes) return 0;
    memcpy(key->bytes + key->used, bytes, size);
    key->used += size;
    return 1;
}

static int put_word(Key *key, uint64_t word) { return put(key, &word, sizeof word); }

/* The extent is that of the tensor's elements. */
static int put_tensor(Key *key, const Tensor *tensor, uint64_t address, Extent *extent) {
    size_t n = (size_t)tensor->dimensions, item = item_sizes[tensor->dtype];
    uint64_t alignment = address & -address, last = 0;
    if (n > INLINE_DIMENSIONS) return 0;
    for (size_t i = 0; i < n; i++) last += (uint64_t)(tensor->size[i] - 1) * (uint64_t)tensor->stride[i];
    *extent = (Extent){address, address + (last + 1) * item};
    return put_word(key, (n << 16) | (alignment > FULL_ALIGNMENT ? FULL_ALIGNMENT : alignment))
           && put(key, tensor->size, n * sizeof *tensor->size) && put(key, tensor->stride, n * sizeof *tensor->stride)
           && put(key, &tensor->dtype, sizeof tensor->dtype + sizeof tensor->device) && put_word(key, tensor->keys);
}

static int put_constant(Key *key, PyObject *value) {
    double number;
    int overflow;
    uint64_t word = 0;
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
        if (!put_word(key, (uint64_t)(uintptr_t)Py_TYPE(value)) || !put_word(key, (uint64_t)count)) return 0;
        for (Py_ssize_t i = 0; i < count; i++)
            if (!put_constant(key, PySequence_Fast_GET_ITEM(value, i))) return 0;
        return 1;
    }
    if (PyFloat_CheckExact(value)) {
        number = PyFloat_AS_DOUBLE(value);
        memcpy(&word, &number, sizeof word);
    } else if (PyLong_CheckExact(value)) {
        word = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) return 0;
    } else if (value != Py_None && !PyBool_Check(value))
        return 0;
    else
        word = (uint64_t)(uintptr_t)value;
    return put_word(key, (uint64_t)(uintptr_t)Py_TYPE(value)) && put_word(key, word);
}

/* Tensors that overlap have their distance in the key, so that one moves as the other does. */
static int put_overlaps(Key *key, const Extent *operand, Py_ssize_t last) {
    for (Py_ssize_t k = 0; k < last; k++)
        if (operand[last].begin < operand[k].end && operand[k].begin < operand[last].end
            && (!put_word(key, (uint64_t)k + 1) || !put_word(key, operand[last].begin - operand[k].begin)))
            return 0;
    return put_word(key, 0);
}

/* Returns 1 if the arguments have a key. A tensor of the host has none: the call may read it before it launches. */
static int make_key(Key *key, int kind, long modes, PyObject *function, PyObject *names, PyObject *const *arguments,
                    Py_ssize_t count, Extent *operand, Py_ssize_t *operands) {
    key->used = 0;
    *operands = 0;
    if (count > MOST_ARGUMENTS || !put_word(key, (uint64_t)modes) || !put_word(key, (uint64_t)(uintptr_t)function)
        || !put_word(key, (uint64_t)(uintptr_t)names))
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t address;
        const Tensor *tensor = fields_of(arguments[i], &address);
        if (!tensor) {
            if (!put_constant(key, arguments[i])) return 0;
            continue;
        }
        if (tensor->device[0] != kind || !put_tensor(key, tensor, address, &operand[*operands])
            || !put_overlaps(key, operand, *operands))
            return 0;
        ++*operands;
    }
    return 1;
}

/* ---- captures ---- */

static int refused(Capture *capture, const char *why) {
    capture->why = why;
    return 0;
}

static PyObject *tuple_of(PyObject *const *arguments, Py_ssize_t count) {
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t i = 0; made && i < count; i++) PyTuple_SET_ITEM(made, i, Py_NewRef(arguments[i]));
    return made;
}

static void clear_capture(Capture *capture) {
    pool_free(&capture->pool);
    Py_CLEAR(capture->temporaries);
    Py_CLEAR(capture->results);
}

/* Makes room for the parameters. Returns 1; 0 with an error. */
static int reserve(Pool *pool, Launch *launch, size_t count, size_t size) {
    launch->count = count;
    launch->size = size;
    if (!(launch->offset = pool_zeros(pool, 2 * (Py_ssize_t)count, sizeof *launch->offset))) return 0;
    launch->width = launch->offset + count;
    return (launch->block = pool_zeros(pool, (Py_ssize_t)size, 1)) != NULL;
}

/* Returns 1; 0 if the parameters are too many, or the driver doesn't describe them, or with an error. */
static int read_parameters(Pool *pool, Launch *kernel, const KernelParams *params) {
    size_t offset[MOST_PARAMETERS + 1], width[MOST_PARAMETERS + 1], count = 0, size = 0;
    Handle function = params->func;
    const unsigned char *packed = NULL, *from;
    if (!function && cu.KernelGetFunction(&function, params->kern)) return 0;
    for (void **extra = params->extra; extra && *extra; extra += 2)
        if (*extra == (void *)BUFFER_POINTER) packed = extra[1];
    for (; !cu.FuncGetParamInfo(function, count, &offset[count], &width[count]); count++) {
        size_t end = offset[count] + width[count];
        if (count == MOST_PARAMETERS || end > MOST_BYTES) return 0;
        if (size < end) size = end;
    }
    if (!reserve(pool, kernel, count, size)) return 0;
    memcpy(kernel->offset, offset, count * sizeof *offset);
    memcpy(kernel->width, width, count * sizeof *width);
    for (size_t k = 0; k < count; k++) {
        from = params->arguments ? params->arguments[k] : packed ? packed + offset[k] : NULL;
        if (!from) return 0;
        memcpy(kernel->block + offset[k], from, width[k]);
    }
    return 1;
}

static int note_addresses(Pool *pool, Launch *memory, Address to, Address from, size_t count) {
    const Address address[] = {to, from};
    if (!reserve(pool, memory, 1, sizeof address)) return 0;
    memory->width[0] = count * sizeof to;
    memcpy(memory->block, address, sizeof address);
    return 1;
}

static int read_fill(Pool *pool, Launch *fill, Handle node) {
    unsigned size;
    if (cu.GraphMemsetNodeGetParams(node, &fill->fill) || fill->fill.height > 1
        || !note_addresses(pool, fill, fill->fill.to, 0, 1))
        return 0;
    fill->fill.to = 0;
    size = fill->fill.element_size;
    return size == 1 || size == 2 || size == 4;
}

static int read_copy(Pool *pool, Launch *copy, Handle node) {
    CopyParams p;
    if (cu.GraphMemcpyNodeGetParams(node, &p) || p.height > 1 || p.depth > 1 || p.from.y || p.from.z || p.to.y
        || p.to.z)
        return 0;
    copy->fill.width = p.width;
    return note_addresses(pool, copy, p.to.device + p.to.x, p.from.device + p.from.x, 2);
}

static int read_kernel(Pool *pool, Launch *kernel, Handle node) {
    KernelParams params;
    memset(&params, 0, sizeof params);
    if (cu.GraphKernelNodeGetParams(node, &params)) return 0;
    kernel->function = params.func ? params.func : params.kern;
    memcpy(kernel->config.grid, params.grid, sizeof params.grid);
    memcpy(kernel->config.block, params.block, sizeof params.block);
    kernel->config.shared_bytes = params.shared_bytes;
    for (int i = 0; i < ATTRIBUTES; i++) {
        LaunchAttribute *to = &kernel->attribute[kernel->config.count];
        int any = 0;
        *to = (LaunchAttribute){.id = attribute_ids[i]};
        if (cu.GraphKernelNodeGetAttribute(node, to->id, to->value)) continue;
        for (int k = 0; k < 16; k++) any |= to->value[k] != 0;
        if (any && !(to->id == CARVE_OUT && to->value[0] == (unsigned)-1)) kernel->config.count++;
    }
    return read_parameters(pool, kernel, &params);
}

/* Returns 1 if each edge leads from a node to a later one, so that they can be launched in their order. */
static int is_in_order(Handle graph, const Handle *node, size_t nodes) {
    Handle edge[2][MOST_KERNELS * MOST_KERNELS];
    EdgeData data[MOST_KERNELS * MOST_KERNELS];
    size_t edges = MOST_KERNELS * MOST_KERNELS, from, to;
    if (nodes < 2) return 1;
    if (cu.GraphGetEdges(graph, edge[0], edge[1], data, &edges)) return 0;
    for (size_t i = 0; i < edges; i++) {
        for (from = 0; from < nodes && node[from] != edge[0][i];) from++;
        for (to = 0; to < nodes && node[to] != edge[1][i];) to++;
        if (from >= to) return 0;
    }
    return 1;
}

/* Returns 1 if the graph has kernels, fills and copies alone, and few; -1: an error. */
static int read_graph(Capture *capture, Handle graph) {
    Handle node[MOST_KERNELS];
    size_t nodes = 0;
    int kind;
    if (cu.GraphGetNodes(graph, NULL, &nodes) || nodes > MOST_KERNELS
        || (nodes && cu.GraphGetNodes(graph, node, &nodes)))
        return refused(capture, "it launches too much");
    if (!is_in_order(graph, node, nodes)) return refused(capture, "its launches are in no known order");
    if (!(capture->launch = pool_zeros(&capture->pool, (Py_ssize_t)nodes, sizeof *capture->launch))) return -1;
    for (size_t i = 0; i < nodes; i++) {
        Launch *launch;
        if (cu.GraphNodeGetType(node[i], &kind)) kind = -1;
        if (kind == EMPTY_NODE) continue;
        if (kind != KERNEL_NODE && kind != FILL_NODE && kind != COPY_NODE)
            return refused(capture, "it does more than to launch kernels");
        launch = &capture->launch[capture->launches++];
        if (!(kind == KERNEL_NODE ? read_kernel(&capture->pool, launch, node[i])
              : kind == FILL_NODE ? read_fill(&capture->pool, launch, node[i])
                                  : read_copy(&capture->pool, launch, node[i])))
            return refused(capture, "a launch isn't known in full");
    }
    return 1;
}

static PyObject *results_of(Calls *self, PyObject *const *arguments, Py_ssize_t count, PyObject *result) {
    PyObject *given, *results = NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        if (result == arguments[i]) return PyLong_FromSsize_t(i);
    if ((given = tuple_of(arguments, count)))
        results = PyObject_CallMethodObjArgs(self->device, name_results, result, given, NULL);
    Py_XDECREF(given);
    return results;
}

/* Captures a call. 1: the capture has its kernels. 0: it can't be captured. BUSY: not now. -1: an error. */
static int capture_call(Calls *self, PyObject *function, PyObject *names, PyObject *const *arguments, Py_ssize_t count,
                        int again, Capture *capture) {
    PyObject *entered = PyObject_CallMethodOneArg(self->device, name_enter, again ? Py_True : Py_False), *result, *left;
    Handle graph = NULL, stream;
    int code = 0;
    if (!entered || entered == Py_None) {
        Py_XDECREF(entered);
        return entered ? BUSY : -1;
    }
    stream = PyLong_AsVoidPtr(entered);
    Py_DECREF(entered);
    if (!cu.StreamBeginCapture(stream, THREAD_LOCAL)) {
        clear_stack(STACK);
        result = PyObject_Vectorcall(function, arguments, (size_t)(count - PyTuple_GET_SIZE(names)), names);
        if (!(code = !cu.StreamEndCapture(stream, &graph) && graph && result)) refused(capture, "its capture fails");
        PyErr_Clear(); /* the call itself will say what is wrong with it */
        if (code && !again && !(capture->results = results_of(self, arguments, count, result))) code = -1;
        Py_XDECREF(result);
        self->captured++;
    } else
        refused(capture, "no capture can be begun");
    if (!(left = PyObject_CallMethodNoArgs(self->device, name_leave))) code = -1;
    Py_XDECREF(left);
    if (code > 0 && !(capture->temporaries = PyObject_CallMethodNoArgs(self->device, name_temporaries))) code = -1;
    if (code > 0) code = read_graph(capture, graph);
    if (graph) cu.GraphDestroy(graph);
    return code;
}

/* ---- words ---- */

static uint64_t word_at(const Launch *kernel, size_t at) {
    uint64_t word;
    memcpy(&word, kernel->block + at, sizeof word);
    return word;
}

static int may_be_address(uint64_t word) { return word >> 32 && !(word >> 48); }

/* Returns the operand or temporary that the word points into, or -1. A temporary's place follows those of operands, by
   its number among all that were allocated. */
static Py_ssize_t place_of(const Capture *capture, uint64_t word, uint64_t *delta) {
    const uint64_t *pair = (const uint64_t *)PyBytes_AS_STRING(capture->temporaries);
    Py_ssize_t pairs = PyBytes_GET_SIZE(capture->temporaries) / 16, found = -1;
    if (!may_be_address(word)) return -1;
    for (Py_ssize_t i = 0; i < capture->operands; i++) /* where tensors overlap, the one that begins there */
        if (word >= capture->operand[i].begin && word < capture->operand[i].end
            && (found < 0 || word == capture->operand[i].begin)) {
            *delta = word - capture->operand[i].begin;
            if (!*delta) return i;
            found = i;
        }
    if (found >= 0) return found;
    if (!pairs || word < pair[0]) return -1; /* a space is used upwards */
    for (Py_ssize_t i = 0; i < pairs; i++)
        if (word >= pair[2 * i] && word < pair[2 * i] + pair[2 * i + 1]) {
            *delta = word - pair[2 * i];
            return MOST_ARGUMENTS + i;
        }
    return -1;
}

/* Returns 1 if a word of a block is an address of memory that the driver knows. Addresses in structures are aligned. */
static int is_memory(uint64_t word, size_t at) {
    unsigned kind;
    return !(at % 8) && may_be_address(word) && !cu.PointerGetAttribute(&kind, MEMORY_TYPE, word);
}

/* Returns 1 if the words are one pointer in two captures, at different addresses. */
static int is_pointer(const Capture *first, const Capture *second, uint64_t a, uint64_t b) {
    uint64_t delta[2];
    Py_ssize_t one = place_of(first, a, &delta[0]), other = place_of(second, b, &delta[1]);
    if (a == b || one < 0 || other < 0 || delta[0] != delta[1]) return 0;
    return one >= MOST_ARGUMENTS ? other >= MOST_ARGUMENTS : one == other && !delta[0];
}

/* Finds the offsets of a kernel's pointers, of which there is room for MOST_SLOTS. Returns NULL; or why they aren't
   known: a word that differs is none, or a word that is the same could be one. */
static const char *compare(const Capture *first, const Capture *second, int i, uint32_t *pointer, size_t *pointers) {
    const Launch *a = &first->launch[i], *b = &second->launch[i];
    uint64_t unused;
    if (a->function != b->function || memcmp(&a->config, &b->config, sizeof a->config)
        || memcmp(a->attribute, b->attribute, sizeof a->attribute))
        return "two captures launch different kernels";
    for (size_t k = 0; k < a->count; k++) {
        size_t at = a->offset[k], end = at + a->width[k];
        while (at < end) {
            uint64_t x, y;
            if (at + 8 > end) {
                if (memcmp(a->block + at, b->block + at, end - at)) return "a number differs in two captures";
                break;
            }
            x = word_at(a, at);
            y = word_at(b, at);
            if (is_pointer(first, second, x, y)) {
                if (*pointers == MOST_SLOTS) return "it has too many pointers";
                pointer[(*pointers)++] = (uint32_t)at;
                at += 8;
            } else if (x == y) {
                if (place_of(first, x, &unused) >= 0 || is_memory(x, at))
                    return "an address is the same in two captures";
                at += 4;
            } else if ((uint32_t)x == (uint32_t)y && at + 12 <= end
                       && is_pointer(first, second, word_at(a, at + 4), word_at(b, at + 4)))
                at += 4;
            else
                return "a word differs in two captures, and is no address of a tensor";
        }
    }
    return NULL;
}

/* Returns the offsets of the pointers of a kernel's function, as bytes, or why they aren't known; a borrowed reference,
 * or NULL. */
static PyObject *known_pointers(Calls *self, Handle function) {
    PyObject *key = PyLong_FromVoidPtr(function), *found = key ? PyDict_GetItemWithError(self->functions, key) : NULL;
    Py_XDECREF(key);
    return found;
}

static int has_offset(const uint32_t *offset, size_t count, size_t wanted) {
    for (size_t i = 0; i < count; i++)
        if (offset[i] == wanted) return 1;
    return 0;
}

/* Compares a capture with a second one at other addresses, and notes where its functions have pointers. */
static int learn(Calls *self, const Capture *first, const Capture *second) {
    for (int i = 0; i < first->launches; i++) {
        uint32_t pointer[2 * MOST_SLOTS];
        size_t pointers = 0;
        Handle function = first->launch[i].function;
        PyObject *known = function ? known_pointers(self, function) : NULL, *key, *value;
        const char *why = "two captures launch different kernels";
        int code;
        if (PyErr_Occurred()) return -1;
        if (!function) continue;
        if (first->launches == second->launches) why = compare(first, second, i, pointer, &pointers);
        if (known && PyBytes_CheckExact(known)) { /* a pointer may have been null before */
            const uint32_t *before = (const uint32_t *)PyBytes_AS_STRING(known);
            for (size_t k = 0, n = (size_t)PyBytes_GET_SIZE(known) / 4; k < n; k++)
                if (!has_offset(pointer, pointers, before[k]) && pointers < MOST_SLOTS) pointer[pointers++] = before[k];
        }
        key = PyLong_FromVoidPtr(function);
        value = why ? PyUnicode_FromString(why)
                    : PyBytes_FromStringAndSize((const char *)pointer, (Py_ssize_t)(4 * pointers));
        code = key && value ? PyDict_SetItem(self->functions, key, value) : -1;
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (code) return -1;
    }
    return 0;
}

/* The same. Most words are numbers, two of 32 bits, and the same in many calls, so the driver is asked once. */
static int seems_memory(Calls *self, uint64_t word, size_t at) {
    uint64_t *number = &self->number[(word * 0x9e3779b97f4a7c15u) >> 52];
    if (at % 8 || !may_be_address(word) || *number == word) return 0;
    if (is_memory(word, at)) return 1;
    *number = word;
    return 0;
}

/* Finds the slots of a kernel. 1: it has them all. 0: a word is no pointer that its function is known to have: then
   `unknown` is set if the function has to be learnt. -1: an error. */
static int find_slots(Calls *self, Capture *capture, Launch *kernel, int *unknown) {
    static const uint32_t of_memory[] = {0, 8};
    PyObject *known = kernel->function ? known_pointers(self, kernel->function) : NULL;
    const uint32_t *pointer = kernel->function ? NULL : of_memory;
    size_t pointers = 2;
    uint64_t delta;
    if (PyErr_Occurred()) return -1;
    if (known && PyBytes_CheckExact(known)) {
        pointer = (const uint32_t *)PyBytes_AS_STRING(known);
        pointers = (size_t)PyBytes_GET_SIZE(known) / 4;
    } else if (kernel->function) {
        *unknown |= !known;
        return refused(capture, known ? PyUnicode_AsUTF8(known) : "a function isn't known");
    }
    kernel->slots = 0;
    if (!(kernel->slot = pool_zeros(&capture->pool, (Py_ssize_t)pointers, sizeof *kernel->slot))) return -1;
    for (size_t k = 0; k < kernel->count; k++)
        for (size_t at = kernel->offset[k]; at + 8 <= kernel->offset[k] + kernel->width[k]; at += 4) {
            uint64_t word = word_at(kernel, at);
            Py_ssize_t place = place_of(capture, word, &delta);
            if (has_offset(pointer, pointers, at)) {
                if (!word && kernel->function) continue;
                if (place < 0) return refused(capture, "a pointer is no address of a tensor");
                if (place < MOST_ARGUMENTS && delta) return refused(capture, "an address is inside of a tensor");
                if ((size_t)kernel->slots == pointers) return refused(capture, "it has too many pointers");
                kernel->slot[kernel->slots++] = (Slot){at, (int)place, delta};
                at += 4;
            } else if (place >= 0 || seems_memory(self, word, at)) {
                *unknown = 1;
                return refused(capture, "an address lies where the function has no pointer");
            }
        }
    return 1;
}

/* ---- entries ---- */

static void entry_dealloc(Entry *self) {
    PyTypeObject *type = Py_TYPE(self);
    pool_free(&self->pool);
    for (int i = 0; i < self->temporaries; i++) Py_XDECREF(self->temporary[i]);
    Py_XDECREF(self->results);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Returns the number of a temporary that an entry allocates by these arguments; it steals them. -1: it has too many. */
static int add_temporary(Entry *entry, PyObject *arguments) {
    if (arguments && entry->temporaries < MOST_TEMPORARIES) {
        entry->temporary[entry->temporaries] = arguments;
        return entry->temporaries++;
    }
    Py_XDECREF(arguments);
    return -1;
}

/* Returns what a launch returns for an item of `results`: a number of an argument, None, or (address, arguments of
   `empty`). `number`: by temporary, its number among all that were allocated. */
static PyObject *result_of(Entry *entry, const Capture *capture, PyObject *item, int *number) {
    uint64_t address, delta;
    PyObject *arguments;
    Py_ssize_t place;
    int made;
    if (item == Py_None || PyLong_Check(item)) return Py_NewRef(item);
    if (!PyArg_ParseTuple(item, "KO!", &address, &PyTuple_Type, &arguments)) return NULL;
    place = place_of(capture, address, &delta);
    for (int i = 0; address && i < entry->temporaries; i++)
        if (number[i] == place) place = -1; /* it shares memory with another one */
    if (address && (place < MOST_ARGUMENTS || delta)) return NULL;
    if ((made = add_temporary(entry, Py_NewRef(arguments))) < 0) return NULL;
    number[made] = address ? (int)place : -1;
    return PyLong_FromLong(-1 - made);
}

static int read_results(Entry *entry, const Capture *capture, int *number) {
    PyObject *results = capture->results;
    if (!PyList_Check(results)) return (entry->results = result_of(entry, capture, results, number)) != NULL;
    entry->results = PyTuple_New(PyList_GET_SIZE(results));
    for (Py_ssize_t i = 0; entry->results && i < PyList_GET_SIZE(results); i++)
        set_item(&entry->results, i, result_of(entry, capture, PyList_GET_ITEM(results, i), number));
    return entry->results != NULL;
}

/* Numbers the temporaries of an entry, which slots name by their numbers among all. Returns 0 if they are too many. */
static int number_temporaries(Entry *entry, const Capture *capture) {
    const uint64_t *pair = (const uint64_t *)PyBytes_AS_STRING(capture->temporaries);
    int number[MOST_TEMPORARIES];
    if (!read_results(entry, capture, number)) return 0;
    for (int i = 0; i < entry->launches; i++)
        for (int k = 0; k < entry->launch[i].slots; k++) {
            Slot *slot = &entry->launch[i].slot[k];
            int n = 0;
            if (slot->place < MOST_ARGUMENTS) continue;
            while (n < entry->temporaries && number[n] != slot->place) n++;
            if (n == entry->temporaries) {
                uint64_t size = pair[2 * (slot->place - MOST_ARGUMENTS) + 1];
                if ((n = add_temporary(entry, Py_BuildValue("(n)", (Py_ssize_t)size))) < 0) return 0;
                number[n] = slot->place;
            }
            slot->place = MOST_ARGUMENTS + n;
        }
    return 1;
}

/* Returns an entry; NULL without an error if the capture can't be one. */
static PyObject *entry_of(Calls *self, Capture *capture, int *unknown) {
    Entry *entry;
    for (int i = 0; i < capture->launches; i++)
        if (find_slots(self, capture, &capture->launch[i], unknown) <= 0) return NULL;
    if (!(entry = (Entry *)entry_type->tp_alloc(entry_type, 0))) return NULL;
    entry->pool = capture->pool;
    entry->launch = capture->launch;
    entry->launches = capture->launches;
    capture->pool = NULL;
    if (number_temporaries(entry, capture)) return (PyObject *)entry;
    refused(capture, "its results or its temporary memory aren't known");
    Py_DECREF(entry);
    return NULL;
}

/* Reads where the operands of a second capture lie. Returns 1 if there are as many. */
static int read_operands(const Capture *first, Capture *second, PyObject *elsewhere) {
    Key key;
    Extent *extent = second->operand;
    uint64_t address;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(elsewhere); i++) {
        const Tensor *tensor = fields_of(PyTuple_GET_ITEM(elsewhere, i), &address);
        key.used = 0;
        if (!tensor) continue;
        if (second->operands == first->operands || !put_tensor(&key, tensor, address, extent++)) return 0;
        second->operands++;
    }
    return second->operands == first->operands;
}

/* Captures the call once more, with tensors that lie elsewhere, and learns its functions. As `capture_call`. */
static int learn_functions(Calls *self, PyObject *function, PyObject *names, PyObject *const *arguments,
                           Py_ssize_t count, const Capture *first) {
    Capture second = {0};
    PyObject *given = tuple_of(arguments, count), *elsewhere = NULL;
    int code = -1;
    if (given && (elsewhere = PyObject_CallMethodOneArg(self->device, name_elsewhere, given)))
        code = PyTuple_CheckExact(elsewhere) && PyTuple_GET_SIZE(elsewhere) == count
               && read_operands(first, &second, elsewhere);
    if (code > 0) code = capture_call(self, function, names, &PyTuple_GET_ITEM(elsewhere, 0), count, 1, &second);
    if (code == 1 && learn(self, first, &second)) code = -1;
    clear_capture(&second);
    Py_XDECREF(given);
    Py_XDECREF(elsewhere);
    return code;
}

/* Returns a new entry, a text if the call can't be one, or True if it can't be captured now. */
static PyObject *make_entry(Calls *self, PyObject *function, PyObject *names, PyObject *const *arguments,
                            Py_ssize_t count, const Extent *operand, Py_ssize_t operands) {
    Capture capture = {.operands = operands};
    PyObject *entry = NULL;
    int unknown = 0, code;
    memcpy(capture.operand, operand, sizeof capture.operand);
    code = capture_call(self, function, names, arguments, count, 0, &capture);
    if (code == 1 && !(entry = entry_of(self, &capture, &unknown)) && unknown && !PyErr_Occurred()
        && (code = learn_functions(self, function, names, arguments, count, &capture)) == 1)
        entry = entry_of(self, &capture, &unknown);
    clear_capture(&capture);
    if (entry || code < 0 || PyErr_Occurred()) return entry;
    return code == BUSY ? Py_NewRef(Py_True) : PyUnicode_FromString(capture.why ? capture.why : "it can't be moved");
}

/* ---- launches ---- */

static int allocate(Calls *self, const Entry *entry, PyObject **held, uint64_t *base) {
    PyObject *empty = PyObject_GetAttr(self->device, name_empty);
    int code = empty ? 0 : -1;
    for (int i = 0; !code && i < entry->temporaries; i++)
        if (!(held[i] = PyObject_Call(empty, entry->temporary[i], NULL)) || address_of(held[i], &base[i])) code = -1;
    Py_XDECREF(empty);
    return code;
}

static PyObject *chosen(PyObject *result, PyObject *const *arguments, PyObject *const *held) {
    long i = result == Py_None ? 0 : PyLong_AsLong(result);
    return Py_NewRef(result == Py_None ? result : i < 0 ? held[-1 - i] : arguments[i]);
}

static PyObject *result_of_launch(const Entry *entry, PyObject *const *arguments, PyObject *const *held) {
    PyObject *results = entry->results, *made;
    if (!PyTuple_Check(results)) return chosen(results, arguments, held);
    if ((made = PyTuple_New(PyTuple_GET_SIZE(results))))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); i++)
            PyTuple_SET_ITEM(made, i, chosen(PyTuple_GET_ITEM(results, i), arguments, held));
    return made;
}

static int fill_or_copy(const MemsetParams *fill, const unsigned char *block, Handle stream) {
    Address address[2];
    memcpy(address, block, sizeof address);
    switch (fill->element_size) {
    case 0: return cu.MemcpyDtoDAsync(address[0], address[1], fill->width, stream);
    case 1: return cu.MemsetD8Async(address[0], (unsigned char)fill->value, fill->width, stream);
    case 2: return cu.MemsetD16Async(address[0], (unsigned short)fill->value, fill->width, stream);
    default: return cu.MemsetD32Async(address[0], fill->value, fill->width, stream);
    }
}

static int launch_kernel(const Launch *launch, const uint64_t *base, Handle stream) {
    unsigned char block[MOST_BYTES];
    void *at[MOST_PARAMETERS + 1];
    LaunchConfig config = launch->config;
    int code;
    memcpy(block, launch->block, launch->size);
    for (int i = 0; i < launch->slots; i++) {
        uint64_t address = base[launch->slot[i].place] + launch->slot[i].delta;
        memcpy(block + launch->slot[i].at, &address, sizeof address);
    }
    for (size_t i = 0; i < launch->count; i++) at[i] = block + launch->offset[i];
    config.stream = stream;
    config.attributes = launch->attribute;
    Py_BEGIN_ALLOW_THREADS code = launch->function ? cu.LaunchKernelEx(&config, launch->function, at, NULL)
                                                   : fill_or_copy(&launch->fill, block, stream);
    Py_END_ALLOW_THREADS return driver_check(
        code, launch->function ? "cuLaunchKernelEx" : "cuMemsetAsync or cuMemcpyAsync", "a call of a library");
}

static PyObject *launch_entry(Calls *self, const Entry *entry, PyObject *const *arguments, const Extent *operand,
                              Py_ssize_t operands, Handle stream) {
    uint64_t base[MOST_ARGUMENTS + MOST_TEMPORARIES];
    PyObject *held[MOST_TEMPORARIES] = {NULL}, *result = NULL;
    int code;
    for (Py_ssize_t i = 0; i < operands; i++) base[i] = operand[i].begin;
    code = entry->temporaries ? allocate(self, entry, held, base + MOST_ARGUMENTS) : 0;
    for (int i = 0; !code && i < entry->launches; i++) code = launch_kernel(&entry->launch[i], base, stream);
    if (!code) result = result_of_launch(entry, arguments, held);
    for (int i = 0; i < entry->temporaries; i++) Py_XDECREF(held[i]);
    self->launched += !code;
    return result;
}

long modes_of_calls(PyObject *calls) {
    PyObject *number = PyObject_CallMethodNoArgs(((Calls *)calls)->device, name_modes);
    long modes = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return modes;
}

static int is_entry(PyObject *found) { return found && Py_TYPE(found) == entry_type; }

/* Finds what is known of a key, and notes the call. Returns 1 if it may be captured. `site`: that of the first call
   with the key, which is this one if the key is new. */
static int look_up(Calls *self, PyObject *key, PyObject **found, long *site) {
    int leads = self->leads[*site];
    *found = Py_XNewRef(PyDict_GetItemWithError(self->entries, key));
    if (is_entry(*found)) {
        self->leads[((Entry *)*found)->site] = 1;
        return 0;
    }
    if (*found && PyLong_CheckExact(*found)) {
        *site = PyLong_AsLong(*found);
        return self->leads[*site] = 1;
    }
    if (*found || PyErr_Occurred()) return 0;
    self->leads[*site] = 0;
    if (PyDict_GET_SIZE(self->entries) >= MOST_ENTRIES) PyDict_Clear(self->entries);
    if ((*found = PyLong_FromLong(*site)) && PyDict_SetItem(self->entries, key, *found)) Py_CLEAR(*found);
    return *found && leads;
}

PyObject *launch_call(PyObject *calls, long modes, PyObject *function, PyObject *names, PyObject *const *arguments,
                      Py_ssize_t count, const void *site, Handle stream) {
    Calls *self = (Calls *)calls;
    Extent operand[MOST_ARGUMENTS] = {{0}};
    Py_ssize_t operands;
    PyObject *key, *found, *result = NULL;
    Key made;
    int is_known;
    long first = (long)((uintptr_t)site / sizeof site % REMEMBERED);
    if (!make_key(&made, self->kind, modes, function, names, arguments, count, operand, &operands)) return NULL;
    if (!(key = PyBytes_FromStringAndSize((const char *)made.bytes, (Py_ssize_t)made.used))) return NULL;
    if (look_up(self, key, &found, &first)) {
        if (self->pause) {
            self->pause--;
        } else if (self->captured < START + self->launched / PAYS) {
            Py_SETREF(found, make_entry(self, function, names, arguments, count, operand, operands));
            /* a first call, whose site doesn't lead now, may fail for what it would load */
            is_known = is_entry(found) || (found && found != Py_True && self->leads[first]);
            if (found == Py_True) self->pause = PAUSE;
            if (is_entry(found))
                ((Entry *)found)->site = first;
            else
                self->leads[first] = 0;
            if (is_known && PyDict_SetItem(self->entries, key, found)) Py_CLEAR(found);
        }
    }
    Py_DECREF(key);
    if (is_entry(found)) result = launch_entry(self, (const Entry *)found, arguments, operand, operands, stream);
    Py_XDECREF(found);
    return result;
}

int check_calls(PyObject *calls) {
    if (Py_TYPE(calls) == calls_type) return 0;
    PyErr_SetString(PyExc_TypeError, "library calls are those of calls()");
    return -1;
}

/* ---- the type ---- */

static void calls_dealloc(Calls *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->entries);
    Py_XDECREF(self->functions);
    Py_XDECREF(self->device);
    type->tp_free(self);
    Py_DECREF(type);
}

static int calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->entries);
    Py_VISIT(self->functions);
    Py_VISIT(self->device);
    return 0;
}

static PyObject *py_calls(PyObject *module, PyObject *args) {
    PyObject *device;
    int kind;
    Calls *self;
    if (!PyArg_ParseTuple(args, "Oi:calls", &device, &kind)) return NULL;
    if (!(self = (Calls *)calls_type->tp_alloc(calls_type, 0))) return NULL;
    self->device = Py_NewRef(device);
    self->kind = kind;
    if (!(self->entries = PyDict_New()) || !(self->functions = PyDict_New())) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef calls_members[] = {
    {"captured", T_ULONGLONG, offsetof(Calls, captured), READONLY, "captures"},
    {"launched", T_ULONGLONG, offsetof(Calls, launched), READONLY, "calls that were launched"},
    {"entries", T_OBJECT, offsetof(Calls, entries), READONLY,
     "by key; a number for one that was called, or a text: why it is none"},
    {"functions", T_OBJECT, offsetof(Calls, functions), READONLY,
     "offsets of pointers, as bytes, or why they aren't known, by handle"},
    {NULL}};
static PyType_Slot calls_slots[] = {
    {Py_tp_dealloc, calls_dealloc}, {Py_tp_traverse, calls_traverse}, {Py_tp_members, calls_members}, {0, NULL}};
static PyType_Spec calls_spec = {"cuda_driver_c.Calls", sizeof(Calls), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 calls_slots};
static PyType_Slot entry_slots[] = {{Py_tp_dealloc, entry_dealloc}, {0, NULL}};
static PyType_Spec entry_spec = {"cuda_driver_c.Entry", sizeof(Entry), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, entry_slots};

static PyMethodDef methods[] = {
    {"calls", py_calls, METH_VARARGS,
     "calls(device, kind): library calls of a device, `capture.calls.Device`, as entries; kind: torch's number for it"},
    {NULL}};

static int init(PyObject *module) {
    if (calls_type) return 0;
    calls_type = (PyTypeObject *)PyType_FromSpec(&calls_spec);
    entry_type = (PyTypeObject *)PyType_FromSpec(&entry_spec);
    name_enter = PyUnicode_InternFromString("enter");
    name_leave = PyUnicode_InternFromString("leave");
    name_elsewhere = PyUnicode_InternFromString("elsewhere");
    name_temporaries = PyUnicode_InternFromString("temporaries");
    name_modes = PyUnicode_InternFromString("modes");
    name_results = PyUnicode_InternFromString("results");
    name_empty = PyUnicode_InternFromString("empty");
    return PyErr_Occurred() ? -1 : 0;
}

PART(.module = "relaunch", .methods = methods, .init = init)
