"""Copies of a captured graph: pointed at real memory before the executable is made, and what happens if the driver
refuses to point them elsewhere later. Graphs and executables are fakes; the driver's structs are the real ones.
"""

import functools
import threading
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.test_case import TestCase

import form  # noqa: F401
from stand_ins.graph_api import FakeApi
from stand_ins.relaunch_device import FakeDevice
from torch_overlay._inductor.relaunch import causes, region_graphs
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.launch import executable, relaunch
from torch_overlay._inductor.relaunch.proof.nodes import CopyNode, FillNode, PointerSlot, Template
from torch_overlay._inductor.relaunch.runner import Runner
from torch_overlay._inductor.relaunch.states import State
from torch_overlay.csrc import DriverError


SLAB, ALIASED = 0x7F00_0000_0000, 0x2B75_A600_0000
WIDTH = 1 << 20


def linear(index: int, handle: int, **fields: Any) -> CopyNode:
    """A copy of WIDTH bytes; `out` to the slab, otherwise from it."""
    out = fields.pop("out", False)
    dst, src = (SLAB, ALIASED) if out else (ALIASED, SLAB)
    width = fields.pop("width", WIDTH)
    values = {"height": 1, "depth": 1, "dst_pitch": 0, "dst_height": 0, "src_pitch": 0, "src_height": 0, **fields}
    return CopyNode(index, handle, dst, src, width, dst_on_host=out, src_on_host=not out, **values)


class Api(FakeApi):
    def cuGraphMemcpyNodeSetParams(self, node: Any, params: Any) -> Any:
        assert isinstance(node, self.real.CUgraphNode) and isinstance(params, self.real.CUDA_MEMCPY3D)
        self.params[int(node)] = params
        return self.ok()


def sides(params: Any) -> tuple[int, ...]:
    """Kind and address of the destination and of the source."""
    found = []
    for side in ("dst", "src"):
        kind = int(getattr(params, f"{side}MemoryType"))
        found += [kind, int(getattr(params, f"{side}{'Host' if kind == cu.MEMORY_HOST else 'Device'}"))]
    return tuple(found)


def template() -> Template:
    """Region 0 is loaded, region 1 is stored; a memset of region 0 stands between them."""
    fill = FillNode(1, 0x51, ALIASED, 0, 4, 16, 1, 0)
    slots = (PointerSlot(0, 0, 0, 0, 64), PointerSlot(1, 0, 0, 0, 0), PointerSlot(2, 1, 0, 1, 0))
    return Template(2, (linear(0, 0x50), fill, linear(2, 0x52, out=True)), slots)


