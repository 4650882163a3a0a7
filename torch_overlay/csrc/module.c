/* The extension module: what the parts of the other files add, in modules inside of it. */

#include "module.h"
#include "driver_api.h"

static Part *parts;

void add_part(Part *part) {
    part->next = parts;
    parts = part;
}

/* Returns a borrowed reference to the module `name` inside of `whole`, which is made if it isn't there. */
static PyObject *module_in(PyObject *whole, const char *name) {
    PyObject *found = PyDict_GetItemString(PyModule_GetDict(whole), name);
    int failed;
    if (found || !(found = PyModule_New(name))) return found;
    failed = PyModule_AddObjectRef(whole, name, found);
    Py_DECREF(found);
    return failed ? NULL : found;
}

static int fill(PyObject *whole, const Part *part) {
    PyObject *module = module_in(whole, part->module);
    if (!module || (part->methods && PyModule_AddFunctions(module, part->methods))) return -1;
    return part->init ? part->init(module) : 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cuda_driver_c", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_cuda_driver_c(void) {
    PyObject *whole;
    if (load_driver() || !(whole = PyModule_Create(&definition))) return NULL;
    extension = whole; /* it lives as long as the process */
    for (const Part *part = parts; part; part = part->next)
        if (fill(whole, part)) {
            Py_DECREF(whole);
            return NULL;
        }
    return whole;
}
