/* The parameters of a node of an executable, as the driver reads them. */

#include "node.h"

void node_clear(Node *node) {
    free(node->block);
    PyMem_Free(node->label);
}

int node_read(Node *node, PyObject *item, Py_ssize_t number) {
    static const size_t least[] = {sizeof(KernelParams), 40, 200};
    unsigned long long handle, context;
    const char *label, *block;
    Py_ssize_t length, label_length;
    PyObject *arguments;
    size_t bytes, count, at, i;
    if (!is_tuple(item, "node", number)
        || !PyArg_ParseTuple(item, "iKKs#y#O!;a node is (kind, handle, context, label, block, arguments)", &node->kind,
                             &handle, &context, &label, &label_length, &block, &length, &PyTuple_Type, &arguments))
        return -1;
    count = (size_t)PyTuple_GET_SIZE(arguments);
    at = round_up((size_t)length, 64);
    bytes = round_up(at + count * sizeof(void *), 64);
    if (node->kind < 0 || node->kind > COPY || (size_t)length < least[node->kind]) {
        PyErr_SetString(PyExc_ValueError, "not a node that can be patched");
        return -1;
    }
    node->handle = (Handle)(uintptr_t)handle;
    node->context = (Handle)(uintptr_t)context;
    if (!(node->label = PyMem_Malloc((size_t)label_length + 1)) || !(node->block = aligned_alloc(64, bytes))) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(node->label, label, (size_t)label_length + 1);
    memset(node->block, 0, bytes);
    memcpy(node->block, block, (size_t)length);
    for (i = 0; i < count; i++) {
        size_t offset = PyLong_AsSize_t(PyTuple_GET_ITEM(arguments, i));
        if (PyErr_Occurred()) return -1;
        if (offset > (size_t)length) {
            PyErr_SetString(PyExc_ValueError, "an argument lies outside of its block");
            return -1;
        }
        ((void **)(node->block + at))[i] = node->block + offset;
    }
    if (node->kind == KERNEL) {
        KernelParams *params = (KernelParams *)node->block;
        params->arguments = count ? (void **)(node->block + at) : NULL;
        params->extra = NULL;
    }
    node->size = (size_t)length;
    return 0;
}

int node_set(const Node *node, Handle exec) {
    const char *what;
    int code;
    if (node->kind == KERNEL) {
        what = "cuGraphExecKernelNodeSetParams";
        code = cu.GraphExecKernelNodeSetParams(exec, node->handle, node->block);
    } else if (node->kind == FILL) {
        what = "cuGraphExecMemsetNodeSetParams";
        code = cu.GraphExecMemsetNodeSetParams(exec, node->handle, node->block, node->context);
    } else {
        what = "cuGraphExecMemcpyNodeSetParams";
        code = cu.GraphExecMemcpyNodeSetParams(exec, node->handle, node->block, node->context);
    }
    if (!code) return 0;
    driver_error_at(code, what, node->label);
    return -1;
}

int node_set_in_graph(const Node *node) {
    int code = cu.GraphMemcpyNodeSetParams(node->handle, node->block);
    if (!code) return 0;
    driver_error_at(code, "cuGraphMemcpyNodeSetParams", node->label);
    return -1;
}
