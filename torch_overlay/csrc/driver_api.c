/* Opens the driver, and fills the table of its functions. */

#include "driver_api.h"

#include <dlfcn.h>

#ifndef DRIVER
#define DRIVER "libcuda.so.1"
#endif

struct Driver cu;
PyObject *extension;

int load_driver(void) {
#define ENTRY(member, symbol, parameters) {(void **)&cu.member, symbol},

    static const struct {
        void **slot;
        const char *symbol;
    } wanted[] = {DRIVER_FUNCTIONS(ENTRY)};

#undef ENTRY
    void *library = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        PyErr_SetString(PyExc_ImportError, DRIVER " can't be loaded");
        return -1;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!(*wanted[i].slot = dlsym(library, wanted[i].symbol))) {
            PyErr_Format(PyExc_ImportError, DRIVER " has no %s", wanted[i].symbol);
            return -1;
        }
    return 0;
}

const char *text_of(int code) {
    const char *text = NULL;
    cu.GetErrorString(code, &text);
    return text ? text : "unknown error";
}

int driver_check(int code, const char *what, const char *where) {
    PyObject *error, *class;
    if (!code) return 0;
    if (!(class = PyDict_GetItemString(PyModule_GetDict(extension), "DriverError"))) /* borrowed */
        PyErr_SetString(PyExc_SystemError, "the extension module has no DriverError");
    else if ((error = PyObject_CallFunction(class, "siss", what, code, text_of(code), where))) {
        PyErr_SetObject(class, error);
        Py_DECREF(error);
    }
    return -1;
}

PyObject *driver_error(int code, const char *what) {
    driver_check(code, what, "");
    return NULL;
}
