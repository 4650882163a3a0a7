/* A count in a dictionary of dictionaries, as torch._dynamo keeps counts. */

#include "counter.h"

/* Does counters[group][name] += 1 if both are dictionaries, as they mostly are. 1: they are not. -1: an error. */
static int add_in_dictionaries(Counter *self) {
    PyObject *group, *before, *after;
    int overflow, code;
    long count;
    if (!PyDict_Check(self->counters) || !(group = PyDict_GetItemWithError(self->counters, self->group))
        || !PyDict_Check(group) || !(before = PyDict_GetItemWithError(group, self->name)) || !PyLong_CheckExact(before))
        return PyErr_Occurred() ? -1 : 1;
    count = PyLong_AsLongAndOverflow(before, &overflow);
    if (overflow || count == LONG_MAX) return 1;
    if (!(after = PyLong_FromLong(count + 1))) return -1;
    code = PyDict_SetItem(group, self->name, after);
    self->seen[0] = self->counters;
    self->seen[1] = group;
    self->seen[2] = after;
    self->seen[3] = ((PyDictObject *)self->counters)->ma_keys;
    self->seen[4] = ((PyDictObject *)group)->ma_keys;
    Py_DECREF(after);
    return code;
}

int counter_add(Counter *self) {
    PyObject *group, *before, *one, *after = NULL;
    int code = add_in_dictionaries(self);
    if (code <= 0) return code;
    if (!(group = PyObject_GetItem(self->counters, self->group))) return -1;
    code = -1;
    before = PyObject_GetItem(group, self->name);
    one = PyLong_FromLong(1);
    if (before && one && (after = PyNumber_Add(before, one))) code = PyObject_SetItem(group, self->name, after);
    Py_DECREF(group);
    Py_XDECREF(before);
    Py_XDECREF(one);
    Py_XDECREF(after);
    return code;
}
