/* Launches the nodes of blocks: by the executable, or the kernels one by one.

   Note [Kernels one by one]
   To set nodes of an executable takes the host longer than to launch their kernels, and the device has to wait until
   all are set. (From idle on a machine with an H200: a call of DistilBERT, 78 nodes, takes 1164 to 1293 us with the
   nodes set, and 1012 to 1058 with its kernels launched.) So where the edges allow one order only, and most nodes would
   have to be set, the kernels are launched in this order, and the executable stays as it is. That is so for a graph for
   any size at a further size, and where graphs of several sizes take turns with one executable. If the next launches
   are of the same graph with the same values, the nodes are set after all, for then the executable is faster:
   `patience` is the number of launches until that. */

#include "launch_nodes.h"

#include <stddef.h>

enum { PATIENCE = 2, INVALID_VALUE = 1, MOST_DYNAMIC_SHARED = 8 };

/* Returns 1 if it takes less time to launch the kernels one by one than to set `count` nodes, of which `own` hold other
   values than at the last launch of these blocks: Note [Kernels one by one]. */
static int pays_by_node(Blocks *self, size_t own, size_t count) {
    Shared *shared = self->shared;
    if (!shared || !shared->attributes) return 0;
    if (shared->recent != self || 2 * own > self->nodes) shared->patience = PATIENCE;
    shared->recent = self;
    if (shared->refused) return 1;
    if (2 * count <= self->nodes || !shared->patience) return 0;
    shared->patience--;
    return 1;
}

/* A library may allow a function as much shared memory as it launches it with, and have launched it with less since. */
static int launch_kernel(const LaunchConfig *config, const KernelParams *params) {
    Handle function = params->func ? params->func : params->kern;
    int code = cu.LaunchKernelEx(config, function, params->arguments, NULL);
    if (code != INVALID_VALUE || !config->shared_bytes) return code;
    if (!params->func && cu.KernelGetFunction(&function, params->kern)) return code;
    if (cu.FuncSetAttribute(function, MOST_DYNAMIC_SHARED, (int)config->shared_bytes)) return code;
    return cu.LaunchKernelEx(config, function, params->arguments, NULL);
}

static int launch_by_node(Blocks *self, Handle stream) {
    int code = 0;
    size_t i;
    Py_BEGIN_ALLOW_THREADS for (i = 0; i < self->nodes && !code; i++) {
        const KernelParams *params = (const KernelParams *)self->node[i].block;
        const Attributes *of = &self->shared->attributes[self->number[i]];
        LaunchConfig config = {.stream = stream, .attributes = of->attribute, .count = of->count};
        memcpy(config.grid, params->grid, offsetof(LaunchConfig, shared_bytes) + sizeof config.shared_bytes);
        code = launch_kernel(&config, params);
    }
    Py_END_ALLOW_THREADS if (!code) return 0;
    driver_error_at(code, "cuLaunchKernelEx", self->node[i - 1].label);
    return -1;
}

static int launch_executable(Blocks *self, Handle stream, PyObject *replay) {
    PyObject *done;
    int code;
    if (!replay) {
        Py_BEGIN_ALLOW_THREADS code = cu.GraphLaunch(self->exec, stream);
        Py_END_ALLOW_THREADS if (code) driver_error(code, "cuGraphLaunch");
        return code ? -1 : 0;
    }
    done = PyObject_CallNoArgs(replay);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int launch_nodes(Blocks *self, size_t own, Handle stream, PyObject *replay, Launched *counts) {
    size_t count = list_others(self, own);
    Py_ssize_t set;
    if (replay || !pays_by_node(self, own, count)) {
        if ((set = set_listed(self, count)) >= 0) {
            counts->patched += (unsigned long long)set;
            return launch_executable(self, stream, replay);
        }
        if (replay || !self->shared || !self->shared->attributes) return -1;
        PyErr_Clear(); /* the executable can't be set to this, but its kernels can be launched */
        self->shared->refused = 1;
    }
    leave_listed(self, count);
    self->stale = 0;
    if (launch_by_node(self, stream)) return -1;
    counts->by_node++;
    return 0;
}
