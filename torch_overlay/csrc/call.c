/* A relaunch as one call: `launch.relaunch` describes it, and has it in Python. */

#include "data_ptr.h"
#include "module.h"
#include "patch.h"
#include "scratch.h"

#include <structmember.h>

enum { GIVEN, REPEATED, SAME, WHOLE, PART, SAVED, EMPTY, NUMBER };

typedef struct {
    int kind;
    Py_ssize_t number;
    PyObject *object, *size, *stride, *offset;
} Recipe;

typedef struct {
    Py_ssize_t position;
    uint64_t mask;
} Input;

/* A region that begins at a result's bytes in another one. */
typedef struct {
    Py_ssize_t parent, result;
} Derived;

/* A graph bound to a layout. Its regions are, in order: inputs, storages of outputs, slab of saved outputs, scratch,
   derived regions. */
typedef struct {
    PyObject_HEAD
    Blocks *blocks;
    Py_ssize_t inputs, least, recipes, memories;
    Input *input;
    Recipe *recipe;
    Py_ssize_t *order; /* of allocations: regions after the inputs */
    Derived *derived;
    Py_ssize_t deriveds, scratch_result;     /* scratch_result: the result with the scratch's bytes, or -1 */
    PyObject *allocations;                   /* arguments of `empty`, for each storage */
    PyObject *slab, *types, *scratch;        /* arguments of `empty`, or None; dtypes of the slab's views */
    PyObject *empty, *reinterpret, *outputs; /* outputs: makes all outputs if a recipe can't, or None */
    Program numbers;
    int is_sized;     /* results stand in sizes */
    PyObject *replay; /* keeps the executable; not called if the driver launches */
    int direct;
    long device;
    Scratch raw; /* allocates the scratch without a tensor, if raw_alloc is not None */
    PyObject *current, *index, *stream_of, *is_capturing;
    PyObject *misaligned, *counters, *group, *counter;
    PyThread_type_lock lock; /* patching and launching are one step */
    unsigned long long launches, patched;
    int bound;              /* a call has given every region of the blocks a base */
    const void *counted[5]; /* where the counter was: to prefetch, never to read */
} Call;

static PyTypeObject *call_type;
static PyObject *name_view;
static __thread int launching; /* this thread holds a lock, so it must wait for no other: Note [A relaunch] */

static void call_dealloc(Call *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; self->recipe && i < self->recipes; i++) {
        Recipe *each = &self->recipe[i];
        Py_XDECREF(each->object);
        Py_XDECREF(each->size);
        Py_XDECREF(each->stride);
        Py_XDECREF(each->offset);
    }
    scratch_clear(&self->raw);
    program_clear(&self->numbers);
    PyMem_Free(self->recipe);
    PyMem_Free(self->input);
    PyMem_Free(self->order);
    PyMem_Free(self->derived);
    Py_XDECREF(self->blocks);
    Py_XDECREF(self->allocations);
    Py_XDECREF(self->slab);
    Py_XDECREF(self->types);
    Py_XDECREF(self->scratch);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->reinterpret);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->replay);
    Py_XDECREF(self->current);
    Py_XDECREF(self->index);
    Py_XDECREF(self->stream_of);
    Py_XDECREF(self->is_capturing);
    Py_XDECREF(self->misaligned);
    Py_XDECREF(self->counters);
    Py_XDECREF(self->group);
    Py_XDECREF(self->counter);
    if (self->lock) PyThread_free_lock(self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

static int is_result(PyObject *object) {
    return PyLong_Check(object) && !PyLong_CheckExact(object) && !PyBool_Check(object);
}

/* 1: each result that a tuple names is one of the program's. 0: an error. */
static int has_results(Call *self, PyObject *object) {
    Py_ssize_t number;
    if (PyTuple_Check(object)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++)
            if (!has_results(self, PyTuple_GET_ITEM(object, i))) return 0;
        return 1;
    }
    if (!is_result(object)) return 1;
    number = PyLong_AsSsize_t(object);
    if (number >= 0 && number < self->numbers.results) return 1;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a size names a result that the program doesn't have");
    return 0;
}

/* Returns a new reference to the object with the values of the results in place of these. */
static PyObject *with_values(PyObject *object, const uint64_t *values) {
    PyObject *made;
    if (is_result(object)) return PyLong_FromLongLong((int64_t)values[PyLong_AsSsize_t(object)]);
    if (!PyTuple_Check(object)) return Py_NewRef(object);
    made = PyTuple_New(PyTuple_GET_SIZE(object));
    for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(made); i++) {
        PyObject *item = with_values(PyTuple_GET_ITEM(object, i), values);
        if (!item)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i, item);
    }
    return made;
}

