"""Scratch memory of launches in C: torch's functions that allocate and free it, and what happens where they fail.

The device is that of `relaunch_device`; its raw memory is counted here, and poisoned when it is freed.
"""

import ctypes
import gc
from unittest import mock

import torch

import form  # noqa: F401
from stand_ins import relaunch_driver
from stand_ins.relaunch_case import region, RelaunchTestCase
from torch_overlay._inductor.relaunch import runners
from torch_overlay._inductor.relaunch.launch import executable


SOURCE = region(
    "x",
    "buf0 = torch.mul(x, 2, out=new(4, 32))",
    "buf1 = torch.add(buf0, x, out=new(4, 32))",
    "del buf0",
    "return (buf1,)",
)
STREAM = 7


class Memory:
    """Raw memory of the device, by address."""

    def __init__(self):
        self.held = {}
        self.full = False

    def alloc(self, size, stream):
        assert stream == STREAM
        if self.full:
            raise torch.OutOfMemoryError("no memory")
        piece = torch.empty(size, dtype=torch.uint8)
        self.held[piece.data_ptr()] = piece
        return piece.data_ptr()

    def delete(self, address):
        self.held.pop(address).fill_(0xFF)


class TestFunctionsOfTorch(RelaunchTestCase):
    """The stream is asked for, and memory is allocated, in C."""

    def setUp(self):
        super().setUp()
        self.memory = Memory()
        self.calls, self.fail = [], set()
        address = ctypes.POINTER(ctypes.c_void_p)
        kinds = [(ctypes.c_int, address), (ctypes.c_uint64, address), (ctypes.c_void_p,)]
        bodies = [self.stream, self.alloc, self.release]
        self.made = [ctypes.CFUNCTYPE(ctypes.c_int, *kind)(body) for kind, body in zip(kinds, bodies)]
        self.device.functions = tuple(ctypes.cast(f, ctypes.c_void_p).value for f in self.made)
        self.device.stream_of = mock.Mock(return_value=STREAM)
        self.device.raw_alloc = mock.Mock(side_effect=self.memory.alloc)
        self.device.raw_delete = mock.Mock(side_effect=self.memory.delete)
        self.addCleanup(lambda: self.assertEqual(self.memory.held, {}))
        self.addCleanup(gc.collect)
        self.addCleanup(runners.forget_all)

    def launch(self, run, times=1):
        for _ in range(times):
            x = torch.randn(4, 32)
            self.assertEqual(run([x])[0], x * 2 + x)
            self.assertEqual(self.memory.held, {})

    def noted(self, name):
        self.calls.append(name)
        return name in self.fail

    def stream(self, device, out):
        out[0] = STREAM
        return int(self.noted("stream"))

    def alloc(self, size, out):
        if self.noted("alloc"):
            return 1
        out[0] = self.memory.alloc(size, STREAM)
        return 0

    def release(self, address):
        if self.noted("release"):
            return 1
        self.memory.delete(address)
        return 0

    def python(self):
        return [f.call_count for f in (self.device.stream_of, self.device.raw_alloc, self.device.raw_delete)]

    def test_torchs_python_is_not_called(self):
        self.launch(self.runner(SOURCE), 5)
        self.assertEqual(self.calls, 4 * ["stream", "alloc", "release"])
        self.assertEqual(self.python(), [0, 0, 0])

    def test_python_is_asked_where_they_fail(self):
        self.fail = {"stream", "alloc", "release"}
        run = self.runner(SOURCE)
        self.launch(run, 3)
        self.assertEqual(self.python(), [2, 2, 2])
        self.memory.full = True
        with self.assertRaisesRegex(torch.OutOfMemoryError, "no memory"):
            self.launch(run)
        self.memory.full = False
        self.launch(run)

    def test_scratch_is_freed_after_an_error(self):
        run = self.runner(SOURCE)
        self.launch(run, 2)
        for name in ("cuGraphLaunch", "cuGraphExecKernelNodeSetParams"):
            for self.fail in (set(), {"release"}):
                relaunch_driver.driver().fail(name, 2)
                with self.assertRaisesRegex(RuntimeError, name):
                    self.launch(run)
                self.launch(run)

    def test_torch_has_them(self):
        self.assertEqual(len(set(executable.torch_functions()) - {0}), 3)

    def test_torch_that_has_them_not(self):
        with (
            mock.patch.object(executable, "TORCH_FUNCTIONS", ("no_such_function",)),
            self.assertLogs(executable.log, "INFO") as logs,
        ):
            self.assertEqual(executable.torch_functions.__wrapped__(), (0,))
        self.assertIn("no_such_function", logs.output[0])
