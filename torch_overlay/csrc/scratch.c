/* Scratch memory that is no tensor, and which of it stays between launches: Note [Scratch cache] in
   `launch.native_call`. The interpreter's lock guards all of it. */

#include "relaunch.h"

static Kept *kept; /* what has memory */

static int release_raw(int (*release)(Handle), PyObject *raw_delete, Handle address) {
    PyObject *number, *done;
    if (release && !release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Gives back what nobody uses, and nobody wants. An error that is set stays. */
static void settle(Kept *one) {
    if (one->users) return;
    if (one->address && (one->unwanted || !one->holders)) {
        PyObject *type, *value, *trace;
        Handle address = one->address;
        for (Kept **at = &kept; *at; at = &(*at)->next)
            if (*at == one) {
                *at = one->next;
                break;
            }
        one->address = NULL;
        PyErr_Fetch(&type, &value, &trace);
        if (release_raw(one->release, one->raw_delete, address)) PyErr_WriteUnraisable(one->raw_delete);
        PyErr_Restore(type, value, trace);
    }
    if (one->holders) return;
    Py_DECREF(one->raw_delete);
    PyMem_Free(one);
}

static void let_go(Kept **held) {
    Kept *one = *held;
    if (!one) return;
    *held = NULL;
    one->holders--;
    settle(one);
}

/* All that stays, as soon as no launch uses it. Returns the bytes that are free by now. */
size_t free_cached(void) {
    size_t bytes = 0;
    Kept *one;
    for (one = kept; one; one = one->next) one->unwanted = 1;
    do {
        for (one = kept; one && one->users; one = one->next) continue;
        if (one) {
            bytes += one->size;
            settle(one);
        }
    } while (one);
    return bytes;
}

void scratch_clear(Scratch *self) {
    for (size_t i = 0; i < STREAMS; i++) let_go(&self->kept[i]);
    Py_CLEAR(self->raw_alloc);
    Py_CLEAR(self->raw_delete);
    Py_CLEAR(self->is_ordinary);
}

/* What stays for this graph on the stream, or NULL. */
static Kept *find_kept(Scratch *self, Handle stream) {
    Kept *one, **place = NULL;
    for (size_t i = 0; i < STREAMS; i++) {
        if ((one = self->kept[i]) && one->unwanted) let_go(&self->kept[i]);
        if (!(one = self->kept[i]))
            place = &self->kept[i];
        else if (one->stream == stream)
            return one;
    }
    if (!place) return NULL;
    for (one = kept; one; one = one->next)
        if (one->device == self->device && one->stream == stream && !one->unwanted && one->size >= self->size) {
            one->holders++;
            return *place = one;
        }
    return NULL;
}

/* 0, or -1 and an error. */
int take_scratch(Scratch *self, Handle stream, Taken *taken) {
    PyObject *made;
    if (self->most && (taken->kept = find_kept(self, stream))) {
        taken->kept->users++;
        taken->address = taken->kept->address;
        return 0;
    }
    if (self->torch.alloc && !self->torch.alloc(self->size, &taken->address)) return 0;
    taken->address = NULL;
    if (!(made = PyObject_CallFunction(self->raw_alloc, "nN", (Py_ssize_t)self->size, PyLong_FromVoidPtr(stream))))
        return -1;
    taken->address = PyLong_AsVoidPtr(made);
    Py_DECREF(made);
    return PyErr_Occurred() ? -1 : 0;
}

/* Where to note memory that stays, or NULL: there is no room for it, or as much stays on the stream already. */
static Kept **room_for(Scratch *self, Handle stream) {
    Kept **place = NULL;
    size_t bytes = self->size;
    for (size_t i = 0; i < STREAMS; i++)
        if (!self->kept[i]) place = &self->kept[i];
    for (Kept *one = kept; one; one = one->next) {
        if (one->device != self->device) continue;
        if (one->unwanted || one->stream != stream)
            bytes += one->size;
        else if (one->size >= self->size)
            return NULL;
    }
    return bytes > self->most ? NULL : place;
}

/* 1: the memory stays from now on, in the place of what stayed on the stream. */
static int stays(Scratch *self, Handle stream, Handle address) {
    PyObject *number, *answer = NULL;
    Kept *one, **place;
    int may = -1;
    if (!room_for(self, stream)) return 0;
    if ((number = PyLong_FromVoidPtr(address))) answer = PyObject_CallOneArg(self->is_ordinary, number);
    Py_XDECREF(number);
    if (answer) may = PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (may < 0) PyErr_WriteUnraisable(self->is_ordinary);
    if (may <= 0) self->most = 0; /* the question takes long: it is not to be asked at each launch */
    /* Another thread may have been here. */
    if (may <= 0 || !(place = room_for(self, stream)) || !(one = PyMem_Calloc(1, sizeof *one))) return 0;
    *one = (Kept){self->device, stream, address, self->size, self->torch.release, Py_NewRef(self->raw_delete), 0, 1, 0,
                  kept};
    kept = *place = one;
    for (one = one->next; one; one = one->next)
        if (one->device == self->device && one->stream == stream && !one->unwanted) {
            one->unwanted = 1;
            settle(one);
            break;
        }
    return 1;
}

/* Behind a launch, or after it has failed. 0, or -1 and an error; one that is set is the one to tell. */
int leave_scratch(Scratch *self, Handle stream, Taken *taken, int again) {
    PyObject *type, *value, *trace;
    Taken was = *taken;
    int code = 0;
    *taken = (Taken){NULL, NULL};
    if (was.kept) {
        was.kept->users--;
        settle(was.kept);
        return 0;
    }
    if (!was.address || (again && self->most && stays(self, stream, was.address))) return 0;
    PyErr_Fetch(&type, &value, &trace);
    code = release_raw(self->torch.release, self->raw_delete, was.address);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return code;
}

static PyObject *py_free_cached(PyObject *module, PyObject *unused) { return PyLong_FromSize_t(free_cached()); }

static PyObject *py_cached(PyObject *module, PyObject *unused) {
    size_t bytes = 0;
    for (Kept *one = kept; one; one = one->next) bytes += one->size;
    return PyLong_FromSize_t(bytes);
}

PyMethodDef scratch_methods[] = {
    {"free_cached", py_free_cached, METH_NOARGS, "free_cached(): scratch memory that stays between launches; bytes"},
    {"cached", py_cached, METH_NOARGS, "cached(): bytes of such memory"},
    {NULL}};
