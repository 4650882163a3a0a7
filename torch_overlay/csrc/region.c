/* Looks up streams, and records and waits for events, at the entry and exit of generated code: `streams.runtime`. */

#include "events.h"
#include "module.h"
#include <limits.h>

#define COPY_STREAMS 900000 /* from here on, indices name copy streams (streams/ids.py), not entries of the table */

/* OperationKind and ResultKind of streams/region_spec.py. */
enum { RECORD, RECORD_BUSY, RECORD_ENTRY, WAIT, WAIT_ENTRY, WAIT_EXIT, OPERATION_KINDS };

enum { RAW, STREAM, EVENT, OBJECT, MULTI_STREAM, RESULT_KINDS };

/* One field of a RegionSpec: each row has the ints of one item, and zeros. */
typedef struct {
    Py_ssize_t count;
    int (*row)[3], largest; /* largest: in the first column */
} Rows;

typedef struct {
    PyObject_HEAD
    Pool pool;
    PyObject *given, *device, *frames;
    PyObject *thread, *stream_type, *current_raw, *current, *resolve, *aliased; /* which `given` keeps alive */
    Py_ssize_t events;
    Rows streams, entry, exit, exit_alone, results, distinct,
        idle_streams; /* -1 idle streams: it never runs on one stream */
    int unasked;
} Region;

typedef struct {
    PyObject_HEAD
    Pool pool;
    Region *region;   /* NULL while no call uses the frame */
    PyObject *events; /* a tuple */
    PyObject **streams;
    Handle *raw;
    Py_ssize_t count;
    int aliased, multi_stream, asked; /* asked: 0, or whether the caller's stream was BUSY or IDLE */
} Frame;

enum { BUSY = 1, IDLE };

static PyObject *objects_name, *handle_name; /* of attributes */
static PyTypeObject *frame_type;

static void frame_clear(Frame *self) {
    for (Py_ssize_t i = 0; self->streams && i < self->count; i++) Py_CLEAR(self->streams[i]);
    Py_CLEAR(self->region);
}

static void frame_dealloc(Frame *self) {
    PyTypeObject *type = Py_TYPE(self);
    frame_clear(self);
    pool_free(&self->pool);
    Py_XDECREF(self->events);
    type->tp_free(self);
    Py_DECREF(type);
}

static Frame *frame_new(Region *region) {
    Frame *self = (Frame *)frame_type->tp_alloc(frame_type, 0);
    if (!self) return NULL;
    self->count = region->streams.count;
    if ((self->streams = pool_zeros(&self->pool, self->count, sizeof *self->streams))
        && (self->raw = pool_zeros(&self->pool, self->count, sizeof *self->raw)))
        self->events = PyTuple_New(region->events);
    for (Py_ssize_t i = 0; self->events && i < region->events; i++)
        set_item(&self->events, i, PyObject_CallOneArg((PyObject *)event_type, region->device));
    if (!self->events) Py_CLEAR(self);
    return self;
}

static int reported(int code) { return driver_check(code, "a region's events", ""); }

static Event *frame_event(Frame *self, int number) { return (Event *)PyTuple_GET_ITEM(self->events, number); }