class TestSettle(TestCase):
    def settle(self, given: Template, nodes: dict[int, Any]) -> tuple[Api, torch.Tensor | None]:
        api = Api()
        api.params.update(nodes)
        return api, executable.settle(given, lambda n: torch.empty(n, dtype=torch.uint8), cu.Driver(api))

    def test_device_sides_point_at_real_memory_and_host_sides_stay(self) -> None:
        api, memory = self.settle(template(), {})
        assert memory is not None
        self.assertEqual(memory.nbytes, 2 * WIDTH)
        start = memory.data_ptr()
        self.assertEqual(sides(api.params[0x50]), (cu.MEMORY_DEVICE, start, cu.MEMORY_HOST, SLAB))
        self.assertEqual(sides(api.params[0x52]), (cu.MEMORY_HOST, SLAB, cu.MEMORY_DEVICE, start + WIDTH))
        self.assertEqual(int(api.params[0x50].WidthInBytes), WIDTH)
        self.assertNotIn(0x51, api.params)

    def test_two_sides_on_the_device_do_not_overlap(self) -> None:
        node = CopyNode(0, 0x50, ALIASED, ALIASED + WIDTH, WIDTH, 1, 1, 0, 0, 0, 0)
        api, memory = self.settle(Template(2, (node,), (PointerSlot(0, 0, 0, 0, 0), PointerSlot(0, 1, 0, 1, 0))), {})
        assert memory is not None
        _, dst, _, src = sides(api.params[0x50])
        self.assertEqual((dst, src), (memory.data_ptr(), memory.data_ptr() + WIDTH))

    def test_rows_have_room(self) -> None:
        node = linear(0, 0x50, width=100, height=3, depth=2, dst_pitch=512, dst_height=4)
        self.assertEqual(executable.extent(node, executable.DESTINATION), 100 + 512 * 2 + 512 * 4)
        _, memory = self.settle(Template(1, (node,), (PointerSlot(0, 0, 0, 0, 0),)), {})
        assert memory is not None
        self.assertGreaterEqual(memory.nbytes // 2, executable.extent(node, executable.DESTINATION))

    def test_graph_without_such_copies_is_left_alone(self) -> None:
        fixed = Template(1, (linear(0, 0x50),), (PointerSlot(0, 0, 0, -1, 0),))
        for given in (Template(1, (), ()), fixed):
            api, memory = self.settle(given, {})
            self.assertEqual((api.params, memory), ({}, None))


class Graph:
    """An executable that is a number, and a new one each time."""

    def __init__(self) -> None:
        self.executable = 100

    def raw_cuda_graph_exec(self) -> int:
        return self.executable

    def instantiate(self) -> None:
        self.executable += 1


class Exec:
    """As the C module's `Exec`. `refuses` has the executables whose copies the driver will not point elsewhere."""

    refuses: set[int] = set()
    error = DriverError("cuGraphExecMemcpyNodeSetParams", 1, "invalid argument", "node 0 (memcpy)")

    def __init__(self, executable: int, nodes: Any, slots: Any, regions: int) -> None:
        self.executable, self.nodes, self.slots = executable, nodes, slots
        self.bases: dict[int, int] = {}

    def patch(self, bases: Any, regions: Any = None) -> int:
        self.bases.update(zip(range(len(bases)) if regions is None else regions, bases))
        has_copies = any(isinstance(self.nodes[s.node], CopyNode) for s in self.slots)
        if has_copies and self.executable in self.refuses:
            raise self.error
        return len({s.node for s in self.slots})


class TestPatcher(TestCase):
    def make(self, given: Template | None = None) -> executable.Patcher:
        self.api, self.graph, self.calls = Api(), Graph(), []
        return executable.Patcher(
            self.graph,
            given or template(),
            upload=lambda graph: self.calls.append("upload"),
            synchronize=lambda: self.calls.append("synchronize"),
            driver=cu.Driver(self.api),
            make=Exec,
        )

    def test_driver_that_follows_is_asked_for_no_more(self) -> None:
        patcher = self.make()
        self.assertEqual(patcher.patch([0x1000, 0x2000], [0, 1]), 3)
        self.assertEqual((self.calls, patcher.rebuilds), ([], 0))

    def test_refused_copy_is_set_in_the_graph_and_the_executable_made_anew(self) -> None:
        before = counters["torch_overlay"]["cudagraph_rebuilds"]
        patcher = self.make()
        with mock.patch.object(Exec, "refuses", {100, 101, 102}):
            self.assertEqual(patcher.patch([0x1000, 0x2000], [0, 1]), 3)
            self.assertEqual(sides(self.api.params[0x50]), (cu.MEMORY_DEVICE, 0x1040, cu.MEMORY_HOST, SLAB))
            self.assertEqual(sides(self.api.params[0x52]), (cu.MEMORY_HOST, SLAB, cu.MEMORY_DEVICE, 0x2000))
            self.assertEqual(self.calls, ["synchronize", "upload"])
            # What is no copy is patched in the new executable, at the bases of this call.
            self.assertEqual((patcher.exec.executable, patcher.exec.bases), (101, {0: 0x1000, 1: 0x2000}))
            self.assertEqual([s.node for s in patcher.exec.slots], [1])
            # Nothing moved: no other executable. One region moved: a new one, with the other where it was.
            patcher.patch([0x1000, 0x2000], [0, 1])
            self.assertEqual(patcher.rebuilds, 1)
            patcher.patch([0x3000], [1])
            self.assertEqual((patcher.rebuilds, patcher.exec.executable), (2, 102))
            self.assertEqual(sides(self.api.params[0x52])[3], 0x3000)
            self.assertEqual(patcher.exec.bases, {0: 0x1000, 1: 0x3000})
        self.assertEqual(counters["torch_overlay"]["cudagraph_rebuilds"] - before, 2)

    def test_refusal_at_a_later_launch(self) -> None:
        patcher = self.make()
        patcher.patch([0x1000, 0x2000])
        with mock.patch.object(Exec, "refuses", {100}):
            patcher.patch([None, 0x4000])
        self.assertEqual(sides(self.api.params[0x50])[1], 0x1040)
        self.assertEqual(sides(self.api.params[0x52])[3], 0x4000)

    def test_other_errors_are_the_callers(self) -> None:
        patcher = self.make()
        error = DriverError("cuGraphExecKernelNodeSetParams", 1, "x")
        refused = mock.patch.multiple(Exec, refuses={100}, error=error)
        with refused, self.assertRaisesRegex(RuntimeError, "KernelNodeSetParams"):
            patcher.patch([0x1000, 0x2000])
        self.assertEqual(patcher.rebuilds, 0)

    def test_executable_that_is_gone_is_not_patched(self) -> None:
        """Making it anew destroys the old one, also when it fails."""
        for failing in ("instantiate", "upload"):
            with self.subTest(failing=failing):
                patcher = self.make()
                with mock.patch.object(Exec, "refuses", {100}):
                    patcher.patch([0x1000, 0x2000])
                no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
                owner = self.graph if failing == "instantiate" else patcher
                with mock.patch.object(owner, failing, no_memory), self.assertRaises(torch.OutOfMemoryError):
                    patcher.patch([0x3000, 0x2000])
                gone = patcher.exec.executable
                patcher.patch([0x1000, 0x2000])
                self.assertGreater(patcher.exec.executable, gone)
                self.assertEqual(patcher.exec.bases, {0: 0x1000, 1: 0x2000})

    def test_rows_are_never_patched(self) -> None:
        rows = linear(0, 0x50, width=100, height=3, dst_pitch=512)
        patcher = self.make(Template(1, (rows,), (PointerSlot(0, 0, 0, 0, 0),)))
        self.assertEqual(patcher.patch([0x1000]), 1)
        self.assertEqual((patcher.rebuilds, patcher.exec.slots), (1, ()))

    def test_region_whose_graph_is_made_anew_again_and_again_runs_without_one(self) -> None:
        patcher = self.make()
        owner = Runner(lambda inputs: None, CodeFacts("a region", 0), FakeDevice())
        state = State()
        state.relaunch = SimpleNamespace(totals=(3, 0))  # type: ignore[assignment]
        patcher.given_up = lambda why: region_graphs._give_up(weakref.ref(owner.region_graphs), weakref.ref(state), why)
        with mock.patch.object(Exec, "refuses", {100}), mock.patch.object(causes, "refuse") as refuse:
            for i in range(executable.MOST_REBUILDS - 1):
                patcher.patch([0x1000 * (i + 1), 0x2000])
            self.assertFalse(state.refused)
            patcher.patch([0x9_0000, 0x2000])
        self.assertTrue(state.refused)
        self.assertIsNone(state.relaunch)
        ((refused,), _) = refuse.call_args
        self.assertEqual(refused.code, "host-memory")
        self.assertIn(f"moved {executable.MOST_REBUILDS} times", refused.message)
        self.assertEqual(owner.launched(), 3)

    def test_graph_is_not_dropped_while_a_thread_that_may_wait_for_its_launch_has_the_lock(self) -> None:
        """A finalizer launches while the lock of the states is held, and waits for this launch."""
        owner = Runner(lambda inputs: None, CodeFacts("a region", 0), FakeDevice())
        state, patcher = State(), self.make()
        state.relaunch = SimpleNamespace(totals=(3, 0))  # type: ignore[assignment]
        give_up = functools.partial(region_graphs._give_up, weakref.ref(owner.region_graphs), weakref.ref(state))
        patcher.given_up = give_up

        def patch(first: int) -> None:
            for i in range(executable.MOST_REBUILDS):
                patcher.patch([0x1000 * (first + i), 0x2000])

        with mock.patch.object(Exec, "refuses", {100}), mock.patch.object(causes, "refuse") as refuse:
            launch = threading.Thread(target=patch, args=(1,), daemon=True)
            with owner.states.lock:
                launch.start()
                launch.join(10)
                self.assertFalse(launch.is_alive(), "it waits for the lock")
            self.assertIsNotNone(state.relaunch)
            patch(100)
        self.assertIsNone(state.relaunch)
        refuse.assert_called_once()

    def test_region_with_copies_is_launched_from_python(self) -> None:
        launcher = mock.Mock(exec=None)
        self.assertIsNone(relaunch.bind(mock.Mock(launcher=launcher)))
