"""Copies of a captured graph: pointed at real memory before the executable is made, and made anew with it where the
driver refuses to point them elsewhere later. The driver is `relaunch_driver`'s.
"""

import functools
import struct
import threading
import weakref
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.test_case import TestCase

import form  # noqa: F401
from stand_ins import relaunch_driver
from stand_ins.graph_api import FakeApi
from stand_ins.relaunch_device import fake_device
from stand_ins.relaunch_driver import At
from torch_overlay._inductor.relaunch import causes, region_graphs
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.proof.nodes import CopyNode, CopySide, FillNode, PointerSlot, Template
from torch_overlay._inductor.relaunch.runner import Runner
from torch_overlay._inductor.relaunch.states import State


driver: relaunch_driver.Driver


def setUpModule() -> None:
    global driver
    driver = relaunch_driver.driver()


SLAB, ALIASED = 0x7F00_0000_0000, 0x2B75_A600_0000
WIDTH = 1 << 20


def linear(index: int, handle: int, **fields: Any) -> CopyNode:
    """A copy of WIDTH bytes; `out` to the slab, otherwise from it."""
    out = fields.pop("out", False)
    dst, src = (SLAB, ALIASED) if out else (ALIASED, SLAB)
    sides = CopySide(dst, fields.pop("pitch", 0), fields.pop("rows", 0), out), CopySide(src, on_host=not out)
    return CopyNode(index, handle, sides, **{"width": WIDTH, "height": 1, "depth": 1, **fields})


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
        return api, executable.settle(
            given, lambda size, stride, dtype: torch.empty(size, dtype=dtype), cu.Driver(api, api)
        )

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
        node = CopyNode(0, 0x50, (CopySide(ALIASED), CopySide(ALIASED + WIDTH)), WIDTH, 1, 1)
        api, memory = self.settle(Template(2, (node,), (PointerSlot(0, 0, 0, 0, 0), PointerSlot(0, 1, 0, 1, 0))), {})
        assert memory is not None
        _, dst, _, src = sides(api.params[0x50])
        self.assertEqual((dst, src), (memory.data_ptr(), memory.data_ptr() + WIDTH))

    def test_rows_have_room(self) -> None:
        node = linear(0, 0x50, width=100, height=3, depth=2, pitch=512, rows=4)
        self.assertEqual(executable.extent(node, 0), 100 + 512 * 2 + 512 * 4)
        _, memory = self.settle(Template(1, (node,), (PointerSlot(0, 0, 0, 0, 0),)), {})
        assert memory is not None
        self.assertGreaterEqual(memory.nbytes // 2, executable.extent(node, 0))

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


class TestRebuild(TestCase):
    def make(self, given: Template | None = None, refused: int = 0) -> Any:
        """A call of a graph whose executables below `refused` can't be pointed at other memory."""
        driver.library.stub_reset()
        driver.library.stub_refuse(refused)
        given = given or template()
        self.graph, self.calls = Graph(), []
        self.rebuild = executable.Rebuild(self.graph, executable.moving(given))
        self.enterContext(mock.patch.object(executable, "upload", lambda graph: self.calls.append("upload")))
        self.enterContext(mock.patch("torch.cuda.synchronize", lambda: self.calls.append("synchronize")))
        blocks = executable.call_maker(relaunch_driver.module(), 100, given, self.rebuild)
        inputs = tuple((k, 0) for k in range(given.regions))
        call = relaunch_driver.call_of(blocks, inputs=inputs, direct=True)
        return lambda *addresses: call.launch([At(address) for address in addresses])

    def driven(self) -> list[tuple[Any, ...]]:
        """Calls of the driver since the last look: (kind, executable or node, node, address on the device)."""
        found: list[tuple[Any, ...]] = []
        for kind, *values in driver.take():
            if kind == "launch":
                found.append((kind, int(values[0], 16)))
            elif kind == "fill":
                found.append((kind, int(values[0], 16), int(values[1], 16)))
            else:
                words = struct.unpack("<25Q", bytes.fromhex(values[-1 if kind == "in_graph" else 2]))
                found.append(
                    (kind, *[int(v, 16) for v in values[: 1 if kind == "in_graph" else 2]], words[17] or words[6])
                )
        return found

    def test_driver_that_follows_is_asked_for_no_more(self) -> None:
        self.make()(0x1000, 0x2000)
        copies = ("copy", 100, 0x50, 0x1040), ("fill", 100, 0x51), ("copy", 100, 0x52, 0x2000)
        self.assertEqual(self.driven(), [*copies, ("launch", 100)])
        self.assertEqual((self.calls, self.rebuild.count), ([], 0))

    def test_refused_copy_is_set_in_the_graph_and_the_executable_made_anew(self) -> None:
        before = counters["torch_overlay"]["cudagraph_rebuilds"]
        launch = self.make(refused=103)
        launch(0x1000, 0x2000)
        self.assertEqual(self.calls, ["synchronize", "upload"])
        # The other nodes are set in the new executable.
        in_graph = [("in_graph", 0x50, 0x1040), ("in_graph", 0x52, 0x2000)]
        self.assertEqual(self.driven(), [*in_graph, ("fill", 101, 0x51), ("launch", 101)])
        launch(0x1000, 0x2000)  # nothing moved
        self.assertEqual((self.driven(), self.rebuild.count), ([("launch", 101)], 1))
        launch(0x1000, 0x3000)  # one region moved: the other is where it was
        in_graph = [("in_graph", 0x50, 0x1040), ("in_graph", 0x52, 0x3000)]
        self.assertEqual(self.driven(), [*in_graph, ("fill", 102, 0x51), ("launch", 102)])
        self.assertEqual(counters["torch_overlay"]["cudagraph_rebuilds"] - before, 2)

    def test_refusal_at_a_later_launch(self) -> None:
        launch = self.make()
        launch(0x1000, 0x2000)
        driver.library.stub_refuse(101)
        driver.take()
        launch(0x1000, 0x4000)
        in_graph = [("in_graph", 0x50, 0x1040), ("in_graph", 0x52, 0x4000)]
        self.assertEqual(self.driven(), [*in_graph, ("fill", 101, 0x51), ("launch", 101)])

    def test_other_errors_are_the_callers(self) -> None:
        for name, refused in (("cuGraphExecMemsetNodeSetParams", 0), ("cuGraphMemcpyNodeSetParams", 101)):
            launch = self.make(refused=refused)
            driver.fail(name, 1)
            with self.assertRaisesRegex(RuntimeError, name):
                launch(0x1000, 0x2000)
            self.assertEqual(self.rebuild.count, 0)
            self.assertNotIn("launch", [call[0] for call in self.driven()])
            launch(0x1000, 0x2000)
            self.assertEqual(self.driven()[-1], ("launch", 100 + self.rebuild.count))

    def test_executable_that_is_gone_is_not_patched(self) -> None:
        """To make it anew destroys the old one, also when that fails."""
        for failing in ("instantiate", "upload"):
            with self.subTest(failing=failing):
                launch = self.make(refused=101)
                launch(0x1000, 0x2000)
                no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
                owner: Any = self.graph if failing == "instantiate" else executable
                with mock.patch.object(owner, failing, no_memory), self.assertRaises(torch.OutOfMemoryError):
                    launch(0x3000, 0x2000)
                gone = self.graph.executable
                driver.take()
                launch(0x1000, 0x2000)
                self.assertGreater(self.graph.executable, gone)
                in_graph = [("in_graph", 0x50, 0x1040), ("in_graph", 0x52, 0x2000)]
                made = self.graph.executable
                self.assertEqual(self.driven(), [*in_graph, ("fill", made, 0x51), ("launch", made)])

    def test_rows_are_never_patched(self) -> None:
        rows = linear(0, 0x50, width=100, height=3, pitch=512)
        launch = self.make(Template(1, (rows,), (PointerSlot(0, 0, 0, 0, 0),)))
        launch(0x1000)
        self.assertEqual(self.driven(), [("in_graph", 0x50, 0x1000), ("launch", 101)])
        self.assertEqual(self.rebuild.count, 1)

    def owned(self) -> tuple[Runner, State]:
        """A runner and its state, whose graph is given up when it has been made anew too often."""
        owner = self.enterContext(fake_device())
        made, state = Runner(lambda inputs: None, CodeFacts("a region", 0), owner), State()
        state.relaunch = object()  # type: ignore[assignment]
        return made, state

    def test_region_whose_graph_is_made_anew_again_and_again_runs_without_one(self) -> None:
        owner, state = self.owned()
        launch = self.make(refused=200)
        self.rebuild.give_up = functools.partial(
            region_graphs._give_up, weakref.ref(owner.region_graphs), weakref.ref(state)
        )
        with mock.patch.object(causes, "refuse") as refuse:
            for i in range(executable.MOST_REBUILDS - 1):
                launch(0x1000 * (i + 1), 0x2000)
            self.assertFalse(state.refused)
            launch(0x9_0000, 0x2000)
        self.assertTrue(state.refused)
        self.assertIsNone(state.relaunch)
        ((refused,), _) = refuse.call_args
        self.assertEqual(refused.code, "host-memory")
        self.assertIn(f"moved {executable.MOST_REBUILDS} times", refused.message)
        self.assertIn("cuGraphExecMemcpyNodeSetParams: invalid argument (1), at node 0 (memcpy)", refused.message)

    def test_graph_is_not_dropped_while_a_thread_that_may_wait_for_its_launch_has_the_lock(self) -> None:
        """A finalizer launches while the lock of the states is held, and waits for this launch."""
        owner, state = self.owned()
        launch = self.make(refused=200)
        self.rebuild.give_up = functools.partial(
            region_graphs._give_up, weakref.ref(owner.region_graphs), weakref.ref(state)
        )

        def launches(first: int) -> None:
            for i in range(executable.MOST_REBUILDS):
                launch(0x1000 * (first + i), 0x2000)

        with mock.patch.object(causes, "refuse") as refuse:
            thread = threading.Thread(target=launches, args=(1,), daemon=True)
            with owner.states.lock:
                thread.start()
                thread.join(10)
                self.assertFalse(thread.is_alive(), "it waits for the lock")
            self.assertIsNotNone(state.relaunch)
            launches(100)
        self.assertIsNone(state.relaunch)
        refuse.assert_called_once()
