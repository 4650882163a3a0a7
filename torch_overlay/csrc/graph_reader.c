/* The nodes and edges of a captured graph: `graph.driver`. */

#include "driver_api.h"
#include "module.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, END = 0, BUFFER_POINTER = 1, BUFFER_SIZE = 2 };

static PyObject *handle_of(Handle handle) { return PyLong_FromVoidPtr(handle); }

/* ---- structure ---- */

/* Returns the graph's nodes, to be freed by PyMem_Free; NULL with a Python error. */
static Handle *nodes_of(Handle graph, size_t *count) {
    Handle *node = NULL;
    int code;
    *count = 0;
    if (!(code = cu.GraphGetNodes(graph, NULL, count)) && (node = zeros((Py_ssize_t)*count, sizeof *node)) && *count)
        code = cu.GraphGetNodes(graph, node, count);
    if (!code) return node;
    driver_error(code, "cuGraphGetNodes");
    PyMem_Free(node);
    return NULL;
}

/* Steals the item, which may be NULL. */
static int append(PyObject *list, PyObject *item) {
    int code = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return code;
}

/* Lists the nodes, and their kinds unless the list of these is NULL. */
static int read_nodes(Handle graph, PyObject *handles, PyObject *kinds) {
    size_t count, i = 0;
    Handle *node = nodes_of(graph, &count);
    for (int kind, code = 0; node && i < count; i++) {
        if (kinds && (code = cu.GraphNodeGetType(node[i], &kind))) driver_error(code, "cuGraphNodeGetType");
        if (code || append(handles, handle_of(node[i])) || (kinds && append(kinds, PyLong_FromLong(kind)))) break;
    }
    PyMem_Free(node);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_edges(Handle graph, PyObject *edges) {
    size_t count = 0, i = 0;
    Handle *node = NULL;
    EdgeData *data = NULL;
    int code = cu.GraphGetEdges(graph, NULL, NULL, NULL, &count);
    if (!code && (node = zeros(2 * (Py_ssize_t)count, sizeof *node)) && (data = zeros((Py_ssize_t)count, sizeof *data))
        && count)
        code = cu.GraphGetEdges(graph, node, node + count, data, &count);
    if (code) driver_error(code, "cuGraphGetEdges");
    for (; !code && data && i < count; i++) {
        int plain = !(data[i].type || data[i].from_port || data[i].to_port);
        PyObject *is_plain = PyBool_FromLong(plain);
        if (append(edges, Py_BuildValue("NNN", handle_of(node[i]), handle_of(node[count + i]), is_plain))) break;
    }
    PyMem_Free(node);
    PyMem_Free(data);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_nodes(PyObject *module, PyObject *arg) {
    Handle graph = PyLong_AsVoidPtr(arg);
    PyObject *handles = PyErr_Occurred() ? NULL : PyList_New(0);
    if (handles && read_nodes(graph, handles, NULL)) Py_CLEAR(handles);
    return handles;
}

static PyObject *py_structure(PyObject *module, PyObject *arg) {
    Handle graph = PyLong_AsVoidPtr(arg);
    PyObject *handles, *kinds, *edges, *result = NULL;
    if (PyErr_Occurred()) return NULL;
    handles = PyList_New(0);
    kinds = PyList_New(0);
    edges = PyList_New(0);
    if (handles && kinds && edges && !read_nodes(graph, handles, kinds) && !read_edges(graph, edges))
        result = PyTuple_Pack(3, handles, kinds, edges);
    Py_XDECREF(handles);
    Py_XDECREF(kinds);
    Py_XDECREF(edges);
    return result;
}

/* ---- kernels ---- */

typedef struct {
    size_t offset, size;
} Parameter;

typedef struct {
    Handle func, kern;
    PyObject *name, *refusal; /* refusal: why the driver doesn't describe it, and there is no name */
    Parameter *parameter;
    size_t count, end;
} Function;

/* The functions of a list of nodes; there is room for as many as there are nodes. */
typedef struct {
    Function *list;
    size_t count;
} Functions;

static void forget(Functions *functions) {
    for (size_t i = 0; i < functions->count; i++) {
        Py_XDECREF(functions->list[i].name);
        Py_XDECREF(functions->list[i].refusal);
        PyMem_Free(functions->list[i].parameter);
    }
    PyMem_Free(functions->list);
}

/* Asks the driver for the function's name and parameters. Returns 0, or -1 with a Python error. */
static int describe(Function *each) {
    Handle function = each->func;
    Parameter *at, unused;
    const char *name = NULL, *what = "cuKernelGetFunction";
    int code = function ? 0 : cu.KernelGetFunction(&function, each->kern);
    if (!code) {
        what = "cuFuncGetName";
        code = cu.FuncGetName(&name, function);
    }
    if (!code) {
        what = "cuFuncGetParamInfo";
        while (!(code = cu.FuncGetParamInfo(function, each->count, &unused.offset, &unused.size))) each->count++;
        if (code == INVALID_VALUE) code = 0; /* there is no such parameter */
    }
    if (code) {
        each->refusal = PyUnicode_FromFormat("the driver doesn't describe the kernel: CUDA driver error in %s: %s (%d)",
                                             what, text_of(code), code);
        return each->refusal ? 0 : -1;
    }
    if (!(each->parameter = zeros((Py_ssize_t)each->count, sizeof unused))) return -1;
    for (size_t k = 0; k < each->count; k++) {
        at = &each->parameter[k];
        cu.FuncGetParamInfo(function, k, &at->offset, &at->size);
        if (at->offset + at->size > each->end) each->end = at->offset + at->size;
    }
    return (each->name = PyUnicode_FromString(name ? name : "")) ? 0 : -1;
}

static Function *find(Functions *functions, Handle func, Handle kern) {
    Function *each;
    for (size_t i = functions->count; i--;)
        if (functions->list[i].func == func && functions->list[i].kern == kern) return &functions->list[i];
    each = &functions->list[functions->count++];
    *each = (Function){func, kern, NULL, NULL, NULL, 0, 0};
    return describe(each) ? NULL : each;
}

/* Returns 1 if the node has a value for each parameter: in an array of addresses, or in a packed block, `base`. */
static int has_values(const KernelParams *params, const Function *function, const char **base) {
    size_t size = 0;
    *base = NULL;
    if (function->count && params->arguments) {
        for (size_t k = 0; k < function->count; k++)
            if (!params->arguments[k]) return 0;
        return 1;
    }
    for (void **extra = params->extra; extra && *extra != (void *)END; extra += 2) {
        if (*extra == (void *)BUFFER_POINTER)
            *base = extra[1];
        else if (*extra == (void *)BUFFER_SIZE)
            size = extra[1] ? *(size_t *)extra[1] : 0;
        else
            return 0;
    }
    return function->count ? *base && function->end <= size : !size;
}

/* Returns a new tuple of (offset, value). */
static PyObject *values_of(const KernelParams *params, const Function *function, const char *base) {
    PyObject *values = PyTuple_New((Py_ssize_t)function->count);
    for (size_t k = 0; values && k < function->count; k++) {
        const Parameter *each = &function->parameter[k];
        const char *at = base ? base + each->offset : params->arguments[k];
        set_item(&values, (Py_ssize_t)k, Py_BuildValue("ny#", (Py_ssize_t)each->offset, at, (Py_ssize_t)each->size));
    }
    return values;
}

static PyObject *kernel_of(Functions *functions, Handle node) {
    KernelParams p;
    Function *function;
    const char *base;
    int code;
    memset(&p, 0, sizeof p);
    if ((code = cu.GraphKernelNodeGetParams(node, &p))) return driver_error(code, "cuGraphKernelNodeGetParams");
    if (!(function = find(functions, p.func, p.kern))) return NULL;
    if (function->refusal) return Py_BuildValue("zO", NULL, function->refusal);
    if (!has_values(&p, function, &base))
        return Py_BuildValue("ON", function->name,
                             PyUnicode_FromFormat("it has no values as the driver's %zu parameters", function->count));
    return Py_BuildValue("NNN(III)(III)ION", handle_of(p.func), handle_of(p.kern), handle_of(p.ctx), p.grid[0],
                         p.grid[1], p.grid[2], p.block[0], p.block[1], p.block[2], p.shared_bytes, function->name,
                         values_of(&p, function, base));
}

static PyObject *py_kernels(PyObject *module, PyObject *arg) {
    PyObject *nodes = PySequence_Fast(arg, "kernels() wants a sequence of nodes"), *result = PyList_New(0);
    Py_ssize_t count = nodes ? PySequence_Fast_GET_SIZE(nodes) : 0;
    Functions functions = {zeros(count, sizeof *functions.list), 0};
    for (Py_ssize_t i = 0; nodes && result && functions.list && i < count; i++) {
        Handle node = PyLong_AsVoidPtr(PySequence_Fast_GET_ITEM(nodes, i));
        if (PyErr_Occurred() || append(result, kernel_of(&functions, node))) break;
    }
    forget(&functions);
    Py_XDECREF(nodes);
    if (PyErr_Occurred()) Py_CLEAR(result);
    return result;
}

/* ---- cut ---- */

/* Notes the handle of the node's clone if the node is wanted, else destroys the clone. */
static int cut_node(Handle node, Handle clone, PyObject *wanted, PyObject *found) {
    Handle there = NULL;
    PyObject *handle = handle_of(node), *other = NULL;
    int code, kept = handle ? PySet_Contains(wanted, handle) : -1;
    if (kept >= 0 && (code = cu.GraphNodeFindInClone(&there, node, clone)))
        driver_error(code, "cuGraphNodeFindInClone");
    else if (kept > 0 && (other = handle_of(there)))
        PyDict_SetItem(found, handle, other);
    else if (!kept && (code = cu.GraphDestroyNode(there)))
        driver_error(code, "cuGraphDestroyNode");
    Py_XDECREF(handle);
    Py_XDECREF(other);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_cut(PyObject *module, PyObject *args) {
    unsigned long long graph, clone;
    PyObject *wanted, *found;
    size_t count;
    Handle *node;
    if (!PyArg_ParseTuple(args, "KKO!:cut", &graph, &clone, &PySet_Type, &wanted)) return NULL;
    if (!(node = nodes_of((Handle)(uintptr_t)graph, &count))) return NULL;
    found = PyDict_New();
    for (size_t i = 0; found && i < count; i++)
        if (cut_node(node[i], (Handle)(uintptr_t)clone, wanted, found)) Py_CLEAR(found);
    PyMem_Free(node);
    return found;
}

static PyMethodDef methods[] = {
    {"nodes", py_nodes, METH_O, "nodes(graph): their handles"},
    {"structure", py_structure, METH_O, "structure(graph): (nodes, kinds, edges)"},
    {"kernels", py_kernels, METH_O,
     "kernels(nodes): what each of these kernel nodes launches, or why that is not known"},
    {"cut", py_cut, METH_VARARGS, "cut(graph, clone, wanted): takes the other nodes out of the clone"},
    {NULL}};

PART(.module = "graph", .methods = methods)
