# Owner(s): ["module: inductor"]

import ctypes
import gc
import tempfile
import unittest
import weakref
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_relaunch import native, nodes, outputs
from torch._inductor.cudagraph_relaunch import relaunch as relaunches
from torch._inductor.cudagraph_relaunch.native_call import Misaligned
from torch._inductor.cudagraph_relaunch.outputs import OfStorage, View
from torch._inductor.cudagraph_relaunch.program import Result
from torch._inductor.cudagraph_relaunch.relaunch import Relaunch
from torch._inductor.cudagraph_relaunch.sized import Sized
from torch._inductor.cudagraph_relaunch.traced import Escaped
from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


# A launch calls `run` with the words of the one kernel, its node: pointers to two
# inputs and to an output, a scratch pointer, and a number.
DRIVER = """
#include <stdint.h>
#include <string.h>

static uint64_t held[5];
static void (*run)(uint64_t *);
void on_launch(void (*function)(uint64_t *)) { run = function; }
int cuGetErrorString(int code, const char **text) { *text = "refused"; return 0; }
int cuCtxGetCurrent(uint64_t *out) { *out = 0xc0; return 0; }
int cuStreamIsCapturing(uint64_t stream, int *status) { *status = 0; return 0; }
int cuGraphExecKernelNodeSetParams_v2(uint64_t exec, uint64_t node, char *params) {
  void **arguments;
  memcpy(&arguments, params + 40, 8);
  for (int i = 0; i < 5; i++) memcpy(&held[i], arguments[i], 8);
  return 0;
}
int cuGraphLaunch(uint64_t exec, uint64_t stream) { run(held); return 0; }
"""
WORDS = 5
N = ("input", 2, int)
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))


def kernel():
    parameters = tuple((8 * i, bytes(8)) for i in range(WORDS))
    return nodes.KernelNode(0, 10, "add", 7, 0, 0, (1, 1, 1), (32, 1, 1), 0, parameters)


def template():
    slots = tuple(
        nodes.PointerSlot(0, i, 0, region, 0) for i, region in enumerate((0, 1, 2, 4))
    )
    return nodes.Template(5, (kernel(),), slots, (nodes.NumberSlot(0, 4, "l", N),))


def layout(*more):
    """The output of 4 floats and more, from two inputs, a number, and scratch."""
    recipes = OfStorage(0, View((4,), (1,), torch.float32)), *more
    return outputs.Layout((0, 1), (outputs.Storage(16),), recipes, (64,))


def floats(address):
    memory = (ctypes.c_float * 4).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32)


class Device:
    index = 0

    def __init__(self):
        self.made = []

    def empty(self, size, stride, dtype):
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.made.append(weakref.ref(made))
        return made

    def current(self):
        return 0

    def is_capturing(self):
        return False


class InPython:
    """A launcher whose nodes are patched in Python, and in which nothing runs."""

    exec = None

    def __init__(self, test):
        self.template, self.test, self.held = template(), test, [None] * WORDS
        self.given = []  # regions of each patch

    def patch(self, bases, regions):
        self.given.append(regions)
        at = {slot.region: slot.parameter for slot in self.template.slots}
        for region, base in zip(regions, bases):
            if region in at:
                address = base if isinstance(base, int) else base.data_ptr()
                self.held[at[region]] = address
        return 1

    def write(self, values):
        self.held[4] = int.from_bytes(values[0], "little", signed=True)

    def replay(self):
        self.test.run_kernel(self.held)


