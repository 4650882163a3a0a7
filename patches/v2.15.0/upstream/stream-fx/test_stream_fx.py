# Owner(s): ["module: aotdispatch"]

import operator

import torch
from torch._functorch._streams import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import run_tests, TestCase


aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
higher = torch.ops.higher_order
MODE = FakeTensorMode()


def fake(device="cuda", dtype=torch.float32):
    data = torch.empty(4, device="meta", dtype=dtype)
    return FakeTensor(MODE, data, torch.device(device))


class TestCaseOfNodes(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.gpu = self.value("gpu", fake())
        self.cpu = self.value("cpu", fake("cpu"))

    def value(self, name, val=None):
        node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def call(self, target, *args, val=None, stream=None, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        if stream is not None:
            fx.place_on(node, stream)
        return node


class TestStreams(TestCaseOfNodes):
    def test_operations_of_the_stream_program(self):
        record = self.call(streams.record_event.default, 1, 0)
        wait = self.call(streams.wait_event, 1, 0)  # as Dynamo writes it
        relu = self.call(aten.relu.default, self.gpu)
        nodes = (record, wait, relu, self.gpu)
        self.assertEqual(
            [fx.is_stream_op(n) for n in nodes], [True, True, False, False]
        )
        device = self.call(streams.synchronize_device.default, 0)
        event = self.call(streams.synchronize_event.default, 1)
        nodes = (device, event, record)
        found = [
            (fx.is_synchronization(n), fx.is_device_synchronization(n)) for n in nodes
        ]
        self.assertEqual(found, [(True, True), (True, False), (False, False)])

    def test_placement_of_a_node_is_not_that_of_nodes_it_shares_a_dict_with(self):
        a, b = (self.call(aten.relu.default, self.gpu) for _ in "ab")
        a.meta["custom"] = b.meta["custom"] = {"other": 1}
        fx.place_on(a, 3)
        self.assertEqual([fx.node_stream(n) for n in (a, b, self.gpu)], [3, 0, 0])
        self.assertEqual(a.meta["custom"], {"other": 1, "stream": 3})
        fx.place_on(a, 0)
        self.assertEqual(a.meta["custom"], {"other": 1})
        fx.set_custom(a, "other", None)
        self.assertNotIn("custom", a.meta)

    def test_first_reader_of_an_input_gives_its_stream(self):
        """Freeing it, or a detached value that nobody may read, is no read."""
        self.call(streams.sync_dealloc.default, 1, 0, self.gpu, stream=1)
        self.call(aten.detach.default, self.gpu, stream=2)
        self.call(aten.relu.default, self.gpu, stream=3)
        self.call(aten.relu.default, self.gpu, stream=4)
        self.assertEqual(fx.first_readers(self.graph.nodes), {self.gpu: 3})

    def test_nodes_of_the_backward(self):
        node = self.call(aten.relu.default, self.gpu)
        self.assertFalse(fx.is_backward(node))
        node.meta["partitioner_tag"] = "is_backward"
        self.assertTrue(fx.is_backward(node))
        node.meta = {fx.BACKWARD: True}
        self.assertTrue(fx.is_backward(node))


class TestMemory(TestCaseOfNodes):
    def test_views(self):
        view = self.call(aten.view.default, self.gpu, [4])
        split = self.call(aten.split.Tensor, view, 2)
        part = self.call(operator.getitem, split, 0)
        add = self.call(aten.add.Tensor, part, 1)
        pair = self.call(aten.max.dim, add, 0)
        item = self.call(operator.getitem, pair, 0)
        nodes = (view, split, add, pair)
        self.assertEqual([fx.is_view(n) for n in nodes], [True, True, False, False])
        self.assertEqual(
            [fx.viewed(n) for n in (part, add, item)], [self.gpu, add, item]
        )

    def test_update_in_place_names_its_first_argument(self):
        """Its result is no view that a pass could leave out."""
        self.assertFalse(fx.is_view(self.call(aten.relu_.default, self.gpu)))

    def test_conversion_to_its_own_type_is_a_view_at_the_ends_of_copies(self):
        def convert(value, dtype=torch.float32):
            target = prims.convert_element_type.default
            return self.call(target, value, dtype, val=fake(dtype=dtype))

        loaded = self.call(prims.device_put.default, self.cpu, "cuda", True, val=fake())
        self.assertTrue(fx.is_view(convert(loaded)))
        self.assertFalse(fx.is_view(convert(loaded, torch.float16)))
        stored = convert(self.gpu)
        self.assertFalse(fx.is_view(stored))  # x.to(torch.float32, copy=True)
        self.call(prims.device_put.default, stored, "cpu", True)
        self.assertTrue(fx.is_view(stored))
        self.call(aten.relu.default, stored)
        self.assertFalse(fx.is_view(stored))

    def test_updated_operands(self):
        out = self.call(aten.add.out, self.gpu, self.cpu, out=self.gpu)
        self.assertEqual(fx.updated_operands(out), [self.gpu])
        copy = self.call(aten.copy_.default, self.cpu, self.gpu)
        self.assertEqual(fx.updated_operands(copy), [self.cpu])
        lists = self.call(aten._foreach_add_.Scalar, [self.gpu, self.cpu], 1)
        self.assertEqual(fx.updated_operands(lists), [self.gpu, self.cpu])
        self.assertEqual(
            fx.updated_operands(self.call(aten.relu.default, self.gpu)), []
        )
        cond = self.call(higher.cond, self.gpu, None, None, (self.cpu,))
        self.assertEqual(fx.updated_operands(cond), [self.gpu, self.cpu])  # any of them

    def test_values_that_functionalized_calls_update(self):
        target = aten.add.out  # it returns one value, the new ones come after
        call = self.call(higher.auto_functionalized_v2, target, _all_bases=[self.gpu])
        self.assertEqual(fx.written_arguments(call), {1: self.gpu})
        nothing = aten._foreach_add_.Scalar  # then the first value is None
        call = self.call(higher.auto_functionalized_v2, nothing, _all_bases=[self.gpu])
        self.assertEqual(fx.written_arguments(call), {1: self.gpu})
        call = self.call(
            higher.auto_functionalized, target, out=self.gpu, other=self.cpu
        )
        self.assertEqual(fx.written_arguments(call), {1: self.gpu})
        names = {"kwargs": {"p": self.gpu, "q": self.cpu}, "tensors_to_clone": ["q"]}
        call = self.call(higher.triton_kernel_wrapper_functional, **names)
        self.assertEqual(fx.written_arguments(call), {"q": self.cpu})
        self.assertEqual(fx.written_arguments(self.call(target, self.gpu, 1)), {})
        self.assertEqual(fx.written_arguments(None), {})

    def test_constants(self):
        zeros = self.call(aten.zeros.default, [4])
        twice = self.call(aten.mul.Tensor, zeros, 2)
        noise = self.call(aten.rand.default, [4])
        added = self.call(aten.add.Tensor, twice, self.gpu)
        self.assertEqual(fx.constants(self.graph), {zeros, twice})
        self.call(
            aten.copy_.default, self.call(aten.view.default, zeros, [4]), self.gpu
        )
        self.assertNotIn(zeros, fx.constants(self.graph))
        self.assertFalse({noise, added} & fx.constants(self.graph))

    def test_updates_as_the_user_writes_them(self):
        def shift_(x):
            return x

        for written in ("add_", operator.iadd, operator.setitem, shift_):
            self.assertTrue(fx.updates_in_place(written), written)
        for written in ("add", "__add__", "__iadd__", operator.add, torch.relu):
            self.assertFalse(fx.updates_in_place(written), written)

    def test_views_and_stream_operations_launch_nothing(self):
        self.call(streams.record_event.default, 1, 0)
        self.call(aten.relu.default, self.gpu)  # nobody reads it
        parts = self.call(aten.split.Tensor, self.gpu, 2)
        self.graph.output(self.call(operator.getitem, parts, 0))
        self.assertFalse(fx.launches_kernels(GraphModule({}, self.graph)))
        (output,) = self.graph.find_nodes(op="output")
        with self.graph.inserting_before(output):
            output.args = (self.call(aten.relu.default, self.gpu),)
        self.assertTrue(fx.launches_kernels(GraphModule({}, self.graph)))


class TestHost(TestCaseOfNodes):
    def test_copies_for_which_the_host_waits(self):
        gpu, cpu = (node.meta["val"] for node in (self.gpu, self.cpu))
        copies = [
            (aten._to_copy.default, (self.gpu,), cpu),
            (aten._to_copy.default, (self.gpu,), gpu),
            (prims.device_put.default, (self.gpu, "cpu"), cpu),
            (prims.device_put.default, (self.gpu, "cpu", False), cpu),
            (prims.device_put.default, (self.cpu, "cpu"), cpu),
            (aten.copy.default, (self.cpu, self.gpu), cpu),
            (aten.copy_.default, (self.gpu, self.cpu), gpu),
            (aten.copy_.default, (self.gpu, self.gpu), gpu),
        ]
        waits = [True, False, True, True, False, True, True, False]
        found = [
            fx.blocks_host(self.call(op, *args, val=val)) for op, args, val in copies
        ]
        self.assertEqual(found, waits)

    def test_number_of_a_tensor(self):
        node = self.call(aten._local_scalar_dense.default, self.gpu)
        self.assertTrue(fx.blocks_host(node))
        self.assertFalse(fx.blocks_host(self.call(aten.relu.default, self.gpu)))

    def test_copies_for_which_it_does_not_wait(self):
        for node in (
            self.call(
                aten._to_copy.default, self.gpu, non_blocking=True, val=fake("cpu")
            ),
            self.call(prims.device_put.default, self.gpu, "cpu", True, val=fake("cpu")),
            self.call(aten.copy.default, self.cpu, self.gpu, True, val=fake("cpu")),
        ):
            self.assertFalse(fx.blocks_host(node))

    def test_asynchronous_copies_into_memory_that_the_user_names(self):
        def copy(*args):
            return fx.is_asynchronous_copy(self.call(aten.copy.default, *args))

        self.assertTrue(copy(self.cpu, self.gpu, True))
        self.assertTrue(copy(self.gpu, self.cpu, True))
        self.assertFalse(copy(self.gpu, self.gpu, True))
        self.assertFalse(copy(self.gpu, self.cpu, False))
        self.assertFalse(copy(self.gpu, self.cpu))


if __name__ == "__main__":
    run_tests()
