/* Reads what Python passes. */

#include "read.h"

void *zeros(Py_ssize_t count, size_t size) {
    void *made = PyMem_Calloc((size_t)count + 1, size);
    if (!made) PyErr_NoMemory();
    return made;
}

void *pool_zeros(Pool *pool, Py_ssize_t count, size_t size) {
    enum { LINE = 64 };

    size_t bytes = LINE + (((size_t)count + 1) * size + LINE - 1) / LINE * LINE;
    Pool made = aligned_alloc(LINE, bytes);
    if (!made) {
        PyErr_NoMemory();
        return NULL;
    }
    memset(made, 0, bytes);
    made->next = *pool;
    *pool = made;
    return (char *)made + LINE;
}

void pool_free(Pool *pool) {
    for (Pool next; *pool; *pool = next) {
        next = (*pool)->next;
        free(*pool);
    }
}

void set_item(PyObject **tuple, Py_ssize_t i, PyObject *item) {
    if (item)
        PyTuple_SET_ITEM(*tuple, i, item);
    else
        Py_CLEAR(*tuple);
}

int refuse(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

int is_tuple(PyObject *item, const char *what, Py_ssize_t i) {
    const char *type = Py_TYPE(item)->tp_name;
    if (PyTuple_Check(item)) return 1;
    if (i < 0)
        PyErr_Format(PyExc_TypeError, "%s must be a tuple, not %.100s", what, type);
    else
        PyErr_Format(PyExc_TypeError, "%s %zd must be a tuple, not %.100s", what, i, type);
    return 0;
}

static int read_integer(PyObject *item, const char *what, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t *to) {
    *to = PyLong_AsSsize_t(item);
    if (*to == -1 && PyErr_Occurred()) return -1;
    if (*to >= begin && *to < end) return 0;
    PyErr_Format(PyExc_ValueError, "%s has a number that isn't there: %zd", what, *to);
    return -1;
}

Py_ssize_t *read_row(Pool *pool, PyObject *items, const char *what, Py_ssize_t begin, Py_ssize_t end,
                     Py_ssize_t *count) {
    Py_ssize_t *made;
    if (!is_tuple(items, what, -1) || !(made = pool_zeros(pool, PyTuple_GET_SIZE(items), sizeof *made))) return NULL;
    *count = PyTuple_GET_SIZE(items);
    for (Py_ssize_t i = 0; i < *count; i++)
        if (read_integer(PyTuple_GET_ITEM(items, i), what, begin, end, &made[i])) return NULL;
    return made;
}

int read_record(PyObject *items, Py_ssize_t i, const char *what, int count, const Py_ssize_t *ends, Py_ssize_t *to) {
    PyObject *item = PyTuple_GET_ITEM(items, i);
    if (!is_tuple(item, what, i)) return -1;
    if (PyTuple_GET_SIZE(item) != count) {
        PyErr_Format(PyExc_TypeError, "%s %zd must have %d numbers", what, i, count);
        return -1;
    }
    for (int k = 0; k < count; k++)
        if (read_integer(PyTuple_GET_ITEM(item, k), what, 0, ends[k], &to[k])) return -1;
    return 0;
}
