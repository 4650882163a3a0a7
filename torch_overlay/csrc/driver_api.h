/* The CUDA driver's functions that this module calls, as one table. It needs no cuda.h and doesn't link against the
   driver, which is opened when the module is imported. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef uint64_t Address;
typedef void *Handle;

/* Structs as in cuda.h; their layout is the driver's ABI. */
typedef struct {
    int type, id;
} Location;

typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    unsigned char flags[8];
} BlockKind;

typedef struct {
    Location location;
    int flags;
} Access;

typedef struct {
    Handle func;
    unsigned grid[3], block[3], shared_bytes;
    void **arguments, **extra;
    Handle kern, ctx;
} KernelParams;

typedef struct {
    Address to;
    size_t pitch;
    unsigned value, element_size;
    size_t width, height;
} MemsetParams;

typedef struct {
    size_t x, y, z, level;
    int type;
    Handle host;
    Address device;
    Handle array, unused;
    size_t pitch, height;
} CopySide;

typedef struct {
    CopySide from, to;
    size_t width, height, depth;
} CopyParams;

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    Handle stream;
    const void *attributes;
    unsigned count;
} LaunchConfig;

typedef struct {
    int id, unused;
    unsigned value[16];
} LaunchAttribute;

typedef struct {
    unsigned char from_port, to_port, type, reserved[5];
} EdgeData;

_Static_assert(sizeof(BlockKind) == 32 && sizeof(Access) == 12, "cuda.h");
_Static_assert(sizeof(MemsetParams) == 40 && sizeof(CopyParams) == 200, "cuda.h");
_Static_assert(sizeof(KernelParams) == 72 && sizeof(EdgeData) == 8, "cuda.h");
_Static_assert(sizeof(LaunchConfig) == 56 && sizeof(LaunchAttribute) == 72, "cuda.h");

/* F(member of `cu`, the driver's symbol, parameters): each returns a CUresult. */
#define DRIVER_FUNCTIONS(F)                                                                                            \
    F(GetErrorString, "cuGetErrorString", (int, const char **))                                                        \
    F(DeviceGet, "cuDeviceGet", (int *, int))                                                                          \
    F(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (Handle *, int))                                             \
    F(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int))                                                  \
    F(CtxGetCurrent, "cuCtxGetCurrent", (Handle *))                                                                    \
    F(CtxSetCurrent, "cuCtxSetCurrent", (Handle))                                                                      \
    F(CtxPushCurrent, "cuCtxPushCurrent_v2", (Handle))                                                                 \
    F(CtxPopCurrent, "cuCtxPopCurrent_v2", (Handle *))                                                                 \
    F(EventCreate, "cuEventCreate", (Handle *, unsigned))                                                              \
    F(EventDestroy, "cuEventDestroy_v2", (Handle))                                                                     \
    F(EventRecord, "cuEventRecord", (Handle, Handle))                                                                  \
    F(EventSynchronize, "cuEventSynchronize", (Handle))                                                                \
    F(StreamWaitEvent, "cuStreamWaitEvent", (Handle, Handle, unsigned))                                                \
    F(StreamQuery, "cuStreamQuery", (Handle))                                                                          \
    F(StreamIsCapturing, "cuStreamIsCapturing", (Handle, int *))                                                       \
    F(StreamBeginCapture, "cuStreamBeginCapture_v2", (Handle, int))                                                    \
    F(StreamEndCapture, "cuStreamEndCapture", (Handle, Handle *))                                                      \
    F(PointerGetAttribute, "cuPointerGetAttribute", (void *, int, Address))                                            \
    F(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *))                                   \
    F(MemGetAllocationGranularity, "cuMemGetAllocationGranularity", (size_t *, const BlockKind *, int))                \
    F(MemAddressReserve, "cuMemAddressReserve", (Address *, size_t, size_t, Address, unsigned long long))              \
    F(MemAddressFree, "cuMemAddressFree", (Address, size_t))                                                           \
    F(MemCreate, "cuMemCreate", (uint64_t *, size_t, const BlockKind *, unsigned long long))                           \
    F(MemRelease, "cuMemRelease", (uint64_t))                                                                          \
    F(MemMap, "cuMemMap", (Address, size_t, size_t, uint64_t, unsigned long long))                                     \
    F(MemUnmap, "cuMemUnmap", (Address, size_t))                                                                       \
    F(MemSetAccess, "cuMemSetAccess", (Address, size_t, const Access *, size_t))                                       \
    F(GraphGetNodes, "cuGraphGetNodes", (Handle, Handle *, size_t *))                                                  \
    F(GraphGetEdges, "cuGraphGetEdges_v2", (Handle, Handle *, Handle *, EdgeData *, size_t *))                         \
    F(GraphNodeGetType, "cuGraphNodeGetType", (Handle, int *))                                                         \
    F(GraphKernelNodeGetParams, "cuGraphKernelNodeGetParams_v2", (Handle, KernelParams *))                             \
    F(GraphKernelNodeGetAttribute, "cuGraphKernelNodeGetAttribute", (Handle, int, void *))                             \
    F(GraphMemsetNodeGetParams, "cuGraphMemsetNodeGetParams", (Handle, MemsetParams *))                                \
    F(GraphMemcpyNodeGetParams, "cuGraphMemcpyNodeGetParams", (Handle, CopyParams *))                                  \
    F(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2", (Address, Address, size_t, Handle))                                     \
    F(MemsetD8Async, "cuMemsetD8Async", (Address, unsigned char, size_t, Handle))                                      \
    F(MemsetD16Async, "cuMemsetD16Async", (Address, unsigned short, size_t, Handle))                                   \
    F(MemsetD32Async, "cuMemsetD32Async", (Address, unsigned, size_t, Handle))                                         \
    F(GraphDestroy, "cuGraphDestroy", (Handle))                                                                        \
    F(GraphNodeFindInClone, "cuGraphNodeFindInClone", (Handle *, Handle, Handle))                                      \
    F(GraphDestroyNode, "cuGraphDestroyNode", (Handle))                                                                \
    F(FuncGetName, "cuFuncGetName", (const char **, Handle))                                                           \
    F(FuncGetParamInfo, "cuFuncGetParamInfo", (Handle, size_t, size_t *, size_t *))                                    \
    F(KernelGetFunction, "cuKernelGetFunction", (Handle *, Handle))                                                    \
    F(GraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams_v2", (Handle, Handle, const void *))               \
    F(GraphExecMemsetNodeSetParams, "cuGraphExecMemsetNodeSetParams", (Handle, Handle, const void *, Handle))          \
    F(GraphExecMemcpyNodeSetParams, "cuGraphExecMemcpyNodeSetParams", (Handle, Handle, const void *, Handle))          \
    F(GraphLaunch, "cuGraphLaunch", (Handle, Handle))                                                                  \
    F(LaunchKernelEx, "cuLaunchKernelEx", (const LaunchConfig *, Handle, void **, void **))

#define DECLARE(member, symbol, parameters) int(*member) parameters;

extern struct Driver {
    DRIVER_FUNCTIONS(DECLARE)
} cu;

#undef DECLARE

/* Fills the table from the library DRIVER. Returns 0, or -1 and an ImportError that names what is missing. */
int load_driver(void);
/* Returns the driver's text for a CUresult. */
const char *text_of(int code);
/* The extension module; the loader gives it the class `DriverError`. */
extern PyObject *extension;

/* Returns 0; or for a CUresult that isn't, -1 with DriverError(what, code, the driver's text, where). */
int driver_check(int code, const char *what, const char *where);
/* Raises the same error; returns NULL. */
PyObject *driver_error(int code, const char *what);

static inline size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }
