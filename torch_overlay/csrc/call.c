/* A relaunch as one call: Note [A relaunch]. */

#include "call.h"
#include "data_ptr.h"
#include "module.h"

static __thread int launching; /* this thread holds a lock, so it must wait for no other: Note [A relaunch] */

/* Reads the addresses of the inputs. 1: done. 0: one is misaligned. -1: an error. */
static int read_inputs(Call *self, PyObject *inputs, uint64_t *base) {
    uint64_t bad = 0;
    for (Py_ssize_t i = 0; i < self->inputs; i++) {
        const Input *each = &self->input[i];
        PyObject *item = PyList_GET_ITEM(inputs, each->position);
        if (!field_address(item, &base[i])) {
            int code;
            Py_INCREF(item);
            code = asked_address(item, &base[i]);
            Py_DECREF(item);
            if (code) return -1;
            if (PyList_GET_SIZE(inputs) < self->least) {
                PyErr_SetString(PyExc_RuntimeError, "the list of inputs changed while it was read");
                return -1;
            }
        }
        bad |= base[i] & each->mask;
    }
    return !bad;
}

static int launch_executable(const Call *self, Handle stream) {
    PyObject *done;
    int code;
    if (self->direct) {
        Py_BEGIN_ALLOW_THREADS code = cu.GraphLaunch(self->blocks.exec, stream);
        Py_END_ALLOW_THREADS if (code) driver_error(code, "cuGraphLaunch");
        return code ? -1 : 0;
    }
    done = PyObject_CallNoArgs(self->replay);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int patch_and_launch(Call *self, Handle stream, const uint64_t *base, const uint64_t *values) {
    Blocks *blocks = &self->blocks;
    Py_ssize_t set;
    int code = -1;
    if (!PyThread_acquire_lock(blocks->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS PyThread_acquire_lock(blocks->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    launching = 1;
    memcpy(blocks->value, values, blocks->words * sizeof *values);
    if ((set = set_listed(blocks, write_bases(blocks, base))) >= 0) {
        self->patched += (unsigned long long)set;
        code = launch_executable(self, stream);
    }
    if (!code) self->launches++;
    launching = 0;
    PyThread_release_lock(blocks->lock);
    return code;
}

PyObject *run_call(Call *self, PyObject *inputs, PyObject *originals, int careful) {
    uint64_t few[512], *base = few;
    size_t regions = layout_regions(&self->layout), count = regions + (size_t)self->numbers.results;
    Memory memory = {NULL, NULL, NULL};
    PyObject *result = NULL;
    Handle stream = NULL;
    int code, is_captured = 0;
    if (launching) {
        if (careful) Py_RETURN_NONE;
        return PyErr_Format(PyExc_RuntimeError, "launch() inside of a launch");
    }
    counter_fetch(&self->counter);
    if (careful) {
        if ((code = find_stream(&self->device, &stream)) < 0) return NULL;
        if (!code || cu.StreamIsCapturing(stream, &is_captured) || is_captured) Py_RETURN_NONE;
    } else if (have_context(&self->device) || current_stream(&self->device, &stream)) {
        return NULL;
    }
    if (!PyList_CheckExact(inputs) || PyList_GET_SIZE(inputs) < self->least) {
        if (careful) Py_RETURN_NONE;
        return PyErr_Format(PyExc_TypeError, "launch() wants a list of %zd inputs or more", self->least);
    }
    if (count > sizeof few / sizeof *few && !(base = PyMem_Malloc(count * sizeof *base))) return PyErr_NoMemory();
    if ((code = read_inputs(self, inputs, base)) > 0 && (self->numbers.results || self->numbers.inputs))
        code = program_run(&self->numbers, inputs, self->blocks.word, self->blocks.words, base + regions);
    if (code <= 0) {
        if (!code && careful)
            result = Py_NewRef(Py_None);
        else if (!code)
            PyErr_SetNone(self->misaligned);
        goto done;
    }
    if (!originals || originals == Py_None) originals = inputs;
    if (!allocate_memory(&self->layout, stream, &memory, base) && !patch_and_launch(self, stream, base, base + regions)
        && !free_scratch(&self->layout, &memory)
        && (result = make_outputs(&self->outputs, originals, memory.storages, memory.slab))
        && (counter_add(&self->counter) || PyList_SetSlice(inputs, 0, PyList_GET_SIZE(inputs), NULL)))
        Py_CLEAR(result);
done:
    if (base != few) PyMem_Free(base);
    free_memory(&self->layout, &memory);
    return result;
}

static PyObject *py_launching(PyObject *module, PyObject *unused) { return PyBool_FromLong(launching); }

static PyMethodDef methods[] = {
    {"launching", py_launching, METH_NOARGS, "launching(): is this thread in the middle of a launch?"}, {NULL}};

PART(.module = "relaunch", .methods = methods)
