/* A relaunch as one call: Note [A relaunch]. `call` reads and checks all that a `Call` is to know.

   A launch allocates the storages of outputs, and scratch, the largest first; each output is made by a recipe. The
   scratch is no tensor: torch's C functions allocate and free it, or where they fail its Python functions, which raise
   torch's errors. */

#include "data_ptr.h"
#include "device.h"
#include "module.h"
#include "patch.h"

#include <structmember.h>

/* Stands for counters[group][name]. */
typedef struct {
    PyObject *counters, *group, *name;
    const void *seen[5]; /* where it was: to prefetch, never to read */
} Counter;

typedef struct {
    Py_ssize_t position;
    uint64_t mask;
} Input;

/* The objects are those of a tuple of `recipes`. */
typedef struct {
    int kind;
    Py_ssize_t number;
    PyObject *object, *size, *stride, *offset;
} Recipe;

/* How the memory of a graph is allocated, and how outputs are made of that and of the inputs. Regions are, in order:
   inputs, storages of outputs, scratch. */
typedef struct {
    PyObject *empty;                  /* makes a tensor of (size, stride, dtype) */
    PyObject *storages;               /* its arguments for each storage */
    size_t scratch;                   /* bytes, which are no tensor */
    PyObject *raw_alloc, *raw_delete; /* torch's Python functions for the scratch, */
    int (*alloc)(uint64_t, Handle *); /* and its C functions, which return 0 on success; or NULL */
    int (*release)(Handle);
    Py_ssize_t inputs, allocated, *order; /* order: of what is allocated, as regions after the inputs */
    PyObject *recipes;                    /* (kind, number, object, size, stride, offset) of each output */
    Recipe *recipe;
    PyObject *typed;       /* (storage, dtype) of views of storages, which come after these */
    Py_ssize_t *viewed;    /* the storage of each */
    PyObject *reinterpret; /* makes a view of a tensor */
} Layout;

/* What one launch has allocated. */
typedef struct {
    PyObject *storages; /* then the typed views */
    Handle scratch;
} Memory;

/* An executable bound to a layout. */
typedef struct {
    PyObject_HEAD
    Pool pool;
    Blocks blocks;
    Device device;
    Py_ssize_t least; /* so many inputs a call has at the least */
    Input *input;
    Program numbers;
    Layout layout;
    Counter counter;
    PyObject *replay; /* keeps the executable; not called if the driver launches */
    int direct;
    PyObject *misaligned;
    PyObject *kept;                       /* keeps all objects above but the device's */
    unsigned long long launches, patched; /* patched: nodes set for them */
    PyObject *counts;                     /* keeps `*count`; NULL if there is none */
    unsigned long long *count;            /* launches of this and of others */
} Call;

/* -- the counter */

/* Returns a new reference. A dictionary's subclass is slow at its own way, which makes what is missing. */
static PyObject *item_of(PyObject *table, PyObject *key) {
    PyObject *found = PyDict_Check(table) ? PyDict_GetItemWithError(table, key) : NULL;
    if (found) return Py_NewRef(found);
    return PyErr_Occurred() ? NULL : PyObject_GetItem(table, key);
}

/* Does counters[group][name] += 1. Returns 0, or -1 with an error. */
static int counter_add(Counter *self) {
    PyObject *group = item_of(self->counters, self->group), *before = NULL, *one = PyLong_FromLong(1), *after = NULL;
    int code = -1;
    if (group && one && (before = item_of(group, self->name)) && (after = PyNumber_Add(before, one)))
        code =
            PyDict_Check(group) ? PyDict_SetItem(group, self->name, after) : PyObject_SetItem(group, self->name, after);
    if (!code && PyDict_Check(group) && PyDict_Check(self->counters)) {
        const void *seen[] = {self->counters, group, after, ((PyDictObject *)self->counters)->ma_keys,
                              ((PyDictObject *)group)->ma_keys};
        memcpy(self->seen, seen, sizeof seen);
    }
    Py_XDECREF(group);
    Py_XDECREF(before);
    Py_XDECREF(one);
    Py_XDECREF(after);
    return code;
}

