/* Runs generated code as data: its calls of Python functions, and its kernels, which are launched from here. Note [Code
   as steps] of `relaunch.steps`.

   All that steps take and make has a place in one row: words, which are the values of kernels' parameters, and objects:
   constants, numbers, the inputs, and what steps make. */

#include "calls.h"
#include "data_ptr.h"
#include "device.h"
#include "module.h"
#include "numbers.h"
#include "room.h"

#include <structmember.h>

/* TUPLE, LIST: make one of the operands. ENTRY: a call that may be an entry. ALLOCATE, VIEW: make a bare tensor. */
enum { CALL, TUPLE, LIST, KERNEL, ENTRY, ALLOCATE, VIEW, KINDS };

enum { FEW = 256, AXES = 3, MOST_PARAMETERS = 256 };

enum { LEAST_ROOM = 1 << 21, MOST_ROOM = 1 << 25, LARGE = MOST_ROOM / 4 }; /* LARGE: such memory is torch's */

/* The objects belong to the tuple of all steps. */
typedef struct {
    int kind;
    PyObject *function, *names;   /* names: of the last operands */
    Py_ssize_t *operand, *item;   /* operand: places; a kernel's grid, then its parameters */
    Py_ssize_t *result, *dropped; /* places; item: 0 for the whole of what the call returns, or a position + 1 */
    Py_ssize_t operands, items, results, drops;
    Handle kernel;
    unsigned threads, shared;
    const char *label;
    Tensor like; /* a bare tensor, but for sizes and strides, which are words */
    PyObject *dtype;
} CodeStep;

/* A tensor that only kernels and entries take is no object: it has the fields of one, and an address. */
typedef struct {
    Tensor tensor;
    uint64_t address;
    PyObject *dtype;
    Hole part; /* of the run's room; empty if its memory isn't there */
} Bare;

typedef struct {
    PyObject_HEAD
    PyObject *constants, *source; /* source: the tuple of the steps */
    PyObject *calls;              /* of a library, or None */
    PyObject *memory;             /* (empty, place, uint8): functions of (size, stride, dtype), and of (address, ...) */
    size_t room;                  /* bytes of the next run's room */
    Py_ssize_t *bare, bares;      /* by place after words: the number of a bare tensor, or -1 */
    Device device;
    Program numbers; /* results: words, then numbers */
    Word *word;
    Py_ssize_t words, inputs, first, objects, steps, result; /* first: the first place that a step may drop */
    CodeStep *step;
    unsigned long long runs;
} Steps;

typedef struct {
    Steps *of;
    const uint64_t *value;
    PyObject **object;
    Handle stream;
    long modes; /* of the library; negative: there are no entries */
    Bare *bare;
    Room room;
    PyObject *memory; /* of the room */
    uint64_t base;
    int is_open;
} Run;

static PyTypeObject *steps_type;

/* -- reading */

static int read_kernel(const Steps *self, CodeStep *step) {
    unsigned long long kernel;
    if (!is_tuple(step->function, "a kernel", -1)
        || !PyArg_ParseTuple(step->function, "KIIs;a kernel is (handle, threads, shared, label)", &kernel,
                             &step->threads, &step->shared, &step->label))
        return -1;
    step->kernel = (Handle)(uintptr_t)kernel;
    if (step->operands < AXES || step->operands > AXES + MOST_PARAMETERS)
        return refuse("a kernel has too many parameters, or no three dimensions");
    for (int i = 0; i < AXES; i++)
        if (step->operand[i] >= self->words) return refuse("a grid is made of words");
    return 0;
}

static int takes_words(int kind) { return kind == KERNEL || kind == ALLOCATE || kind == VIEW; }

