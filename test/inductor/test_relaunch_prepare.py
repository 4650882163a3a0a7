"""What the first capture needs is made ready while other processes compile kernels."""

import functools
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.relaunch_case import ADD, RelaunchTestCase
from torch_overlay import config, csrc
from torch_overlay._inductor.relaunch import causes
from torch_overlay._inductor.relaunch.capture import device
from torch_overlay._inductor.relaunch.capture.device import Cuda
from torch_overlay._inductor.relaunch.capture.recording import AddressSpace
from torch_overlay._inductor.relaunch.graph import fill_copy_kernels
from torch_overlay._inductor.relaunch.launch import executable


class TestPrepare(TestCase):
    def setUp(self):
        super().setUp()
        self.done = []
        device.prepare.cache_clear()
        self.addCleanup(device.prepare.cache_clear)

    def fake(self, owner, name, **how):
        return self.enterContext(mock.patch.object(owner, name, **how))

    def fakes(self, **how):
        """Nothing is loaded; a call of each is noted."""
        self.fake(executable, "implementation", new=lambda: self.done.append("module"))
        self.fake(device, "Driver", new=lambda: self.done.append("bindings"))
        return self.fake(fill_copy_kernels, "_function", return_value=1, **how)

    def wait(self, mode="relaunch", wanted=True, ready=True, used=True, capturing=False):
        """Of Inductor for its workers, in a process whose current device is 3."""
        with (
            config.patch(cudagraphs=mode),
            inductor_config.patch({"triton.cudagraphs": wanted, "compile_threads": 2}),
            mock.patch.object(torch.cuda, "is_initialized", lambda: ready),
            mock.patch.object(torch._C, "_cuda_hasPrimaryContext", lambda device: used and device == 3, create=True),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing),
            mock.patch.object(torch.cuda, "current_device", lambda: 3),
            mock.patch.object(AsyncCompile, "_wait_futures", lambda compiler, scope: self.done.append(scope["name"])),
        ):
            AsyncCompile().wait({"name": "kernels"})

    def test_it_is_done_once_before_the_kernels_are_waited_for(self):
        function = self.fakes()
        self.wait()
        self.wait()
        self.assertEqual(self.done, ["module", "bindings", "kernels", "kernels"])
        self.assertEqual({call.args[3] for call in function.call_args_list}, {3})

    def test_only_for_graphs_of_ours(self):
        self.fakes()
        self.wait(mode="trees")
        self.wait(mode="off")
        self.wait(wanted=False)
        self.assertEqual(self.done, ["kernels"] * 3)

    def test_not_on_a_device_that_is_not_used_nor_in_a_capture(self):
        self.fakes()
        self.wait(ready=False)
        self.wait(used=False)
        self.wait(capturing=True)
        self.assertEqual(self.done, ["kernels"] * 3)
        self.wait()
        self.assertEqual(self.done[3:], ["module", "bindings", "kernels"])

    def test_an_error_is_left_to_whoever_needs_it(self):
        self.fake(executable, "implementation", side_effect=ImportError("no driver"))
        with self.assertLogs(device.log, "INFO") as logs:
            self.wait()
            self.wait()
        self.assertEqual(self.done, ["kernels", "kernels"])
        self.assertEqual(len(logs.output), 1)
        self.assertIn("no driver", logs.output[0])

    def test_kernels_of_words_are_compiled_beforehand(self):
        function = self.fakes()
        self.fake(fill_copy_kernels, "_device", new=lambda: 3)
        for _ in range(2):
            device.prepare(3)
        fill_copy_kernels.fill(0x1004, 0, 4, 1)
        *beforehand, later = function.call_args_list
        self.assertEqual(len(beforehand), 4)
        self.assertIn(later, beforehand)

    def test_a_capture_does_without_these_kernels(self):
        self.fakes(side_effect=RuntimeError("no assembler"))
        with self.assertLogs(device.log, "INFO") as logs:
            device.prepare(4)
        self.assertIn("no assembler", logs.output[0])


class TestWithoutTheCModule(RelaunchTestCase):
    def test_region_runs_as_compiled(self):
        """Where the C module can't be built, the first call is no error, and the second says why there is no graph."""
        for module in device.prepare, executable.implementation:
            module.cache_clear()
        run, error = self.runner(ADD), csrc.NotBuiltError("there is no compiler")
        self.enterContext(mock.patch.object(csrc, "extension", side_effect=error))
        self.enterContext(mock.patch.object(self.device, "prepare", functools.partial(Cuda.prepare, self.device)))
        self.enterContext(mock.patch.object(self.device, "new_recording", lambda gap, inputs: AddressSpace(0, gap=gap)))
        self.add(run, 3)
        self.assertEqual([each.code for each in causes.refused()], ["c-module"])
