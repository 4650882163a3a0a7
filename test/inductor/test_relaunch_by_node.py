"""Tests of launches that launch the kernels of a graph one by one, instead of setting most nodes of its executable."""

import ctypes
import dataclasses
import random
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from stand_ins import relaunch_driver
from stand_ins.relaunch_driver import kernel, word
from torch_overlay import csrc
from torch_overlay._inductor.relaunch.graph.subgraph import Part
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.launch.executable import make_blocks
from torch_overlay._inductor.relaunch.proof.nodes import PointerSlot, Template
from torch_overlay.orders import only_order


COUNT, SIZE = 9, 64  # of attributes, and bytes of one


def attributes(**values):
    """As the graph reader gives them: the value of each attribute by its place."""
    parts = [values.get(f"_{k}", 0).to_bytes(SIZE, "little") for k in range(COUNT)]
    return b"".join(parts)


class TestOrder(TestCase):
    def test_chain(self):
        self.assertEqual(only_order(3, [(0, 1), (1, 2)]), (0, 1, 2))
        self.assertEqual(only_order(3, [(2, 0), (0, 1), (2, 1)]), (2, 0, 1))
        self.assertEqual((only_order(1, []), only_order(0, [])), ((0,), ()))

    def test_several_orders(self):
        for nodes, edges in ((2, []), (3, [(0, 1)]), (3, [(0, 1), (0, 2)]), (4, [(0, 2), (1, 2), (2, 3)])):
            self.assertIsNone(only_order(nodes, edges))

    def test_drawn(self):
        draw = random.Random(3)
        for _ in range(50):
            nodes = draw.randrange(2, 12)
            order = draw.sample(range(nodes), nodes)
            chain = list(zip(order, order[1:]))
            implied = [(order[i], order[draw.randrange(i + 1, nodes)]) for i in range(nodes - 1)]
            self.assertEqual(only_order(nodes, [*implied, *chain]), tuple(order))
            chain.pop(draw.randrange(len(chain)))
            self.assertIsNone(only_order(nodes, chain))