class InC:
    """A launcher whose nodes are set by the C module, and that the driver launches."""

    direct, replay = True, None

    def __init__(self, test):
        self.template = given = template()
        parts = given.nodes, given.slots, given.regions, given.numbers
        self.exec = test.module.Exec(0xE0, *parts)


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestRelaunch(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, cls.library = cuda_driver_stand_in.build_module(DRIVER, folder)
        cls.module = native.complete(module.relaunch)

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(native, "launching", self.module.launching))
        self.function = FUNCTION(lambda words: self.run_kernel(words))
        self.library.on_launch(self.function)
        self.error = None

    def run_kernel(self, words):
        """x + n * y, as the graph would."""
        made = [made() for made in self.device.made]
        self.inside.append((relaunches.launching(), [t.numel() for t in made]))
        if self.error is not None:
            raise self.error
        x, y, out, scratch, n = words[:WORDS]
        self.assertEqual(scratch, made[0].data_ptr())  # the largest first
        floats(out).copy_(floats(x) + n * floats(y))

    def make(self, launcher, *more, static=(1,), alignments=(4, 4), **kwargs):
        self.device, self.inside = Device(), []
        launcher = launcher(self)
        given = layout(*more), launcher, static, alignments
        return Relaunch(self.device, *given, **kwargs)

    def test_outputs(self):
        group = counters["inductor"]
        more = outputs.Given("text"), outputs.SameInput(1), outputs.Computed(N)
        for launcher in (InC, InPython):
            before, results = group["cudagraph_relaunches"], []
            made = self.make(launcher, *more)
            for n in (3, 3, -5):
                x, y = torch.randn(4), torch.randn(4)
                inputs = [x, y, n]
                results.append((made.launch(inputs), x + n * y))
                self.assertEqual(inputs, [])
                self.assertIs(results[-1][0][2], y)
                self.assertEqual(results[-1][0][1::2], ("text", n))
                self.device.made.clear()
            for found, wanted in results:  # none was overwritten
                self.assertEqual(found[0], wanted)
            self.assertEqual(made.totals[0], 3)
            self.assertEqual(group["cudagraph_relaunches"] - before, 3)

    def test_scratch_is_freed(self):
        for launcher in (InC, InPython):
            made = self.make(launcher)
            result = made.launch([torch.randn(4), torch.randn(4), 1])
            self.assertEqual(self.inside, [(True, [512, 4])])
            self.assertIsNone(self.device.made[0]())
            self.assertIs(self.device.made[1](), result[0])
            self.assertFalse(relaunches.launching())

    def test_what_does_not_fit(self):
        base = torch.zeros(16)
        first = -base.data_ptr() // 4 % 4
        good, odd = (base[first + k :][:4] for k in (0, 1))
        for launcher in (InC, InPython):
            made = self.make(launcher, alignments=(16, 4))
            for inputs in ([odd, good, 1], [good, good, 2**63], [good, good, 1.0]):
                with self.assertRaises(Misaligned):
                    made.launch(inputs)
                self.assertEqual(len(inputs), 3)
            self.assertEqual((self.inside, made.totals[0]), ([], 0))
            made.launch([good, odd, 1])

    def test_wrapped_for_profiles(self):
        def wrap(function):
            def call(*args):
                calls.append(len(args))
                return function(*args)

            return call

        for launcher in (InC, InPython):
            made, calls = self.make(launcher), []
            made.show(wrap)
            for run in filter(None, (made.launch, made.attempt)):
                self.assertIsNotNone(run([torch.randn(4), torch.randn(4), 1]))
                self.device.made.clear()
            self.assertEqual(len(calls), made.totals[0])

    def test_nothing_keeps_it(self):
        for launcher in (InC, InPython):
            made = self.make(launcher)
            launch, gone = made.launch, weakref.ref(made)
            self.assertIn(made, relaunches.live)
            del made
            gc.collect()
            self.assertIsNone(gone())
            del launch

    def test_attempt(self):
        made = self.make(InC)
        x, y = torch.randn(4), torch.randn(4)
        self.assertEqual(made.attempt([x, y, 2])[0], x + 2 * y)
        self.assertIsNone(made.attempt([x, y, 2.5]))
        self.assertIsNone(made.attempt((x, y, 2)))

    def test_view_that_needs_python(self):
        made = self.make(InC, OfStorage(0, View((4,), (1,), torch.int32)))
        x, y = torch.randn(4), torch.randn(4)
        found, as_bits = made.launch([x, y, 2])
        self.assertEqual(as_bits, found.view(torch.int32))
        self.assertEqual(found, x + 2 * y)

    def test_sizes_that_a_launch_computes(self):
        size = Result(1)  # after the number slot's
        sized = Sized(
            expressions=(N, ("mul", N, ("const", 99))),
            allocations=(((size,), (1,), torch.float32),),
            outputs={0: ((size,), (1,), 0)},
            scratch=Result(2),
            derived=(),
        )
        made = self.make(InC, sized=sized)
        for n in (4, 9):
            x, y = torch.randn(4), torch.randn(4)
            (found,) = made.launch([x, y, n])
            self.assertEqual((found.numel(), found[:4]), (n, x + n * y))
            self.assertEqual(self.inside.pop()[1], [99 * n, n])
            self.device.made.clear()
        with self.assertRaisesRegex(Escaped, "not launched by the C module"):
            self.make(InPython, sized=sized)

    def test_error_in_the_launch(self):
        made = self.make(InPython)
        self.error, inputs = ZeroDivisionError(), [torch.randn(4), torch.randn(4), 1]
        with self.assertRaises(ZeroDivisionError):
            made.launch(inputs)
        self.assertEqual((len(inputs), made.totals[0]), (3, 0))
        self.assertFalse(relaunches.launching())

    def test_static_inputs(self):
        made = self.make(InPython)
        launcher, x = made.launcher, torch.randn(4)
        all_regions, few, parameter = [0, 4, 2, 1], [0, 4, 2], torch.randn(4)
        for _ in range(3):
            made.launch([x, parameter, 1])
            self.device.made.clear()
        self.assertEqual(launcher.given, [all_regions, few, few])
        for _ in range(relaunches.MOVES):  # it isn't static
            parameter = torch.randn(4)
            self.assertEqual(made.launch([x, parameter, 2])[0], x + 2 * parameter)
            self.device.made.clear()
        made.launch([x, parameter, 1])
        self.assertEqual(launcher.given[-1], [0, 1, 4, 2])


if __name__ == "__main__":
    run_tests()