/* The operands of a bare tensor are its base, if it is a view, its sizes, its strides, and for a view an offset. */
static int read_bare(Steps *self, CodeStep *step) {
    int is_view = step->kind == VIEW, dtype, kind, index;
    Py_ssize_t dimensions = (step->operands - 2 * is_view) / 2;
    if (!is_tuple(step->function, "a bare tensor", -1)
        || !PyArg_ParseTuple(step->function, "OiiiK;a bare tensor is (dtype, its number, device, its index, keys)",
                             &step->dtype, &dtype, &kind, &index, &step->like.keys))
        return -1;
    if (dimensions < 0 || dimensions > INLINE_DIMENSIONS || step->operands != 2 * dimensions + 2 * is_view
        || step->results != 1 || dtype < 0 || dtype >= DTYPES || !item_sizes[dtype])
        return refuse("a bare tensor with an unknown number of dimensions, or type");
    for (Py_ssize_t i = is_view; i < step->operands; i++)
        if (step->operand[i] >= self->words) return refuse("sizes, strides and offsets are words");
    if (is_view && step->operand[0] < self->words) return refuse("a view has a base");
    step->like.dimensions = dimensions;
    step->like.dtype = (uint16_t)dtype;
    step->like.device[0] = (int8_t)kind;
    step->like.device[1] = (int8_t)index;
    self->bare[step->result[0] - self->words] = self->bares++;
    return 0;
}

static int read_step(Steps *self, CodeStep *step, PyObject *item, Py_ssize_t i) {
    PyObject *operands, *items, *results, *drops;
    Py_ssize_t end = self->words + self->objects;
    if (!is_tuple(item, "step", i)
        || !PyArg_ParseTuple(item, "iOO!OOOO;a step is (kind, function, names, operands, items, results, drops)",
                             &step->kind, &step->function, &PyTuple_Type, &step->names, &operands, &items, &results,
                             &drops))
        return -1;
    if (step->kind < 0 || step->kind >= KINDS) return refuse("a step of an unknown kind");
    if (!(step->operand =
              read_row(operands, "an operand", takes_words(step->kind) ? 0 : self->words, end, &step->operands))
        || !(step->item = read_row(items, "an item", 0, PY_SSIZE_T_MAX, &step->items))
        || !(step->result = read_row(results, "a result", self->first, end, &step->results))
        || !(step->dropped = read_row(drops, "what is dropped", self->first, end, &step->drops)))
        return -1;
    if (step->items != step->results || PyTuple_GET_SIZE(step->names) > step->operands
        || ((step->kind == TUPLE || step->kind == LIST) && step->results != 1))
        return refuse("a step has more names than operands, or other items than results");
    if (step->kind == ENTRY && step->operands > MOST_ARGUMENTS) return refuse("an entry has too many arguments");
    if (step->kind == ALLOCATE || step->kind == VIEW) return read_bare(self, step);
    return step->kind == KERNEL ? read_kernel(self, step) : 0;
}

static void steps_dealloc(Steps *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; self->step && i < self->steps; i++) {
        PyMem_Free(self->step[i].operand);
        PyMem_Free(self->step[i].item);
        PyMem_Free(self->step[i].result);
        PyMem_Free(self->step[i].dropped);
    }
    PyMem_Free(self->step);
    PyMem_Free(self->word);
    PyMem_Free(self->bare);
    program_clear(&self->numbers);
    device_clear(&self->device);
    Py_XDECREF(self->constants);
    Py_XDECREF(self->source);
    Py_XDECREF(self->calls);
    Py_XDECREF(self->memory);
    type->tp_free(self);
    Py_DECREF(type);
}

static int steps_traverse(Steps *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->constants);
    Py_VISIT(self->source);
    Py_VISIT(self->calls);
    Py_VISIT(self->memory);
    return 0;
}

static int read_steps(Steps *self, PyObject *numbers, PyObject *words, PyObject *device) {
    Py_ssize_t *type, known;
    if ((self->calls != Py_None && check_calls(self->calls)) || device_init(&self->device, device)
        || program_init(&self->numbers, numbers)
        || !(type = read_row(words, "the type of a word", 0, TYPES, &self->words)))
        return -1;
    if ((self->word = zeros(self->words, sizeof *self->word)))
        for (Py_ssize_t i = 0; i < self->words; i++) self->word[i].type = type[i];
    PyMem_Free(type);
    self->first = self->words + PyTuple_GET_SIZE(self->constants) + self->numbers.results - self->words;
    known = self->first - self->words + self->inputs;
    if (!self->word) return -1;
    if (self->words > self->numbers.results || self->inputs < self->numbers.least || self->objects < known
        || self->result < self->words || self->result >= self->words + self->objects)
        return refuse("steps with other numbers of words, objects or inputs than they name");
    if (!(self->step = zeros(PyTuple_GET_SIZE(self->source), sizeof *self->step))
        || !(self->bare = zeros(self->objects, sizeof *self->bare)))
        return -1;
    for (Py_ssize_t i = 0; i < self->objects; i++) self->bare[i] = -1;
    self->room = LEAST_ROOM;
    self->steps = PyTuple_GET_SIZE(self->source);
    for (Py_ssize_t i = 0; i < self->steps; i++)
        if (read_step(self, &self->step[i], PyTuple_GET_ITEM(self->source, i), i)) return -1;
    return 0;
}

