"""The C source of `native`, of five parts: the aliased allocator, addresses of tensors, the patching of executables,
scratch memory, and whole calls. `native` tells their story.

cuda.h is not needed, and nothing links against the driver: it is opened when the module is imported. `@driver@` stands
for its name.
"""

from torch_overlay._inductor.relaunch.launch import (
    data_ptrs,
    native_call_source,
    native_memory_source,
    native_patch_source,
    native_scratch_source,
)


HEAD = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define ARENA ((size_t)4 << 40)
#define LOWEST ((Address)1 << 32)     /* Note [Addresses of captures], 5 and 6 */
#define WISH ((Address)0x2c15a600000)
#define BLOCK ((size_t)12 << 20)
#define AHEAD 4
#define GAP ((size_t)64 << 10)
#define ALIGNMENT 512
#define DEEP ((size_t)256 << 10)
#define SHALLOW ((size_t)64 << 10)
typedef uint64_t Address;
typedef void *Handle;

/* As cuda.h declares them; the layout is the driver's ABI. */
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *win32; unsigned char flags[8]; } BlockKind;
typedef struct { Location location; int flags; } Access;
typedef struct {
    Handle func; unsigned grid[3], block[3], shared_bytes; void **arguments, **extra; Handle kern, ctx;
} KernelParams;
_Static_assert(sizeof(BlockKind) == 32 && sizeof(Access) == 12 && sizeof(KernelParams) == 72, "cuda.h");

static struct {
    int (*granularity)(size_t *, const BlockKind *, int);
    int (*reserve)(Address *, size_t, size_t, Address, unsigned long long), (*unreserve)(Address, size_t);
    int (*create)(uint64_t *, size_t, const BlockKind *, unsigned long long), (*destroy)(uint64_t);
    int (*map)(Address, size_t, size_t, uint64_t, unsigned long long), (*unmap)(Address, size_t);
    int (*access)(Address, size_t, const Access *, size_t), (*mode)(int *), (*text)(int, const char **);
    int (*context)(Handle *), (*set_context)(Handle), (*set_kernel)(Handle, Handle, const void *);
    int (*set_fill)(Handle, Handle, const void *, Handle), (*set_copy)(Handle, Handle, const void *, Handle);
    int (*launch)(Handle, Handle), (*is_capturing)(Handle, int *);
} cu;

static const char *text_of(int code) {
    const char *text = NULL;
    cu.text(code, &text);
    return text ? text : "unknown error";
}

/* PyArg_ParseTuple takes it for granted, and PyObject_Call. */
static int is_tuple(PyObject *item, const char *what, Py_ssize_t i) {
    const char *type = Py_TYPE(item)->tp_name;
    if (PyTuple_Check(item)) return 1;
    if (i < 0) PyErr_Format(PyExc_TypeError, "%s must be a tuple, not %.100s", what, type);
    else PyErr_Format(PyExc_TypeError, "%s %zd must be a tuple, not %.100s", what, i, type);
    return 0;
}

/* Zeros where what this thread calls next has its stack: Note [Remains on the stack]. */
static void clear_stack(size_t most) {
    static __thread uintptr_t end;
    size_t room;
    void *cleared;
    if (!end) {
        pthread_attr_t attributes;
        size_t size;
        end = UINTPTR_MAX;  /* not known */
        if (!pthread_getattr_np(pthread_self(), &attributes)) {
            if (!pthread_attr_getstack(&attributes, &cleared, &size)) end = (uintptr_t)cleared;
            pthread_attr_destroy(&attributes);
        }
    }
    room = (uintptr_t)&room > end ? ((uintptr_t)&room - end) / 2 : 0;  /* a thread may have been given little */
    if (room > most) room = most;
    cleared = memset(__builtin_alloca(room + 1), 0, room);
    __asm__ volatile("" : : "r"(cleared) : "memory");  /* nobody reads it, and yet it has to be done */
}
"""

MODULE = r"""
static PyObject *py_clear_stack(PyObject *module, PyObject *unused) {
    clear_stack(DEEP);
    Py_RETURN_NONE;
}
static PyObject *py_context(PyObject *module, PyObject *unused) {
    Handle context;
    return get_context(&context) ? NULL : PyLong_FromVoidPtr(context);
}

static PyMethodDef blocks_methods[] = {
    {"patch", (PyCFunction)(void (*)(void))blocks_patch, METH_FASTCALL,
     "patch(bases, regions=None): write what moved, and return the number of nodes set"},
    {"call", (PyCFunction)(void (*)(void))blocks_call, METH_VARARGS | METH_KEYWORDS, "call(...): a Call of them"},
    {NULL}};
static PyGetSetDef blocks_getset[] = {
    {"stale", (getter)blocks_stale, NULL, "the next patch() sets every node", NULL},
    {"nodes", (getter)blocks_nodes, NULL, "how many nodes can be patched", NULL},
    {NULL}};
static PyType_Slot blocks_slots[] = {
    {Py_tp_new, blocks_new}, {Py_tp_dealloc, blocks_dealloc}, {Py_tp_methods, blocks_methods},
    {Py_tp_getset, blocks_getset}, {0, NULL}};
