"""The C module of `graph.native_read` over a driver library whose functions are Python's."""

from __future__ import annotations

import ctypes
import re
import tempfile

import driver_stand_in


# A driver library whose functions a test defines.
HOOKS = {
    "cuGraphGetNodes": "void *graph, void **node, size_t *count",
    "cuGraphGetEdges_v2": "void *graph, void **before, void **after, char *data, size_t *count",
    "cuGraphNodeGetType": "void *node, int *kind",
    "cuGraphKernelNodeGetParams_v2": "void *node, char *params",
    "cuFuncGetName": "const char **name, void *func",
    "cuFuncGetParamInfo": "void *func, size_t index, size_t *offset, size_t *size",
    "cuKernelGetFunction": "void **func, void *kernel",
    "cuGraphNodeFindInClone": "void **found, void *node, void *clone",
    "cuGraphDestroyNode": "void *node",
}


class DriverInC:
    """The C module of `graph.native_read`, which asks a stand-in for cuda.bindings.driver. Its folder is the test's to
    clean up."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        lines = ["#include <stddef.h>"]
        for name, parameters in HOOKS.items():
            arguments = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
            lines.append(f"int (*hook_{name})({parameters});")
            lines.append(f"int {name}({parameters}) {{ return hook_{name}({arguments}); }}")
        module, self.library = driver_stand_in.build_module("\n".join(lines), self.folder.name)
        self.module = module.graph
        self.hooks, self.names = {}, {}

    def ask(self, api):
        """From now on the functions are those of `api`."""
        pointer, size, number = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t
        handle = ctypes.c_void_p

        def fill(out, values):
            for i, value in enumerate(values):
                out[i] = int(value)

        def nodes(graph, out, count):
            code, found, total = api.cuGraphGetNodes(api.real.CUgraph(graph), count[0] if out else 0)
            fill(count, [total])
            fill(out, found)
            return code

        def edges(graph, before, after, data, count):
            code, *columns, total = api.cuGraphGetEdges(api.real.CUgraph(graph), count[0] if before else 0)
            fill(count, [total])
            fill(before, columns[0])
            fill(after, columns[1])
            for i, edge in enumerate(columns[2]):
                ctypes.memmove(data + 8 * i, bytes([edge.from_port, edge.to_port, edge.type]), 3)
            return code

        def kind(node, out):
            out[0] = api.kind[node]  # also a kind that cuda.bindings doesn't know
            return 0

        def kernel(node, out):
            code, params = api.cuGraphKernelNodeGetParams(node)
            ctypes.memmove(out, int(params.getPtr()), 72)
            return code

        def name(out, func):
            code, value = api.cuFuncGetName(func)
            buffer = self.names.setdefault(value, ctypes.create_string_buffer(value))
            fill(out, [ctypes.addressof(buffer)])
            return code

        def parameter(func, index, offset, size):
            code, *values = api.cuFuncGetParamInfo(func, index)
            fill(offset, values[:1])
            fill(size, values[1:])
            return code

        def function(out, kern):
            code, func = api.cuKernelGetFunction(kern)
            fill(out, [func or 0])
            return code

        def in_clone(out, node, clone):
            code, found = api.cuGraphNodeFindInClone(node, clone)
            fill(out, [found])
            return code

        def destroy(node):
            (code,) = api.cuGraphDestroyNode(node)
            return code

        types = [
            (nodes, handle, pointer, size),
            (edges, handle, pointer, pointer, handle, size),
            (kind, handle, ctypes.POINTER(ctypes.c_int)),
            (kernel, handle, handle),
            (name, pointer, handle),
            (parameter, handle, number, size, size),
            (function, pointer, handle),
            (in_clone, pointer, handle, handle),
            (destroy, handle),
        ]
        for hook, (python, *arguments) in zip(HOOKS, types, strict=True):
            made = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *args, python=python: int(python(*args)))
            self.hooks[hook] = made
            ctypes.c_void_p.in_dll(self.library, f"hook_{hook}").value = ctypes.cast(made, ctypes.c_void_p).value
