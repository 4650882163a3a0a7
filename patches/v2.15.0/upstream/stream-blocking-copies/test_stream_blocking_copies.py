# Owner(s): ["module: aotdispatch"]

import operator

import torch
from torch._dynamo._streams import registry
from torch._functorch._streams.blocking_copies import (
    keep_waits,
    orders_by_blocking,
    split_lists,
)
from torch._functorch._streams.fx import place_on
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.testing._internal.common_utils import run_tests, TestCase


aten, streams = torch.ops.aten, torch.ops.streams
WAIT = streams.synchronize_stream.default
MODE = FakeTensorMode()


def fake(device="cuda", size=(4,)):
    return FakeTensor(MODE, torch.empty(size, device="meta"), torch.device(device))


class CopiesCase(TestCase):
    def setUp(self):
        super().setUp()
        registry.reset()
        self.addCleanup(registry.reset)
        self.addCleanup(setattr, registry, "_has_streams", registry._has_streams)
        registry.note_streams()
        self.graph = Graph()
        self.gpu, self.cpu = self.value("gpu", fake()), self.value("cpu", fake("cpu"))

    def value(self, name, val):
        node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def call(self, target, *args, val=None, stream=0, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake() if val is None else val
        place_on(node, stream)
        return node

    def copy(self, source, device, stream=0, size=(4,), **kwargs):
        val = fake(device, size)
        target = aten._to_copy.default
        return self.call(target, source, val=val, stream=stream, **kwargs)


class TestGraphsWithoutStreams(CopiesCase):
    def orders(self):
        return orders_by_blocking(list(self.graph.nodes))

    def test_copy_blocks(self):
        self.copy(self.gpu, "cpu")
        self.assertTrue(self.orders())

    def test_program_has_no_streams(self):
        registry._has_streams = False
        self.copy(self.gpu, "cpu")
        self.assertFalse(self.orders())

    def test_no_copy_blocks(self):
        self.copy(self.gpu, "cpu", non_blocking=True)
        self.copy(self.gpu, "cuda")
        self.assertFalse(self.orders())

    def test_single_number(self):
        number = self.value("lr", fake("cpu", ()))
        self.copy(number, "cuda", size=())
        self.assertFalse(self.orders())
        self.call(aten._local_scalar_dense.default, self.gpu, val=fake("cpu", ()))
        self.assertTrue(self.orders())


class TestKeepWaits(CopiesCase):
    def setUp(self):
        super().setUp()
        registry.current().goes_on = True

    def waits(self, *results):
        """The copies before which there is a wait, and the waits' streams."""
        self.graph.output(results)
        keep_waits(self.graph)
        found = self.graph.find_nodes(op="call_function", target=WAIT)
        return [(wait.next, *wait.args) for wait in found]

    def test_copy_that_nobody_reads(self):
        copy = self.copy(self.gpu, "cpu", stream=2)
        copy.meta |= {"stack_trace": "here", "seq_nr": 3, "other": 4}
        self.assertEqual(self.waits(self.gpu), [(copy, 2)])
        meta = copy.prev.meta
        self.assertEqual(meta.keys(), {"custom", "stack_trace", "seq_nr"})
        self.assertEqual(meta["stack_trace"], "here")

    def test_copy_that_is_read(self):
        copy = self.copy(self.gpu, "cpu")
        self.assertEqual(self.waits(copy), [])

    def test_only_reader_is_not_read(self):
        copy = self.copy(self.gpu, "cpu")
        self.call(aten.relu.default, copy, val=fake("cpu"))
        self.assertEqual(self.waits(), [(copy, 0)])

    def test_overwritten_tensor_is_not_read(self):
        copy = self.copy(self.cpu, "cuda", stream=1)
        over = self.call(aten.copy.default, copy, self.gpu)
        self.assertEqual(self.waits(over), [(copy, 1)])

    def test_source_of_an_overwriting_copy_is_read(self):
        copy = self.copy(self.cpu, "cuda", stream=1)
        over = self.call(aten.copy.default, self.gpu, copy)
        self.assertEqual(self.waits(over), [])

    def test_side_effect_reads(self):
        copy = self.copy(self.cpu, "cuda", stream=1)
        self.call(aten.copy_.default, self.gpu, copy)
        self.assertEqual(self.waits(), [])

    def test_copy_of_a_constant(self):
        zeros = self.call(aten.zeros.default, [4], val=fake("cpu"))
        copy = self.copy(zeros, "cuda", stream=3)
        self.assertEqual(self.waits(copy), [(copy, 3)])

    def test_number_that_is_a_constant(self):
        zero = self.call(aten.zeros.default, [], val=fake("cpu", ()))
        copy = self.copy(zero, "cuda", size=())
        self.assertEqual(self.waits(copy), [])

    def test_copy_that_does_not_block(self):
        self.copy(self.gpu, "cpu", non_blocking=True)
        self.assertEqual(self.waits(), [])

    def test_copy_of_the_backward(self):
        self.copy(self.gpu, "cpu").meta["partitioner_tag"] = "is_backward"
        self.assertEqual(self.waits(), [])

    def test_graph_breaks(self):
        for goes_on, is_resumed in ((False, False), (False, True), (True, False)):
            self.graph = Graph()
            copy = self.copy(self.value("x", fake()), "cpu")
            registry.current().goes_on = goes_on
            registry.current().is_resumed = is_resumed
            expected = [(copy, 0)] if goes_on or is_resumed else []
            self.assertEqual(self.waits(), expected)


class TestLists(CopiesCase):
    def lists(self, *args, devices=("cuda", "cpu"), **kwargs):
        targets = [self.value(f"t{i}", fake()) for i in range(2)]
        sources = [self.value(f"s{i}", fake(d)) for i, d in enumerate(devices)]
        val = [fake(), fake()]
        target = aten._foreach_copy.default
        node = self.call(target, targets, sources, *args, val=val, stream=2, **kwargs)
        made = [self.call(operator.getitem, node, i, val=val[i]) for i in (1, 0)]
        self.graph.output(made)
        split_lists(self.graph)
        self.graph.lint()
        copies = self.graph.find_nodes(op="call_function", target=aten.copy.default)
        return targets, sources, val, copies

    def test_each_copy_is_one_of_its_own(self):
        for args, kwargs, given in (
            ((), {}, ()),
            ((True,), {}, (True,)),
            ((), {"non_blocking": True}, (True,)),
        ):
            self.setUp()
            targets, sources, val, copies = self.lists(*args, **kwargs)
            found = [copy.args for copy in copies]
            self.assertEqual(found, [(t, s, *given) for t, s in zip(targets, sources)])
            self.assertEqual([c.meta["custom"]["stream"] for c in copies], [2, 2])
            self.assertTrue(all(c.meta["val"] is v for c, v in zip(copies, val)))
            (results,) = self.graph.output_node().args
            self.assertEqual(results, copies[::-1])
            self.assertEqual(len(self.graph.nodes), 2 + 4 + 2 + 1)

    def test_list_of_one_device(self):
        *_, copies = self.lists(devices=("cuda", "cuda"))
        self.assertEqual(list(copies), [])


if __name__ == "__main__":
    run_tests()
