/* Scratch memory that is no tensor, and the scratch cache: Note [Scratch cache] in `launch.native_call`. The GIL guards
   all of it. */

#include "relaunch.h"

static Kept *kept; /* all blocks of the cache */

static int release_raw(int (*release)(Handle), PyObject *raw_delete, Handle address) {
    PyObject *number, *done;
    if (release && !release(address)) return 0;
    if (!(number = PyLong_FromVoidPtr(address))) return -1;
    done = PyObject_CallOneArg(raw_delete, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Frees the block if no launch uses it and no graph may use it again. Keeps an error that is set. */
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

/* Frees the cache: blocks in use as soon as no launch uses them. Returns the bytes that are freed by now. */
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

/* Returns the cached block for this graph on the stream, or NULL. */
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

/* Takes the cached block, or allocates. Returns 0, or -1 and an error. */
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

/* Returns the place for a new block, or NULL: there is no room, or the stream has a block as large already. */
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

/* Caches the memory, in place of the stream's block. Returns 1 if it is cached. */
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
    if (may <= 0) self->most = 0; /* the call takes long: don't make it at each launch */
    /* Another thread may have run in the meantime. */
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

/* Caches or frees the scratch after a launch, or after its failure. Returns 0, or -1 and an error; an error that is set
   already is kept. */
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
