/* What an executable holds whose nodes are set to much else at many launches.

   `Shared(nodes, launches=None, apart=False)`; `apart`: kernels are always launched one by one. */

#include "shared.h"
#include "module.h"

#include <structmember.h>

static void shared_dealloc(Shared *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->holder);
    PyMem_Free(self->attributes);
    Py_XDECREF(self->launches);
    if (self->lock) PyThread_free_lock(self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

static int read_launches(Shared *self) {
    static const int ids[] = ATTRIBUTES;
    if (!PyTuple_Check(self->launches)) {
        PyErr_SetString(PyExc_TypeError, "launches are a tuple, or None");
        return -1;
    }
    if (!(self->attributes = PyMem_Calloc(self->nodes + 1, sizeof *self->attributes))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->launches); i++) {
        PyObject *item = PyTuple_GET_ITEM(self->launches, i);
        const char *values;
        Py_ssize_t node, size;
        Attributes *of;
        if (!is_tuple(item, "launch", i)
            || !PyArg_ParseTuple(item, "ny#;a launch is (node, attributes)", &node, &values, &size))
            return -1;
        if (node < 0 || (size_t)node >= self->nodes || (size && size != ATTRIBUTE_COUNT * ATTRIBUTE_SIZE)
            || self->attributes[node].count) {
            PyErr_SetString(PyExc_ValueError, "not a launch of a node");
            return -1;
        }
        of = &self->attributes[node];
        for (size_t k = 0; size && k < ATTRIBUTE_COUNT; k++) {
            Attribute *attribute = &of->attribute[of->count];
            int is_set = 0;
            memcpy(attribute->value, values + k * ATTRIBUTE_SIZE, ATTRIBUTE_SIZE);
            for (size_t at = 0; at < ATTRIBUTE_SIZE / 8; at++) is_set |= attribute->value[at] != 0;
            attribute->id = ids[k];
            of->count += (unsigned)is_set;
        }
    }
    return 0;
}

static PyObject *shared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int apart = 0;
    Py_ssize_t nodes;
    PyObject *launches = Py_None;
    Shared *self;
    if (!PyArg_ParseTuple(args, "n|Op", &nodes, &launches, &apart)) return NULL;
    if (nodes < 0) return PyErr_Format(PyExc_ValueError, "a negative number of nodes");
    if (!(self = (Shared *)type->tp_alloc(type, 0))) return NULL;
    self->nodes = (size_t)nodes;
    self->refused = apart;
    self->launches = Py_NewRef(launches);
    if (!(self->holder = PyMem_Calloc(self->nodes + 1, sizeof *self->holder))
        || !(self->lock = PyThread_allocate_lock()))
        PyErr_NoMemory();
    else if (launches == Py_None || !read_launches(self))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef members[] = {
    {"launches", T_OBJECT, offsetof(Shared, launches), READONLY, "(node, attributes) in the order of launch, or None"},
    {NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, shared_new}, {Py_tp_dealloc, shared_dealloc}, {Py_tp_members, members}, {0, NULL}};
static PyType_Spec spec = {"cuda_driver_c.Shared", sizeof(Shared), 0, Py_TPFLAGS_DEFAULT, slots};

PyTypeObject *shared_type(void) {
    static PyTypeObject *made;
    if (!made) made = (PyTypeObject *)PyType_FromSpec(&spec);
    return made;
}

static int init(PyObject *module) {
    return shared_type() ? PyModule_AddObjectRef(module, "Shared", (PyObject *)shared_type()) : -1;
}

PART(.module = "relaunch", .init = init)
