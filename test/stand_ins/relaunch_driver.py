"""A CUDA driver of our own for tests without a GPU, which checks and records, and the C module built over it.

The driver is a few hundred lines of C: memory as in `memory_driver`, and the patching and launching of executables.
"""

import ctypes
import functools
from typing import Any

from stand_ins import c_module, memory_driver
from stand_ins.memory_driver import Driver
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.proof.nodes import KernelNode, Template


DRIVER = (
    memory_driver.DRIVER
    + r"""
static int delivering;
static void *captured_stream, *broken_stream, *can_copy;

void stub_reset(void) {
    memory_reset();
    delivering = 0;
    captured_stream = broken_stream = can_copy = NULL;
}
int cuKernelGetFunction(void **func, void *kernel) { *func = kernel; return 0; }
void stub_deliver(void) { delivering = 1; }
void stub_streams(void *captured, void *broken) { captured_stream = captured; broken_stream = broken; }

int cuStreamIsCapturing(void *stream, int *status) {
    *status = stream == captured_stream;
    return stream == broken_stream ? 901 : 0;
}
/* While we deliver, a node is a place for its values, and an executable is a function. */
int cuGraphLaunch(void *exec, void *stream) {
    int code;
    pthread_mutex_lock(&lock);
    say("launch %#lx %#lx", (long)exec, (long)stream);
    code = fails("cuGraphLaunch");
    pthread_mutex_unlock(&lock);
    return code || !delivering ? code : ((int (*)(void))exec)();
}
static __thread void *context = (void *)0xc0ffee;
void forget_context(void) { context = NULL; }
int cuCtxGetCurrent(void **out) { *out = context; return 0; }
int cuCtxSetCurrent(void *now) { context = now; say("context %#lx", (long)now); return 0; }
/* A function is a table here: the number of its parameters, and their sizes. */
typedef struct {
    const uint64_t *func; unsigned shape[7]; void **arguments, **extra; void *kern, *ctx;
} Kernel;
static void bytes_of(char *out, const unsigned char *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) sprintf(out + 2 * i, "%02x", bytes[i]);
    if (!size) *out = 0;
}
static void values_of(char *at, const uint64_t *func, void **arguments) {
    for (uint64_t i = 0; i < func[0]; i++) {
        bytes_of(at, arguments[i], func[i + 1]);
        at += strlen(at);
        if (i + 1 < func[0]) *at++ = ',';
    }
}
int cuGraphExecKernelNodeSetParams_v2(void *exec, void *node, const Kernel *kernel) {
    char values[3000] = "-";
    int code = 0;
    if (delivering) {
        uint64_t *words = node;
        pthread_mutex_lock(&lock);
        for (int i = 0; i < 3; i++) if (!kernel->shape[i]) code = 1;
        if (!code && !(code = fails("cuGraphExecKernelNodeSetParams")))
            for (uint64_t i = 0; i < (words[0] = kernel->shape[3]); i++) memcpy(&words[i + 5], kernel->arguments[i], 8);
        if (!code) words[1] = kernel->shape[4];
        for (int i = 0; !code && i < 3; i++) words[i + 2] = kernel->shape[i];
        pthread_mutex_unlock(&lock);
        return code;
    }
    if (logging) values_of(values, kernel->func, kernel->arguments);
    pthread_mutex_lock(&lock);
    if (!(code = fails("cuGraphExecKernelNodeSetParams")))
        say("kernel %#lx %#lx %u,%u,%u %u,%u,%u %u %#lx %#lx %s %#lx %#lx", (long)exec, (long)node, kernel->shape[0],
            kernel->shape[1], kernel->shape[2], kernel->shape[3], kernel->shape[4], kernel->shape[5], kernel->shape[6],
            (long)kernel->kern, (long)kernel->ctx, values, (long)kernel, (long)kernel->arguments);
    if (kernel->extra) code = 1;
    DONE
}
typedef struct { unsigned shape[7]; void *stream; const void *attributes; unsigned count; } Config;
int cuLaunchKernelEx(const Config *config, const uint64_t *func, void **arguments, void **extra) {
    char values[3000] = "-";
    int code;
    pthread_mutex_lock(&lock);
    code = fails("cuLaunchKernelEx");
    if (logging) values_of(values, func, arguments);
    if (!code) say("run %#lx %u,%u,%u %u,%u,%u %u %#lx %s %u", (long)func, config->shape[0], config->shape[1],
                   config->shape[2], config->shape[3], config->shape[4], config->shape[5], config->shape[6],
                   (long)config->stream, values, config->count);
    if (extra) code = 1;
    DONE
}
int cuGraphExecMemsetNodeSetParams(void *exec, void *node, const unsigned char *params, void *context) {
    char hex[200];
    int code;
    bytes_of(hex, params, 40);
    pthread_mutex_lock(&lock);
    if (!(code = fails("cuGraphExecMemsetNodeSetParams")))
        say("fill %#lx %#lx %s %#lx", (long)exec, (long)node, hex, (long)context);
    DONE
}
/* The copies of executables below this one can't be set. */
void stub_refuse(void *exec) { can_copy = exec; }
int cuGraphExecMemcpyNodeSetParams(void *exec, void *node, const unsigned char *params, void *context) {
    char hex[500];
    int code;
    bytes_of(hex, params, 200);
    pthread_mutex_lock(&lock);
    code = fails("cuGraphExecMemcpyNodeSetParams");
    if (exec < can_copy) code = 1;
    if (!code) say("copy %#lx %#lx %s %#lx", (long)exec, (long)node, hex, (long)context);
    DONE
}
"""
)


