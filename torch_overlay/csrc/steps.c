/* Runs generated code as data: its calls of Python functions, and its kernels, which are launched from here. Note [Code
   as steps] of `relaunch.steps`. */

#include "data_ptr.h"
#include "device.h"
#include "module.h"
#include "numbers.h"

#include <structmember.h>

enum { SLOT, CONSTANT, POOLED, BUILT }; /* kinds of operands */

enum { POINTER, WORD, BYTES }; /* kinds of parameters */

enum { NUMBER_I, NUMBER_F, TUPLE, LIST }; /* kinds of what is built */

enum { WHOLE = -1, FEW = 256, MOST_PARAMETERS = 256 };

typedef struct {
    int kind, number;
} Operand;

typedef struct {
    int kind, count;
    int number; /* of a result */
    Operand *item;
} Built;

typedef struct {
    int item, slot; /* item: WHOLE, or a position in what the call returns */
} Kept;

typedef struct {
    int kind;
    int number; /* of a slot or word */
    uint64_t bytes;
} Parameter;

typedef struct {
    PyObject *function, *names; /* function: NULL for a kernel */
    Operand *argument;
    Kept *kept;
    Handle kernel;
    Parameter *parameter;
    Operand grid[3]; /* kind: 1 if `number` is of a word */
    unsigned threads, shared;
    char *label;
    int *dropped;
    int arguments, keptcount, parameters, drops;
} CodeStep;

typedef struct {
    PyObject_HEAD
    PyObject *constants, *kept; /* kept: what else has to live */
    Device device;
    Program numbers;
    Word *word;
    Py_ssize_t words, slots, inputs, built, pooled, steps;
    Built *build; /* the first ones are made once a run */
    CodeStep *step;
    Operand result;
    unsigned long long runs;
} Steps;

typedef struct {
    const Steps *of;
    const uint64_t *value;
    PyObject **slot, **pool;
} Run;

static PyTypeObject *steps_type;

/* -- reading */

static void *zeros(size_t count, size_t size) {
    void *made = PyMem_Calloc(count + 1, size);
    if (!made) PyErr_NoMemory();
    return made;
}

static int in_range(int number, Py_ssize_t end, const char *what) {
    if (number >= 0 && number < end) return 1;
    PyErr_Format(PyExc_ValueError, "a step names %s %d, which isn't there", what, number);
    return 0;
}

static int read_operand(const Steps *self, PyObject *item, Operand *to, Py_ssize_t built) {
    const Py_ssize_t ends[] = {self->slots, PyTuple_GET_SIZE(self->constants), self->pooled, self->built};
    if (!is_tuple(item, "operand", -1)
        || !PyArg_ParseTuple(item, "ii;an operand is (kind, number)", &to->kind, &to->number))
        return -1;
    if (!in_range(to->kind, 4, "operands of kind") || !in_range(to->number, ends[to->kind], "an operand's number"))
        return -1;
    if (to->kind >= POOLED && to->number >= built) {
        PyErr_SetString(PyExc_ValueError, "an operand is built of what comes later");
        return -1;
    }
    return 0;
}

static Operand *read_operands(const Steps *self, PyObject *items, int *count, Py_ssize_t built) {
    Operand *made;
    if (!is_tuple(items, "the operands", -1)) return NULL;
    *count = (int)PyTuple_GET_SIZE(items);
    if (!(made = zeros((size_t)*count, sizeof *made))) return NULL;
    for (int i = 0; i < *count; i++)
        if (read_operand(self, PyTuple_GET_ITEM(items, i), &made[i], built)) {
            PyMem_Free(made);
            return NULL;
        }
    return made;
}

static int read_builds(Steps *self, PyObject *builds) {
    for (Py_ssize_t i = 0; i < self->built; i++) {
        Built *each = &self->build[i];
        PyObject *items;
        if (!is_tuple(PyTuple_GET_ITEM(builds, i), "what is built", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(builds, i), "iiO!;what is built is (kind, number, operands)",
                                 &each->kind, &each->number, &PyTuple_Type, &items)
            || !(each->item = read_operands(self, items, &each->count, i)))
            return -1;
        if (each->kind <= NUMBER_F && !in_range(each->number, self->numbers.results, "result")) return -1;
        if (!in_range(each->kind, LIST + 1, "what is built of kind")) return -1;
        for (int k = 0; i < self->pooled && k < each->count; k++)
            if (each->item[k].kind == SLOT || each->kind == LIST) {
                PyErr_SetString(PyExc_ValueError, "what is built once a run has a slot, or is a list");
                return -1;
            }
    }
    return 0;
}

