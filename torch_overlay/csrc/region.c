/* Looks up streams, and records and waits for events, at the entry and exit of generated code: `streams.runtime`. */

#include "events.h"
#include "module.h"

#define COPY_STREAMS 900000 /* from here on, indices name copy streams (streams/ids.py), not entries of the table */

typedef struct {
    int kind, event, stream;
} Operation;

enum { RECORD, RECORD_BUSY, RECORD_ENTRY, WAIT, WAIT_ENTRY, WAIT_EXIT };

enum { RAW, STREAM, EVENT, OBJECT, MULTI_STREAM };

static const char *const operation_kinds[] = {"record",    "record_busy", "record_entry", "wait", "wait_entry",
                                              "wait_exit", NULL};
static const char *const result_kinds[] = {"raw", "stream", "event", "object", "multi_stream", NULL};

typedef struct {
    PyObject_HEAD
    PyObject *device, *thread, *stream_type, *current_raw, *current, *resolve, *aliased, *frames;
    PyObject *objects_name, *handle_name;
    Py_ssize_t streams, results, entries, exits, distincts, idle_streams,
        count;           /* idle_streams: -1 if the region never runs on one stream */
    Py_ssize_t *indices; /* of streams in the running graph's table; -1: the current stream of the device */
    int *distinct, *idle_stream, unasked;
    Operation *entry, *exit;

    struct {
        int kind;
        Py_ssize_t which;
    } *result;
} Region;

typedef struct {
    PyObject_HEAD
    Region *region;   /* NULL while no call uses the frame */
    PyObject *events; /* a tuple */
    PyObject **streams;
    Handle *raw;
    Py_ssize_t count;
    int aliased, multi_stream, asked; /* asked: 0, or whether the caller's stream was BUSY or IDLE */
} Frame;

enum { BUSY = 1, IDLE };

static PyTypeObject *frame_type;

static void frame_clear(Frame *self) {
    for (Py_ssize_t i = 0; self->streams && i < self->count; i++) Py_CLEAR(self->streams[i]);
    Py_CLEAR(self->region);
}

static void frame_dealloc(Frame *self) {
    PyTypeObject *type = Py_TYPE(self);
    frame_clear(self);
    PyMem_Free(self->streams);
    PyMem_Free(self->raw);
    Py_XDECREF(self->events);
    type->tp_free(self);
    Py_DECREF(type);
}

static Frame *frame_new(Region *region) {
    Frame *self = (Frame *)frame_type->tp_alloc(frame_type, 0);
    if (!self) return NULL;
    self->count = region->streams;
    self->streams = PyMem_Calloc(region->streams + 1, sizeof *self->streams);
    self->raw = PyMem_Calloc(region->streams + 1, sizeof *self->raw);
    if (!self->streams || !self->raw) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    if (!(self->events = PyTuple_New(region->count))) {
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < region->count; i++) {
        PyObject *event = PyObject_CallOneArg((PyObject *)event_type, region->device);
        if (!event) {
            Py_DECREF(self);
            return NULL;
        }
        PyTuple_SET_ITEM(self->events, i, event);
    }
    return self;
}

static int frame_run(Frame *self, const Operation *ops, Py_ssize_t count) {
    Event *first = count ? (Event *)PyTuple_GET_ITEM(self->events, ops[0].event) : NULL;
    int pushed = 0, code = first ? enter(first->context, &pushed) : 0;
    int captured = count && is_capturing(self->raw[0]);
    Mode mode = {0, 0};
    for (Py_ssize_t i = 0; i < count && !code; i++) {
        Event *event = (Event *)PyTuple_GET_ITEM(self->events, ops[i].event);
        Handle stream = self->raw[ops[i].stream];
        switch (ops[i].kind) {
        case RECORD_BUSY:
            event->idle = self->asked ? self->asked == IDLE : holds_nothing(stream, &mode);
            if (event->idle) break;
            /* fall through */
        case RECORD:
            event->idle = 0;
            code = cu.EventRecord(event->event, stream);
            break;
        case RECORD_ENTRY:
            event->captured = is_capturing(stream);
            code = cu.EventRecord(event->event, stream);
            break;
        case WAIT:
            if (!event->idle) code = cu.StreamWaitEvent(stream, event->event, 0);
            break;
        case WAIT_ENTRY:
            if (event->captured || !captured || !is_capturing(stream))
                code = cu.StreamWaitEvent(stream, event->event, 0);
            break;
        case WAIT_EXIT:
            code = captured ? wait_exit(event, stream, self->raw[0]) : cu.StreamWaitEvent(stream, event->event, 0);
            break;
        }
    }
    restore(&mode);
    if (first) leave(pushed);
    if (code) {
        driver_error(code, "a region's events");
        return -1;
    }
    return 0;
}

