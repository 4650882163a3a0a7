/* What regions know of events. */

#pragma once

#include "driver_api.h"

typedef struct {
    PyObject_HEAD
    Handle event, context;
    int device, captured, idle;
} Event;

extern PyTypeObject *event_type;

/* Makes the context current, for the null stream and the creation of events depend on it; a CUresult. */
int enter(Handle context, int *pushed);
void leave(int pushed);
int is_capturing(Handle stream);

/* A capture that is under way, of any stream and in any thread, forbids the question unless the mode is relaxed. */
typedef struct {
    int relaxed, before;
} Mode;

int holds_nothing(Handle stream, Mode *mode);
void restore(Mode *mode);
/* Makes a stream wait for the event, and joins it where only that wait made it part of a capture; a CUresult. */
int wait_exit(Event *self, Handle stream, Handle caller);

int events_init(PyObject *module);
int region_init(PyObject *module);