static int read_derived(Call *self, PyObject *derived) {
    Py_ssize_t regions = self->inputs + PyTuple_GET_SIZE(self->allocations) + 2;
    self->deriveds = derived ? PyTuple_GET_SIZE(derived) : 0;
    if (!(self->derived = PyMem_Calloc(self->deriveds + 1, sizeof *self->derived))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->deriveds; i++) {
        Derived *each = &self->derived[i];
        if (!is_tuple(PyTuple_GET_ITEM(derived, i), "derived region", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(derived, i), "nn;a derived region is (region, result)", &each->parent,
                                 &each->result))
            return -1;
        if (each->parent < 0 || each->parent >= regions || each->result < 0 || each->result >= self->numbers.results) {
            PyErr_SetString(PyExc_ValueError, "a derived region lies in none, or begins at no result");
            return -1;
        }
    }
    if (self->scratch_result < self->numbers.results) return 0;
    PyErr_SetString(PyExc_ValueError, "the scratch is as large as no result");
    return -1;
}

static int read_recipes(Call *self, PyObject *recipes) {
    Py_ssize_t made = PyTuple_GET_SIZE(self->allocations), types = PyTuple_GET_SIZE(self->types);
    for (Py_ssize_t i = 0; i < self->recipes; i++) {
        Recipe *each = &self->recipe[i];
        Py_ssize_t n, ends[] = {1, i, PY_SSIZE_T_MAX, made, made, types, 1, self->numbers.results};
        if (!is_tuple(PyTuple_GET_ITEM(recipes, i), "recipe", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(recipes, i),
                                 "inOOOO;a recipe is (kind, number, object, size, stride, offset)", &each->kind, &n,
                                 &each->object, &each->size, &each->stride, &each->offset)) {
            memset(each, 0, sizeof *each);
            return -1;
        }
        each->number = n;
        Py_INCREF(each->object);
        Py_INCREF(each->size);
        Py_INCREF(each->stride);
        Py_INCREF(each->offset);
        if (each->kind < GIVEN || each->kind > NUMBER || n < 0 || n >= ends[each->kind]
            || (each->kind == SAVED && self->slab == Py_None)) {
            PyErr_SetString(PyExc_ValueError, "a recipe of an output names what isn't there");
            return -1;
        }
        if (!has_results(self, each->size) || !has_results(self, each->stride) || !has_results(self, each->offset))
            return -1;
        if (each->kind == EMPTY && !is_tuple(each->object, "what is allocated for recipe", i)) return -1;
        if (each->kind == SAME && n >= self->least) self->least = n + 1; /* inputs that are no region may come last */
    }
    return 0;
}

/* Each allocated region has to be in the order once: the storages, and the slab and the scratch if there are any. */
static int read_order(Call *self, PyObject *order) {
    Py_ssize_t made = PyTuple_GET_SIZE(self->allocations), slab = self->slab != Py_None;
    self->memories = made + slab + (self->scratch != Py_None);
    if (PyTuple_GET_SIZE(order) != self->memories || !(self->order = PyMem_Calloc(self->memories + 1, sizeof made))) {
        PyErr_SetString(PyExc_ValueError, "so many regions are not allocated");
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->memories; i++) {
        Py_ssize_t k = PyLong_AsSsize_t(PyTuple_GET_ITEM(order, i));
        int known = k >= 0 && (k < made || (k == made && slab) || (k == made + 1 && self->scratch != Py_None));
        for (Py_ssize_t j = 0; j < i; j++) known &= self->order[j] != k;
        if (!known) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the order names a region twice, or none that is");
            return -1;
        }
        self->order[i] = k;
    }
    return 0;
}

