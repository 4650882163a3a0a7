/* Runs generated code as data: its calls of Python functions, and its kernels, which are launched from here. Note [Code
   as steps] of `relaunch.steps`.

   All that steps take and make has a place in one row: words, which are the values of kernels' parameters, and objects:
   constants, numbers, the inputs, and what steps make. */

#include "calls.h"
#include "data_ptr.h"
#include "device.h"
#include "module.h"
#include "numbers.h"

#include <structmember.h>

/* TUPLE, LIST: make one of the operands. ENTRY: a call that may be an entry. */
enum { CALL, TUPLE, LIST, KERNEL, ENTRY, KINDS };

enum { FEW = 256, AXES = 3, MOST_PARAMETERS = 256 };

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
} CodeStep;

typedef struct {
    PyObject_HEAD
    Pool pool;
    PyObject *constants, *source; /* source: the tuple of the steps */
    PyObject *calls;              /* of a library, or None */
    PyObject *kept;               /* keeps these */
    Device device;
    Program numbers; /* results: words, then numbers */
    Word *word;
    Py_ssize_t words, inputs, first, objects, steps, result; /* first: the first place that a step may drop */
    CodeStep *step;
    unsigned long long runs;
} Steps;

typedef struct {
    const Steps *of;
    const uint64_t *value;
    PyObject **object;
    Handle stream;
    long modes; /* of the library; negative: there are no entries */
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

static int read_step(Steps *self, CodeStep *step, PyObject *item, Py_ssize_t i) {
    PyObject *operands, *items, *results, *drops;
    Py_ssize_t end = self->words + self->objects;
    if (!is_tuple(item, "step", i)
        || !PyArg_ParseTuple(item, "iOO!OOOO;a step is (kind, function, names, operands, items, results, drops)",
                             &step->kind, &step->function, &PyTuple_Type, &step->names, &operands, &items, &results,
                             &drops))
        return -1;
    if (step->kind < 0 || step->kind >= KINDS) return refuse("a step of an unknown kind");
    if (!(step->operand = read_row(&self->pool, operands, "an operand", step->kind == KERNEL ? 0 : self->words, end,
                                   &step->operands))
        || !(step->item = read_row(&self->pool, items, "an item", 0, PY_SSIZE_T_MAX, &step->items))
        || !(step->result = read_row(&self->pool, results, "a result", self->first, end, &step->results))
        || !(step->dropped = read_row(&self->pool, drops, "what is dropped", self->first, end, &step->drops)))
        return -1;
    if (step->items != step->results || PyTuple_GET_SIZE(step->names) > step->operands
        || ((step->kind == TUPLE || step->kind == LIST) && step->results != 1))
        return refuse("a step has more names than operands, or other items than results");
    return step->kind == KERNEL ? read_kernel(self, step) : 0;
}

static void steps_dealloc(Steps *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    pool_free(&self->pool);
    device_clear(&self->device);
    Py_XDECREF(self->kept);
    type->tp_free(self);
    Py_DECREF(type);
}

static int steps_traverse(Steps *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->kept);
    return 0;
}

static int read_steps(Steps *self, PyObject *numbers, PyObject *words, PyObject *device) {
    Py_ssize_t *type, known;
    if ((self->calls != Py_None && check_calls(self->calls)) || device_init(&self->device, device)
        || program_init(&self->numbers, &self->pool, numbers)
        || !(type = read_row(&self->pool, words, "the type of a word", 0, TYPES, &self->words)))
        return -1;
    if (!(self->word = pool_zeros(&self->pool, self->words, sizeof *self->word))) return -1;
    for (Py_ssize_t i = 0; i < self->words; i++) self->word[i].type = type[i];
    self->first = self->words + PyTuple_GET_SIZE(self->constants) + self->numbers.results - self->words;
    known = self->first - self->words + self->inputs;
    if (self->words > self->numbers.results || self->inputs < self->numbers.least || self->objects < known
        || self->result < self->words || self->result >= self->words + self->objects)
        return refuse("steps with other numbers of words, objects or inputs than they name");
    if (!(self->step = pool_zeros(&self->pool, PyTuple_GET_SIZE(self->source), sizeof *self->step))) return -1;
    self->steps = PyTuple_GET_SIZE(self->source);
    for (Py_ssize_t i = 0; i < self->steps; i++)
        if (read_step(self, &self->step[i], PyTuple_GET_ITEM(self->source, i), i)) return -1;
    return 0;
}

static PyObject *py_steps(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"numbers", "words",  "constants", "steps", "result",
                            "objects", "inputs", "device",    "calls", NULL};
    PyObject *numbers, *words, *device;
    Steps *self = (Steps *)steps_type->tp_alloc(steps_type, 0);
    if (!self) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!nnnOO", names, &numbers, &words, &PyTuple_Type,
                                     &self->constants, &PyTuple_Type, &self->source, &self->result, &self->objects,
                                     &self->inputs, &device, &self->calls)
        || !(self->kept = PyTuple_Pack(3, self->constants, self->source, self->calls))
        || read_steps(self, numbers, words, device))
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
    if (i == count && step->kind == ENTRY && run->modes >= 0)
        result =
            launch_call(run->of->calls, run->modes, step->function, step->names, arguments, count, step, run->stream);
    if (i == count && !result && !PyErr_Occurred())
        result = PyObject_Vectorcall(step->function, arguments, (size_t)(i - named), named ? step->names : NULL);
    if (arguments != few) PyMem_Free(arguments);
    return result;
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
        at[i] = &value[i];
        if (place < run->of->words)
            value[i] = run->value[place];
        else if (!(tensor = object_at(run, place)) || address_of(tensor, &value[i]))
            return -1;
    }
    Py_BEGIN_ALLOW_THREADS code = cu.LaunchKernelEx(&config, step->kernel, at, NULL);
    Py_END_ALLOW_THREADS return driver_check(code, "cuLaunchKernelEx", step->label);
}

static int run_step(const Run *run, const CodeStep *step) {
    if (step->kind == KERNEL) return launch(run, step);
    return keep(run, step, step->kind == CALL || step->kind == ENTRY ? call(run, step) : build(run, step));
}

static int run_steps(const Steps *self, Run *run) {
    if (self->calls != Py_None && (run->modes = modes_of_calls(self->calls)) < 0 && PyErr_Occurred()) return -1;
    for (Py_ssize_t i = 0; i < self->steps; i++) {
        const CodeStep *step = &self->step[i];
        if (run_step(run, step)) return -1;
        for (Py_ssize_t k = 0; k < step->drops; k++) Py_CLEAR(run->object[step->dropped[k] - self->words]);
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
    Run run = {self, values, object, stream, -1};
    if (!begin(self, &run, inputs) && !run_steps(self, &run) && (result = object_at(&run, self->result))) {
        Py_INCREF(result);
        self->runs++;
    }
    for (size_t i = constants; i < objects; i++) Py_CLEAR(object[i]);
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