static PyObject *py_steps(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"numbers", "words",  "constants", "steps",  "result", "objects",
                            "inputs",  "device", "calls",     "memory", NULL};
    PyObject *numbers, *words, *device;
    Steps *self = (Steps *)steps_type->tp_alloc(steps_type, 0);
    if (!self) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!nnnOOO!", names, &numbers, &words, &PyTuple_Type,
                                     &self->constants, &PyTuple_Type, &self->source, &self->result, &self->objects,
                                     &self->inputs, &device, &self->calls, &PyTuple_Type, &self->memory)) {
        self->constants = self->source = self->calls = self->memory = NULL; /* they are borrowed */
        Py_CLEAR(self);
        return NULL;
    }
    Py_INCREF(self->constants);
    Py_INCREF(self->source);
    Py_INCREF(self->calls);
    Py_INCREF(self->memory);
    if (PyTuple_GET_SIZE(self->memory) != 3) {
        refuse("memory is (empty, place, uint8)");
        Py_CLEAR(self);
    } else if (read_steps(self, numbers, words, device))
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* -- running */

/* Returns a borrowed reference. */
static PyObject *object_at(const Run *run, Py_ssize_t place) {
    PyObject *found = run->object[place - run->of->words];
    return found ? found : PyErr_Format(PyExc_RuntimeError, "place %zd is empty", place);
}

static PyObject *build(const Run *run, const CodeStep *step) {
    PyObject *made = step->kind == TUPLE ? PyTuple_New(step->operands) : PyList_New(step->operands);
    for (Py_ssize_t i = 0; made && i < step->operands; i++) {
        PyObject *item = object_at(run, step->operand[i]);
        if (!item)
            Py_CLEAR(made);
        else if (step->kind == TUPLE)
            PyTuple_SET_ITEM(made, i, Py_NewRef(item));
        else
            PyList_SET_ITEM(made, i, Py_NewRef(item));
    }
    return made;
}

static PyObject *call(const Run *run, const CodeStep *step) {
    PyObject *few[16], **arguments = few, *result = NULL;
    Py_ssize_t i = 0, named = PyTuple_GET_SIZE(step->names), count = step->operands;
    if (count > 16 && !(arguments = zeros(count, sizeof *arguments))) return NULL;
    while (i < count && (arguments[i] = object_at(run, step->operand[i]))) i++;
    if (i == count)
        result = PyObject_Vectorcall(step->function, arguments, (size_t)(i - named), named ? step->names : NULL);
    if (arguments != few) PyMem_Free(arguments);
    return result;
}

/* -- bare tensors */

static Bare *bare_at(const Run *run, Py_ssize_t place) {
    Py_ssize_t i = run->of->bare[place - run->of->words];
    return i < 0 ? NULL : &run->bare[i];
}

/* Returns empty(size, stride, dtype), or place(address, size, stride, dtype). */
static PyObject *made(PyObject *function, PyObject *address, const Tensor *tensor, PyObject *dtype) {
    PyObject *item[] = {address, row_of(tensor->size, tensor->dimensions), row_of(tensor->stride, tensor->dimensions),
                        dtype};
    int first = !address;
    PyObject *result =
        item[1] && item[2] ? PyObject_Vectorcall(function, item + first, (size_t)(4 - first), NULL) : NULL;
    Py_XDECREF(item[1]);
    Py_XDECREF(item[2]);
    return result;
}

