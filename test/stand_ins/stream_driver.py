"""A driver in C that notes its calls on events and streams.

    module, library = c_module.build_module(DRIVER)

The tests of events and of regions share it.
"""

DRIVER = r"""
#include <stdio.h>
#include <string.h>
typedef void *Handle;
static char noted[65536];
/* Events have the numbers in which they are made, streams those of their handles. */
static int events, context, retained, capturing[64], failing, failing_creation, idle, elsewhere, mode;
#define NOTE(...) snprintf(noted + strlen(noted), sizeof noted - strlen(noted), __VA_ARGS__)
const char *noted_calls(void) { static char copy[65536]; strcpy(copy, noted); noted[0] = 0; return copy; }
void reset(void) { memset(capturing, events = failing = failing_creation = idle = noted[0] = 0, sizeof capturing); }
void set_capturing(int stream, int yes) { capturing[stream] = yes; }
void set_failing(int code) { failing = code; }
void set_elsewhere(int yes) { elsewhere = yes; }
int cuCtxGetCurrent(Handle *out) { *out = elsewhere ? NULL : &context; return 0; }
int cuCtxPushCurrent_v2(Handle c) { NOTE("push "); return 0; }
int cuCtxPopCurrent_v2(Handle *c) { NOTE("pop "); return 0; }
int cuDeviceGet(int *out, int index) { *out = index; return 0; }
int cuDevicePrimaryCtxRetain(Handle *out, int device) {
    if (device > 1) return 101;
    *out = &context;
    retained++;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { if (device == 1) retained--; return 0; }
int retains(void) { return retained; }
void set_failing_creation(int code) { failing_creation = code; }
int cuEventCreate(Handle *out, unsigned flags) {
    *out = (Handle)(long)(++events);
    NOTE("create%d ", events);
    return failing_creation;
}
int cuEventDestroy_v2(Handle e) { NOTE("destroy%ld ", (long)e); return 0; }
int cuEventRecord(Handle e, Handle s) { NOTE("record%ld@%ld ", (long)e, (long)s); return failing; }
int cuStreamWaitEvent(Handle s, Handle e, unsigned f) { NOTE("wait%ld@%ld ", (long)e, (long)s); return failing; }
int cuEventSynchronize(Handle e) { NOTE("synchronize%ld ", (long)e); return failing; }
int cuGetErrorString(int code, const char **text) { *text = "stand-in"; return 0; }
void set_idle(int yes) { idle = yes; }
/* A capture may be under way anywhere: unless the mode is relaxed, a query is an error. */
int cuStreamQuery(Handle s) { NOTE("query@%ld ", (long)s); return mode != 2 ? 900 : idle ? 0 : 600; }
int cuThreadExchangeStreamCaptureMode(int *other) { int old = mode; mode = *other; *other = old; return 0; }
int cuStreamIsCapturing(Handle s, int *out) { *out = capturing[(long)s]; return 0; }
"""
