"""`csrc/bind.c`: a call of a graph binds what it should, or nothing."""

import sys
import tempfile
import threading
import unittest

import torch
from torch.testing._internal.common_utils import TestCase
from torch.utils._triton import has_triton_package

import driver_stand_in
import form  # noqa: F401
from node_stand_in import DRIVER, kernel, noted, VALUES


LAUNCHES = """
static uint64_t captured;
void capture(uint64_t stream) { captured = stream; }
int cuGraphLaunch(uint64_t exec, uint64_t stream) { return note(3, exec, 0, 0, stream); }
int cuStreamIsCapturing(uint64_t stream, int *status) {
  *status = stream == captured;
  return 0;
}
"""
EXECUTABLE, STREAM, OTHER = 0xE0, 7, 8


class Misaligned(Exception):
    pass


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestCall(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        module, cls.library = driver_stand_in.build_module(DRIVER + LAUNCHES, folder)
        cls.module, cls.launching = module.relaunch, module.relaunch.launching

    def setUp(self):
        super().setUp()
        self.library.reset(0)
        self.library.capture(0)
        self.device, self.stream, self.counters = 0, STREAM, {"test": {"launches": 0}}
        self.memory = [torch.zeros(64) for _ in range(8)]  # what empty() returns

    def noted(self):
        """What was set and launched since the last look: nodes, or a stream."""
        rows = noted(self.library)
        found = [f"stream {on}" if kind == 3 else node for kind, _, node, _, on in rows]
        self.assertTrue(all(row[1] == EXECUTABLE for row in rows))
        return found

    def empty(self, size, stride, dtype):
        return self.memory.pop(0)

    def call(self, nodes=None, slots=None, regions=5, words=(), **changes):
        """Node 10 has pointers to both inputs, node 11 to the output and the scratch."""
        nodes = nodes or (kernel(10, 1, 2), kernel(11, 3, 4))
        places = (0, VALUES, 0, 0), (0, VALUES + 8, 1, 0), (1, VALUES, 2, 0)
        slots = slots or (*places, (1, VALUES + 8, 4, 0))
        blocks = self.module.Blocks(EXECUTABLE, nodes, slots, regions, words, None)
        return blocks.call(
            **{
                "positions": (0, 1),
                "masks": (3, 3),
                "allocations": (((64,), (1,), torch.float32),),
                "slab": None,
                "types": (),
                "scratch": ((64,), (1,), torch.uint8),
                "numbers": ((), (), (), ()),
                "order": (0, 2),
                "recipes": ((3, 0, None, None, None, None),),  # the storage
                "empty": self.empty,
                "reinterpret": torch.as_strided,
                "outputs": None,
                "replay": lambda: self.fail("the driver launches"),
                "direct": True,
                "raw": (None, None, 0, (0, 0, 0)),
                "current": lambda: self.device,
                "index": 0,
                "stream_of": lambda index: self.stream,
                "is_capturing": lambda: self.fail("the driver says it"),
                "misaligned": Misaligned,
                "counters": self.counters,
                "group": "test",
                "counter": "launches",
            }
            | changes
        )

    def test_launch(self):
        call, output = self.call(), self.memory[0]
        x, y = torch.randn(4), torch.randn(4)
        inputs = [x, y]
        self.assertIs(call.launch(inputs)[0], output)
        self.assertEqual((inputs, self.noted()), ([], [10, 11, f"stream {STREAM}"]))
        self.assertEqual((call.launches, call.patched), (1, 2))
        self.assertEqual(self.counters["test"]["launches"], 1)

    def test_only_what_moved_is_set(self):
        call, kept = self.call(), self.memory[:2]
        x, y = torch.randn(4), torch.randn(4)
        for inputs, nodes in (([x, y], [10, 11]), ([x, y], []), ([y, x], [10])):
            self.memory = [*kept]
            call.attempt([*inputs])
            self.assertEqual(self.noted(), [*nodes, f"stream {STREAM}"])

    def test_when_there_is_no_launch(self):
        call, x = self.call(), torch.randn(4)
        odd = torch.zeros(20, dtype=torch.uint8)[1:17]
        for inputs in ([x], (x, x), [x, odd]):
            before = len(inputs)
            self.assertIsNone(call.attempt(inputs))
            self.assertEqual(len(inputs), before)
        with self.assertRaises(Misaligned):
            call.launch([odd, x])
        with self.assertRaisesRegex(TypeError, "wants a list of 2 inputs or more"):
            call.launch([x])
        self.library.capture(STREAM)
        self.assertIsNone(call.attempt([x, x]))
        self.stream = OTHER
        self.assertIsNotNone(call.attempt([x, x]))
        self.assertEqual(self.noted()[-1], f"stream {OTHER}")
        self.assertEqual(call.launches, 1)

    def test_thread_without_a_context(self):
        call, x = self.call(), torch.randn(4)
        self.library.forget_context()
        self.device = 1
        self.assertIsNone(call.attempt([x, x]))
        self.assertEqual(self.module.context(), 0)  # it keeps the other device
        self.device = 0
        self.assertIsNotNone(call.attempt([x, x]))
        self.assertEqual(self.module.context(), 0xC0)

    def test_launch_by_torch(self):
        x, seen = torch.randn(4), []

        def replay():
            seen.append((self.launching(), call.attempt([x, x]), self.noted()))
            with self.assertRaisesRegex(RuntimeError, "inside of a launch"):
                call.launch([x, x])

        call = self.call(replay=replay, direct=False)
        self.assertIsNotNone(call.attempt([x, x]))
        self.assertEqual(seen, [(True, None, [10, 11])])
        self.assertFalse(self.launching())
        self.assertEqual(self.noted(), [])

    def test_patching_and_launching_are_one_step(self):
        x, started, go, order = torch.randn(4), threading.Event(), threading.Event(), []

        def replay():
            order.append("begin")
            started.set()
            go.wait(60)
            order.append("end")

        call = self.call(replay=replay, direct=False)
        threads = [threading.Thread(target=call.launch, args=([x, x],)) for _ in "ab"]
        threads[0].start()
        started.wait(60)
        threads[1].start()
        self.assertFalse(self.launching())  # another thread is
        threads[1].join(0.2)
        self.assertEqual(order, ["begin"])
        go.set()
        for thread in threads:
            thread.join()
        self.assertEqual(order, ["begin", "end"] * 2)
        self.assertEqual(call.launches, 2)

    def test_errors_of_the_driver(self):
        call, kept = self.call(), self.memory[:2]
        x, y = torch.randn(4), torch.randn(4)
        node, graph = "cuGraphExecKernelNodeSetParams.*at node 11", "cuGraphLaunch: ref"
        for failing, text in ((2, node), (3, graph)):
            self.memory, inputs = [*kept], [x, y]
            self.library.reset(failing)
            with self.assertRaisesRegex(RuntimeError, text):
                call.launch(inputs)
            self.assertEqual((len(inputs), self.launching()), (2, False))
            self.noted()
        self.memory = [*kept]
        call.launch([x, y])
        self.assertEqual(self.noted(), [f"stream {STREAM}"])  # all nodes are set
        self.assertEqual((call.launches, self.counters["test"]["launches"]), (1, 1))

    def test_numbers(self):
        node = kernel(10, 1, 2)
        program = ((2, 0),), ((0, 1),), ((0, 0, 1),), (2,)  # inputs[2] + 1
        call = self.call(
            (node,),
            ((0, VALUES, 0, 0),),
            words=((0, VALUES + 8, 2),),
            numbers=program,
            scratch=None,
            order=(0,),
        )
        x, kept = torch.randn(4), self.memory[:1]
        for number, nodes in ((5, [10]), (5, []), (6, [10])):
            self.memory = [*kept]
            self.assertIsNotNone(call.attempt([x, x, number]))
            self.assertEqual(self.noted(), [*nodes, f"stream {STREAM}"])
        for number in (2**31, 5.0, None):
            self.assertIsNone(call.attempt([x, x, number]))
        with self.assertRaises(Misaligned):
            call.launch([x, x, 2**63])

    def test_callers_tensors(self):
        call = self.call(recipes=((2, 1, 0, 0, 0, 0),))  # an input
        x, y = torch.randn(4), torch.randn(4)
        self.assertIs(call.launch([x, y])[0], y)
        self.assertIs(call.launch([x, y], [y, x])[0], x)

    def test_aligned(self):
        call, base = self.call(), torch.zeros(64, dtype=torch.uint8)
        first = -base.data_ptr() % 16
        given = [base[first + k :] for k in (0, 8)]
        self.assertTrue(call.aligned(given, (0, 1), (15, 7)))
        self.assertFalse(call.aligned(given, (0, 1), (15, 15)))

    def test_descriptions_that_make_no_sense(self):
        for error, text, changes in (
            (ValueError, "so many inputs are no regions", {"masks": (3,)}),
            (ValueError, "are no regions", {"positions": 6 * (0,), "masks": 6 * (3,)}),
            (ValueError, "so many regions are not allocated", {"order": (0,)}),
            (ValueError, "isn't there", {"recipes": ((3, 1, 0, 0, 0, 0),)}),
            (ValueError, "no numbers", {"words": ((0, VALUES, 2),)}),
            (ValueError, "float", {"numbers": (((2, 1),), (), (), (0,))}),
            (TypeError, "argument 1 must be tuple", {"positions": [0, 1]}),
        ):
            with self.assertRaisesRegex(error, text):
                self.call(**changes)

    def test_no_reference_is_lost_or_gained(self):
        size, recipe = (64,), (0, 0, "given", None, None, None)
        kept = size, recipe, Misaligned, self.counters
        before = [sys.getrefcount(each) for each in kept]
        for _ in range(20):
            call = self.call(recipes=(recipe,), allocations=((size, (1,), torch.int8),))
            self.assertEqual(call.attempt([self.memory[2]] * 2), ("given",))
            self.memory += [torch.zeros(64) for _ in "ab"]
            with self.assertRaises(ValueError):
                self.call(recipes=(recipe, (3, 9, 0, 0, 0, 0)))
        del call
        self.assertEqual([sys.getrefcount(each) for each in kept], before)
