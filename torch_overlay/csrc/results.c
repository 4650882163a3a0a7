/* Results of a program of numbers in sizes, strides and offsets: objects of a subclass of int, whose value is the
   number of the result. */

#include "results.h"

static int is_result(PyObject *object) {
    return PyLong_Check(object) && !PyLong_CheckExact(object) && !PyBool_Check(object);
}

int has_results(PyObject *object, Py_ssize_t results) {
    Py_ssize_t number;
    if (PyTuple_Check(object)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++)
            if (!has_results(PyTuple_GET_ITEM(object, i), results)) return 0;
        return 1;
    }
    if (!is_result(object)) return 1;
    number = PyLong_AsSsize_t(object);
    if (number >= 0 && number < results) return 1;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a size names a result that the program doesn't have");
    return 0;
}

PyObject *with_values(PyObject *object, const uint64_t *values) {
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
