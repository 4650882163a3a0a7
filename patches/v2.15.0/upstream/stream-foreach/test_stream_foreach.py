# Owner(s): ["module: inductor"]

import operator

import torch
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten


class TestStreamsOfGroups(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.inputs = [self.program.input(64) for _ in range(2)]

    def foreach(self, stream):
        made = self.program.call(
            aten._foreach_add.Scalar, self.inputs, 1, stream=stream
        )
        return [
            self.program.call(operator.getitem, made, i, stream=stream) for i in (0, 1)
        ]

    def streams(self, *results):
        """The user's streams of nodes and of buffers, and whether nodes are groups."""
        self.program.output(*results)
        with self.program.scheduled() as scheduler:
            number = scheduler.stream_idx_to_user_obj_idx
            nodes = [
                number.get(scheduler.node_to_stream[n], 0) for n in scheduler.nodes
            ]
            buffers = {
                name: number.get(scheduler.buff_to_stream[name], 0)
                for node in scheduler.nodes
                for name in node.get_buffer_names()
            }
            groups = [
                isinstance(n, ForeachKernelSchedulerNode) for n in scheduler.nodes
            ]
            self.assertEqual(scheduler._multi_stream_nodes, any(nodes))
            return nodes, buffers, groups

    def test_operator_on_a_side_stream(self):
        nodes, buffers, groups = self.streams(*self.foreach(3))
        self.assertEqual((nodes, groups), ([3], [True]))
        self.assertEqual(buffers, {"buf0": 3, "buf1": 3})

    def test_operator_on_the_current_stream(self):
        self.assertEqual(self.streams(*self.foreach(0))[0], [0])

    def test_two_operators(self):
        nodes, _, groups = self.streams(*self.foreach(3), *self.foreach(5))
        self.assertEqual((sorted(nodes), groups), ([3, 5], [True] * 2))

    def test_other_nodes(self):
        sine = self.program.call(aten.sin.default, self.inputs[0], stream=3)
        x = self.program.input(4, 4)
        product = self.program.call(aten.mm.default, x, x)
        nodes, _, groups = self.streams(sine, product)
        self.assertEqual((sorted(nodes), groups), ([0, 3], [False] * 2))


if __name__ == "__main__":
    run_tests()