/* Note [Streams can't pay on an idle device] in single_stream.py. True if the region may run on the caller's stream
   alone. A captured stream can't be queried. Querying the side streams costs more than waiting for them, so an idle
   answer holds for the next 15 calls, which wait instead. */
static int frame_may_follow(Frame *self) {
    Region *region = self->region;
    Event *event = (Event *)PyTuple_GET_ITEM(self->events, 0);
    int pushed = 0, yes, code = 0;
    Mode mode = {0, 0};
    if (self->aliased || enter(event->context, &pushed)) return 0;
    yes = holds_nothing(self->raw[0], &mode);
    self->asked = yes ? IDLE : BUSY;
    if (yes && region->unasked > 0) {
        region->unasked--;
        for (Py_ssize_t i = 0; i < region->idle_streams && yes && !code; i++) {
            Handle stream = self->raw[region->idle_stream[i]];
            if ((yes = !is_capturing(stream)) && !(code = cu.EventRecord(event->event, stream)))
                code = cu.StreamWaitEvent(self->raw[0], event->event, 0);
        }
    } else if (yes) {
        for (Py_ssize_t i = 0; i < region->idle_streams && yes; i++)
            yes = holds_nothing(self->raw[region->idle_stream[i]], &mode);
        if (yes) region->unasked = 15;
    }
    restore(&mode);
    leave(pushed);
    if (code) {
        driver_error(code, "a region's events");
        return -1;
    }
    return yes;
}

/* Orders the side streams after the work that ran on the caller's stream in their place. */
static int frame_order_after(Frame *self) {
    Region *region = self->region;
    Event *event;
    int pushed = 0, code;
    if (!region->idle_streams) return 0;
    event = (Event *)PyTuple_GET_ITEM(self->events, 0);
    if (!(code = enter(event->context, &pushed))) code = cu.EventRecord(event->event, self->raw[0]);
    for (Py_ssize_t i = 0; i < region->idle_streams && !code; i++)
        code = cu.StreamWaitEvent(self->raw[region->idle_stream[i]], event->event, 0);
    leave(pushed);
    if (code) {
        driver_error(code, "a region's events");
        return -1;
    }
    return 0;
}