static PyObject *blocks_call(Blocks *blocks, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"positions",      "masks",      "allocations", "slab",    "types",       "scratch",
                            "numbers",        "order",      "recipes",     "empty",   "reinterpret", "outputs",
                            "replay",         "direct",     "raw",         "current", "index",       "stream_of",
                            "is_capturing",   "misaligned", "counters",    "group",   "counter",     "derived",
                            "scratch_result", NULL};
    Scratch *raw;
    PyObject *positions, *masks, *numbers, *order, *recipes, *derived = NULL;
    unsigned long long stream, alloc, release;
    Py_ssize_t size;
    Call *self = (Call *)call_type->tp_alloc(call_type, 0);
    if (!self) return NULL;
    raw = &self->raw;
    self->scratch_result = -1;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!OO!OOO!O!OOOOp(OOn(KKK))OOOOOOOO|O!n", names, &PyTuple_Type, &positions, &PyTuple_Type,
            &masks, &PyTuple_Type, &self->allocations, &self->slab, &PyTuple_Type, &self->types, &self->scratch,
            &numbers, &PyTuple_Type, &order, &PyTuple_Type, &recipes, &self->empty, &self->reinterpret, &self->outputs,
            &self->replay, &self->direct, &raw->raw_alloc, &raw->raw_delete, &size, &stream, &alloc, &release,
            &self->current, &self->index, &self->stream_of, &self->is_capturing, &self->misaligned, &self->counters,
            &self->group, &self->counter, &PyTuple_Type, &derived, &self->scratch_result)) {
        /* The references that were parsed are borrowed: drop them. */
        memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
        Py_DECREF(self);
        return NULL;
    }
    self->blocks = (Blocks *)Py_NewRef(blocks);
    Py_INCREF(self->allocations);
    Py_INCREF(self->slab);
    Py_INCREF(self->types);
    Py_INCREF(self->scratch);
    Py_INCREF(self->empty);
    Py_INCREF(self->reinterpret);
    Py_INCREF(self->outputs);
    Py_INCREF(self->replay);
    Py_INCREF(self->current);
    Py_INCREF(self->index);
    Py_INCREF(self->stream_of);
    Py_INCREF(self->is_capturing);
    Py_INCREF(self->misaligned);
    Py_INCREF(self->counters);
    Py_INCREF(self->group);
    Py_INCREF(self->counter);
    Py_INCREF(raw->raw_alloc);
    Py_INCREF(raw->raw_delete);
    if (program_init(&self->numbers, numbers)) goto failed;
    for (Py_ssize_t i = (Py_ssize_t)blocks->words; i < self->numbers.results; i++)
        if (self->numbers.is_float[self->numbers.result[i]]) {
            PyErr_SetString(PyExc_ValueError, "a size that is a float");
            goto failed;
        }
    if ((size_t)self->numbers.results < blocks->words) {
        PyErr_SetString(PyExc_ValueError, "so many number slots have no numbers");
        goto failed;
    }
    self->least = self->numbers.least;
    self->inputs = PyTuple_GET_SIZE(positions);
    self->recipes = PyTuple_GET_SIZE(recipes);
    if (!(self->lock = PyThread_allocate_lock()) || !(self->input = PyMem_Calloc(self->inputs + 1, sizeof(Input)))
        || !(self->recipe = PyMem_Calloc(self->recipes + 1, sizeof(Recipe)))) {
        PyErr_NoMemory();
        goto failed;
    }
    if (PyTuple_GET_SIZE(masks) != self->inputs || (size_t)self->inputs > blocks->regions) {
        PyErr_SetString(PyExc_ValueError, "so many inputs are no regions");
        goto failed;
    }
    for (Py_ssize_t i = 0; i < self->inputs; i++) {
        Input *each = &self->input[i];
        each->position = PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i));
        each->mask = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(masks, i));
        if (PyErr_Occurred()) goto failed;
        if (each->position < 0) {
            PyErr_SetString(PyExc_ValueError, "a negative position");
            goto failed;
        }
        if (each->position >= self->least) self->least = each->position + 1;
    }
    if ((self->slab != Py_None && !is_tuple(self->slab, "the slab", -1))
        || (self->scratch != Py_None && !is_tuple(self->scratch, "the scratch", -1)))
        goto failed;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->allocations); i++)
        if (!is_tuple(PyTuple_GET_ITEM(self->allocations, i), "allocation", i)) goto failed;
    if (!has_results(self, self->allocations) || read_derived(self, derived)) goto failed;
    self->device = PyLong_AsLong(self->index);
    raw->torch.stream = (int (*)(int, Handle *))(uintptr_t)stream;
    raw->torch.alloc = (int (*)(uint64_t, Handle *))(uintptr_t)alloc;
    raw->torch.release = (int (*)(Handle))(uintptr_t)release;
    raw->size = (size_t)size;
    self->is_sized = (size_t)self->numbers.results > blocks->words;
    if (PyErr_Occurred() || read_order(self, order) || read_recipes(self, recipes)) goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int current_stream(Call *self, Handle *stream) {
    PyObject *answer;
    if (self->raw.torch.stream && !self->raw.torch.stream((int)self->device, stream)) return 0;
    if (!(answer = PyObject_CallOneArg(self->stream_of, self->index))) return -1;
    *stream = PyLong_AsVoidPtr(answer);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* 1: the graph can be launched. 0: another device is current, or the stream is being captured. -1: an error. If `now`,
   the thread's context, is the executable's, the device is right. Otherwise torch is asked for the current device
   before the thread gets a context, so that a thread with another device keeps that. */
static int is_time(Call *self, Handle now, Handle *stream) {
    PyObject *answer;
    int status = 0;
    if (!now || now != self->blocks->context) {
        long device;
        if (!(answer = PyObject_CallNoArgs(self->current))) return -1;
        device = PyLong_AsLong(answer);
        Py_DECREF(answer);
        if (device != self->device) return PyErr_Occurred() ? -1 : 0;
        if (have_context(self->blocks, now)) return -1;
    }
    if (self->stream_of != Py_None)
        return current_stream(self, stream) ? -1 : !cu.StreamIsCapturing(*stream, &status) && !status;
    if (!(answer = PyObject_CallNoArgs(self->is_capturing))) return -1;
    status = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return status < 0 ? -1 : !status;
}

/* Reads the addresses of the inputs. 1: done. 0: one is misaligned. -1: an error. */
static int read_inputs(Call *self, PyObject *inputs, uint64_t *base) {
    uint64_t bad = 0;
    for (Py_ssize_t i = 0; i < self->inputs; i++) {
        const Input *each = &self->input[i];
        PyObject *item = PyList_GET_ITEM(inputs, each->position);
        if (!field_address(item, &base[i])) {
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

typedef struct {
    PyObject *made, *slab, *scratch;
    Handle raw;
} Memory; /* the scratch is in `scratch` if it is a tensor, else at `raw` */

/* Returns a new tensor, whose size and stride may name results. */
static PyObject *allocate(Call *self, PyObject *arguments, const uint64_t *values) {
    PyObject *made, *plain;
    if (!self->is_sized) return PyObject_Call(self->empty, arguments, NULL);
    if (!(plain = with_values(arguments, values))) return NULL;
    made = PyObject_Call(self->empty, plain, NULL);
    Py_DECREF(plain);
    return made;
}

static int allocate_scratch(Call *self, Handle stream, Memory *memory, const uint64_t *values, uint64_t *base) {
    size_t size = self->scratch_result < 0 ? self->raw.size : (size_t)values[self->scratch_result];
    if (self->raw.raw_alloc == Py_None) {
        memory->scratch = allocate(self, self->scratch, values);
        return memory->scratch && !address_of(memory->scratch, base) ? 0 : -1;
    }
    if (take_scratch(&self->raw, size, stream, &memory->raw)) return -1;
    *base = (uint64_t)(uintptr_t)memory->raw;
    return 0;
}

/* What is allocated when it fails is in `memory`. */
static int allocate_memory(Call *self, Handle stream, Memory *memory, const uint64_t *values, uint64_t *base) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->allocations);
    uint64_t *all = base;
    base += self->inputs;
    base[count] = base[count + 1] = 0;
    if (!(memory->made = PyTuple_New(count))) return -1;
    for (Py_ssize_t i = 0; i < self->memories; i++) {
        Py_ssize_t k = self->order[i];
        PyObject *made;
        if (k == count + 1) {
            if (allocate_scratch(self, stream, memory, values, base + k)) return -1;
            continue;
        }
        made = allocate(self, k == count ? self->slab : PyTuple_GET_ITEM(self->allocations, k), values);
        if (!made) return -1;
        if (k == count)
            memory->slab = made;
        else
            PyTuple_SET_ITEM(memory->made, k, made);
        if (address_of(made, base + k)) return -1;
    }
    for (Py_ssize_t i = 0; i < self->deriveds; i++)
        base[count + 2 + i] = all[self->derived[i].parent] + values[self->derived[i].result];
    return 0;
}

static int free_after_launch(Call *self, Memory *memory) {
    Py_CLEAR(memory->scratch);
    return free_scratch(&self->raw, &memory->raw);
}

static void free_memory(Call *self, Memory *memory) {
    free_after_launch(self, memory);
    Py_CLEAR(memory->made);
    Py_CLEAR(memory->slab);
}

static int patch_and_launch(Call *self, Handle stream, const uint64_t *base, const uint64_t *values) {
    Blocks *blocks = self->blocks;
    size_t slab = (size_t)(self->inputs + PyTuple_GET_SIZE(self->allocations));
    size_t regions = slab + 2 + (size_t)self->deriveds;
    Py_ssize_t set = -1;
    int code = 0;
    PyThread_type_lock lock = blocks->shared ? blocks->shared->lock : self->lock;
    if (!PyThread_acquire_lock(lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS PyThread_acquire_lock(lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    launching = 1;
    if (blocks->busy)
        PyErr_SetString(PyExc_RuntimeError, "patch() is running already");
    else {
        blocks->busy = 1;
        memcpy(blocks->value, values, blocks->words * sizeof *values);
        if (self->bound && !blocks->stale)
            set = set_moved(blocks, base, regions);
        else {
            memcpy(blocks->fresh, blocks->base, blocks->regions * sizeof *blocks->fresh);
            memcpy(blocks->given, blocks->known, blocks->regions);
            for (size_t r = 0; r < regions && r < blocks->regions; r++) {
                if (r == slab && self->slab == Py_None) continue;
                if (r == slab + 1 && self->scratch == Py_None) continue;
                blocks->fresh[r] = base[r];
                blocks->given[r] = 1;
            }
            set = set_nodes(blocks);
            self->bound = set >= 0 && regions == blocks->regions;
        }
        if (set >= 0) {
            self->patched += (unsigned long long)set;
            if (self->direct) {
                Py_BEGIN_ALLOW_THREADS code = cu.GraphLaunch(blocks->exec, stream);
                Py_END_ALLOW_THREADS if (code) {
                    driver_error(code, "cuGraphLaunch");
                    set = -1;
                }
            } else {
                PyObject *done = PyObject_CallNoArgs(self->replay);
                if (!done) set = -1;
                Py_XDECREF(done);
            }
        }
        blocks->busy = 0;
        if (set >= 0) self->launches++;
    }
    launching = 0;
    PyThread_release_lock(lock);
    return set < 0 ? -1 : 0;
}

static PyObject *view_of(Call *self, PyObject *of, const Recipe *recipe, const uint64_t *values) {
    PyObject *args[] = {of, recipe->size, recipe->stride, recipe->offset}, *made = NULL;
    if (!self->is_sized) return PyObject_Vectorcall(self->reinterpret, args, 4, NULL);
    args[1] = with_values(recipe->size, values);
    args[2] = with_values(recipe->stride, values);
    args[3] = with_values(recipe->offset, values);
    if (args[1] && args[2] && args[3]) made = PyObject_Vectorcall(self->reinterpret, args, 4, NULL);
    for (int i = 1; i < 4; i++) Py_XDECREF(args[i]);
    return made;
}

/* Returns a new tuple of the slab as a tensor of each dtype. */
static PyObject *typed_slabs(Call *self, PyObject *slab) {
    Py_ssize_t count = PyTuple_GET_SIZE(self->types);
    PyObject *typed = PyTuple_New(slab ? count : 0);
    for (Py_ssize_t i = 0; typed && i < PyTuple_GET_SIZE(typed); i++) {
        PyObject *one = PyObject_CallMethodOneArg(slab, name_view, PyTuple_GET_ITEM(self->types, i));
        if (!one)
            Py_CLEAR(typed);
        else
            PyTuple_SET_ITEM(typed, i, one);
    }
    return typed;
}

static PyObject *make_outputs(Call *self, PyObject *source, Memory *memory, const uint64_t *values) {
    PyObject *result, *typed;
    if (self->outputs != Py_None) {
        PyObject *args[] = {source, memory->made, memory->slab ? memory->slab : Py_None};
        return PyObject_Vectorcall(self->outputs, args, 3, NULL);
    }
    if (!(typed = typed_slabs(self, memory->slab))) return NULL;
    if (!(result = PyTuple_New(self->recipes))) {
        Py_DECREF(typed);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < self->recipes; i++) {
        const Recipe *each = &self->recipe[i];
        PyObject *out = NULL;
        switch (each->kind) {
        case GIVEN: out = Py_NewRef(each->object); break;
        case REPEATED: out = Py_NewRef(PyTuple_GET_ITEM(result, each->number)); break;
        case SAME: out = PySequence_GetItem(source, each->number); break;
        case WHOLE: out = Py_NewRef(PyTuple_GET_ITEM(memory->made, each->number)); break;
        case PART: out = view_of(self, PyTuple_GET_ITEM(memory->made, each->number), each, values); break;
        case SAVED: out = view_of(self, PyTuple_GET_ITEM(typed, each->number), each, values); break;
        case NUMBER: out = PyLong_FromLongLong((int64_t)values[each->number]); break;
        case EMPTY: out = PyObject_Call(self->empty, each->object, NULL); break;
        }
        if (!out) {
            Py_CLEAR(result);
            break;
        }
        PyTuple_SET_ITEM(result, i, out);
    }
    Py_DECREF(typed);
    return result;
}

/* Does counters[group][counter] += 1 if both are dictionaries, as they mostly are. 1: they are not. -1: an error. */
static int count_in_dictionaries(Call *self) {
    PyObject *group, *before, *after;
    int overflow, code;
    long count;
    if (!PyDict_Check(self->counters) || !(group = PyDict_GetItemWithError(self->counters, self->group))
        || !PyDict_Check(group) || !(before = PyDict_GetItemWithError(group, self->counter))
        || !PyLong_CheckExact(before))
        return PyErr_Occurred() ? -1 : 1;
    count = PyLong_AsLongAndOverflow(before, &overflow);
    if (overflow || count == LONG_MAX) return 1;
    if (!(after = PyLong_FromLong(count + 1))) return -1;
    code = PyDict_SetItem(group, self->counter, after);
    self->counted[0] = self->counters;
    self->counted[1] = group;
    self->counted[2] = after;
    self->counted[3] = ((PyDictObject *)self->counters)->ma_keys;
    self->counted[4] = ((PyDictObject *)group)->ma_keys;
    Py_DECREF(after);
    return code;
}

static int count_launch(Call *self) {
    PyObject *group, *before, *one, *after = NULL;
    int code = count_in_dictionaries(self);
    if (code <= 0) return code;
    if (!(group = PyObject_GetItem(self->counters, self->group))) return -1;
    code = -1;
    before = PyObject_GetItem(group, self->counter);
    one = PyLong_FromLong(1);
    if (before && one && (after = PyNumber_Add(before, one))) code = PyObject_SetItem(group, self->counter, after);
    Py_DECREF(group);
    Py_XDECREF(before);
    Py_XDECREF(one);
    Py_XDECREF(after);
    return code;
}

/* Prefetches the five objects on the way to the counter, long before they are needed. */
static void fetch_counter(Call *self) {
    for (size_t i = 0; i < sizeof self->counted / sizeof *self->counted; i++) __builtin_prefetch(self->counted[i]);
}

static PyObject *py_launching(PyObject *module, PyObject *unused) { return PyBool_FromLong(launching); }

/* Launches. With `careful` it returns None if the graph can't be launched now, or an input is misaligned. */
static PyObject *run(Call *self, PyObject *inputs, PyObject *originals, int careful) {
    uint64_t few[512], *base = few;
    size_t regions = (size_t)(self->inputs + PyTuple_GET_SIZE(self->allocations) + 2 + self->deriveds);
    size_t count = regions + (size_t)self->numbers.results;
    Memory memory = {NULL, NULL, NULL, NULL};
    PyObject *result = NULL;
    Handle stream = NULL, now;
    int code;
    if (launching) {
        if (careful) Py_RETURN_NONE;
        return PyErr_Format(PyExc_RuntimeError, "launch() inside of a launch");
    }
    if (get_context(&now)) return NULL;
    if (!PyList_CheckExact(inputs) || PyList_GET_SIZE(inputs) < self->least) {
        if (careful) Py_RETURN_NONE;
        return PyErr_Format(PyExc_TypeError, "launch() wants a list of %zd inputs or more", self->least);
    }
    fetch_counter(self);
    if (careful) {
        if ((code = is_time(self, now, &stream)) < 0) return NULL;
        if (!code) Py_RETURN_NONE;
    } else if (have_context(self->blocks, now) || (self->stream_of != Py_None && current_stream(self, &stream))) {
        return NULL;
    }
    if (count > sizeof few / sizeof *few && !(base = PyMem_Malloc(count * sizeof *base))) return PyErr_NoMemory();
    if ((code = read_inputs(self, inputs, base)) > 0 && self->numbers.results)
        code = program_run(&self->numbers, inputs, self->blocks->word, self->blocks->words, base + regions);
    if (code <= 0) {
        if (!code && careful)
            result = Py_NewRef(Py_None);
        else if (!code)
            PyErr_SetNone(self->misaligned);
        goto done;
    }
    if (!allocate_memory(self, stream, &memory, base + regions, base)
        && !patch_and_launch(self, stream, base, base + regions) && !free_after_launch(self, &memory)
        && (result =
                make_outputs(self, originals && originals != Py_None ? originals : inputs, &memory, base + regions))
        && (count_launch(self) || PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), NULL)))
        Py_CLEAR(result);
done:
    if (base != few) PyMem_Free(base);
    free_memory(self, &memory);
    return result;
}

static PyObject *call_attempt(Call *self, PyObject *inputs) { return run(self, inputs, NULL, 1); }

static PyObject *call_launch(Call *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 1 && count != 2) return PyErr_Format(PyExc_TypeError, "launch(inputs, originals=None)");
    return run(self, args[0], count == 2 ? args[1] : NULL, 0);
}

static PyObject *aligned(PyObject *tensors, PyObject *indices, PyObject *masks) {
    uint64_t bad = 0;
    if (!PyList_CheckExact(tensors) || !PyTuple_CheckExact(indices) || !PyTuple_CheckExact(masks)
        || PyTuple_GET_SIZE(indices) != PyTuple_GET_SIZE(masks))
        return PyErr_Format(PyExc_TypeError, "aligned() wants a list of tensors, and two tuples of one length");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(indices); i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(indices, i));
        uint64_t mask = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(masks, i)), address;
        PyObject *tensor;
        int code;
        if (PyErr_Occurred()) return NULL;
        if (index < 0 || index >= PyList_GET_SIZE(tensors))
            return PyErr_Format(PyExc_IndexError, "aligned(): there is no tensor %zd", index);
        tensor = Py_NewRef(PyList_GET_ITEM(tensors, index));
        code = address_of(tensor, &address);
        Py_DECREF(tensor);
        if (code) return NULL;
        bad |= address & mask;
    }
    return PyBool_FromLong(!bad);
}

