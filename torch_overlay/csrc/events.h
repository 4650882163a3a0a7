/* Events, as region.c uses them. */

#pragma once

#include "driver_api.h"

typedef struct {
    PyObject_HEAD
    Handle event, context;
    int device, captured, idle;
} Event;

extern PyTypeObject *event_type;

/* Makes the context current, for the null stream and the creation of events depend on it. Returns a CUresult. */
int enter(Handle context, int *pushed);
void leave(int pushed);
int is_capturing(Handle stream);

/* Any capture under way, of any stream and in any thread, forbids querying a stream unless the mode is relaxed. */
typedef struct {
    int relaxed, before;
} Mode;

int holds_nothing(Handle stream, Mode *mode);
void restore(Mode *mode);
/* Makes the stream wait for the event. If only that wait makes the stream part of a capture, joins it to the caller's
   stream. Returns a CUresult. */
int wait_exit(Event *self, Handle stream, Handle caller);