/* Returns a new tensor for a bare one. It doesn't own its memory, and so it must not live longer. */
static PyObject *shown(const Run *run, const Bare *bare) {
    PyObject *address = PyLong_FromUnsignedLongLong(bare->address), *place = PyTuple_GET_ITEM(run->of->memory, 1);
    PyObject *result = address ? made(place, address, &bare->tensor, bare->dtype) : NULL;
    Py_XDECREF(address);
    return result;
}

/* Reads the sizes and strides of a bare tensor. Returns its bytes, 0 if one of them is negative. */
static size_t read_shape(const Run *run, const CodeStep *step, Tensor *tensor) {
    const Py_ssize_t *operand = step->operand + (step->kind == VIEW);
    int64_t last = 0, n = step->like.dimensions;
    *tensor = step->like;
    tensor->length = 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t size = tensor->size[i] = (int64_t)run->value[operand[i]];
        int64_t stride = tensor->stride[i] = (int64_t)run->value[operand[n + i]];
        tensor->length = size < 0 || tensor->length < 0 ? -1 : tensor->length * size;
        last += (size - 1) * stride;
    }
    return tensor->length > 0 ? (size_t)(last + 1) * item_sizes[tensor->dtype] : 0;
}

static PyObject *new_tensor(const Run *run, const Tensor *tensor, PyObject *dtype) {
    return made(PyTuple_GET_ITEM(run->of->memory, 0), NULL, tensor, dtype);
}

/* Allocates the run's room. Where the device has no memory left for it, the run has none. */
static void open_memory(Run *run) {
    Tensor whole = {.dimensions = 1, .size = {(int64_t)run->of->room}, .stride = {1}};
    run->memory = new_tensor(run, &whole, PyTuple_GET_ITEM(run->of->memory, 2));
    if (run->memory && !address_of(run->memory, &run->base))
        open_room(&run->room, run->of->room);
    else
        PyErr_Clear();
    run->is_open = 1;
}

/* Returns 1 if the run has room for so many bytes. If it hasn't, the next run has more. */
static int find_part(Run *run, size_t bytes, Bare *bare) {
    if (bytes > LARGE) return 0;
    if (!run->is_open) open_memory(run);
    if (take_part(&run->room, bytes, &bare->part)) {
        bare->address = run->base + bare->part.begin;
        return 1;
    }
    if (run->memory && run->of->room < MOST_ROOM) run->of->room *= 2;
    return 0;
}

static int allocate(Run *run, const CodeStep *step) {
    Py_ssize_t place = step->result[0];
    Bare *bare = bare_at(run, place);
    size_t bytes = read_shape(run, step, &bare->tensor);
    PyObject *tensor;
    bare->part = (Hole){0, 0};
    bare->address = 0;
    bare->dtype = step->dtype;
    if (!bare->tensor.length) return 0;
    if (bytes && find_part(run, bytes, bare)) return 0;
    if (!(tensor = new_tensor(run, &bare->tensor, step->dtype))) return -1;
    Py_XSETREF(run->object[place - run->of->words], tensor);
    return address_of(tensor, &bare->address);
}

static int view(Run *run, const CodeStep *step) {
    Bare *made = bare_at(run, step->result[0]), *base = bare_at(run, step->operand[0]);
    int64_t offset = (int64_t)run->value[step->operand[step->operands - 1]];
    PyObject *tensor;
    uint64_t address = base ? base->address : 0;
    if (!base && (!(tensor = object_at(run, step->operand[0])) || address_of(tensor, &address))) return -1;
    read_shape(run, step, &made->tensor);
    made->part = (Hole){0, 0};
    made->dtype = step->dtype;
    made->address = address + (uint64_t)(offset * item_sizes[step->like.dtype]);
    return 0;
}

