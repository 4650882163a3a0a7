"""`upstream_fixes.partition_concat`: results of a concatenation that a partition reads."""

import torch
import torch._inductor.config
from torch._inductor import ir
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import Program


aten, prims = torch.ops.aten, torch.ops.prims
KINDS = {ir.ComputedBuffer: "computed", ir.ConcatKernel: "cat", ir.DeviceCopy: "moved", ir.ExternKernelOut: "mm"}


class TestPartitionConcat(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.x = self.program.input(64, 64)

    def mm(self, x, y):
        return self.program.call(aten.mm.default, x, y)

    def cat(self, *parts):
        return self.program.call(aten.cat.default, list(parts))

    def moved(self):
        """A value that goes over the host, which splits the graph."""
        value = self.program.call(aten.add.Tensor, self.x, 1)
        for device in ("cpu", "cuda:0"):
            value = self.program.call(prims.device_put.default, value, torch.device(device))
        return value

    def partitions(self, *results):
        """What each partition for CUDA graphs takes and returns: buffers by their kind,
        inputs by name."""
        self.program.output(*results)
        options = {"triton.cudagraphs": True, "graph_partition": True}

        def named(node):
            buffer = scheduler.name_to_buf.get(node.get_name())
            return node.get_name() if buffer is None else KINDS[type(buffer.node)]

        with torch._inductor.config.patch(options), self.program.scheduled() as scheduler:
            _, signatures = scheduler.graph_partition()
            return [
                tuple(sorted(map(named, nodes)) for nodes in (s.input_nodes.values(), s.output_nodes))
                for s in signatures
            ]

    def test_parts_in_two_partitions(self):
        whole = self.cat(self.mm(self.x, self.x), self.mm(self.moved(), self.x))
        self.assertEqual(
            self.partitions(whole),
            [(["x0"], ["cat", "computed", "x0"]), (["computed"], ["moved"]), (["cat", "moved", "x0"], ["cat"])],
        )

    def test_concatenation_of_a_concatenation(self):
        first = self.cat(self.mm(self.x, self.x), self.mm(self.x, self.x))
        self.assertEqual(
            self.partitions(self.cat(first, self.mm(self.moved(), self.x))),
            [(["x0"], ["cat", "computed", "x0"]), (["computed"], ["moved"]), (["cat", "moved", "x0"], ["cat"])],
        )

    def test_part_that_something_else_reads(self):
        part, other = self.mm(self.x, self.x), self.moved()
        whole = self.cat(part, self.mm(other, self.x))
        self.assertEqual(
            self.partitions(whole, self.mm(part, other)),
            [
                (["x0"], ["cat", "computed", "mm", "x0"]),
                (["computed"], ["moved"]),
                (["cat", "mm", "moved", "x0"], ["cat", "mm"]),
            ],
        )

    def test_parts_in_one_partition(self):
        other = self.moved()
        whole = self.cat(self.mm(self.x, other), self.mm(other, self.x))
        self.assertEqual(
            self.partitions(whole),
            [(["x0"], ["computed", "x0"]), (["computed"], ["moved"]), (["moved", "x0"], ["cat"])],
        )
