"""Calls of a library as entries: `capture.calls`, `csrc/calls.c`. The library launches on a driver of our own, whose
captures hold what it launches, and whose launches are recorded."""

import _thread
import contextlib
import ctypes
import functools
import gc
import logging
import threading
import types
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from stand_ins import c_module
from stand_ins.relaunch_case import run_in_threads
from torch_overlay._inductor.relaunch import steps
from torch_overlay._inductor.relaunch.capture import calls
from torch_overlay._inductor.relaunch.launch import executable


STREAM, CAPTURES, CPU = 0x55, 0x66, 0
KERNEL, MEMCPY, MEMSET, HOST, EMPTY = 0, 1, 2, 3, 5
FOREIGN = 0x7E1234567000  # memory that no operand and no temporary has
SPACE = 0x100200000000

DRIVER = r"""
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { NODES = 16, WORDS = 16 };
typedef struct { int kind; uint64_t func, grid, words, cluster, word[WORDS]; void *at[WORDS]; } Node;
typedef struct {
    void *func; unsigned grid[3], block[3], shared; void **arguments, **extra; void *kern, *ctx;
} Kernel;
typedef struct { unsigned grid[3], block[3], shared; void *stream; const unsigned *attributes; unsigned count; } Config;
static Node node[NODES], launched[NODES];
static int nodes, launches, backwards, packed, broken, capturing, destroyed;
static uint64_t foreign;
static void *extra[NODES][5];
static uint64_t sizes[NODES];

void reset(uint64_t memory) {
    nodes = launches = backwards = packed = broken = capturing = destroyed = 0;
    foreign = memory;
}
void add(int kind, uint64_t func, uint64_t grid, uint64_t cluster, uint64_t words, const uint64_t *word) {
    Node *made = &node[nodes++];
    *made = (Node){kind, func, grid, words, cluster};
    memcpy(made->word, word, 8 * words);
}
void set_backwards(void) { backwards = 1; }
void set_packed(void) { packed = 1; }
void set_broken(int times) { broken = times; }
int is_capturing(void) { return capturing; }
int graphs_destroyed(void) { return destroyed; }
int take(uint64_t *to) { /* func, grid, stream, cluster, words ... */
    int n = launches;
    for (int i = 0; i < n; i++, to += 5 + WORDS) {
        to[0] = launched[i].func; to[1] = launched[i].grid; to[2] = launched[i].kind; to[3] = launched[i].cluster;
        to[4] = launched[i].words;
        memcpy(to + 5, launched[i].word, 8 * WORDS);
    }
    launches = 0;
    return n;
}
int cuGetErrorString(int code, const char **text) { *text = "refused"; return 0; }
int cuCtxGetCurrent(void **out) { *out = (void *)0xc0ffee; return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) {
    nodes = 0;
    capturing = stream == (void *)0x66 && mode == 1 && broken < 2;
    return broken == 2;
}
int cuStreamEndCapture(void *stream, void **graph) {
    capturing = 0;
    *graph = broken ? NULL : (void *)1;
    return broken ? 901 : 0;
}
int cuGraphDestroy(void *graph) { destroyed++; return 0; }
int cuGraphGetNodes(void *graph, void **to, size_t *count) {
    for (int i = 0; to && i < nodes; i++) to[i] = &node[i];
    *count = nodes;
    return 0;
}
int cuGraphGetEdges_v2(void *graph, void **from, void **to, void *data, size_t *count) {
    for (int i = 0; i + 1 < nodes; i++) {
        from[i] = &node[backwards ? i + 1 : i];
        to[i] = &node[backwards ? i : i + 1];
    }
    *count = nodes - 1;
    return 0;
}
int cuGraphNodeGetType(Node *each, int *kind) { *kind = each->kind; return 0; }
int cuGraphKernelNodeGetParams_v2(Node *each, Kernel *to) {
    int i = each - node;
    *to = (Kernel){(void *)each->func, {each->grid, 1, 1}, {32, 1, 1}, 48};
    for (uint64_t k = 0; k < each->words; k++) each->at[k] = &each->word[k];
    sizes[i] = 8 * each->words;
    extra[i][0] = (void *)1; extra[i][1] = each->word; extra[i][2] = (void *)2; extra[i][3] = &sizes[i];
    extra[i][4] = NULL;
    if (packed) to->extra = extra[i]; else to->arguments = each->at;
    return 0;
}
int cuGraphKernelNodeGetAttribute(Node *each, int id, unsigned *value) {
    if (id == 11) return 1;
    if (id == 14) value[0] = -1;
    if (id == 4 && each->cluster) { value[0] = each->cluster; value[1] = value[2] = 1; }
    return 0;
}
/* A function has as many parameters of 8 bytes as its last digit says. */
int cuFuncGetParamInfo(void *func, size_t index, size_t *offset, size_t *size) {
    *offset = 8 * index;
    *size = 8;
    return index < (uint64_t)func % 16 ? 0 : 1;
}
int cuPointerGetAttribute(unsigned *kind, int what, uint64_t address) {
    return what == 2 && foreign && address >= foreign && address < foreign + 4096 ? 0 : 1;
}
typedef struct { uint64_t to, pitch; unsigned value, size; uint64_t width, height; } Fill;
int cuGraphMemsetNodeGetParams(Node *each, Fill *to) {
    *to = (Fill){each->word[0], 0, (unsigned)each->word[1], (unsigned)each->grid, each->word[2], each->word[3]};
    return 0;
}
int cuGraphMemcpyNodeGetParams(Node *each, uint64_t *to) { /* CUDA_MEMCPY3D */
    memset(to, 0, 200);
    to[17] = each->word[0]; to[6] = each->word[1]; to[22] = each->word[2]; to[23] = each->word[3];
    return 0;
}
static int fill(uint64_t size, uint64_t to, uint64_t value, uint64_t width, void *stream) {
    launched[launches++] = (Node){(int)(uintptr_t)stream, size, 0, 3, 0, {to, value, width}};
    return 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t width, void *s) { return fill(1, to, value, width, s); }
int cuMemsetD16Async(uint64_t to, unsigned short value, size_t width, void *s) { return fill(2, to, value, width, s); }
int cuMemsetD32Async(uint64_t to, unsigned value, size_t width, void *s) { return fill(4, to, value, width, s); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t width, void *s) { return fill(0, to, from, width, s); }
int cuLaunchKernelEx(const Config *config, void *func, void **arguments, void **more) {
    Node *made = &launched[launches++ % NODES];
    *made = (Node){(int)(uintptr_t)config->stream, (uint64_t)func, config->grid[0], (uint64_t)func % 16};
    made->cluster = config->count ? config->attributes[0] << 8 | config->attributes[2] : 0;
    for (uint64_t i = 0; i < made->words; i++) memcpy(&made->word[i], arguments[i], 8);
    return more || config->block[0] != 32 || config->shared != 48;
}
"""


