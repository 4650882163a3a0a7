# Owner(s): ["module: inductor"]

import importlib.util
import unittest
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_relaunch import driver as cu, memcpy_nodes
from torch._inductor.cudagraph_relaunch.memcpy_nodes import DESTINATION, Patcher
from torch._inductor.cudagraph_relaunch.nodes import (
    CopyNode,
    FillNode,
    FIXED,
    PointerSlot,
    Template,
)
from torch.testing._internal.common_utils import run_tests, TestCase


HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)
PINNED, CAPTURED = 0x7F00_0000_0000, 0x2B75_A600_0000
WIDTH = 1 << 20


def copy(index, handle, out=False, **fields):
    """A copy of a row; `out`: to pinned memory, otherwise from it."""
    dst, src = (PINNED, CAPTURED) if out else (CAPTURED, PINNED)
    shape = {"width": WIDTH, "height": 1, "depth": 1}
    shape |= dict.fromkeys(("dst_pitch", "dst_height", "src_pitch", "src_height"), 0)
    sides = {"dst_on_host": out, "src_on_host": not out}
    return CopyNode(index, handle, dst, src, **{**shape, **sides, **fields})


def template():
    """Region 0 is loaded and filled, region 1 is stored."""
    fill = FillNode(1, 0x51, CAPTURED, 0, 4, 16, 1, 0)
    slots = (
        PointerSlot(0, 0, 0, 0, 64),
        PointerSlot(1, 0, 0, 0, 0),
        PointerSlot(2, 1, 0, 1, 0),
    )
    return Template(2, (copy(0, 0x50), fill, copy(2, 0x52, True)), slots)


class Api:
    """cuda.bindings.driver, which notes the parameters of copies by node."""

    def __init__(self):
        from cuda.bindings import driver

        self.real, self.params = driver, {}

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cuCtxGetCurrent(self):
        return self.real.CUresult.CUDA_SUCCESS, self.real.CUcontext(0xC0)

    def cuGraphMemcpyNodeGetParams(self, node):
        return self.real.CUresult.CUDA_SUCCESS, self.real.CUDA_MEMCPY3D()

    def cuGraphMemcpyNodeSetParams(self, node, params):
        self.params[int(node)] = params
        return (self.real.CUresult.CUDA_SUCCESS,)

    def sides(self, node):
        """Kind and address of the destination and of the source."""
        params, found = self.params[node], []
        for side in ("dst", "src"):
            kind = int(getattr(params, f"{side}MemoryType"))
            where = "Host" if kind == cu.MEMORY_HOST else "Device"
            found += [kind, int(getattr(params, f"{side}{where}"))]
        return tuple(found)


class Graph:
    """An executable that is a number, and a new one each time."""

    executable = 100

    def raw_cuda_graph_exec(self):
        return self.executable

    def instantiate(self):
        self.executable += 1


