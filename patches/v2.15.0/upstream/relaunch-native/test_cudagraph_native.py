# Owner(s): ["module: inductor"]

import ctypes
import dataclasses
import tempfile
import unittest
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import csrc, native
from torch._inductor.cudagraph_relaunch.nodes import (
    EmptyNode,
    KernelNode,
    PointerSlot,
    Refusal,
    Template,
)
from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.cuda_node_stand_in import DRIVER, noted
from torch.utils._triton import has_triton_package


def kernel(index):
    parameters = ((0, bytes(8)),)
    shape = (1, 1, 1), (32, 1, 1), 0
    return KernelNode(index, 10 + index, "add", 7, 0, 0, *shape, parameters)


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestNative(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.built, cls.library = cuda_driver_stand_in.build_module(DRIVER, folder)

    def setUp(self):
        super().setUp()
        native.implementation.cache_clear()
        self.addCleanup(native.implementation.cache_clear)
        self.extension = self.enterContext(
            mock.patch.object(csrc, "extension", mock.Mock(return_value=self.built))
        )
        self.library.reset(0)

    def test_one_module_a_process(self):
        self.assertIs(native.implementation(), native.implementation())
        self.extension.assert_called_once_with()

    def test_it_knows_the_fields_of_tensors(self):
        class Asked(torch.Tensor):
            def data_ptr(self):
                raise AssertionError("it is asked")

        x = torch.randn(3)
        found = native.implementation().addresses([x.as_subclass(Asked)])
        self.assertEqual(found, (x.data_ptr(),))

    def test_exec(self):
        slots = [PointerSlot(1, 0, 0, 0, 8)]
        made = native.implementation().Exec(0xE0, [kernel(0), kernel(1)], slots, 1)
        self.assertEqual((made.nodes, made.patch([0x7000])), (1, 1))
        (row,) = noted(self.library)
        self.assertEqual(row[1:3], (0xE0, 11))

    def test_shared_executable(self):
        nodes = kernel(0), EmptyNode(1, 11), kernel(2)
        shared = native.shared(Template(1, nodes, ()))
        slots = [PointerSlot(2, 0, 0, 0, 0)]
        exec = native.implementation().Exec
        made = exec(0xE0, nodes, slots, 1, (), shared)
        self.assertEqual(made.patch([0x7000]), 2)  # every node, though one has a slot
        with self.assertRaisesRegex(ValueError, "doesn't have"):
            exec(0xE0, [*nodes, kernel(3)], slots, 1, (), shared)

    def test_kernels_that_may_be_launched_one_by_one(self):
        native.implementation()
        nodes = kernel(0), EmptyNode(1, 11), kernel(2)
        template = Template(1, nodes, ())
        self.assertIsNone(native.shared(template).launches)
        shared = native.shared(template, (2, 1, 0))
        self.assertEqual(shared.launches, ((2, nodes[2].attributes), (0, b"")))

    def test_kernels_without_an_executable(self):
        """They are launched one by one at every call, in the order."""
        native.implementation()
        nodes = kernel(0), EmptyNode(1, 11), kernel(2)
        cluster = bytes(64) + (2).to_bytes(64, "little") + bytes(7 * 64)
        nodes = dataclasses.replace(nodes[0], attributes=cluster), *nodes[1:]
        made = native.apart(Template(1, nodes, ()), (2, 1, 0))
        self.assertEqual(made.launches, ((2, b""), (0, cluster)))
        # A stage has some of the nodes.
        made = native.apart(Template(1, nodes[:2], ()), (2, 1, 0))
        self.assertEqual(made.launches, ((0, cluster),))

    def test_module_that_cannot_be_built(self):
        self.extension.side_effect = csrc.NotBuiltError("there is no compiler")
        with self.assertRaisesRegex(Refusal, "there is no compiler") as caught:
            native.implementation()
        self.assertEqual(caught.exception.reason, "c-module")
        self.assertFalse(native.launching())

    def test_asking_whether_it_launches_builds_nothing(self):
        self.assertFalse(native.launching())
        self.extension.assert_not_called()
        native.implementation()
        with mock.patch.object(native.implementation(), "launching", lambda: True):
            self.assertTrue(native.launching())


class TestFunctionsOfTorch(TestCase):
    def find(self):
        return native.torch_functions.__wrapped__()

    def test_library_that_has_them(self):
        functions = mock.Mock()
        names = native.TORCH_FUNCTIONS
        made = [ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) for _ in names]
        for name, function in zip(names, made):
            setattr(functions, name, function)
        with mock.patch.object(ctypes, "CDLL", return_value=functions):
            found = self.find()
        wanted = [ctypes.cast(function, ctypes.c_void_p).value for function in made]
        self.assertEqual((list(found), len(set(found))), (wanted, 3))

    def test_library_that_has_them_not(self):
        for CDLL in (
            mock.Mock(side_effect=OSError("no such library")),
            mock.Mock(return_value=mock.Mock(spec=[])),
        ):
            with (
                mock.patch.object(ctypes, "CDLL", CDLL),
                self.assertLogs(native.log, "INFO") as logs,
            ):
                self.assertEqual(self.find(), (0, 0, 0))
            self.assertIn("torch's Python functions", logs.output[0])


if __name__ == "__main__":
    run_tests()
