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
    result = PyTuple_New(PyTuple_GET_SIZE(tensors));
    for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(tensors); i++) {
        uint64_t address;
        int code = address_of(PyTuple_GET_ITEM(tensors, i), &address);
        set_item(&result, i, code ? NULL : PyLong_FromUnsignedLongLong(address));
    }
    Py_DECREF(tensors);
    return result;
}

static PyObject *row_of(const int64_t *values, int64_t count) {
    PyObject *row = PyTuple_New((Py_ssize_t)count);
    for (Py_ssize_t i = 0; row && i < count; i++) set_item(&row, i, PyLong_FromLongLong(values[i]));
    return row;
}

static PyObject *py_fields(PyObject *module, PyObject *arg) {
    uint64_t address;
    const Tensor *tensor = fields_of(arg, &address);
    if (!tensor || tensor->dimensions < 0 || tensor->dimensions > INLINE_DIMENSIONS) Py_RETURN_NONE;
    return Py_BuildValue("NNibbK", row_of(tensor->size, tensor->dimensions), row_of(tensor->stride, tensor->dimensions),
                         (int)tensor->dtype, tensor->device[0], tensor->device[1], (unsigned long long)tensor->keys);
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
    {"fields", py_fields, METH_O,
     "fields(tensor): (size, stride, dtype, device, its index, keys), or None if its fields don't hold them"},
    {"learn", py_learn, METH_VARARGS, "learn(type, tensor, item_size): a dtype, by one of its tensors"},
    {NULL}};

static int init(PyObject *module) { return (name_data_ptr = PyUnicode_InternFromString("data_ptr")) ? 0 : -1; }

PART(.module = "relaunch", .methods = methods, .init = init)