class Exec:
    """Blocks of an executable. The driver refuses copies in `refusing`."""

    refusing = ()
    error = "CUDA driver error in cuGraphExecMemcpyNodeSetParams: refused (1)"

    def __init__(self, executable, nodes, slots, regions):
        self.executable, self.nodes, self.slots = executable, nodes, slots
        self.bases = {}

    def patch(self, bases, regions=None):
        numbers = range(len(bases)) if regions is None else regions
        self.bases |= dict(zip(numbers, bases))
        copies = [s for s in self.slots if isinstance(self.nodes[s.node], CopyNode)]
        if copies and self.executable in self.refusing:
            raise RuntimeError(self.error)
        return len({s.node for s in self.slots})


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestSettle(TestCase):
    def settle(self, *args):
        api = Api()
        empty = mock.Mock(side_effect=lambda n: torch.empty(n, dtype=torch.uint8))
        memory = memcpy_nodes.settle(Template(*args), empty, cu.Driver(api))
        return api, memory

    def test_sides_on_the_device(self):
        given = template()
        api, memory = self.settle(given.regions, given.nodes, given.slots)
        start, device, host = memory.data_ptr(), cu.MEMORY_DEVICE, cu.MEMORY_HOST
        self.assertEqual(memory.nbytes, 2 * WIDTH)
        self.assertEqual(api.sides(0x50), (device, start, host, PINNED))
        self.assertEqual(api.sides(0x52), (host, PINNED, device, start + WIDTH))
        self.assertEqual(int(api.params[0x50].WidthInBytes), WIDTH)
        self.assertEqual(api.params.keys(), {0x50, 0x52})

    def test_two_sides_on_the_device(self):
        node = copy(0, 0x50, src_on_host=False)
        slots = PointerSlot(0, 0, 0, 0, 0), PointerSlot(0, 1, 0, 1, 0)
        api, memory = self.settle(2, (node,), slots)
        _, dst, _, src = api.sides(0x50)
        self.assertEqual((dst, src - dst), (memory.data_ptr(), WIDTH))

    def test_rows(self):
        rows = {"width": 100, "height": 3, "depth": 2, "dst_pitch": 512}
        node = copy(0, 0x50, dst_height=4, **rows)
        bytes = 100 + 512 * 2 + 512 * 4
        self.assertEqual(memcpy_nodes.extent(node, DESTINATION), bytes)
        _, memory = self.settle(1, (node,), (PointerSlot(0, 0, 0, 0, 0),))
        self.assertGreaterEqual(memory.nbytes // 2, bytes)

    def test_graph_without_such_copies(self):
        fixed = PointerSlot(0, 0, 0, FIXED, 0)
        for args in ((1, (), ()), (1, (copy(0, 0x50),), (fixed,))):
            api, memory = self.settle(*args)
            self.assertEqual((api.params, memory), ({}, None))


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestPatcher(TestCase):
    def make(self, given=None):
        self.api, self.calls, self.given_up = Api(), [], []
        patcher = Patcher(
            Graph(),
            given or template(),
            upload=lambda graph: self.calls.append("upload"),
            synchronize=lambda: self.calls.append("synchronize"),
            driver=cu.Driver(self.api),
            make=Exec,
        )
        patcher.given_up = lambda why: not self.given_up.append(why)
        return patcher

    def refusing(self, *executables):
        return mock.patch.object(Exec, "refusing", executables)

    def test_driver_that_follows(self):
        patcher = self.make()
        self.assertEqual(patcher.patch([0x1000, 0x2000]), 3)
        self.assertEqual(patcher.exec.bases, {0: 0x1000, 1: 0x2000})
        self.assertEqual((self.calls, patcher.rebuilds, self.api.params), ([], 0, {}))

    def test_refused_copy(self):
        before = counters["inductor"]["cudagraph_rebuilds"]
        patcher = self.make()
        with self.refusing(100, 101, 102):
            self.assertEqual(patcher.patch([0x1000, 0x2000], [0, 1]), 3)
            sides = self.api.sides(0x50)
            self.assertEqual(sides, (cu.MEMORY_DEVICE, 0x1040, cu.MEMORY_HOST, PINNED))
            self.assertEqual(self.api.sides(0x52)[3], 0x2000)
            self.assertEqual(self.calls, ["synchronize", "upload"])
            made = patcher.exec  # what is no copy is set there
            self.assertEqual(
                (made.executable, [s.node for s in made.slots]), (101, [1])
            )
            self.assertEqual(made.bases, {0: 0x1000, 1: 0x2000})
            patcher.patch([0x1000, 0x2000])
            self.assertEqual(patcher.rebuilds, 1)  # nothing moved
            patcher.patch([0x3000], [1])
            self.assertEqual((patcher.rebuilds, patcher.exec.executable), (2, 102))
            self.assertEqual(self.api.sides(0x50)[1], 0x1040)
            self.assertEqual(self.api.sides(0x52)[3], 0x3000)
        self.assertEqual(counters["inductor"]["cudagraph_rebuilds"] - before, 2)

    def test_refusal_at_a_later_launch(self):
        patcher = self.make()
        patcher.patch([0x1000, torch.empty(4)])
        with self.refusing(100):
            patcher.patch([None, 0x4000])
        self.assertEqual(self.api.sides(0x50)[1], 0x1040)
        self.assertEqual(self.api.sides(0x52)[3], 0x4000)

    def test_first_call_needs_every_base(self):
        patcher = self.make()
        with self.refusing(100), self.assertRaisesRegex(ValueError, "region 1 has no"):
            patcher.patch([0x1000, None])

    def test_other_errors(self):
        patcher = self.make()
        error = mock.patch.object(Exec, "error", "in cuGraphExecKernelNodeSetParams")
        with error, self.refusing(100), self.assertRaisesRegex(RuntimeError, "Kernel"):
            patcher.patch([0x1000, 0x2000])
        self.assertEqual(patcher.rebuilds, 0)

    def test_rows(self):
        node = copy(0, 0x50, width=100, height=3, dst_pitch=512)
        patcher = self.make(Template(1, (node,), (PointerSlot(0, 0, 0, 0, 0),)))
        self.assertEqual(patcher.patch([0x1000]), 1)
        self.assertEqual((patcher.rebuilds, patcher.exec.slots), (1, ()))

    def test_copies_that_move_again_and_again(self):
        patcher = self.make()
        with self.refusing(100):
            for i in range(memcpy_nodes.MOST_REBUILDS + 2):
                self.assertEqual(len(self.given_up), i >= memcpy_nodes.MOST_REBUILDS)
                patcher.patch([0x1000 * (i + 1), 0x2000])
        self.assertIn(f"moved {memcpy_nodes.MOST_REBUILDS} times", self.given_up[0])

    def test_graph_that_could_not_be_given_up(self):
        patcher = self.make()
        patcher.given_up = self.given_up.append
        with self.refusing(100):
            for i in range(memcpy_nodes.MOST_REBUILDS + 2):
                patcher.patch([0x1000 * (i + 1), 0x2000])
        self.assertEqual(len(self.given_up), 3)


if __name__ == "__main__":
    run_tests()
