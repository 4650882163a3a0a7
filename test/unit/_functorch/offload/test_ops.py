"""`_functorch.offload.ops`: saved values go to host memory and come back."""

from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._functorch.offload import runtime
from torch_overlay._functorch.offload.ops import IN_USE, LOAD, OPERATIONS, SLAB, STORE


CPU = torch.device("cpu")


def step(x, y):
    """Save two values on the host and load them again."""
    slab = SLAB(2048, 0, True)
    STORE(slab, x, 0)
    STORE(slab, y, 1024)
    IN_USE(slab)
    first = LOAD(slab, 1024, list(y.shape), list(y.stride()), y.dtype, CPU)
    return first, LOAD(slab, 0, list(x.shape), list(x.stride()), x.dtype, CPU)


class TestOffloadOps(TestCase):
    def setUp(self):
        super().setUp()
        self.noted, self.taken = [], []

        def take(nbytes, device, strict):
            self.taken.append((nbytes, device, strict))
            return torch.zeros(nbytes, dtype=torch.uint8)

        for patch in (
            mock.patch.object(runtime, "take_slab", take),
            mock.patch.object(runtime, "note_use", self.noted.append),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.x = torch.randn(3, 5).t()
        self.y = torch.arange(7).to(torch.bfloat16)

    def test_values_come_back(self):
        y, x = step(self.x, self.y)
        self.assertEqual((x, y), (self.x, self.y))
        self.assertEqual((x.stride(), y.dtype), (self.x.stride(), self.y.dtype))
        self.assertEqual(self.taken, [(2048, 0, True)])
        self.assertEqual([slab.numel() for slab in self.noted], [2048])

    def test_traced_program(self):
        gm = make_fx(step, tracing_mode="fake")(self.x, self.y)
        self.assertEqual(self.taken, [])
        found = [node.target for node in gm.graph.nodes if node.target in OPERATIONS]
        self.assertEqual(found, [SLAB, STORE, STORE, IN_USE, LOAD, LOAD])
        self.assertEqual(gm(self.x, self.y), (self.y, self.x))

    def test_what_nobody_reads(self):
        """A load is left out; stores and uses are side effects."""
        graph = Graph()
        slab, x = graph.placeholder("slab"), graph.placeholder("x")
        graph.call_function(STORE, (slab, x, 0))
        graph.call_function(IN_USE, (slab,))
        graph.call_function(LOAD, (slab, 0, [1], [1], torch.float32, CPU))
        graph.output(slab)
        graph.eliminate_dead_code()
        kept = [node.target for node in graph.nodes if node.op == "call_function"]
        self.assertEqual(kept, [STORE, IN_USE])

    def test_layouts_without_data(self):
        with FakeTensorMode():
            slab = SLAB(64, 0, False)
            self.assertEqual((slab.shape, slab.dtype), ((64,), torch.uint8))
            made = LOAD(slab, 0, [2, 3], [1, 2], torch.int16, torch.device("cuda:1"))
        self.assertEqual((made.shape, made.stride()), ((2, 3), (1, 2)))
        self.assertEqual((made.dtype, made.device.type), (torch.int16, "cuda"))
        self.assertEqual(self.taken, [])
