/* The type of calls, and the method of blocks that makes one: it reads and checks all that a call is to know. */

#include "call.h"
#include "data_ptr.h"
#include "module.h"

#include <structmember.h>

static PyTypeObject *call_type;

#define AT(field) offsetof(Call, field)

/* The objects that a call owns. */
static const size_t objects[] = {AT(blocks),
                                 AT(layout.empty),
                                 AT(layout.storages),
                                 AT(layout.slab),
                                 AT(layout.scratch),
                                 AT(layout.raw.raw_alloc),
                                 AT(layout.raw.raw_delete),
                                 AT(outputs.types),
                                 AT(outputs.empty),
                                 AT(outputs.reinterpret),
                                 AT(outputs.make),
                                 AT(counter.counters),
                                 AT(counter.group),
                                 AT(counter.name),
                                 AT(replay),
                                 AT(current),
                                 AT(index),
                                 AT(stream_of),
                                 AT(is_capturing),
                                 AT(misaligned)};

#define OBJECTS (sizeof objects / sizeof *objects)

static PyObject *owned(Call *self, size_t i) { return *(PyObject **)((char *)self + objects[i]); }

static void call_dealloc(Call *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; i < OBJECTS; i++) Py_XDECREF(owned(self, i));
    outputs_clear(&self->outputs);
    layout_clear(&self->layout);
    program_clear(&self->numbers);
    PyMem_Free(self->input);
    type->tp_free(self);
    Py_DECREF(type);
}

static int read_inputs(Call *self, PyObject *positions, PyObject *masks) {
    if (!(self->input = PyMem_Calloc(self->inputs + 1, sizeof(Input)))) {
        PyErr_NoMemory();
        return -1;
    }
    if (PyTuple_GET_SIZE(masks) != self->inputs || (size_t)self->inputs > self->blocks->regions) {
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
    if ((size_t)program->results != self->blocks->words) {
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
    for (size_t r = 0; r < self->blocks->regions; r++) {
        int is_pointed = self->blocks->first[r] < self->blocks->first[r + 1];
        int has_none = (r == slab && layout->slab == Py_None) || (r == slab + 1 && layout->scratch == Py_None);
        if (r < regions && !(is_pointed && has_none)) continue;
        PyErr_Format(PyExc_ValueError, "region %zu has no memory", r);
        return -1;
    }
    return 0;
}

static PyObject *blocks_call(Blocks *blocks, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"positions",    "masks",      "allocations", "slab",    "types",       "scratch",
                            "numbers",      "order",      "recipes",     "empty",   "reinterpret", "outputs",
                            "replay",       "direct",     "raw",         "current", "index",       "stream_of",
                            "is_capturing", "misaligned", "counters",    "group",   "counter",     NULL};
    PyObject *positions, *masks, *numbers, *order, *recipes;
    unsigned long long stream, alloc, release;
    Call *self = (Call *)call_type->tp_alloc(call_type, 0);
    Layout *layout;
    Outputs *outputs;
    Counter *counter;
    Scratch *raw;
    Py_ssize_t size;
    if (!self) return NULL;
    layout = &self->layout;
    outputs = &self->outputs;
    counter = &self->counter;
    raw = &layout->raw;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!OO!OOO!O!OOOOp(OOn(KKK))OOOOOOOO", names, &PyTuple_Type, &positions, &PyTuple_Type,
            &masks, &PyTuple_Type, &layout->storages, &layout->slab, &PyTuple_Type, &outputs->types, &layout->scratch,
            &numbers, &PyTuple_Type, &order, &PyTuple_Type, &recipes, &layout->empty, &outputs->reinterpret,
            &outputs->make, &self->replay, &self->direct, &raw->raw_alloc, &raw->raw_delete, &size, &stream, &alloc,
            &release, &self->current, &self->index, &self->stream_of, &self->is_capturing, &self->misaligned,
            &counter->counters, &counter->group, &counter->name)) {
        /* The references that were parsed are borrowed: drop them. */
        memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
        Py_DECREF(self);
        return NULL;
    }
    self->blocks = blocks;
    outputs->empty = layout->empty;
    for (size_t i = 0; i < OBJECTS; i++) Py_INCREF(owned(self, i));
    self->inputs = layout->inputs = PyTuple_GET_SIZE(positions);
    self->device = PyLong_AsLong(self->index);
    raw->torch.stream = (int (*)(int, Handle *))(uintptr_t)stream;
    raw->torch.alloc = (int (*)(uint64_t, Handle *))(uintptr_t)alloc;
    raw->torch.release = (int (*)(Handle))(uintptr_t)release;
    raw->size = (size_t)size;
    if (PyErr_Occurred() || read_numbers(self, numbers) || read_inputs(self, positions, masks)
        || layout_init(layout, order)
        || outputs_init(outputs, recipes, PyTuple_GET_SIZE(layout->storages), layout->slab != Py_None, &self->least)
        || check_regions(self))
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
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
    if (add_call()) return -1;
    return call_type || (call_type = (PyTypeObject *)PyType_FromSpec(&call_spec)) ? 0 : -1;
}

PART(.module = "relaunch", .init = init)