static int read_kernel(Steps *self, CodeStep *step, PyObject *grid, PyObject *parameters) {
    if (!is_tuple(parameters, "the parameters", -1) || !is_tuple(grid, "the grid", -1)) return -1;
    step->parameters = (int)PyTuple_GET_SIZE(parameters);
    if (step->parameters > MOST_PARAMETERS || PyTuple_GET_SIZE(grid) != 3) {
        PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters, or no three dimensions");
        return -1;
    }
    if (!(step->parameter = zeros((size_t)step->parameters, sizeof *step->parameter))) return -1;
    for (int i = 0; i < 3; i++) {
        Operand *axis = &step->grid[i];
        if (!is_tuple(PyTuple_GET_ITEM(grid, i), "blocks", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(grid, i), "pi;blocks are (is a word, number)", &axis->kind,
                                 &axis->number)
            || (axis->kind && !in_range(axis->number, self->words, "word")))
            return -1;
    }
    for (int i = 0; i < step->parameters; i++) {
        Parameter *each = &step->parameter[i];
        unsigned long long bytes;
        if (!is_tuple(PyTuple_GET_ITEM(parameters, i), "parameter", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "iiK;a parameter is (kind, number, bytes)",
                                 &each->kind, &each->number, &bytes)
            || !in_range(each->kind, BYTES + 1, "parameters of kind")
            || (each->kind == POINTER && !in_range(each->number, self->slots, "slot"))
            || (each->kind == WORD && !in_range(each->number, self->words, "word")))
            return -1;
        each->bytes = bytes;
    }
    return 0;
}

static int read_call(Steps *self, CodeStep *step, PyObject *arguments, PyObject *kept) {
    if (!(step->argument = read_operands(self, arguments, &step->arguments, self->built))
        || !is_tuple(kept, "what is kept", -1))
        return -1;
    if (PyTuple_GET_SIZE(step->names) > step->arguments) {
        PyErr_SetString(PyExc_ValueError, "a call has more names than arguments");
        return -1;
    }
    step->keptcount = (int)PyTuple_GET_SIZE(kept);
    if (!(step->kept = zeros((size_t)step->keptcount, sizeof *step->kept))) return -1;
    for (int i = 0; i < step->keptcount; i++)
        if (!is_tuple(PyTuple_GET_ITEM(kept, i), "what is kept", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(kept, i), "ii;what is kept is (item, slot)", &step->kept[i].item,
                                 &step->kept[i].slot)
            || !in_range(step->kept[i].slot, self->slots, "slot"))
            return -1;
    return 0;
}

static int read_step(Steps *self, CodeStep *step, PyObject *item) {
    PyObject *function, *first, *second, *drops;
    unsigned long long kernel;
    const char *label;
    if (!PyArg_ParseTuple(
            item, "OO!OOO!KIIs;a step is (function, names, arguments, kept, drops, kernel, threads, shared, label)",
            &function, &PyTuple_Type, &step->names, &first, &second, &PyTuple_Type, &drops, &kernel, &step->threads,
            &step->shared, &label))
        return -1;
    Py_INCREF(step->names);
    if (function != Py_None) step->function = Py_NewRef(function);
    step->kernel = (Handle)(uintptr_t)kernel;
    if (!(step->label = PyMem_Malloc(strlen(label) + 1))) {
        PyErr_NoMemory();
        return -1;
    }
    strcpy(step->label, label);
    step->drops = (int)PyTuple_GET_SIZE(drops);
    if (!(step->dropped = zeros((size_t)step->drops, sizeof *step->dropped))) return -1;
    for (int i = 0; i < step->drops; i++) {
        step->dropped[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(drops, i));
        if (PyErr_Occurred() || !in_range(step->dropped[i], self->slots, "slot")) return -1;
    }
    return step->function ? read_call(self, step, first, second) : read_kernel(self, step, first, second);
}

static void steps_dealloc(Steps *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; self->step && i < self->steps; i++) {
        CodeStep *step = &self->step[i];
        Py_XDECREF(step->function);
        Py_XDECREF(step->names);
        PyMem_Free(step->argument);
        PyMem_Free(step->kept);
        PyMem_Free(step->parameter);
        PyMem_Free(step->label);
        PyMem_Free(step->dropped);
    }
    for (Py_ssize_t i = 0; self->build && i < self->built; i++) PyMem_Free(self->build[i].item);
    PyMem_Free(self->step);
    PyMem_Free(self->build);
    PyMem_Free(self->word);
    program_clear(&self->numbers);
    device_clear(&self->device);
    Py_XDECREF(self->constants);
    Py_XDECREF(self->kept);
    type->tp_free(self);
    Py_DECREF(type);
}

