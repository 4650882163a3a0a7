/* The type of calls, and the function that makes one: it reads and checks all that a call is to know. */

#include "call.h"
#include "data_ptr.h"
#include "module.h"

#include <structmember.h>

static PyTypeObject *call_type;

#define AT(field) offsetof(Call, field)

/* The objects that a call owns. */
static const size_t objects[] = {AT(layout.empty),      AT(layout.storages), AT(layout.slab),   AT(layout.raw_alloc),
                                 AT(layout.raw_delete), AT(outputs.types),   AT(outputs.empty), AT(outputs.reinterpret),
                                 AT(counter.counters),  AT(counter.group),   AT(counter.name),  AT(replay),
                                 AT(misaligned)};

#define OBJECTS (sizeof objects / sizeof *objects)

static PyObject *owned(Call *self, size_t i) { return *(PyObject **)((char *)self + objects[i]); }

static void call_dealloc(Call *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; i < OBJECTS; i++) Py_XDECREF(owned(self, i));
    outputs_clear(&self->outputs);
    layout_clear(&self->layout);
    program_clear(&self->numbers);
    device_clear(&self->device);
    blocks_clear(&self->blocks);
    PyMem_Free(self->input);
    type->tp_free(self);
    Py_DECREF(type);
}

static int read_inputs(Call *self, PyObject *positions, PyObject *masks) {
    if (!(self->input = PyMem_Calloc(self->inputs + 1, sizeof(Input)))) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyTuple_GET_SIZE(masks) != self->inputs || (size_t)self->inputs > self->blocks.regions) {
        PyErr_SetString(PyExc_ValueError, "so many inputs are no regions");
        return -1;
    }
    for (Py_ssize_t i = 0; i < self->inputs; i++) {
        Input *each = &self->input[i];
        each->position = PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i));
        each->mask = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(masks, i));
        if (PyErr_Occurred()) return -1;
        if (each->position < 0 || each->position == PY_SSIZE_T_MAX) {
            PyErr_SetString(PyExc_ValueError, "an input at a position that no list has");
            return -1;
        }
        if (each->position >= self->least) self->least = each->position + 1;
    }
    return 0;
}

/* The results are the values of the number slots. */
static int read_numbers(Call *self, PyObject *numbers) {
    const Program *program = &self->numbers;
    if (program_init(&self->numbers, numbers)) return -1;
    if ((size_t)program->results != self->blocks.words) {
        PyErr_SetString(PyExc_ValueError, "so many number slots have no numbers");
        return -1;
    }
    self->least = program->least;
    return 0;
}

/* Each region that a node points into needs memory. */
static int check_regions(const Call *self) {
    const Layout *layout = &self->layout;
    size_t slab = slab_region(layout), regions = layout_regions(layout);
    for (size_t r = 0; r < self->blocks.regions; r++) {
        int is_pointed = self->blocks.first[r] < self->blocks.first[r + 1];
        int has_none = (r == slab && layout->slab == Py_None) || (r == slab + 1 && !layout->scratch);
        if (r < regions && !(is_pointed && has_none)) continue;
        PyErr_Format(PyExc_ValueError, "region %zu has no memory", r);
        return -1;
    }
    return 0;
}

static PyObject *py_call(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"exec",      "nodes",      "slots",       "regions",     "words",   "rebuild", "by_graph",
                            "positions", "masks",      "allocations", "slab",        "types",   "scratch", "numbers",
                            "order",     "recipes",    "empty",       "reinterpret", "replay",  "direct",  "raw",
                            "device",    "misaligned", "counters",    "group",       "counter", NULL};
    PyObject *positions, *masks, *numbers, *order, *recipes, *device;
    unsigned long long alloc, release;
    Call *self = (Call *)call_type->tp_alloc(call_type, 0);
    Layout *layout;
    Outputs *outputs;
    Counter *counter;
    Parts parts;
    Py_ssize_t scratch;
    if (!self) return NULL;
    layout = &self->layout;
    outputs = &self->outputs;
    counter = &self->counter;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KO!O!nO!OpO!O!O!OO!nOO!O!OOOp(OOKK)OOOOO", names, &parts.exec,
                                     &PyTuple_Type, &parts.nodes, &PyTuple_Type, &parts.slots, &parts.regions,
                                     &PyTuple_Type, &parts.words, &parts.rebuild, &parts.by_graph, &PyTuple_Type,
                                     &positions, &PyTuple_Type, &masks, &PyTuple_Type, &layout->storages, &layout->slab,
                                     &PyTuple_Type, &outputs->types, &scratch, &numbers, &PyTuple_Type, &order,
                                     &PyTuple_Type, &recipes, &layout->empty, &outputs->reinterpret, &self->replay,
                                     &self->direct, &layout->raw_alloc, &layout->raw_delete, &alloc, &release, &device,
                                     &self->misaligned, &counter->counters, &counter->group, &counter->name)) {
        /* The references that were parsed are borrowed: drop them. */
        memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
        Py_DECREF(self);
        return NULL;
    }
    outputs->empty = layout->empty;
    for (size_t i = 0; i < OBJECTS; i++) Py_INCREF(owned(self, i));
    self->inputs = layout->inputs = PyTuple_GET_SIZE(positions);
    layout->scratch = (size_t)scratch;
    layout->alloc = (int (*)(uint64_t, Handle *))(uintptr_t)alloc;
    layout->release = (int (*)(Handle))(uintptr_t)release;
    if (blocks_init(&self->blocks, &parts) || device_init(&self->device, device) || read_numbers(self, numbers)
        || read_inputs(self, positions, masks) || layout_init(layout, order)
        || outputs_init(outputs, recipes, PyTuple_GET_SIZE(layout->storages), layout->slab != Py_None, &self->least)
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
    {"try_launch", (PyCFunction)call_try_launch, METH_O,
     "try_launch(inputs): the outputs, or None if it is not the time"},
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
    {"call", (PyCFunction)(void (*)(void))py_call, METH_VARARGS | METH_KEYWORDS, "call(...): a Call of an executable"},
    {NULL}};

static int init(PyObject *module) {
    return call_type || (call_type = (PyTypeObject *)PyType_FromSpec(&call_spec)) ? 0 : -1;
}

PART(.module = "relaunch", .methods = methods, .init = init)