/* Prefetches the five objects on the way to the count, long before they are needed. */
static inline void counter_fetch(const Counter *self) {
    for (size_t i = 0; i < sizeof self->seen / sizeof *self->seen; i++) __builtin_prefetch(self->seen[i]);
}

/* -- memory and outputs */

static size_t scratch_region(const Layout *self) { return (size_t)(self->inputs + PyTuple_GET_SIZE(self->storages)); }

/* Each allocated region has to be in the order once: the storages, and the scratch if there is any. */
static int read_order(Layout *self, Pool *pool, PyObject *order) {
    Py_ssize_t made = PyTuple_GET_SIZE(self->storages), all = made + (self->scratch != 0);
    for (Py_ssize_t i = 0; i < made; i++)
        if (!is_tuple(PyTuple_GET_ITEM(self->storages, i), "allocation", i)) return -1;
    if (!(self->order = read_row(pool, order, "the order", 0, all, &self->allocated))) return -1;
    if (self->allocated != all) return refuse("so many regions are not allocated");
    for (Py_ssize_t i = 0; i < all; i++)
        for (Py_ssize_t j = 0; j < i; j++)
            if (self->order[j] == self->order[i]) return refuse("the order names a region twice");
    return 0;
}

/* Kinds of recipes: the recipe's object, the output `number`, the input `number`, the tensor of storage `number`, a
   view of that or of one of the `typed` after them, and what the object makes of the inputs and the storages. */
enum { GIVEN, REPEATED, SAME, WHOLE, PART, MADE };

static PyObject *name_view;

static int read_typed(Layout *self, Pool *pool) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->typed);
    if (!(self->viewed = pool_zeros(pool, count, sizeof *self->viewed))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->typed, i), *dtype;
        if (!is_tuple(item, "typed view", i)
            || !PyArg_ParseTuple(item, "nO;a typed view is (storage, dtype)", &self->viewed[i], &dtype))
            return -1;
        if (self->viewed[i] < 0 || self->viewed[i] >= PyTuple_GET_SIZE(self->storages))
            return refuse("a typed view of no storage");
    }
    return 0;
}

/* Raises `least` so that a list of that many inputs has each that is an output. */
static int read_recipes(Layout *self, Pool *pool, Py_ssize_t *least) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->recipes), storages = PyTuple_GET_SIZE(self->storages);
    Py_ssize_t parts = storages + PyTuple_GET_SIZE(self->typed);
    if (read_typed(self, pool) || !(self->recipe = pool_zeros(pool, count, sizeof *self->recipe))) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(self->recipes, i);
        Recipe *each = &self->recipe[i];
        Py_ssize_t ends[] = {1, i, PY_SSIZE_T_MAX, storages, parts, 1};
        if (!is_tuple(item, "recipe", i)
            || !PyArg_ParseTuple(item, "inOOOO;a recipe is (kind, number, object, size, stride, offset)", &each->kind,
                                 &each->number, &each->object, &each->size, &each->stride, &each->offset))
            return -1;
        if (each->kind < GIVEN || each->kind > MADE || each->number < 0 || each->number >= ends[each->kind])
            return refuse("a recipe of an output names what isn't there");
        if (each->kind == SAME && each->number >= *least)
            *least = each->number + 1; /* inputs that are no region may come last */
    }
    return 0;
}

static int allocate_scratch(const Layout *self, Handle stream, Handle *address) {
    PyObject *made;
    if (self->alloc && !self->alloc(self->scratch, address)) return 0;
    *address = NULL;
    made = PyObject_CallFunction(self->raw_alloc, "nN", (Py_ssize_t)self->scratch, PyLong_FromVoidPtr(stream));
    if (!made) return -1;
    *address = PyLong_AsVoidPtr(made);
    Py_DECREF(made);
    return PyErr_Occurred() ? -1 : 0;
}