/* A call of a library: as an entry, if it is one, or has become one; else with objects for all bare tensors. */
static PyObject *call_library(Run *run, const CodeStep *step) {
    Argument argument[MOST_ARGUMENTS];
    PyObject *object[MOST_ARGUMENTS], *calls = run->of->calls, *result = NULL;
    Py_ssize_t count = step->operands, named = PyTuple_GET_SIZE(step->names), i;
    int code = 0;
    for (i = 0; i < count; i++) {
        const Bare *bare = bare_at(run, step->operand[i]);
        if (bare)
            argument[i] = (Argument){NULL, bare->tensor.length > 0 ? &bare->tensor : NULL, bare->address};
        else if (!(argument[i].object = object_at(run, step->operand[i])))
            return NULL;
        else
            argument[i].tensor = fields_of(argument[i].object, &argument[i].address);
    }
    if (run->modes >= 0)
        result = launch_call(calls, run->modes, step->function, step->names, argument, count, run->stream);
    if (result || PyErr_Occurred()) return result;
    for (i = 0; i < count; i++) {
        const Bare *bare = bare_at(run, step->operand[i]);
        if (!(object[i] = bare ? shown(run, bare) : Py_NewRef(argument[i].object))) break;
    }
    if (i == count && run->modes >= 0
        && (code = note_call(calls, run->modes, step->function, step->names, argument, object, count)) > 0)
        result = launch_call(calls, run->modes, step->function, step->names, argument, count, run->stream);
    if (i == count && code >= 0 && !result && !PyErr_Occurred())
        result = PyObject_Vectorcall(step->function, object, (size_t)(count - named), named ? step->names : NULL);
    while (i--) Py_DECREF(object[i]);
    return result;
}

static void drop(Run *run, Py_ssize_t place) {
    Bare *bare = bare_at(run, place);
    if (bare && bare->part.end) give_part(&run->room, bare->part);
    Py_CLEAR(run->object[place - run->of->words]);
}

/* Steals the result of a step. */
static int keep(const Run *run, const CodeStep *step, PyObject *result) {
    int code = result ? 0 : -1;
    for (Py_ssize_t i = 0; !code && i < step->results; i++) {
        PyObject *item = step->item[i] ? PySequence_GetItem(result, step->item[i] - 1) : Py_NewRef(result);
        if (item)
            Py_XSETREF(run->object[step->result[i] - run->of->words], item);
        else
            code = -1;
    }
    Py_XDECREF(result);
    return code;
}

static int launch(const Run *run, const CodeStep *step) {
    LaunchConfig config = {.block = {step->threads, 1, 1}, .shared_bytes = step->shared, .stream = run->stream};
    uint64_t value[MOST_PARAMETERS];
    void *at[MOST_PARAMETERS + 1];
    int code;
    for (int i = 0; i < AXES; i++)
        if (!(config.grid[i] = (unsigned)run->value[step->operand[i]])) return 0; /* as torch's launcher does it */
    for (Py_ssize_t i = 0; i < step->operands - AXES; i++) {
        Py_ssize_t place = step->operand[AXES + i];
        PyObject *tensor;
        const Bare *bare;
        at[i] = &value[i];
        if (place < run->of->words)
            value[i] = run->value[place];
        else if ((bare = bare_at(run, place)))
            value[i] = bare->address;
        else if (!(tensor = object_at(run, place)) || address_of(tensor, &value[i]))
            return -1;
    }
    Py_BEGIN_ALLOW_THREADS code = cu.LaunchKernelEx(&config, step->kernel, at, NULL);
    Py_END_ALLOW_THREADS if (!code) return 0;
    driver_error_at(code, "cuLaunchKernelEx", step->label);
    return -1;
}

static int run_step(Run *run, const CodeStep *step) {
    switch (step->kind) {
    case KERNEL: return launch(run, step);
    case ALLOCATE: return allocate(run, step);
    case VIEW: return view(run, step);
    case ENTRY: return keep(run, step, call_library(run, step));
    case CALL: return keep(run, step, call(run, step));
    default: return keep(run, step, build(run, step));
    }
}

static int run_steps(const Steps *self, Run *run) {
    if (self->calls != Py_None && (run->modes = modes_of_calls(self->calls)) < 0 && PyErr_Occurred()) return -1;
    for (Py_ssize_t i = 0; i < self->steps; i++) {
        const CodeStep *step = &self->step[i];
        if (run_step(run, step)) return -1;
        for (Py_ssize_t k = 0; k < step->drops; k++) drop(run, step->dropped[k]);
    }
    return 0;
}