@functools.cache
def built():
    made, library = c_module.build_module(DRIVER)
    executable.teach(made.relaunch)
    return made.relaunch, library


def aligned(*size, dtype=torch.float32):
    """Zeros at an address as the allocator of a device gives it."""
    count = torch.Size(size).numel()
    whole = torch.zeros(count + 256, dtype=dtype)
    skip = -whole.data_ptr() % 256 // dtype.itemsize
    return whole[skip : skip + count].view(size)


class Library:
    """A device for entries, and a function of its library, which launches what `launches(*tensors)` says: (kind,
    function, grid, words), where a word is a tensor, a number, or ("scratch", bytes of an allocation, offset)."""

    def __init__(self, launches):
        self.launches, self.mode, self.is_busy, self.entered = launches, 0, False, 0
        self.called, self.allocated, self.again, self.fails = 0, {}, False, False
        self.made = []  # memory that launches allocate
        self.stays = None  # a tensor that can't be elsewhere
        self.returns = None  # what the function returns in place of `out`

    def enter(self, again):
        if self.is_busy:
            return None
        self.entered, self.again = self.entered + 1, again
        return CAPTURES

    def leave(self):
        self.entered -= 1

    def modes(self):
        return self.mode

    def temporaries(self):
        return b"".join(word.to_bytes(8, "little") for pair in sorted(self.allocated.items()) for word in pair)

    def elsewhere(self, arguments):
        memory = {}

        def moved(v):
            if not isinstance(v, torch.Tensor):
                return v
            storage = v.untyped_storage()
            other = memory.setdefault(storage.data_ptr(), storage.clone())
            return torch.empty(0, dtype=v.dtype).set_(other, v.storage_offset(), v.size(), v.stride())

        return tuple(v if v is self.stays else moved(v) for v in arguments)

    def empty(self, size, stride=(1,), dtype=torch.uint8):
        self.made.append(torch.empty_strided((size,) if isinstance(size, int) else size, stride, dtype=dtype))
        return self.made[-1]

    def results(self, result, arguments):
        return (
            [self._result(v, arguments) for v in result]
            if isinstance(result, tuple)
            else self._result(result, arguments)
        )

    def _result(self, value, arguments):
        if isinstance(value, tuple):  # ("scratch", bytes, offset) stands for a result
            return self._word(value), ((value[1] // 4,), (1,), torch.float32)
        return next((k for k, v in enumerate(arguments) if v is value), None)

    def function(self, *args, out):
        library = built()[1]
        if not library.is_capturing():
            self.called += 1
            return out.fill_(1.0) if self.returns is None else (torch.ones(4), out, None)
        assert self.entered == 1
        if self.fails:
            raise RuntimeError("not in a capture")
        for launched in self.launches(*args, out):
            kind, function, grid, words, cluster = (*launched, 0)[:5]
            held = (ctypes.c_uint64 * max(len(words), 1))(*map(self._word, words))
            library.add(
                kind, ctypes.c_uint64(function), ctypes.c_uint64(grid), ctypes.c_uint64(cluster), len(words), held
            )
        return out if self.returns is None else (self.returns[0], out, self.returns[1])

    def _word(self, word):
        if isinstance(word, torch.Tensor):
            return word.data_ptr()
        if not isinstance(word, tuple):
            return word
        address = SPACE + (self.again << 24) + (word[1] << 8)  # one for each size, and other ones in a second capture
        self.allocated[address] = word[1]
        return address + word[2]


def product(a, b, out):
    return [(KERNEL, 0x1004, a.shape[0], (a, b, out, a.shape[1]))]


class TestDevice(TestCase):
    def test_tensors_elsewhere_are_as_much_aligned_and_overlap_as_before(self):
        device = calls.Device(None, torch.empty_strided)
        whole = aligned(4096)
        tensors = whole[1000:2000], whole[:500], whole[400:700].view(3, 100), torch.empty(0), 1.5
        with (
            mock.patch.object(device, "_room", lambda need: SPACE + 4 if need < 1 << 20 else None),
            mock.patch.object(calls, "_placed", lambda tensor, address: address),
        ):
            moved = device.elsewhere(tensors)
        a, b, c, _, number = moved
        self.assertEqual((number, c - b), (1.5, tensors[2].data_ptr() - tensors[1].data_ptr()))
        self.assertTrue(a >= c + 1200 or a + 4000 <= b)
        self.assertTrue(all(n >= SPACE + 4 for n in (a, b, c)))
        self.assertEqual([n % 512 for n in (a, b, c)], [t.data_ptr() % 512 for t in tensors[:3]])

    def test_results(self):
        device = calls.Device(None, torch.empty_strided)
        given, fresh = torch.ones(3), torch.ones(2, 3).t()
        found = device.results((given, fresh, None, 4, fresh[1:], torch.ones(0)), (1, given))
        self.assertEqual(found[:4], [1, (fresh.data_ptr(), ((3, 2), (1, 3), torch.float32)), None, None])
        self.assertEqual(found[4:], [calls.UNKNOWN, (0, ((0,), (1,), torch.float32))])
        self.assertEqual(device.results(given, (given,)), 0)

    def test_empty(self):
        device = calls.Device(None, lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
        self.assertEqual((device.empty(5).dtype, device.empty(5).shape), (torch.uint8, (5,)))
        self.assertEqual(device.empty((2, 3), (1, 2), torch.float64).stride(), (1, 2))

    def test_a_capture_holds_the_lock_and_leaves_nothing_behind(self):
        said, pool = [], types.SimpleNamespace(id=(0, 9))
        device = calls.Device(3, torch.empty_strided)
        device._space, device._pools = types.SimpleNamespace(begin=lambda: 7, end=lambda *a: said.append(a)), [pool] * 2
        device._stream, device._handle = (5, 3, 1), CAPTURES
        names = "beginAllocateCurrentThreadToPool endAllocateToPool releasePool setStream clearCublasWorkspaces"
        with contextlib.ExitStack() as stack:
            for name in names.split():
                note = functools.partial(
                    lambda name, *args, **kwargs: said.append((name, *args, *kwargs.values())), name
                )
                stack.enter_context(mock.patch.object(torch._C, f"_cuda_{name}", note, create=True))
            stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentStream", lambda index: (0, index, 1)))
            stack.enter_context(mock.patch.object(torch.cuda, "current_blas_handle", lambda: 0))
            self.assertEqual(device.enter(True), CAPTURES)
            self.assertTrue(calls.capturing.locked())
            self.assertFalse(gc.isenabled())
            self.assertIsNone(device.enter(False))
            device.leave()
            self.assertFalse(calls.capturing.locked())
            self.assertTrue(gc.isenabled())
            wanted = ["clearCublasWorkspaces", "beginAllocateCurrentThreadToPool", "setStream"]
            wanted += ["setStream", "endAllocateToPool", "releasePool", "clearCublasWorkspaces", 7]
            self.assertEqual([each[0] for each in said], wanted)
            self.assertEqual([each[1:] for each in said if each[0] == "setStream"], [(5, 3, 1), (0, 3, 1)])
            fails = mock.patch.object(torch.cuda, "current_blas_handle", side_effect=RuntimeError("no handle"))
            with fails:
                self.assertEqual(device.enter(False), CAPTURES)  # this thread has a handle
                device.leave()
            del device._mine.handle
            with fails, self.assertLogs(calls.log, "WARNING"):
                self.assertIsNone(device.enter(False))
        self.assertFalse(calls.capturing.locked())
        self.assertTrue(gc.isenabled())
        self.assertEqual(device.modes(), -1)

    def test_second_thread_of_python_ends_captures(self):
        device, found, ended = calls.Device(None, torch.empty_strided), [], threading.Event()

        def ask():
            logging.getLogger("unheard").makeRecord("unheard", 0, "", 0, "", (), None)  # asks for the thread's name
            found.append(device.is_alone())
            ended.set()

        self.assertTrue(device.is_alone())
        _thread.start_new_thread(ask, ())  # as those of autograd, it isn't Python's
        self.assertTrue(ended.wait(60))
        run_in_threads(ask)
        self.assertEqual(found, [True, False])
        self.assertTrue(device.is_alone())  # the other one has ended

    def test_functions(self):
        self.assertTrue(calls.may_be_entry(torch.mm, ("out",)))
        self.assertFalse(calls.may_be_entry(torch.mm, ()))
        self.assertFalse(calls.may_be_entry(torch.mul, ("out",)))
        self.assertTrue(calls.may_be_entry(calls.OPERATORS[0], ("scale",)))


class TestEntries(TestCase):
    def setUp(self):
        super().setUp()
        module, self.driver = built()
        self.driver.reset(ctypes.c_uint64(FOREIGN))
        self.enterContext(mock.patch.object(executable, "implementation", lambda: module))

    def made(self, launches=product, tensors=2, constants=(), names=("out",), items=0, kind=CPU):
        """Have one call in code of which all tensors are inputs. Return the library, and the code."""
        library = Library(launches)
        function = library.function  # one object, as functions of a library are
        with mock.patch.object(calls, "FUNCTIONS", (function,)):
            shown, held = steps.Shown(), [torch.zeros(3) for _ in range(tensors + 1)]
            shown.inputs = tensors + 1
            for tensor in held:
                shown.add(tensor)
            operands = [shown.operand(v) for v in (*held[:-1], *constants, held[-1])]
            made = (torch.zeros(4), held[-1], None)[:items] or held[-1]
            shown.note_call(function, names, tuple(operands), made)
            shown.result = shown.operand(made[:2] if items else made)
        self.assertEqual(shown.steps[0].kind, steps.ENTRY)
        self.entries = built()[0].calls(library, kind)
        device = 0, lambda: 0, lambda index: STREAM, 0
        return library, built()[0].steps(**shown.arguments(()), device=device, calls=self.entries)

    def run_code(self, code, *tensors):
        """Run the code. Return what it launched: (function, grid, stream, cluster, words)."""
        self.assertIs(code.run(list(tensors)), tensors[-1])
        to = (ctypes.c_uint64 * (21 * 16))()
        count = self.driver.take(to)
        rows = [list(to[21 * i : 21 * i + 21]) for i in range(count)]
        return [(*row[:4], row[5 : 5 + row[4]]) for row in rows]

    def tensors(self, n=4, k=3, dtype=torch.float32):
        return aligned(n, k, dtype=dtype), aligned(k, n, dtype=dtype), aligned(n, n, dtype=dtype)

    def words(self, tensors, *more):
        return [*[v.data_ptr() for v in tensors], *more]

    def is_entry(self, code, *tensors):
        """True if the call is launched at its third run, at the latest."""
        return [bool(self.run_code(code, *tensors)) for _ in range(3)][-1]

    def test_second_call_is_captured_and_later_ones_are_launched(self):
        library, code = self.made()
        self.assertEqual(self.run_code(code, *self.tensors()), [])
        for _ in range(3):
            tensors = self.tensors()
            launched = self.run_code(code, *tensors)
            self.assertEqual(launched, [(0x1004, 4, STREAM, 0, self.words(tensors, 3))])
        # Two captures of the second call, since its kernel wasn't known.
        self.assertEqual((library.called, library.entered, self.entries.captured, self.entries.launched), (1, 0, 2, 3))
        self.assertEqual(self.driver.graphs_destroyed(), 2)

    def test_new_size_is_captured_at_its_first_call_where_others_followed_the_last(self):
        library, code = self.made()
        for n, called in ((4, 1), (4, 1), (5, 1), (6, 2), (5, 2), (7, 2), (7, 2)):
            tensors = self.tensors(n)
            launched = self.run_code(code, *tensors)
            self.assertEqual(library.called, called)
        self.assertEqual(launched, [(0x1004, 7, STREAM, 0, self.words(tensors, 3))])
        library.fails = True  # a first call may load what a capture forbids
        self.assertEqual(self.run_code(code, *self.tensors(8)), [])
        library.fails = False
        self.assertEqual((len(self.run_code(code, *self.tensors(8))), library.called), (1, 3))

    def test_sizes_have_entries_of_their_own_and_share_functions(self):
        library, code = self.made()
        for n in (4, 5, 4, 5, 4, 5):
            tensors = self.tensors(n)
            launched = self.run_code(code, *tensors)
        self.assertEqual(launched, [(0x1004, 5, STREAM, 0, self.words(tensors, 3))])
        self.assertEqual((library.called, self.entries.captured, self.entries.launched), (2, 3, 4))

    def test_all_that_decides_a_call_is_in_its_key(self):
        library, code = self.made()
        a, b, out = self.tensors()
        self.run_code(code, a, b, out)
        other_strides = aligned(3, 4).t()
        for tensors in (
            self.tensors(dtype=torch.float64),
            (other_strides, b, out),
            (aligned(13)[1:].view(4, 3), b, out),
            (torch.ones(4, 3, dtype=torch.complex64).conj().imag, b, out),
            (aligned(4, 3, 1), b, out),
        ):
            self.assertEqual(self.run_code(code, *tensors), [])
        library.mode = 1
        self.assertEqual(self.run_code(code, a, b, out), [])
        library.mode = 0
        self.assertEqual(len(self.run_code(code, a, b, out)), 1)
        self.assertEqual(library.called, 7)

    def test_constants_are_in_the_key(self):
        for one, other in ((1, 2), (1.0, 2.0), (1, 1.0), (None, True), (True, 1)):
            library, code = self.made(lambda a, b, _, out: product(a, b, out), constants=(one,))
            _, differs = self.made(lambda a, b, _, out: product(a, b, out), constants=(other,))
            self.assertTrue(self.is_entry(code, *self.tensors()))
        library, code = self.made(lambda a, b, _, out: product(a, b, out), constants=(torch.float32,))
        self.assertFalse(self.is_entry(code, *self.tensors()))

    def test_no_entries_where_the_library_measures(self):
        library, code = self.made()
        library.mode = -1
        self.assertFalse(self.is_entry(code, *self.tensors()))
        self.assertEqual((library.called, self.entries.captured), (3, 0))

    def test_tensors_that_overlap_move_together(self):
        library, code = self.made()
        for _ in range(3):
            a, _, out = self.tensors()
            launched = self.run_code(code, a, a.t(), out)
        self.assertEqual(launched[0][4], self.words((a, a, out), 3))
        for distance in (11, 7):  # each is a kind of call of its own
            captured = self.entries.captured
            for _ in range(3):
                whole = aligned(24)
                a, b, out = whole[:12].view(4, 3), whole[distance : distance + 12].view(3, 4), aligned(4, 4)
                launched = self.run_code(code, a, b, out)
            self.assertEqual(launched[0][4], self.words((a, b, out), 3))
            self.assertEqual(self.entries.captured, captured + 1)

    def test_call_with_a_tensor_of_the_host_is_no_entry(self):
        """It may read a seed there, and pass what it has read to a kernel."""
        library, code = self.made(kind=CPU + 1)
        self.assertFalse(self.is_entry(code, *self.tensors()))
        self.assertEqual((self.entries.entries, library.called), ({}, 3))

    def test_results_are_allocated_for_each_launch(self):
        """One in new memory, one that is an argument, and None."""
        library, code = self.made(lambda a, b, out: [(KERNEL, 0x1004, 1, (a, b, out, ("scratch", 4096, 0)))], items=3)
        library.returns = ("scratch", 4096, 0), None
        results = [code.run([*self.tensors()]) for _ in range(3)]
        self.assertEqual([len(each) for each in results], [2, 2, 2])
        tensors = a, b, out = self.tensors()
        library.made.clear()
        fresh, same = code.run([*tensors])
        self.assertIs(same, out)
        self.assertIs(fresh, library.made[0])
        self.assertEqual(fresh.shape, (1024,))
        self.assertEqual(self.entries.launched, 3)

    def test_results_that_no_launch_can_make(self):
        scratch = "scratch", 4096, 0
        for returns in ((scratch, scratch), (("scratch", 4096, 8), None)):
            library, code = self.made(lambda a, b, out: [(KERNEL, 0x1003, 1, (a, b, out))], items=3)
            library.returns = returns
            for _ in range(3):
                self.assertEqual(len(code.run([*self.tensors()])), 2)
            self.assertEqual([*self.entries.entries.values()], ["its results or its temporary memory aren't known"])

    def test_temporary_memory_is_allocated_for_each_launch(self):
        def launches(a, b, out):
            yield KERNEL, 0x1003, 1, (a, b, ("scratch", 4096, 256))
            yield KERNEL, 0x2003, 1, (("scratch", 4096, 0), ("scratch", 512, 0), out)

        library, code = self.made(launches)
        self.run_code(code, *self.tensors())
        for _ in range(2):
            tensors = a, b, out = self.tensors()
            library.made.clear()
            first, second = self.run_code(code, *tensors)
            self.assertEqual([len(v) for v in library.made], [4096, 512])
            large, small = [v.data_ptr() for v in library.made]
            self.assertEqual(first[4], self.words((a, b), large + 256))
            self.assertEqual(second[4], [large, small, out.data_ptr()])

    def test_number_that_looks_like_an_address_is_no_pointer_of_the_function(self):
        library, code = self.made(lambda a, b, out: [(KERNEL, 0x1004, 1, (a, b, out, number))])
        number = 7
        self.assertTrue(self.is_entry(code, *self.tensors()))
        tensors = self.tensors(5)
        number = tensors[0].data_ptr()  # where the function has no pointer so far
        self.assertFalse(self.is_entry(code, *tensors))

    def test_pointer_that_was_null_is_learnt_later(self):
        bias = aligned(4)
        library, code = self.made(lambda a, b, c, out: [(KERNEL, 0x1004, 1, (a, b, out, word(c)))], tensors=3)
        word = lambda c: 0  # noqa: E731
        a, b, out = self.tensors()
        self.assertTrue(self.is_entry(code, a, b, bias, out))
        word = lambda c: c  # noqa: E731
        tensors = a, b, c, out = (*self.tensors(5)[:2], aligned(5), aligned(5, 5))
        self.assertTrue(self.is_entry(code, *tensors))
        self.assertEqual(self.run_code(code, *tensors)[0][4], self.words((a, b, out, c)))
        # and may be null again
        word = lambda c: 0  # noqa: E731
        tensors = a, b, c, out = (*self.tensors(6)[:2], aligned(6), aligned(6, 6))
        self.assertTrue(self.is_entry(code, *tensors))
        self.assertEqual(self.run_code(code, *tensors)[0][4], self.words((a, b, out), 0))

    def test_what_a_launch_cannot_repeat_is_no_entry(self):
        kernel = KERNEL, 0x1003, 1
        for why, launches in {
            "it launches too much": lambda a, b, out: [(*kernel, (a, b, out))] * 9,
            "it does more than to launch kernels": lambda a, b, out: [(HOST, 0, 1, ())],
            "a launch isn't known in full": lambda a, b, out: [(MEMSET, 0, 4, (out, 0, 4, 2))],  # two rows
            "a pointer is no address of a tensor": lambda a, b, out: [(MEMCPY, 0, 0, (out, FOREIGN, 8, 1))],
            "an address is inside of a tensor": lambda a, b, out: [(MEMSET, 0, 4, (out.data_ptr() + 16, 0, 4, 1))],
            "a word differs in two captures, and is no address of a tensor": (
                lambda a, b, out: [(*kernel, (a, b, self.entries.captured))]
            ),
            "an address is the same in two captures": lambda a, b, out: [(*kernel, (a, b, FOREIGN + 16))],
            "its results or its temporary memory aren't known": lambda a, b, out: [
                (*kernel, [("scratch", n + k, 0) for k in range(3)]) for n in (1, 4, 7)
            ],
        }.items():
            with self.subTest(why):
                library, code = self.made(launches)
                self.assertFalse(self.is_entry(code, *self.tensors()))
                self.assertEqual((library.called, library.entered, [*self.entries.entries.values()]), (3, 0, [why]))
        captured = self.entries.captured
        self.assertFalse(self.is_entry(code, *self.tensors(5)))
        self.assertEqual(self.entries.captured, captured + 1, "one attempt for each size")
        library, code = self.made(lambda a, b, out: [(*kernel, (a, b, out))] * 2)
        self.driver.set_backwards()
        self.assertFalse(self.is_entry(code, *self.tensors()))
        self.assertEqual([*self.entries.entries.values()], ["its launches are in no known order"])

    def test_fills_and_copies_are_launched(self):
        def launches(size, a, b, out):
            first = (MEMSET, 0, size, (out, 7, 12, 1)) if size else (MEMCPY, 0, 0, (out, a, 48, 1))
            return [first, *product(a, b, out)]

        for size in (0, 1, 2, 4):
            library, code = self.made(functools.partial(launches, size))
            self.run_code(code, *self.tensors())
            for _ in range(2):
                tensors = a, b, out = self.tensors()
                first, launched = self.run_code(code, *tensors)
                words = [out.data_ptr(), 7, 12] if size else [out.data_ptr(), a.data_ptr(), 48]
                self.assertEqual(first, (size, 0, STREAM, 0, words))
                self.assertEqual(launched, (0x1004, 4, STREAM, 0, self.words(tensors, 3)))

    def test_empty_nodes_launch_nothing(self):
        library, code = self.made(lambda a, b, out: [(EMPTY, 0, 1, ()), *product(a, b, out)])
        self.run_code(code, *self.tensors())
        self.assertEqual(len(self.run_code(code, *self.tensors())), 1)

    def test_attributes_and_packed_parameters(self):
        library, code = self.made(lambda a, b, out: [(KERNEL, 0x1003, 1, (a, b, out), 2)])
        self.driver.set_packed()
        self.run_code(code, *self.tensors())
        tensors = self.tensors()
        self.assertEqual(self.run_code(code, *tensors), [(0x1003, 1, STREAM, 4 << 8 | 2, self.words(tensors))])

    def test_capture_that_fails_leaves_the_call_as_it_is(self):
        for broken in (0, 1, 2):  # the function, the capture's end, its begin
            library, code = self.made()
            library.fails = not broken
            self.driver.set_broken(broken)
            self.assertFalse(self.is_entry(code, *self.tensors()))
            self.assertEqual((library.called, library.entered), (3, 0))

    def test_call_is_captured_later_if_another_capture_is_under_way(self):
        library, code = self.made()
        library.is_busy = True
        tensors = self.tensors()
        for _ in range(2):
            self.run_code(code, *tensors)
        library.is_busy = False
        launched = [bool(self.run_code(code, *tensors)) for _ in range(258)]
        self.assertEqual((launched.index(True), library.called), (256, 258))  # it isn't tried at each call

    def test_captures_beyond_a_start_are_earned_by_launches(self):
        library, code = self.made()
        for k in range(500):  # each size twice
            tensors = self.tensors(4, k + 1)
            self.run_code(code, *tensors)
            self.run_code(code, *tensors)
        captured, launched = self.entries.captured, self.entries.launched
        self.assertLess(captured, 256 + launched // 5 + 2)
        self.assertLess(captured, 450)
        tensors = self.tensors(4, 1)
        for _ in range(900):
            self.run_code(code, *tensors)
        tensors = self.tensors(4, 500)
        self.assertEqual(len(self.run_code(code, *tensors)), 1)

    def test_errors_are_those_of_the_device_object(self):
        for name in ("enter", "leave", "temporaries", "modes", "elsewhere"):
            library, code = self.made()
            fails = mock.patch.object(library, name, side_effect=RuntimeError(f"no {name}"))
            with fails, self.assertRaisesRegex(RuntimeError, f"no {name}"):
                for _ in range(2):
                    code.run(list(self.tensors()))
