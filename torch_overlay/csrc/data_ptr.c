/* Addresses of tensors: Note [Fields of a tensor] in `launch.executable`. */

#include "data_ptr.h"
#include "module.h"

PyTypeObject *tensor_type, *usual_type;
uint8_t item_sizes[DTYPES];
static PyObject *name_data_ptr;

int asked_address(PyObject *object, uint64_t *address) {
    PyObject *number = PyObject_CallMethodNoArgs(object, name_data_ptr);
    if (!number) return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_addresses(PyObject *module, PyObject *arg) {
    PyObject *tensors = PySequence_Tuple(arg), *result;
    if (!tensors) return NULL;
    if ((result = PyTuple_New(PyTuple_GET_SIZE(tensors))))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
            PyObject *number;
            uint64_t address;
            if (address_of(PyTuple_GET_ITEM(tensors, i), &address)
                || !(number = PyLong_FromUnsignedLongLong(address))) {
                Py_CLEAR(result);
                break;
            }
            PyTuple_SET_ITEM(result, i, number);
        }
    Py_DECREF(tensors);
    return result;
}

/* Learns the number and item size of a dtype from one of its tensors. None for the tensor: forgets all dtypes. */
static PyObject *py_learn(PyObject *module, PyObject *args) {
    PyObject *object, *type;
    int size;
    uint16_t dtype;
    if (!PyArg_ParseTuple(args, "OOi", &type, &object, &size)) return NULL;
    if (object == Py_None) {
        memset(item_sizes, 0, sizeof item_sizes);
        Py_RETURN_NONE;
    }
    if (!PyType_Check(type) || !PyObject_TypeCheck(object, (PyTypeObject *)type))
        return PyErr_Format(PyExc_TypeError, "learn(type, tensor, item_size) takes a tensor of the type");
    dtype = ((Holder *)object)->tensor->dtype;
    if (dtype >= DTYPES) return PyErr_Format(PyExc_RuntimeError, "the number of a dtype is %d", (int)dtype);
    item_sizes[dtype] = (uint8_t)size;
    Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(type));
    Py_XSETREF(usual_type, (PyTypeObject *)Py_NewRef(Py_TYPE(object)));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"addresses", py_addresses, METH_O, "addresses(tensors): (data_ptr, ...)"},
    {"learn", py_learn, METH_VARARGS, "learn(type, tensor, item_size): a dtype, by one of its tensors"},
    {NULL}};

static int init(PyObject *module) { return (name_data_ptr = PyUnicode_InternFromString("data_ptr")) ? 0 : -1; }

PART(.module = "relaunch", .methods = methods, .init = init)
