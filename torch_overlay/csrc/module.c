/* The extension module: `events`, `relaunch` and `graph` are modules in it. */

#include "events.h"
#include "relaunch.h"

extern PyMethodDef graph_reader_methods[];

static struct PyModuleDef events = {PyModuleDef_HEAD_INIT, "torch_overlay_c.events", NULL, -1, NULL};
static struct PyModuleDef relaunch = {PyModuleDef_HEAD_INIT, "torch_overlay_c.relaunch", NULL, -1, NULL};
static struct PyModuleDef graph = {PyModuleDef_HEAD_INIT, "torch_overlay_c.graph", NULL, -1, NULL};
static struct PyModuleDef whole = {PyModuleDef_HEAD_INIT, "torch_overlay_c", NULL, -1, NULL};

/* A borrowed reference to a new module inside of `parent`. */
static PyObject *add_module(PyObject *parent, const char *name, struct PyModuleDef *definition) {
    PyObject *made = PyModule_Create(definition);
    return made && !PyModule_AddObject(parent, name, made) ? made : NULL;
}

static int fill_relaunch(PyObject *module) {
    PyMethodDef *const methods[] = {aliased_memory_methods, data_ptr_methods, patch_methods, call_module_methods};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (PyModule_AddFunctions(module, methods[i])) return -1;
    return aliased_memory_init(module) || data_ptr_init() || patch_init(module) || call_init() ? -1 : 0;
}

PyMODINIT_FUNC PyInit_torch_overlay_c(void) {
    PyObject *self, *made;
    if (load_driver() || !(self = PyModule_Create(&whole))) return NULL;
    if (!(made = add_module(self, "events", &events)) || events_init(made) || region_init(made)
        || !(made = add_module(self, "relaunch", &relaunch)) || fill_relaunch(made)
        || !(made = add_module(self, "graph", &graph)) || PyModule_AddFunctions(made, graph_reader_methods)) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