static PyObject *call_aligned(Call *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "aligned(inputs, positions, masks)");
    return aligned(args[0], args[1], args[2]);
}

static PyMethodDef call_methods[] = {
    {"attempt", (PyCFunction)call_attempt, METH_O, "attempt(inputs): the outputs, or None if it is not the time"},
    {"launch", (PyCFunction)(void (*)(void))call_launch, METH_FASTCALL, "launch(inputs, originals=None): the outputs"},
    {"aligned", (PyCFunction)(void (*)(void))call_aligned, METH_FASTCALL,
     "aligned(inputs, positions, masks): has no address a bit of its mask?"},
    {NULL}};
static PyMemberDef call_members[] = {
    {"launches", T_ULONGLONG, offsetof(Call, launches), READONLY, NULL},
    {"patched", T_ULONGLONG, offsetof(Call, patched), READONLY, "nodes set in all launches"},
    {NULL}};
static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, call_dealloc}, {Py_tp_methods, call_methods}, {Py_tp_members, call_members}, {0, NULL}};
static PyType_Spec call_spec = {"cuda_driver_c.Call", sizeof(Call), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

static PyMethodDef methods[] = {
    {"launching", py_launching, METH_NOARGS, "launching(): is this thread in the middle of a launch?"}, {NULL}};

/* Adds the method to `Blocks`, whose file knows nothing of calls. */
static int add_call(void) {
    static PyMethodDef definition = {"call", (PyCFunction)(void (*)(void))blocks_call, METH_VARARGS | METH_KEYWORDS,
                                     "call(...): a Call of them"};
    PyObject *method = blocks_type() ? PyDescr_NewMethod(blocks_type(), &definition) : NULL;
    int code = method ? PyObject_SetAttrString((PyObject *)blocks_type(), "call", method) : -1;
    Py_XDECREF(method);
    return code;
}

static int init(PyObject *module) {
    if (!(name_view = PyUnicode_InternFromString("view")) || add_call()) return -1;
    return call_type || (call_type = (PyTypeObject *)PyType_FromSpec(&call_spec)) ? 0 : -1;
}

PART(.module = "relaunch", .methods = methods, .init = init)