class TestInC(TestCase):
    def setUp(self):
        super().setUp()
        self.driver, self.module = relaunch_driver.driver(), relaunch_driver.module()
        self.driver.library.stub_reset()

    def bound(self, shared, nodes, regions=1, direct=True):
        """A call of a graph whose nodes read the only input at their first parameter."""
        slots = [PointerSlot(node.index, 0, 0, 0, 0) for node in nodes]
        template = Template(regions + 2, tuple(nodes), tuple(slots))
        return relaunch_driver.call_of(
            make_blocks(self.module, relaunch_driver.EXECUTABLE, template, shared),
            positions=(0,),
            masks=(0,),
            direct=direct,
            stream_of=lambda index: 0x55,
        )

    def run_at(self, call, tensor):
        """What the driver was told by a launch."""
        self.driver.take()
        call.launch([tensor])
        return self.driver.take()

    def pair(self, order=(1, 0), values=()):
        nodes = [kernel(0, word(1), b"\x05\0\0\0", grid=(9, 2, 1)), kernel(1, word(3))]
        launches = tuple((i, values[i] if values else b"") for i in order)
        shared = self.module.Shared(2, launches)
        return nodes, shared, self.bound(shared, nodes)

    def test_kernels_are_launched_in_order_with_all_that_they_get(self):
        cluster = attributes(_1=0x1_0000_0010, _6=0xFF, _7=2, _8=2)  # more blocks than any device must take
        nodes, _, call = self.pair(values=(cluster, attributes()))
        x = torch.zeros(4)
        lines = self.run_at(call, x)
        address = word(x.data_ptr()).hex()
        self.assertEqual(
            [line[:6] for line in lines],
            [
                ["run", hex(nodes[1].func), "1,2,3", "4,5,6", "7", "0x55"],
                ["run", hex(nodes[0].func), "9,2,1", "4,5,6", "7", "0x55"],
            ],
        )
        self.assertEqual(
            [line[6:] for line in lines], [[address, "-"], [f"{address},05000000", "4:100000010,14:ff,17:2,18:2"]]
        )
        self.assertEqual((call.by_node, call.launches, call.patched), (1, 1, 0))

    def test_kernel_without_a_function_is_launched_by_its_handle(self):
        nodes = [kernel(0, word(1), func=0, kern=kernel(0, word(1)).func)]
        call = self.bound(self.module.Shared(1, ((0, b""),)), nodes)
        self.assertEqual(self.run_at(call, torch.zeros(1))[0][1], hex(nodes[0].kern))

    def test_nodes_are_set_when_the_same_is_launched_again_and_again(self):
        _, _, call = self.pair()
        x = torch.zeros(4)
        kinds = [[line[0] for line in self.run_at(call, x)] for _ in range(5)]
        self.assertEqual(kinds, [["run"] * 2] * 2 + [["kernel"] * 2 + ["launch"], ["launch"], ["launch"]])
        self.assertEqual((call.by_node, call.patched), (2, 2))

    def test_kernels_apart_are_always_launched_one_by_one(self):
        nodes = [kernel(0, word(1)), kernel(1, word(3))]
        cluster = attributes(_1=0x1_0000_0002)
        call = self.bound(self.module.Shared(2, ((0, cluster), (1, cluster)), True), nodes)
        x = torch.zeros(4)
        for _ in range(6):
            self.assertEqual([line[0] for line in self.run_at(call, x)], ["run"] * 2)
        self.assertEqual((call.by_node, call.launches, call.patched), (6, 6, 0))

    def test_launchers_that_forget_their_nodes(self):
        """They launch on, and an executable's launcher makes others."""
        nodes = (kernel(0, word(1)), kernel(1, word(3)))
        template = Template(3, nodes, tuple(PointerSlot(node.index, 0, 0, 0, 0) for node in nodes))
        part = mock.Mock(spec=Part)
        part.raw_cuda_graph_exec.return_value = 0xE0
        with mock.patch.object(executable, "implementation", lambda: self.module):
            first = executable.Launcher(part, template, True, executable.shared(template, (0, 1)))
            moved = [dataclasses.replace(node, handle=0, grid=(9, 1, 1)) for node in nodes]
            first.forget()
            made = [
                first,
                first.with_template(dataclasses.replace(template, nodes=tuple(moved))),
                executable.ByNode(template, (0, 1)),
            ]
        for each in made:
            each.forget()
            self.assertEqual((each.template, each.nodes), (Template(3, (), ()), 2))
        self.driver.take()
        for each in made[:2]:
            call = relaunch_driver.call_of(each.exec, positions=(0,), masks=(0,))
            call.launch([torch.zeros(1)])
            self.assertEqual(call.patched, 2)
        told = [line[2:4] for line in self.driver.take()]
        grids = ["1,2,3"] * 2 + ["9,1,1"] * 2
        self.assertEqual(told, [[hex(node.handle), grid] for node, grid in zip(nodes * 2, grids)])

    def test_graphs_that_take_turns(self):
        nodes, shared, one = self.pair()
        other = self.bound(
            shared, [kernel(0, word(1), b"\x06\0\0\0", grid=(8, 2, 1)), kernel(1, word(3), grid=(7, 1, 1))]
        )
        x = torch.zeros(4)
        for _ in range(6):
            for call in (one, other):
                self.assertEqual([line[0] for line in self.run_at(call, x)], ["run"] * 2)
        for _ in range(4):
            last = self.run_at(one, x)
        self.assertEqual([line[0] for line in last], ["launch"])
        self.run_at(other, x)
        self.assertEqual([line[0] for line in self.run_at(one, x)], ["launch"], "the executable stayed as it was")
        self.assertEqual([line[0] for line in self.run_at(one, torch.zeros(9))], ["run"] * 2)

    def test_few_nodes_are_set(self):
        nodes = [kernel(i, word(1)) for i in range(5)]
        shared = self.module.Shared(5, tuple((i, b"") for i in range(5)))
        call = self.bound(shared, nodes)
        x = torch.zeros(4)
        for _ in range(3):
            self.run_at(call, x)
        other = self.bound(shared, [kernel(i, word(1), grid=(2, 1, 1) if i < 2 else (1, 2, 3)) for i in range(5)])
        kinds = [[line[0] for line in self.run_at(other, x)] for _ in range(2)]
        self.assertEqual(kinds, [["run"] * 5, ["kernel", "kernel", "launch"]], "two of five hold otherwise")

    def test_executable_that_other_kernels_were_launched_beside(self):
        """It held all of the last launch but one, and no longer does."""
        _, _, call = self.pair()
        x, y = torch.zeros(4), torch.zeros(4)
        for _ in range(4):
            self.run_at(call, x)
        kinds = [[line[0] for line in self.run_at(call, y)] for _ in range(3)]
        self.assertEqual(kinds, [["run"] * 2] * 2 + [["kernel"] * 2 + ["launch"]])

    def test_executable_that_the_driver_does_not_set(self):
        _, _, call = self.pair()
        x = torch.zeros(4)
        self.driver.fail("cuGraphExecKernelNodeSetParams", 1, 1)
        for _ in range(6):
            call.launch([x])
        self.assertEqual(call.by_node, 6)
        self.assertEqual([line[0] for line in self.run_at(call, x)], ["run"] * 2)

    def test_kernel_that_can_not_be_launched(self):
        _, _, call = self.pair()
        self.driver.fail("cuLaunchKernelEx", 1, 1)
        message = r"CUDA driver error in cuLaunchKernelEx: invalid argument \(1\), at node 0 \(kernel_0\)"
        with self.assertRaisesRegex(RuntimeError, message):
            call.launch([torch.zeros(1)])
        self.assertEqual((call.by_node, call.launches), (0, 0))
        self.assertEqual([line[0] for line in self.run_at(call, torch.zeros(1))], ["run"] * 2)
        self.assertEqual((call.by_node, call.launches), (1, 1))

    def test_function_that_a_library_has_allowed_less_shared_memory_since(self):
        func = kernel(0, word(1)).func
        for node in (kernel(0, word(1)), kernel(0, word(1), func=0, kern=func)):
            call = self.bound(self.module.Shared(1, ((0, b""),), True), [node])
            for _ in range(2):
                self.driver.library.stub_limit(ctypes.c_void_p(func), 6)
                self.assertEqual([line[:2] for line in self.run_at(call, torch.zeros(1))], [["run", hex(func)]])

    def test_graph_that_torch_launches(self):
        nodes, shared, _ = self.pair()
        call = self.bound(shared, nodes, direct=False)
        self.assertEqual([line[0] for line in self.run_at(call, torch.zeros(1))], ["kernel"] * 2)

    def test_arguments(self):
        self.assertEqual(self.module.Shared(2).launches, None)
        self.assertEqual(self.module.Shared(2, ((1, b""),)).launches, ((1, b""),))
        for launches, kind in (
            ([], TypeError), ((3,), TypeError), (((1,),), TypeError), (((2, b""),), ValueError),
            (((-1, b""),), ValueError), (((0, b"short"),), ValueError), (((0, 5),), TypeError),
            (((0, attributes(_0=1)),) * 9, ValueError),
        ):  # fmt: skip
            with self.assertRaises(kind):
                self.module.Shared(2, launches)

    def test_attributes_are_those_of_the_graph_reader(self):
        header = (csrc.FOLDER / "driver_api.h").read_text()
        self.assertIn(f"ATTRIBUTE_COUNT = {COUNT}, ATTRIBUTE_SIZE = {SIZE}", header)