static int steps_traverse(Steps *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->constants);
    Py_VISIT(self->kept);
    for (Py_ssize_t i = 0; self->step && i < self->steps; i++) Py_VISIT(self->step[i].function);
    return 0;
}

static PyObject *py_steps(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"numbers", "words", "constants", "builds", "pooled", "steps",
                            "result",  "slots", "inputs",    "device", "kept",   NULL};
    PyObject *numbers, *words, *builds, *steps, *result, *device;
    Steps *self = (Steps *)steps_type->tp_alloc(steps_type, 0);
    if (!self) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!nO!OnnOO", names, &numbers, &PyTuple_Type, &words,
                                     &PyTuple_Type, &self->constants, &PyTuple_Type, &builds, &self->pooled,
                                     &PyTuple_Type, &steps, &result, &self->slots, &self->inputs, &device,
                                     &self->kept)) {
        self->constants = self->kept = NULL; /* they are borrowed */
        goto failed;
    }
    Py_INCREF(self->constants);
    Py_INCREF(self->kept);
    self->built = PyTuple_GET_SIZE(builds);
    self->words = PyTuple_GET_SIZE(words);
    if (device_init(&self->device, device) || program_init(&self->numbers, numbers)) goto failed;
    if (self->pooled > self->built || self->pooled < 0 || self->words > self->numbers.results
        || self->slots < self->inputs || self->inputs < self->numbers.least) {
        PyErr_SetString(PyExc_ValueError, "steps with other numbers of words, slots or inputs than they name");
        goto failed;
    }
    if (!(self->build = zeros((size_t)self->built, sizeof *self->build))
        || !(self->word = zeros((size_t)self->words, sizeof *self->word)))
        goto failed;
    for (Py_ssize_t i = 0; i < self->words; i++) {
        self->word[i].type = (int)PyLong_AsLong(PyTuple_GET_ITEM(words, i));
        if (PyErr_Occurred()) goto failed;
        if (!size_of_word(self->word[i].type)) {
            PyErr_SetString(PyExc_ValueError, "a word of an unknown type");
            goto failed;
        }
    }
    if (read_builds(self, builds) || !(self->step = zeros((size_t)PyTuple_GET_SIZE(steps), sizeof *self->step)))
        goto failed;
    self->steps = PyTuple_GET_SIZE(steps);
    for (Py_ssize_t i = 0; i < self->steps; i++)
        if (!is_tuple(PyTuple_GET_ITEM(steps, i), "step", i)
            || read_step(self, &self->step[i], PyTuple_GET_ITEM(steps, i)))
            goto failed;
    if (read_operand(self, result, &self->result, self->built)) goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* -- running */

static PyObject *build(const Run *run, int number);

/* Returns a new reference. */
static PyObject *operand(const Run *run, Operand of) {
    PyObject *found;
    switch (of.kind) {
    case CONSTANT: return Py_NewRef(PyTuple_GET_ITEM(run->of->constants, of.number));
    case POOLED: return Py_NewRef(run->pool[of.number]);
    case BUILT: return build(run, of.number);
    }
    if ((found = run->slot[of.number])) return Py_NewRef(found);
    return PyErr_Format(PyExc_RuntimeError, "slot %d is empty", of.number);
}

static PyObject *build(const Run *run, int number) {
    const Built *self = &run->of->build[number];
    PyObject *made, *item;
    if (self->kind == NUMBER_I) return PyLong_FromLongLong((int64_t)run->value[self->number]);
    if (self->kind == NUMBER_F) {
        double value;
        memcpy(&value, &run->value[self->number], sizeof value);
        return PyFloat_FromDouble(value);
    }
    made = self->kind == TUPLE ? PyTuple_New(self->count) : PyList_New(self->count);
    for (int i = 0; made && i < self->count; i++) {
        if (!(item = operand(run, self->item[i])))
            Py_CLEAR(made);
        else if (self->kind == TUPLE)
            PyTuple_SET_ITEM(made, i, item);
        else
            PyList_SET_ITEM(made, i, item);
    }
    return made;
}

static int keep(const Run *run, const CodeStep *step, PyObject *result) {
    for (int i = 0; i < step->keptcount; i++) {
        const Kept *each = &step->kept[i];
        PyObject *item = each->item == WHOLE ? Py_NewRef(result) : PySequence_GetItem(result, each->item);
        if (!item) return -1;
        Py_XSETREF(run->slot[each->slot], item);
    }
    return 0;
}