static int frame_look_up(Frame *self, PyObject *table, Py_ssize_t slot) {
    Region *region = self->region;
    Py_ssize_t index = region->indices[slot];
    PyObject *raw, *item;
    if (index < 0) {
        raw = PyObject_CallOneArg(region->current_raw, region->device);
    } else if (index >= COPY_STREAMS) {
        PyObject *number = PyLong_FromSsize_t(index);
        item = number ? PyObject_CallOneArg(region->resolve, number) : NULL;
        Py_XDECREF(number);
        if (!item) return -1;
        Py_XSETREF(self->streams[slot], item);
        raw = PyObject_GetAttr(item, region->handle_name);
    } else {
        if (index >= PySequence_Fast_GET_SIZE(table)) {
            PyErr_Format(PyExc_RuntimeError, "stream object %zd isn't in the table of the running graph", index);
            return -1;
        }
        item = Py_NewRef(PySequence_Fast_GET_ITEM(table, index));
        if ((PyObject *)Py_TYPE(item) != region->stream_type)
            Py_SETREF(item, PyObject_CallOneArg(region->resolve, item));
        if (!item) return -1;
        Py_XSETREF(self->streams[slot], item);
        raw = PyObject_GetAttr(item, region->handle_name);
    }
    if (!raw) return -1;
    self->raw[slot] = PyLong_AsVoidPtr(raw);
    Py_DECREF(raw);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *frame_result(Frame *self, PyObject *table, int kind, Py_ssize_t which) {
    Region *region = self->region;
    switch (kind) {
    case RAW: return PyLong_FromVoidPtr(self->raw[self->multi_stream ? which : 0]);
    case MULTI_STREAM: return PyBool_FromLong(self->multi_stream);
    case STREAM:
        if (!self->multi_stream) Py_RETURN_NONE; /* only switches use it */
        if (!self->streams[which]) self->streams[which] = PyObject_CallOneArg(region->current, region->device);
        return Py_XNewRef(self->streams[which]);
    case EVENT: return Py_NewRef(PyTuple_GET_ITEM(self->events, which));
    }
    if (!table || which >= PySequence_Fast_GET_SIZE(table))
        return PyErr_Format(PyExc_RuntimeError, "event object %zd isn't in the table of the running graph", which);
    return PyObject_CallOneArg(region->resolve, PySequence_Fast_GET_ITEM(table, which));
}

static PyObject *region_enter(Region *self, PyObject *unused) {
    Frame *frame = NULL;
    PyObject *table = NULL, *results = NULL;
    Py_ssize_t free_frames = PyList_GET_SIZE(self->frames);
    if (free_frames) {
        frame = (Frame *)Py_NewRef(PyList_GET_ITEM(self->frames, free_frames - 1));
        if (PyList_SetSlice(self->frames, free_frames - 1, free_frames, NULL)) goto failed;
    } else if (!(frame = frame_new(self))) {
        goto failed;
    }
    frame->region = (Region *)Py_NewRef((PyObject *)self);
    PyObject *found = PyObject_GetAttr(self->thread, self->objects_name);
    if (!found) goto failed;
    if (found == Py_None)
        Py_DECREF(found);
    else {
        table = PySequence_Fast(found, "the table of stream objects is no sequence");
        Py_DECREF(found);
        if (!table) goto failed;
    }
    for (Py_ssize_t slot = 0; slot < self->streams; slot++) {
        if (!table && self->indices[slot] >= 0 && self->indices[slot] < COPY_STREAMS) {
            PyErr_SetString(PyExc_RuntimeError, "a stream was looked up outside the call of the graph it belongs to");
            goto failed;
        }
        if (frame_look_up(frame, table, slot)) goto failed;
    }
    frame->aliased = 0;
    for (Py_ssize_t i = 1; i < self->distincts; i++)
        for (Py_ssize_t j = 0; j < i; j++)
            frame->aliased |= frame->raw[self->distinct[i]] == frame->raw[self->distinct[j]];
    if (frame->aliased) {
        PyObject *done = PyObject_CallOneArg(self->aliased, Py_True);
        if (!done) goto failed;
        Py_DECREF(done);
    }
    frame->asked = 0;
    int follow = self->idle_streams < 0 ? 0 : frame_may_follow(frame);
    if (follow < 0) goto failed;
    frame->multi_stream = !follow;
    if (frame->multi_stream && frame_run(frame, self->entry, self->entries)) goto failed;
    if (!(results = PyTuple_New(self->results + 1))) goto failed;
    for (Py_ssize_t i = 0; i < self->results; i++) {
        PyObject *one = frame_result(frame, table, self->result[i].kind, self->result[i].which);
        if (!one) goto failed;
        PyTuple_SET_ITEM(results, i + 1, one);
    }
    PyTuple_SET_ITEM(results, 0, (PyObject *)frame);
    Py_XDECREF(table);
    return results;
failed:
    Py_XDECREF(results);
    Py_XDECREF(table);
    Py_XDECREF((PyObject *)frame);
    return NULL;
}

static PyObject *frame_leave(Frame *self, PyObject *unused) {
    Region *region = self->region;
    PyObject *done;
    if (!region) return PyErr_Format(PyExc_RuntimeError, "leave() of a region that was left already");
    if (self->multi_stream ? frame_run(self, region->exit, region->exits) : frame_order_after(self)) return NULL;
    Py_INCREF((PyObject *)region);
    frame_clear(self);
    done = PyList_Append(region->frames, (PyObject *)self) ? NULL
           : self->aliased                                 ? PyObject_CallOneArg(region->aliased, Py_False)
                                                           : Py_NewRef(Py_None);
    Py_DECREF((PyObject *)region);
    return done;
}

static int number_of(const char *const *names, PyObject *name) {
    for (int i = 0; names[i]; i++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, names[i])) return i;
    PyErr_Format(PyExc_ValueError, "Region: unknown kind %R", name);
    return -1;
}