@functools.cache
def _built() -> tuple[Any, ctypes.CDLL]:
    return c_module.build_module(DRIVER)


@functools.cache
def driver() -> Driver:
    return Driver(_built()[1])


@functools.cache
def module() -> Any:
    """The C module, over this driver."""
    executable.teach(_built()[0].relaunch)
    return _built()[0].relaunch


EXECUTABLE = 0xE0
FUNCTIONS: dict[tuple[int, ...], ctypes.Array] = {}


def function(*sizes: int) -> int:
    """A CUfunction, as the recording driver has them."""
    table = FUNCTIONS.setdefault(sizes, (ctypes.c_uint64 * (1 + len(sizes)))(len(sizes), *sizes))
    return ctypes.addressof(table)


def kernel(index: int, *values: bytes, **changes: object) -> KernelNode:
    """A node whose parameters lie one after the other, each aligned to 8 bytes."""
    parameters, offset = [], 0
    for value in values:
        parameters.append((offset, value))
        offset += (len(value) + 7) // 8 * 8
    fields = dict(
        index=index,
        handle=0x1000 + index,
        name=f"kernel_{index}",
        func=function(*map(len, values)),
        kern=0x77,
        ctx=0x88,
        grid=(1, 2, 3),
        block=(4, 5, 6),
        shared_bytes=7,
        parameters=tuple(parameters),
    )
    return KernelNode(**{**fields, **changes})  # type: ignore[arg-type]


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def call_arguments(**arguments: Any) -> dict[str, Any]:
    """Arguments of a call, with nothing where these say nothing. The executable is not launched."""
    given: dict[str, Any] = dict.fromkeys(("empty", "reinterpret", "misaligned"))
    given |= dict.fromkeys(("inputs", "allocations", "typed", "order", "recipes"), ())
    given |= {"scratch": 0, "numbers": ((),) * 4, "raw": (None, None, 0, 0), "device": (0, int, lambda index: 0, 0)}
    given |= {"counters": {"x": {"y": 0}}, "group": "x", "counter": "y"}
    return given | {"replay": lambda: None, "direct": False} | arguments


def call_of(make_call: Any, **arguments: Any) -> Any:
    return make_call(**call_arguments(**arguments))


class At:
    """An input at this address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Patched:
    """An executable whose regions are the inputs of a call. `patch` launches it at other addresses, and returns how
    many nodes were set."""

    def __init__(self, nodes: Any, slots: Any, regions: int) -> None:
        template = Template(regions, tuple(nodes), tuple(slots))
        make_call = executable.call_maker(module(), EXECUTABLE, template)
        self.call = call_of(make_call, inputs=tuple((k, 0) for k in range(regions)))

    def patch(self, inputs: Any) -> int:
        before = self.call.patched
        self.call.launch([At(each) if isinstance(each, int) else each for each in inputs])
        return self.call.patched - before
