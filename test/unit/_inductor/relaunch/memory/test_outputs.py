"""`_inductor.relaunch.memory.outputs`: results have the type and strides of the region's."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins import relaunch_driver
from torch_overlay._inductor.relaunch.launch import relaunch
from torch_overlay._inductor.relaunch.launch.executable import Executable
from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch
from torch_overlay._inductor.relaunch.memory.outputs import (
    Computed,
    Empty,
    Given,
    OfInput,
    OfStorage,
    OutputLayout,
    Repeated,
    SameInput,
    Storage,
    TensorView,
)
from torch_overlay._inductor.relaunch.proof.nodes import Template


def vector(size, dtype=torch.float32, offset=0):
    return TensorView((size,), (1,), dtype, offset)


class TestOutputs(TestCase):
    def empty(self, size, stride, dtype):
        made = torch.empty_strided(size, stride, dtype=dtype)
        made.view(torch.uint8).random_(0, 60)
        self.allocated.append(made)
        return made

    def relaunch(self, recipes, storages):
        layout, template = OutputLayout((), tuple(storages), tuple(recipes), ()), Template(0, (), ())
        device = SimpleNamespace(empty=self.empty, index=0, current=int, stream_of=lambda index: 0)
        device.functions, device.raw_alloc, device.raw_delete = (0, 0, 0), None, None
        graph = SimpleNamespace(raw_cuda_graph_exec=lambda: 0)
        with mock.patch.object(relaunch, "implementation", relaunch_driver.module):
            return Relaunch(device, layout, Executable(graph, template, lambda: None, direct=False), ())

    def make(self, recipes, storages=(), inputs=()):
        """Return the outputs and the storages of a call."""
        relaunch = self.relaunch(recipes, storages)
        self.allocated = []
        outputs = relaunch.launch([*inputs])
        found = dict(zip(relaunch.layout.order, self.allocated))
        return outputs, [found[k] for k in range(len(storages))]

    def test_storages_alone(self):
        recipes = [OfStorage(0, vector(4)), OfStorage(1, vector(3, torch.int64))]
        outputs, made = self.make(recipes, [Storage(16), Storage(24)])
        self.assertEqual([out is one for out, one in zip(outputs, made)], [True, True])
        self.assertIsInstance(outputs, tuple)

    def test_views_of_a_storage(self):
        first = TensorView((2, 3), (3, 1), torch.float32)
        column = TensorView((2,), (3,), torch.float32, 4)
        recipes = [OfStorage(0, view) for view in (first, column, first)]
        outputs, (made,) = self.make(recipes, [Storage(24)])
        self.assertIs(outputs[0], made)
        self.assertEqual(outputs[1].data_ptr() - made.data_ptr(), 4)
        self.assertEqual(outputs[1].view(torch.int32), made.view(torch.int32)[:, 1])
        self.assertIsNot(outputs[2], made)  # each output is a tensor of its own
        self.assertEqual(outputs[2].data_ptr(), made.data_ptr())
        for out in outputs:
            self.assertEqual(out.untyped_storage().data_ptr(), made.data_ptr())

    def test_views_of_several_types(self):
        first, column = TensorView((2, 3), (3, 1), torch.float32), TensorView((2,), (3,), torch.float32, 4)
        bits, odd = vector(6, torch.int32), vector(2, torch.uint8, 5)
        recipes = [OfStorage(0, view) for view in (first, column, bits, odd)]
        outputs, (made,) = self.make(recipes, [Storage(24)])
        self.assertEqual((made.dtype, made.numel()), (torch.uint8, 32))
        bits = made[:24].view(torch.int32).view(2, 3)
        self.assertEqual([out.dtype for out in outputs], [torch.float32] * 2 + [torch.int32, torch.uint8])
        self.assertEqual(outputs[0].view(torch.int32), bits)
        self.assertEqual(outputs[1].view(torch.int32), bits[:, 1])
        self.assertEqual(outputs[2], bits.flatten())
        self.assertEqual(outputs[3], made[5:7])
        for out in outputs:
            self.assertEqual(out.untyped_storage().data_ptr(), made.data_ptr())

    def test_storage_that_no_output_spans(self):
        recipes = [OfStorage(0, vector(2, torch.float32, 8))]
        outputs, (made,) = self.make(recipes, [Storage(20)])
        self.assertEqual((made.dtype, made.numel()), (torch.uint8, 32))
        self.assertEqual(outputs[0].view(torch.uint8), made[8:16])

    def test_views_of_the_slab(self):
        storages = [Storage(1024, torch.uint8, (0, 512)), Storage(24)]
        recipes = [
            OfStorage(0, vector(2, torch.int16, 516)),
            OfStorage(0, vector(4)),
            OfStorage(1, vector(6)),
            OfStorage(0, vector(3, torch.float32, 512)),
        ]
        outputs, (slab, made) = self.make(recipes, storages)
        self.assertEqual(outputs[0].view(torch.uint8), slab[516:520])
        self.assertEqual(outputs[1].view(torch.uint8), slab[:16])
        self.assertIs(outputs[2], made)
        self.assertEqual(outputs[3].view(torch.uint8), slab[512:524])

    def test_view_between_elements_of_a_storage(self):
        recipes = [OfStorage(0, vector(1, torch.float32, 2))]
        with self.assertRaisesRegex(ValueError, "output 0 lies between elements of its storage"):
            self.make(recipes, [Storage(512, torch.uint8)])

    def test_inputs(self):
        x = torch.arange(12.0)[2:]
        recipes = [SameInput(1), OfInput(1, vector(3, torch.float32, 8)), OfInput(1, vector(4, torch.int16, 6))]
        outputs, _ = self.make(recipes, inputs=[None, x])
        self.assertIs(outputs[0], x)
        self.assertEqual(outputs[1], x[2:5])
        self.assertEqual(outputs[2], x.view(torch.int16)[3:7])

    def test_other_values(self):
        expression = ("add", ("input", 0, int), ("const", 5))
        recipes = [
            Given(None),
            Computed(expression),
            Empty(TensorView((0, 4), (4, 1), torch.float16)),
            Repeated(1),
            OfStorage(0, vector(4)),
            Repeated(4),
        ]
        outputs, (made,) = self.make(recipes, [Storage(16)], inputs=[37])
        self.assertEqual((outputs[:2], outputs[3]), ((None, 42), 42))
        self.assertEqual((outputs[2].shape, outputs[2].dtype), ((0, 4), torch.float16))
        self.assertIs(outputs[4], made)
        self.assertIs(outputs[5], made)

    def test_calls_share_nothing(self):
        self.allocated = []
        relaunch = self.relaunch((Given(1), OfStorage(0, vector(4))), [Storage(16)])
        first, second = (relaunch.launch([]) for _ in "ab")
        self.assertNotEqual(first[1].data_ptr(), second[1].data_ptr())
        self.assertEqual(first[0], 1)