static int release(const Layout *self, Handle address) {
    PyObject *number, *done;
    if (self->release && !self->release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(self->raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Frees the scratch, if there is any; an error that is set already is kept. */
static int free_scratch(const Layout *self, Memory *memory) {
    PyObject *type, *value, *trace;
    Handle was = memory->scratch;
    int code;
    if (!was) return 0;
    memory->scratch = NULL;
    PyErr_Fetch(&type, &value, &trace);
    code = release(self, was);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return code;
}

/* Allocates, and writes the addresses of the regions after the inputs into `base`, where those of the inputs are. What
   is allocated when it fails is in `memory`. */
static int allocate_memory(const Layout *self, Handle stream, Memory *memory, uint64_t *base) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->storages);
    base += self->inputs;
    base[count] = 0;
    if (!(memory->storages = PyTuple_New(count + PyTuple_GET_SIZE(self->typed)))) return -1;
    for (Py_ssize_t i = 0; i < self->allocated; i++) {
        Py_ssize_t k = self->order[i];
        PyObject *made;
        if (k == count) {
            if (allocate_scratch(self, stream, &memory->scratch)) return -1;
            base[k] = (uint64_t)(uintptr_t)memory->scratch;
            continue;
        }
        if (!(made = PyObject_Call(self->empty, PyTuple_GET_ITEM(self->storages, k), NULL))) return -1;
        PyTuple_SET_ITEM(memory->storages, k, made);
        if (address_of(made, base + k)) return -1;
    }
    return 0;
}

static PyObject *view_of(const Layout *self, PyObject *of, const Recipe *recipe) {
    PyObject *args[] = {of, recipe->size, recipe->stride, recipe->offset};
    return PyObject_Vectorcall(self->reinterpret, args, 4, NULL);
}

/* Makes the views of storages as other dtypes, which come after these. */
static int make_typed(const Layout *self, PyObject *storages) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->storages);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->typed); i++) {
        PyObject *dtype = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->typed, i), 1);
        PyObject *made = PyObject_CallMethodOneArg(PyTuple_GET_ITEM(storages, self->viewed[i]), name_view, dtype);
        if (!made) return -1;
        PyTuple_SET_ITEM(storages, count + i, made);
    }
    return 0;
}

/* Returns a new tuple of the outputs, or NULL with an error. `source`: the inputs. */
static PyObject *make_outputs(const Layout *self, PyObject *source, PyObject *storages) {
    Py_ssize_t recipes = PyTuple_GET_SIZE(self->recipes);
    PyObject *result = make_typed(self, storages) ? NULL : PyTuple_New(recipes), *args[] = {source, storages};
    for (Py_ssize_t i = 0; result && i < recipes; i++) {
        const Recipe *each = &self->recipe[i];
        Py_ssize_t n = each->number;
        PyObject *out = NULL;
        switch (each->kind) {
        case GIVEN: out = Py_NewRef(each->object); break;
        case REPEATED: out = Py_NewRef(PyTuple_GET_ITEM(result, n)); break;
        case SAME: out = PySequence_GetItem(source, n); break;
        case WHOLE: out = Py_NewRef(PyTuple_GET_ITEM(storages, n)); break;
        case PART: out = view_of(self, PyTuple_GET_ITEM(storages, n), each); break;
        case MADE: out = PyObject_Vectorcall(each->object, args, 2, NULL); break;
        }
        set_item(&result, i, out);
    }
    return result;
}

/* -- launching */

static __thread int launching; /* this thread holds a lock, so it must wait for no other: Note [A relaunch] */

