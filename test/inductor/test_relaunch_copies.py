"""Copies of a captured graph: pointed at real memory before the executable is made, and refused where the driver can't
point them elsewhere. The driver is `relaunch_driver`'s.
"""

import struct
from typing import Any

import torch
from torch._inductor.test_case import TestCase

import form  # noqa: F401
from stand_ins import relaunch_driver
from stand_ins.graph_api import FakeApi
from stand_ins.relaunch_driver import At, driver
from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.proof.nodes import (
    CopyNode,
    CopySide,
    FillNode,
    PointerSlot,
    Template,
    Unprovable,
)
from torch_overlay._inductor.relaunch.runner import COPY_SETTER
from torch_overlay.csrc import DriverError


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

    def test_rows_are_refused(self) -> None:
        node = linear(0, 0x50, width=100, height=3, pitch=512)
        with self.assertRaisesRegex(Unprovable, r"node 0 \(memcpy\): it copies several rows"):
            self.settle(Template(1, (node,), (PointerSlot(0, 0, 0, 0, 0),)), {})

    def test_graph_without_such_copies_is_left_alone(self) -> None:
        fixed = Template(1, (linear(0, 0x50),), (PointerSlot(0, 0, 0, -1, 0),))
        for given in (Template(1, (), ()), fixed):
            api, memory = self.settle(given, {})
            self.assertEqual((api.params, memory), ({}, None))


class TestRefused(TestCase):
    def make(self, refused: int = 0) -> Any:
        """A call of a graph, whose copies can't be set if its executable, 100, is below `refused`."""
        driver().library.stub_reset()
        driver().library.stub_refuse(refused)
        blocks = executable.call_maker(relaunch_driver.module(), 100, template())
        on_stream = {"direct": True, "device": (0, int, lambda index: 5, 0)}
        return relaunch_driver.call_of(blocks, inputs=((0, 0), (1, 0)), **on_stream)

    def launch(self, call: Any, *addresses: int) -> None:
        call.launch([At(address) for address in addresses])

    def driven(self) -> list[tuple[Any, ...]]:
        """Calls of the driver since the last look: (kind, executable or node, node, address on the device)."""
        found: list[tuple[Any, ...]] = []
        for kind, *values in driver().take():
            if kind == "launch":
                found.append((kind, int(values[0], 16)))
            elif kind == "fill":
                found.append((kind, int(values[0], 16), int(values[1], 16)))
            else:
                words = struct.unpack("<25Q", bytes.fromhex(values[2]))
                found.append((kind, *[int(v, 16) for v in values[:2]], words[17] or words[6]))
        return found

    def test_driver_that_follows(self) -> None:
        self.launch(self.make(), 0x1000, 0x2000)
        copies = ("copy", 100, 0x50, 0x1040), ("fill", 100, 0x51), ("copy", 100, 0x52, 0x2000)
        self.assertEqual(self.driven(), [*copies, ("launch", 100)])

    def test_refused_copy_is_named_and_nothing_is_launched(self) -> None:
        call = self.make(refused=101)
        with self.assertRaisesRegex(DriverError, r"invalid argument \(1\), at node 0 \(memcpy\)") as raised:
            self.launch(call, 0x1000, 0x2000)
        self.assertEqual(raised.exception.function, COPY_SETTER)
        self.assertEqual((self.driven(), call.launches), ([], 0))

    def test_refusal_at_a_later_launch(self) -> None:
        """The launch that may return None does, and leaves its inputs; a further one sets each node again."""
        call = self.make()
        self.launch(call, 0x1000, 0x2000)
        driver().library.stub_refuse(101)
        driver().take()
        inputs = [At(0x1000), At(0x4000)]
        self.assertIsNone(call.try_launch(inputs))
        self.assertEqual((len(inputs), self.driven(), call.launches), (2, [], 1))
        driver().library.stub_refuse(0)
        self.assertIsNotNone(call.try_launch(inputs))
        copies = ("copy", 100, 0x50, 0x1040), ("fill", 100, 0x51), ("copy", 100, 0x52, 0x4000)
        self.assertEqual(self.driven(), [*copies, ("launch", 100)])

    def test_other_errors_are_the_callers(self) -> None:
        call = self.make()
        driver().fail("cuGraphExecMemsetNodeSetParams", 1)
        with self.assertRaisesRegex(DriverError, "cuGraphExecMemsetNodeSetParams"):
            call.try_launch([At(0x1000), At(0x2000)])
        self.assertNotIn("launch", [kind for kind, *_ in self.driven()])