static int frame_run(Frame *self, const Rows *operations) {
    if (!operations->count) return 0;
    int pushed = 0, code = enter(frame_event(self, 0)->context, &pushed);
    int captured = operations->largest > WAIT && is_capturing(self->raw[0]);
    Mode mode = {0, 0};
    for (Py_ssize_t i = 0; i < operations->count && !code; i++) {
        const int *row = operations->row[i];
        Event *event = frame_event(self, row[1]);
        Handle stream = self->raw[row[2]];
        switch (row[0]) {
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
    leave(pushed);
    return reported(code);
}

/* Note [Streams can't pay on an idle device] in single_stream.py. True if the region may run on the caller's stream
   alone. A captured stream can't be queried. Querying the side streams costs more than waiting for them, so an idle
   answer holds for the next 15 calls, which wait instead. */
static int frame_may_follow(Frame *self) {
    Region *region = self->region;
    Event *event = frame_event(self, 0);
    int pushed = 0, yes, code = 0;
    Mode mode = {0, 0};
    if (self->aliased || enter(event->context, &pushed)) return 0;
    yes = holds_nothing(self->raw[0], &mode);
    self->asked = yes ? IDLE : BUSY;
    int waits = yes && region->unasked > 0;
    for (Py_ssize_t i = 0; i < region->idle_streams.count && yes && !code; i++) {
        Handle stream = self->raw[*region->idle_streams.row[i]];
        if (!waits)
            yes = holds_nothing(stream, &mode);
        else if ((yes = !is_capturing(stream)) && !(code = cu.EventRecord(event->event, stream)))
            code = cu.StreamWaitEvent(self->raw[0], event->event, 0);
    }
    if (waits)
        region->unasked--;
    else if (yes)
        region->unasked = 15;
    restore(&mode);
    leave(pushed);
    return reported(code) ? -1 : yes;
}

/* Returns a borrowed item of the table of the running graph. */
static PyObject *in_table(PyObject *table, int index, const char *what) {
    if (table && index < PySequence_Fast_GET_SIZE(table)) return PySequence_Fast_GET_ITEM(table, index);
    const char *text = table ? "%s object %d isn't in the table of the running graph"
                             : "%s object %d was looked up outside the call of the graph that it belongs to";
    return PyErr_Format(PyExc_RuntimeError, text, what, index);
}

static int frame_look_up(Frame *self, PyObject *table, Py_ssize_t slot) {
    Region *region = self->region;
    int index = *region->streams.row[slot];
    PyObject *raw, *item;
    if (index < 0) {
        raw = PyObject_CallOneArg(region->current_raw, region->device);
    } else {
        item = index < COPY_STREAMS ? Py_XNewRef(in_table(table, index, "stream")) : PyLong_FromLong(index);
        if (item && (PyObject *)Py_TYPE(item) != region->stream_type)
            Py_SETREF(item, PyObject_CallOneArg(region->resolve, item));
        if (!item) return -1;
        Py_XSETREF(self->streams[slot], item);
        raw = PyObject_GetAttr(item, handle_name);
    }
    if (!raw) return -1;
    self->raw[slot] = PyLong_AsVoidPtr(raw);
    Py_DECREF(raw);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *frame_result(Frame *self, PyObject *table, int kind, int which) {
    Region *region = self->region;
    PyObject *found;
    switch (kind) {
    case RAW: return PyLong_FromVoidPtr(self->raw[self->multi_stream ? which : 0]);
    case MULTI_STREAM: return PyBool_FromLong(self->multi_stream);
    case STREAM:
        if (!(found = self->streams[which]))
            found = self->streams[which] = PyObject_CallOneArg(region->current, region->device);
        return Py_XNewRef(found);
    case EVENT: return Py_NewRef(PyTuple_GET_ITEM(self->events, which));
    }
    return (found = in_table(table, which, "event")) ? PyObject_CallOneArg(region->resolve, found) : NULL;
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
    PyObject *found = PyObject_GetAttr(self->thread, objects_name);
    if (!found) goto failed;
    if (found == Py_None)
        Py_DECREF(found);
    else {
        table = PySequence_Fast(found, "the table of stream objects is no sequence");
        Py_DECREF(found);
        if (!table) goto failed;
    }
    for (Py_ssize_t slot = 0; slot < self->streams.count; slot++)
        if (frame_look_up(frame, table, slot)) goto failed;
    frame->aliased = 0;
    for (Py_ssize_t i = 1; i < self->distinct.count; i++)
        for (Py_ssize_t j = 0; j < i; j++)
            frame->aliased |= frame->raw[*self->distinct.row[i]] == frame->raw[*self->distinct.row[j]];
    if (frame->aliased) {
        PyObject *done = PyObject_CallOneArg(self->aliased, Py_True);
        if (!done) goto failed;
        Py_DECREF(done);
    }
    frame->asked = 0;
    int follow = self->idle_streams.count < 0 ? 0 : frame_may_follow(frame);
    if (follow < 0) goto failed;
    frame->multi_stream = !follow;
    if (frame->multi_stream && frame_run(frame, &self->entry)) goto failed;
    if (!(results = PyTuple_New(self->results.count + 1))) goto failed;
    for (Py_ssize_t i = 0; i < self->results.count; i++) {
        PyObject *one = frame_result(frame, table, self->results.row[i][0], self->results.row[i][1]);
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
    if (frame_run(self, self->multi_stream ? &region->exit : &region->exit_alone)) return NULL;
    Py_INCREF((PyObject *)region);
    frame_clear(self);
    done = PyList_Append(region->frames, (PyObject *)self) ? NULL
           : self->aliased                                 ? PyObject_CallOneArg(region->aliased, Py_False)
                                                           : Py_NewRef(Py_None);
    Py_DECREF((PyObject *)region);
    return done;
}

/* Reads a field of a RegionSpec: a tuple whose items PyArg_Parse takes by `format`. `limits`: of each number, or NULL.
   Where `rows` has -1 rows, the field may be None. */
static int read_rows(Pool *pool, Rows *rows, PyObject *spec, const char *name, const char *format,
                     const Py_ssize_t *limits) {
    PyObject *field = PyObject_GetAttrString(spec, name);
    int failed = !field;
    if (failed || (field == Py_None && rows->count < 0)) goto done;
    if ((failed = !is_tuple(field, name, -1))) goto done;
    rows->count = PyTuple_GET_SIZE(field);
    failed = !(rows->row = pool_zeros(pool, rows->count, sizeof *rows->row));
    for (Py_ssize_t i = 0; !failed && i < rows->count; i++) {
        int *row = rows->row[i];
        failed = !PyArg_Parse(PyTuple_GET_ITEM(field, i), format, row, row + 1, row + 2);
        if (row[0] > rows->largest) rows->largest = row[0];
        for (int k = 0; !failed && limits && k < 3; k++)
            if ((failed = row[k] < 0 || row[k] >= limits[k]))
                PyErr_Format(PyExc_ValueError, "Region: %s has %d in item %zd, which must be less than %zd", name,
                             row[k], i, limits[k]);
    }
done:
    Py_XDECREF(field);
    return failed;
}

static void region_dealloc(Region *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->given);
    Py_XDECREF(self->device);
    Py_XDECREF(self->frames);
    pool_free(&self->pool);
    type->tp_free(self);
    Py_DECREF(type);
}

static int read_spec(Region *self, PyObject *spec) {
    PyObject *events = PyObject_GetAttrString(spec, "events");
    Pool *pool = &self->pool;
    self->events = events ? PyLong_AsSsize_t(events) : 0;
    Py_XDECREF(events);
    if (PyErr_Occurred() || read_rows(pool, &self->streams, spec, "streams", "i", NULL)) return -1;
    Py_ssize_t streams[] = {self->streams.count, 1, 1};
    Py_ssize_t operations[] = {OPERATION_KINDS, self->events, self->streams.count},
               results[] = {RESULT_KINDS, INT_MAX, 1};
    Py_ssize_t of_kind[] = {self->streams.count, self->streams.count, self->events, INT_MAX, INT_MAX};
    self->idle_streams.count = -1;
    const char *format = "(iii);Region: an operation is (kind, event, stream)";
    if (read_rows(pool, &self->idle_streams, spec, "idle_streams", "i", streams)
        || read_rows(pool, &self->entry, spec, "entry", format, operations)
        || read_rows(pool, &self->exit, spec, "exit", format, operations)
        || read_rows(pool, &self->exit_alone, spec, "exit_alone", format, operations)
        || read_rows(pool, &self->results, spec, "results", "(ii);Region: a result is (kind, number)", results)
        || read_rows(pool, &self->distinct, spec, "distinct", "i", streams))
        return -1;
    for (Py_ssize_t i = 0; i < self->results.count; i++)
        if (self->results.row[i][1] >= of_kind[self->results.row[i][0]])
            PyErr_SetString(PyExc_ValueError, "Region: results has an event or a stream that the region doesn't have");
    if (self->events < 0 || (self->idle_streams.count >= 0 && !self->events))
        PyErr_SetString(PyExc_ValueError, "Region: events is negative, or 0 although idle streams need one");
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *region_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *spec;
    Region *self = (Region *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->given = Py_NewRef(args);
    if (!PyArg_ParseTuple(args, "OOOOOOO:Region", &spec, &self->thread, &self->stream_type, &self->current_raw,
                          &self->current, &self->resolve, &self->aliased)
        || read_spec(self, spec) || !(self->device = PyObject_GetAttrString(spec, "device"))
        || !(self->frames = PyList_New(0)))
        Py_CLEAR(self);
    return (PyObject *)self;
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
    if (!(frame_type = (PyTypeObject *)PyType_FromSpec(&frame_spec))
        || !(objects_name = PyUnicode_InternFromString("objects"))
        || !(handle_name = PyUnicode_InternFromString("cuda_stream")))
        return -1;
    return (type = PyType_FromSpec(&region_spec)) ? PyModule_AddObject(module, "Region", type) : -1;
}

PART(.module = "events", .init = init)