/* Reads the addresses of the inputs. 1: done. 0: one is misaligned. -1: an error. */
static int read_inputs(Call *self, PyObject *inputs, uint64_t *base) {
    uint64_t bad = 0;
    for (Py_ssize_t i = 0; i < self->layout.inputs; i++) {
        const Input *each = &self->input[i];
        PyObject *item = PyList_GET_ITEM(inputs, each->position);
        if (!fields_of(item, &base[i])) {
            int code;
            Py_INCREF(item);
            code = asked_address(item, &base[i]);
            Py_DECREF(item);
            if (code) return -1;
            if (PyList_GET_SIZE(inputs) < self->least) {
                PyErr_SetString(PyExc_RuntimeError, "the list of inputs changed while it was read");
                return -1;
            }
        }
        bad |= base[i] & each->mask;
    }
    return !bad;
}

static int launch_executable(const Call *self, Handle stream) {
    PyObject *done;
    int code;
    if (self->direct) {
        Py_BEGIN_ALLOW_THREADS code = cu.GraphLaunch(self->blocks.exec, stream);
        Py_END_ALLOW_THREADS return driver_check(code, "cuGraphLaunch", "");
    }
    done = PyObject_CallNoArgs(self->replay);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int patch_and_launch(Call *self, Handle stream, const uint64_t *base, const uint64_t *values) {
    Blocks *blocks = &self->blocks;
    Py_ssize_t set;
    int code = -1;
    if (!PyThread_acquire_lock(blocks->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS PyThread_acquire_lock(blocks->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    launching = 1;
    blocks->refused = 0;
    if ((set = set_listed(blocks, write_blocks(blocks, base, values))) >= 0) {
        self->patched += (unsigned long long)set;
        code = launch_executable(self, stream);
    }
    if (!code) {
        self->launches++;
        if (self->count) ++*self->count;
    }
    launching = 0;
    PyThread_release_lock(blocks->lock);
    return code;
}

/* Launches, and returns the outputs. With `careful` it returns None if the graph can't be launched now, an input is
   misaligned, or the driver refuses a copy. `originals`: the caller's tensors where inputs are copies, or NULL. */
static PyObject *run_call(Call *self, PyObject *inputs, PyObject *originals, int careful) {
    uint64_t few[512], *base = few;
    size_t regions = scratch_region(&self->layout) + 1, count = regions + (size_t)self->numbers.results;
    Memory memory = {NULL, NULL};
    PyObject *result = NULL;
    Handle stream = NULL;
    int code, is_captured = 0;
    if (launching) {
        if (careful) Py_RETURN_NONE;
        return PyErr_Format(PyExc_RuntimeError, "launch() inside of a launch");
    }
    counter_fetch(&self->counter);
    if (careful) {
        if ((code = find_stream(&self->device, &stream)) < 0) return NULL;
        if (!code || cu.StreamIsCapturing(stream, &is_captured) || is_captured) Py_RETURN_NONE;
    } else if (have_context(&self->device) || current_stream(&self->device, &stream)) {
        return NULL;
    }
    if (!PyList_CheckExact(inputs) || PyList_GET_SIZE(inputs) < self->least) {
        if (careful) Py_RETURN_NONE;
        return PyErr_Format(PyExc_TypeError, "launch() wants a list of %zd inputs or more", self->least);
    }
    if (count > sizeof few / sizeof *few && !(base = PyMem_Malloc(count * sizeof *base))) return PyErr_NoMemory();
    if ((code = read_inputs(self, inputs, base)) > 0 && (self->numbers.results || self->numbers.inputs))
        code = program_run(&self->numbers, inputs, self->blocks.word, self->blocks.words, base + regions);
    if (code <= 0) {
        if (!code && careful)
            result = Py_NewRef(Py_None);
        else if (!code)
            PyErr_SetNone(self->misaligned);
        goto done;
    }
    if (!originals || originals == Py_None) originals = inputs;
    if (!allocate_memory(&self->layout, stream, &memory, base) && !patch_and_launch(self, stream, base, base + regions)
        && !free_scratch(&self->layout, &memory) && (result = make_outputs(&self->layout, originals, memory.storages))
        && (counter_add(&self->counter) || PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), NULL)))
        Py_CLEAR(result);
    if (!result && careful && self->blocks.refused) {
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
done:
    if (base != few) PyMem_Free(base);
    free_scratch(&self->layout, &memory);
    Py_XDECREF(memory.storages);
    return result;
}

/* -- binding */

static PyTypeObject *call_type;

static void call_dealloc(Call *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->counts);
    device_clear(&self->device);
    blocks_clear(&self->blocks);
    pool_free(&self->pool);
    type->tp_free(self);
    Py_DECREF(type);
}

static int bind_inputs(Call *self, PyObject *inputs) {
    static const Py_ssize_t ends[] = {PY_SSIZE_T_MAX, PY_SSIZE_T_MAX};
    if ((size_t)self->layout.inputs > self->blocks.regions) return refuse("so many inputs are no regions");
    if (!(self->input = pool_zeros(&self->pool, self->layout.inputs, sizeof(Input)))) return -1;
    for (Py_ssize_t i = 0; i < self->layout.inputs; i++) {
        Py_ssize_t input[2];
        if (read_record(inputs, i, "input", 2, ends, input)) return -1;
        self->input[i] = (Input){input[0], (uint64_t)input[1]};
        if (input[0] >= self->least) self->least = input[0] + 1;
    }
    return 0;
}

/* The results are the values of the number slots. */
static int read_numbers(Call *self, PyObject *numbers) {
    if (program_init(&self->numbers, &self->pool, numbers)) return -1;
    self->least = self->numbers.least;
    return (size_t)self->numbers.results == self->blocks.words ? 0 : refuse("so many number slots have no numbers");
}

/* Each region that a node points into needs memory. */
static int check_regions(const Call *self) {
    size_t scratch = scratch_region(&self->layout), regions = scratch + (self->layout.scratch != 0);
    for (size_t r = regions; r < self->blocks.regions; r++) {
        if (r == scratch && self->blocks.first[r] == self->blocks.first[r + 1]) continue;
        PyErr_Format(PyExc_ValueError, "region %zu has no memory", r);
        return -1;
    }
    return 0;
}

static PyObject *py_call(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"exec",        "nodes",       "slots",   "regions", "words", "inputs",
                            "allocations", "typed",       "scratch", "numbers", "order", "recipes",
                            "empty",       "reinterpret", "replay",  "direct",  "raw",   "device",
                            "misaligned",  "counters",    "group",   "counter", NULL};
    PyObject *nodes, *slots, *words, *inputs, *numbers, *order, *device;
    unsigned long long exec, alloc, release;
    Call *self = (Call *)call_type->tp_alloc(call_type, 0);
    Blocks *blocks;
    Layout *layout;
    Counter *counter;
    Py_ssize_t regions, scratch;
    if (!self) return NULL;
    blocks = &self->blocks;
    layout = &self->layout;
    counter = &self->counter;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "KO!O!nO!O!O!O!nOOO!OOOp(OOKK)OOOOO", names, &exec, &PyTuple_Type, &nodes, &PyTuple_Type,
            &slots, &regions, &PyTuple_Type, &words, &PyTuple_Type, &inputs, &PyTuple_Type, &layout->storages,
            &PyTuple_Type, &layout->typed, &scratch, &numbers, &order, &PyTuple_Type, &layout->recipes, &layout->empty,
            &layout->reinterpret, &self->replay, &self->direct, &layout->raw_alloc, &layout->raw_delete, &alloc,
            &release, &device, &self->misaligned, &counter->counters, &counter->group, &counter->name)) {
        Py_DECREF(self);
        return NULL;
    }
    self->kept = PyTuple_Pack(12, layout->storages, layout->typed, layout->recipes, layout->empty, layout->reinterpret,
                              layout->raw_alloc, layout->raw_delete, self->replay, self->misaligned, counter->counters,
                              counter->group, counter->name);
    blocks->exec = (Handle)(uintptr_t)exec;
    layout->inputs = PyTuple_GET_SIZE(inputs);
    layout->scratch = (size_t)scratch;
    layout->alloc = (int (*)(uint64_t, Handle *))(uintptr_t)alloc;
    layout->release = (int (*)(Handle))(uintptr_t)release;
    if (!self->kept || blocks_init(blocks, &self->pool, regions, nodes, slots, words)
        || device_init(&self->device, device) || read_numbers(self, numbers) || bind_inputs(self, inputs)
        || read_order(layout, &self->pool, order) || read_recipes(layout, &self->pool, &self->least)
        || check_regions(self)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *call_try_launch(Call *self, PyObject *inputs) { return run_call(self, inputs, NULL, 1); }

static PyObject *call_launch(Call *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 1 && count != 2) return PyErr_Format(PyExc_TypeError, "launch(inputs, originals=None)");
    return run_call(self, args[0], count == 2 ? args[1] : NULL, 0);
}