static PyType_Spec blocks_spec = {"torch_overlay_relaunch.Blocks", sizeof(Blocks), 0, Py_TPFLAGS_DEFAULT, blocks_slots};
static PyMethodDef call_methods[] = {
    {"attempt", (PyCFunction)call_attempt, METH_O, "attempt(inputs): the outputs, or None if it is not the time"},
    {"launch", (PyCFunction)(void (*)(void))call_launch, METH_FASTCALL, "launch(inputs, originals=None): the outputs"},
    {"aligned", (PyCFunction)(void (*)(void))call_aligned, METH_FASTCALL,
     "aligned(inputs, positions, masks): has no address a bit of its mask?"},
    {NULL}};
static PyMemberDef call_members[] = {
    {"launches", T_ULONGLONG, offsetof(Call, launches), READONLY, NULL},
    {"patched", T_ULONGLONG, offsetof(Call, patched), READONLY, "nodes set in all launches"}, {NULL}};
static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, call_dealloc}, {Py_tp_methods, call_methods}, {Py_tp_members, call_members}, {0, NULL}};
static PyType_Spec call_spec = {"torch_overlay_relaunch.Call", sizeof(Call), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

static PyMethodDef methods[] = {
    {"reserve", py_reserve, METH_VARARGS, "reserve(device, bytes, gap=1): a new range"},
    {"use", py_use, METH_O, "use(range or None): where this thread allocates; returns what it was"},
    {"take", py_take, METH_VARARGS, "take(range, bytes): an address that no allocator knows of"},
    {"seal", py_seal, METH_O, "seal(range): no allocation any more"},
    {"release", py_release, METH_O, "release(range): unmap it"},
    {"allocations", py_allocations, METH_VARARGS,
     "allocations(range, first=0): [(address, requested size)] in order, from that one on"},
    {"count", py_count, METH_O, "count(range): how many allocations there are"},
    {"bounds", py_bounds, METH_O, "bounds(range): (low, high)"},
    {"error", py_error, METH_O, "error(range): why the last allocation failed, or None"},
    {"clear_stack", py_clear_stack, METH_NOARGS, "clear_stack(): zeros where what is called next has its stack"},
    {"context", py_context, METH_NOARGS, "context(): the current context"},
    {"addresses", py_addresses, METH_O, "addresses(tensors): (data_ptr, ...)"},
    {"learn", py_learn, METH_VARARGS, "learn(type, tensor, item_size): a dtype, by one of its tensors"},
    {"give_back", py_give_back, METH_NOARGS, "give_back(): scratch memory that stays between launches; bytes"},
    {"kept", py_kept, METH_NOARGS, "kept(): bytes of such memory"},
    {"launching", py_launching, METH_NOARGS, "launching(): is this thread in the middle of a launch?"},
    {"counts", py_counts, METH_NOARGS, "counts(): what is held, by kind"},
    {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "torch_overlay_relaunch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_torch_overlay_relaunch(void) {
    void *driver = dlopen("@driver@", RTLD_NOW | RTLD_LOCAL);
    PyObject *self, *type;
    struct { void **slot; const char *name; } want[] = {
        {(void **)&cu.granularity, "cuMemGetAllocationGranularity"}, {(void **)&cu.reserve, "cuMemAddressReserve"},
        {(void **)&cu.unreserve, "cuMemAddressFree"}, {(void **)&cu.create, "cuMemCreate"},
        {(void **)&cu.destroy, "cuMemRelease"}, {(void **)&cu.map, "cuMemMap"}, {(void **)&cu.unmap, "cuMemUnmap"},
        {(void **)&cu.access, "cuMemSetAccess"}, {(void **)&cu.mode, "cuThreadExchangeStreamCaptureMode"},
        {(void **)&cu.text, "cuGetErrorString"}, {(void **)&cu.context, "cuCtxGetCurrent"},
        {(void **)&cu.set_context, "cuCtxSetCurrent"},
        {(void **)&cu.set_kernel, "cuGraphExecKernelNodeSetParams_v2"},
        {(void **)&cu.set_fill, "cuGraphExecMemsetNodeSetParams"},
        {(void **)&cu.set_copy, "cuGraphExecMemcpyNodeSetParams"}, {(void **)&cu.launch, "cuGraphLaunch"},
        {(void **)&cu.is_capturing, "cuStreamIsCapturing"}};
    if (!driver) { PyErr_SetString(PyExc_ImportError, "@driver@ can't be loaded"); return NULL; }
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        if (!(*want[i].slot = dlsym(driver, want[i].name)))
            return PyErr_Format(PyExc_ImportError, "@driver@ has no %s", want[i].name);
    if (!(name_data_ptr = PyUnicode_InternFromString("data_ptr"))
        || !(name_view = PyUnicode_InternFromString("view"))) return NULL;
    if (!call_type && !(call_type = (PyTypeObject *)PyType_FromSpec(&call_spec))) return NULL;
    if (!(self = PyModule_Create(&module)) || !(type = PyType_FromSpec(&blocks_spec))) return NULL;
    if (PyModule_AddObject(self, "Blocks", type) < 0
        || PyModule_AddObject(self, "alloc_address", PyLong_FromVoidPtr((void *)overlay_alloc)) < 0
        || PyModule_AddObject(self, "free_address", PyLong_FromVoidPtr((void *)overlay_free)) < 0) return NULL;
    return self;
}
"""

SOURCE = "\n".join(
    (
        HEAD,
        native_memory_source.SOURCE,
        data_ptrs.SOURCE,
        native_patch_source.SOURCE,
        native_scratch_source.SOURCE,
        native_call_source.SOURCE,
        MODULE,
    )
)