static int call(const Run *run, const CodeStep *step) {
    PyObject *few[16], **arguments = few, *result = NULL;
    Py_ssize_t named = PyTuple_GET_SIZE(step->names);
    int i = 0, code = -1;
    if (step->arguments > 16 && !(arguments = zeros((size_t)step->arguments, sizeof *arguments))) return -1;
    for (; i < step->arguments; i++)
        if (!(arguments[i] = operand(run, step->argument[i]))) break;
    if (i == step->arguments)
        result = PyObject_Vectorcall(step->function, arguments, (size_t)(step->arguments - named),
                                     named ? step->names : NULL);
    while (i) Py_DECREF(arguments[--i]);
    if (arguments != few) PyMem_Free(arguments);
    if (result) code = keep(run, step, result);
    Py_XDECREF(result);
    return code;
}

static int launch(const Run *run, const CodeStep *step, Handle stream) {
    LaunchConfig config = {.block = {step->threads, 1, 1}, .shared_bytes = step->shared, .stream = stream};
    uint64_t value[MOST_PARAMETERS];
    void *at[MOST_PARAMETERS + 1];
    int code;
    for (int i = 0; i < 3; i++) {
        config.grid[i] =
            (unsigned)(step->grid[i].kind ? run->value[step->grid[i].number] : (uint64_t)step->grid[i].number);
        if (!config.grid[i]) return 0; /* as torch's launcher does it */
    }
    for (int i = 0; i < step->parameters; i++) {
        const Parameter *each = &step->parameter[i];
        at[i] = &value[i];
        value[i] = each->kind == WORD ? run->value[each->number] : each->bytes;
        if (each->kind != POINTER) continue;
        if (!run->slot[each->number]) {
            PyErr_Format(PyExc_RuntimeError, "slot %d is empty", each->number);
            return -1;
        }
        if (address_of(run->slot[each->number], &value[i])) return -1;
    }
    Py_BEGIN_ALLOW_THREADS code = cu.LaunchKernelEx(&config, step->kernel, at, NULL);
    Py_END_ALLOW_THREADS if (!code) return 0;
    driver_error_at(code, "cuLaunchKernelEx", step->label);
    return -1;
}

static int run_steps(Steps *self, const Run *run, Handle stream) {
    for (Py_ssize_t i = 0; i < self->pooled; i++)
        if (!(run->pool[i] = build(run, (int)i))) return -1;
    for (Py_ssize_t i = 0; i < self->steps; i++) {
        const CodeStep *step = &self->step[i];
        if (step->function ? call(run, step) : launch(run, step, stream)) return -1;
        for (int k = 0; k < step->drops; k++) Py_CLEAR(run->slot[step->dropped[k]]);
    }
    return 0;
}

static PyObject *steps_run(Steps *self, PyObject *inputs) {
    size_t results = (size_t)self->numbers.results, objects = (size_t)(self->slots + self->pooled);
    uint64_t few_values[FEW], *values = few_values;
    PyObject *few[FEW], **slots = few, *result = NULL;
    Run run = {.of = self};
    Handle stream = NULL;
    int code;
    if (!PyList_CheckExact(inputs) || PyList_GET_SIZE(inputs) != self->inputs) Py_RETURN_NONE;
    if ((code = find_stream(&self->device, &stream)) <= 0) {
        if (code) return NULL;
        Py_RETURN_NONE;
    }
    if (results > FEW && !(values = zeros(results, sizeof *values))) return NULL;
    if (objects > FEW && !(slots = PyMem_Malloc(objects * sizeof *slots))) {
        PyErr_NoMemory();
        goto done;
    }
    memset(slots, 0, objects * sizeof *slots);
    run.value = values;
    run.slot = slots;
    run.pool = slots + self->slots;
    if ((code = program_run(&self->numbers, inputs, self->word, (size_t)self->words, values)) <= 0) {
        if (!code) result = Py_NewRef(Py_None);
        goto done;
    }
    for (Py_ssize_t i = 0; i < self->inputs; i++) slots[i] = Py_NewRef(PyList_GET_ITEM(inputs, i));
    if (!PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), NULL) && !run_steps(self, &run, stream)
        && (result = operand(&run, self->result)))
        self->runs++;
    for (size_t i = 0; i < objects; i++) Py_CLEAR(slots[i]);
done:
    if (values != few_values) PyMem_Free(values);
    if (slots && slots != few) PyMem_Free(slots);
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