/* Returns a new reference to a number of the run. */
static PyObject *number(const Run *run, Py_ssize_t result) {
    double value;
    memcpy(&value, &run->value[result], sizeof value);
    return run->of->numbers.is_float[run->of->numbers.result[result]]
               ? PyFloat_FromDouble(value)
               : PyLong_FromLongLong((int64_t)run->value[result]);
}

/* Puts the numbers and the inputs into the row, of which the rest is NULL. */
static int begin(const Steps *self, const Run *run, PyObject *inputs) {
    PyObject **next = run->object + PyTuple_GET_SIZE(self->constants);
    for (Py_ssize_t i = self->words; i < self->numbers.results; i++)
        if (!(*next++ = number(run, i))) return -1;
    for (Py_ssize_t i = 0; i < self->inputs; i++) *next++ = Py_NewRef(PyList_GET_ITEM(inputs, i));
    return PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), NULL);
}

static PyObject *steps_run(Steps *self, PyObject *inputs) {
    size_t objects = (size_t)self->objects, constants = (size_t)PyTuple_GET_SIZE(self->constants);
    uint64_t few_values[FEW], *values = few_values;
    PyObject *few[FEW], **object = few, *result = NULL;
    Handle stream = NULL;
    int code;
    if (!PyList_CheckExact(inputs) || PyList_GET_SIZE(inputs) != self->inputs) Py_RETURN_NONE;
    if ((code = find_stream(&self->device, &stream)) <= 0) {
        if (code) return NULL;
        Py_RETURN_NONE;
    }
    if (self->numbers.results > FEW && !(values = zeros(self->numbers.results, sizeof *values))) return NULL;
    if (objects > FEW && !(object = zeros(self->objects, sizeof *object))) goto done;
    if ((code = program_run(&self->numbers, inputs, self->word, (size_t)self->words, values)) <= 0) {
        if (!code) result = Py_NewRef(Py_None);
        goto done;
    }
    for (size_t i = 0; i < objects; i++) object[i] = i < constants ? PyTuple_GET_ITEM(self->constants, i) : NULL;
    Run run = {.of = self, .value = values, .object = object, .stream = stream, .modes = -1};
    if (!(run.bare = PyMem_Malloc((size_t)(self->bares + 1) * sizeof *run.bare))) {
        PyErr_NoMemory();
        goto done;
    }
    if (!begin(self, &run, inputs) && !run_steps(self, &run) && (result = object_at(&run, self->result))) {
        Py_INCREF(result);
        self->runs++;
    }
    for (size_t i = constants; i < objects; i++) Py_CLEAR(object[i]);
    Py_XDECREF(run.memory);
    PyMem_Free(run.bare);
done:
    if (values != few_values) PyMem_Free(values);
    if (object && object != few) PyMem_Free(object);
    return result;
}

static PyMethodDef steps_methods[] = {
    {"run", (PyCFunction)steps_run, METH_O,
     "run(inputs): what the code returns, and the list is empty; None, and the list is as it was, if the numbers are"
     " unfit, or the device is another one"},
    {NULL}};
static PyMemberDef steps_members[] = {{"runs", T_ULONGLONG, offsetof(Steps, runs), READONLY, "runs that returned"},
                                      {NULL}};
static PyType_Slot steps_slots[] = {{Py_tp_dealloc, steps_dealloc},
                                    {Py_tp_traverse, steps_traverse},
                                    {Py_tp_methods, steps_methods},
                                    {Py_tp_members, steps_members},
                                    {0, NULL}};
static PyType_Spec steps_spec = {"cuda_driver_c.Steps", sizeof(Steps), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 steps_slots};

static PyMethodDef methods[] = {
    {"steps", (PyCFunction)(void (*)(void))py_steps, METH_VARARGS | METH_KEYWORDS, "steps(...): Steps that can be run"},
    {NULL}};

static int init(PyObject *module) {
    return steps_type || (steps_type = (PyTypeObject *)PyType_FromSpec(&steps_spec)) ? 0 : -1;
}

PART(.module = "relaunch", .methods = methods, .init = init)