static PyObject *call_count_in(Call *self, PyObject *args) {
    PyObject *counts;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK;count_in(object, address)", &counts, &address)) return NULL;
    Py_XSETREF(self->counts, Py_NewRef(counts));
    self->count = (unsigned long long *)(uintptr_t)address;
    Py_RETURN_NONE;
}

static PyObject *call_aligned(Call *self, PyObject *const *args, Py_ssize_t count) {
    uint64_t bad = 0;
    if (count != 2 || !PyList_CheckExact(args[0]) || !PyTuple_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "aligned() wants a list of tensors, and a tuple of (position, mask)");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); i++) {
        const Py_ssize_t ends[] = {PyList_GET_SIZE(args[0]), PY_SSIZE_T_MAX}; /* a method may change the list */
        Py_ssize_t input[2];
        uint64_t address;
        PyObject *tensor;
        int code;
        if (read_record(args[1], i, "input", 2, ends, input)) return NULL;
        tensor = Py_NewRef(PyList_GET_ITEM(args[0], input[0]));
        code = address_of(tensor, &address);
        Py_DECREF(tensor);
        if (code) return NULL;
        bad |= address & (uint64_t)input[1];
    }
    return PyBool_FromLong(!bad);
}

static PyMethodDef call_methods[] = {
    {"try_launch", (PyCFunction)call_try_launch, METH_O,
     "try_launch(inputs): the outputs, or None if it is not the time"},
    {"launch", (PyCFunction)(void (*)(void))call_launch, METH_FASTCALL, "launch(inputs, originals=None): the outputs"},
    {"count_in", (PyCFunction)call_count_in, METH_VARARGS,
     "count_in(object, address): count launches there, too, in 8 bytes that live as long as the object"},
    {"aligned", (PyCFunction)(void (*)(void))call_aligned, METH_FASTCALL,
     "aligned(inputs, ((position, mask), ...)): has no address a bit of its mask?"},
    {NULL}};
static PyMemberDef call_members[] = {
    {"launches", T_ULONGLONG, offsetof(Call, launches), READONLY, NULL},
    {"patched", T_ULONGLONG, offsetof(Call, patched), READONLY, "nodes set in all launches"},
    {NULL}};
static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, call_dealloc}, {Py_tp_methods, call_methods}, {Py_tp_members, call_members}, {0, NULL}};
static PyType_Spec call_spec = {"cuda_driver_c.Call", sizeof(Call), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

static PyObject *py_launching(PyObject *module, PyObject *unused) { return PyBool_FromLong(launching); }

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))py_call, METH_VARARGS | METH_KEYWORDS, "call(...): a Call of an executable"},
    {"launching", py_launching, METH_NOARGS, "launching(): is this thread in the middle of a launch?"},
    {NULL}};

static int init(PyObject *module) {
    if (!call_type) call_type = (PyTypeObject *)PyType_FromSpec(&call_spec);
    return call_type && (name_view = PyUnicode_InternFromString("view")) ? 0 : -1;
}

PART(.module = "relaunch", .methods = methods, .init = init)