static Operation *operations(PyObject *list, Py_ssize_t events, Py_ssize_t streams, Py_ssize_t *count) {
    Operation *ops;
    *count = PyTuple_GET_SIZE(list);
    if (!(ops = PyMem_Calloc(*count + 1, sizeof *ops))) return (Operation *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *kind;
        if (!is_tuple(PyTuple_GET_ITEM(list, i), "Region: operation", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(list, i), "Oii;Region: an operation is (kind, event, stream)", &kind,
                                 &ops[i].event, &ops[i].stream))
            goto failed;
        if ((ops[i].kind = number_of(operation_kinds, kind)) < 0) goto failed;
        if (ops[i].event < 0 || ops[i].event >= events || ops[i].stream < 0 || ops[i].stream >= streams) {
            PyErr_SetString(PyExc_ValueError, "Region: an operation names an event or a stream that it doesn't have");
            goto failed;
        }
    }
    return ops;
failed:
    PyMem_Free(ops);
    return NULL;
}

static void region_dealloc(Region *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->device);
    Py_XDECREF(self->thread);
    Py_XDECREF(self->stream_type);
    Py_XDECREF(self->current_raw);
    Py_XDECREF(self->current);
    Py_XDECREF(self->resolve);
    Py_XDECREF(self->aliased);
    Py_XDECREF(self->frames);
    Py_XDECREF(self->objects_name);
    Py_XDECREF(self->handle_name);
    PyMem_Free(self->indices);
    PyMem_Free(self->distinct);
    PyMem_Free(self->idle_stream);
    PyMem_Free(self->entry);
    PyMem_Free(self->exit);
    PyMem_Free(self->result);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *region_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device",  "indices",  "events",  "entry",        "exit",
                            "results", "distinct", "thread",  "stream_type",  "current_raw",
                            "current", "resolve",  "aliased", "idle_streams", NULL};
    PyObject *device, *indices, *entry, *exit_, *results, *distinct, *thread, *stream_type, *raw, *current, *resolve;
    PyObject *aliased, *idle_streams = Py_None;
    Py_ssize_t events;
    Region *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!nO!O!O!O!OOOOOO|O", names, &device, &PyTuple_Type, &indices,
                                     &events, &PyTuple_Type, &entry, &PyTuple_Type, &exit_, &PyTuple_Type, &results,
                                     &PyTuple_Type, &distinct, &thread, &stream_type, &raw, &current, &resolve,
                                     &aliased, &idle_streams))
        return NULL;
    if (events < 0) return PyErr_Format(PyExc_ValueError, "Region: a negative number of events");
    if (!(self = (Region *)type->tp_alloc(type, 0))) return NULL;
    self->device = Py_NewRef(device);
    self->thread = Py_NewRef(thread);
    self->stream_type = Py_NewRef(stream_type);
    self->current_raw = Py_NewRef(raw);
    self->current = Py_NewRef(current);
    self->resolve = Py_NewRef(resolve);
    self->aliased = Py_NewRef(aliased);
    self->count = events;
    self->streams = PyTuple_GET_SIZE(indices);
    self->results = PyTuple_GET_SIZE(results);
    self->distincts = PyTuple_GET_SIZE(distinct);
    self->indices = PyMem_Calloc(self->streams + 1, sizeof *self->indices);
    if (idle_streams != Py_None && !PyTuple_Check(idle_streams)) {
        PyErr_SetString(PyExc_TypeError, "Region: idle_streams is a tuple or None");
        goto failed;
    }
    self->idle_streams = idle_streams == Py_None ? -1 : PyTuple_GET_SIZE(idle_streams);
    self->distinct = PyMem_Calloc(self->distincts + 1, sizeof *self->distinct);
    self->idle_stream = PyMem_Calloc(self->idle_streams + 2, sizeof *self->idle_stream);
    self->result = PyMem_Calloc(self->results + 1, sizeof *self->result);
    if (!self->indices || !self->distinct || !self->idle_stream || !self->result) {
        PyErr_NoMemory();
        goto failed;
    }
    if (!(self->frames = PyList_New(0)) || !(self->objects_name = PyUnicode_InternFromString("objects"))
        || !(self->handle_name = PyUnicode_InternFromString("cuda_stream")))
        goto failed;
    for (Py_ssize_t i = 0; i < self->streams; i++) self->indices[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(indices, i));
    for (Py_ssize_t i = 0; i < self->distincts; i++) {
        self->distinct[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(distinct, i));
        if (self->distinct[i] < 0 || self->distinct[i] >= self->streams) {
            PyErr_SetString(PyExc_ValueError, "Region: distinct names a stream that the region doesn't have");
            goto failed;
        }
    }
    for (Py_ssize_t i = 0; i < self->idle_streams && !PyErr_Occurred(); i++) {
        self->idle_stream[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(idle_streams, i));
        if (self->idle_stream[i] < 0 || self->idle_stream[i] >= self->streams) {
            PyErr_SetString(PyExc_ValueError, "Region: idle_streams names a stream that the region doesn't have");
            goto failed;
        }
    }
    if (!PyErr_Occurred() && self->idle_streams >= 0 && !events)
        PyErr_SetString(PyExc_ValueError, "Region: idle streams need an event");
    if (PyErr_Occurred()) goto failed;
    if (!(self->entry = operations(entry, events, self->streams, &self->entries))) goto failed;
    if (!(self->exit = operations(exit_, events, self->streams, &self->exits))) goto failed;
    for (Py_ssize_t i = 0; i < self->results; i++) {
        PyObject *kind;
        if (!is_tuple(PyTuple_GET_ITEM(results, i), "Region: result", i)
            || !PyArg_ParseTuple(PyTuple_GET_ITEM(results, i), "On;Region: a result is (kind, number)", &kind,
                                 &self->result[i].which))
            goto failed;
        if ((self->result[i].kind = number_of(result_kinds, kind)) < 0) goto failed;
        Py_ssize_t limit = self->result[i].kind == EVENT ? events : self->streams;
        if (self->result[i].which < 0 || (self->result[i].kind != OBJECT && self->result[i].which >= limit)) {
            PyErr_SetString(PyExc_ValueError, "Region: a result names an event or a stream it doesn't have");
            goto failed;
        }
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef region_methods[] = {
    {"enter", (PyCFunction)region_enter, METH_NOARGS, "enter() -> (frame, *results)"}, {NULL}};
static PyMethodDef frame_methods[] = {
    {"leave", (PyCFunction)frame_leave, METH_NOARGS, "leave(): what the region owes to the caller's streams"}, {NULL}};
static PyType_Slot region_slots[] = {
    {Py_tp_new, region_new}, {Py_tp_dealloc, region_dealloc}, {Py_tp_methods, region_methods}, {0, NULL}};
static PyType_Slot frame_slots[] = {{Py_tp_dealloc, frame_dealloc}, {Py_tp_methods, frame_methods}, {0, NULL}};
static PyType_Spec region_spec = {"cuda_driver_c.Region", sizeof(Region), 0, Py_TPFLAGS_DEFAULT, region_slots};
static PyType_Spec frame_spec = {"cuda_driver_c.Frame", sizeof(Frame), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, frame_slots};

static int init(PyObject *module) {
    PyObject *type;
    if (!(frame_type = (PyTypeObject *)PyType_FromSpec(&frame_spec))) return -1;
    return (type = PyType_FromSpec(&region_spec)) ? PyModule_AddObject(module, "Region", type) : -1;
}

PART(.module = "events", .init = init)
