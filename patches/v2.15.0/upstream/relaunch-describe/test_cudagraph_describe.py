# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._guards import CompileContext, CompileId
from torch._inductor.cudagraph_relaunch import describe as module
from torch._inductor.cudagraph_relaunch.describe import (
    describe,
    describe_partition,
    describe_whole,
)
from torch._inductor.cudagraph_relaunch.partitions import Partitions
from torch.testing._internal.common_utils import run_tests, TestCase


KNOWN = {"device_index": 0, "is_backward": False, "is_inference": True}
TRAINING = KNOWN | {"is_inference": False}


def trace(line):
    return f'  File "/model.py", line {line}, in f\n    y = g(x)\n'


def placeholder(line):
    """An input of code, whose first user is of this line."""
    return SimpleNamespace(users=[SimpleNamespace(stack_trace=trace(line))])


def partition(inputs, outputs):
    return SimpleNamespace(input_index_mapping=inputs, output_index_mapping=outputs)


class DescribeTestCase(TestCase):
    def setUp(self):
        super().setUp()
        for name in ("index_now", "written_index"):
            self.enterContext(mock.patch.object(module, name, lambda device: device))
        context = CompileContext(CompileId(frame_id=3, frame_compile_id=0))
        self.enterContext(torch._guards.compile_context(context))


class TestWhole(DescribeTestCase):
    def test_kinds(self):
        for kwargs, kind in (
            (KNOWN, "inference"),
            (TRAINING, "forward"),
            (TRAINING | {"is_backward": True}, "backward"),
        ):
            code = describe(None, [0], **kwargs)
            self.assertEqual(code.name, f"{kind} of compiled frame 3/0")
            self.assertEqual(code.is_backward, kind == "backward")
            self.assertEqual(code.static_inputs, (0,))

    def test_outputs_that_are_saved(self):
        graph = SimpleNamespace(relaunch_visible_outputs=(0,))
        for kwargs, saved in (
            (TRAINING, {1, 2}),
            (KNOWN, set()),
            (TRAINING | {"is_backward": True}, set()),
        ):
            code = describe(graph, (), stack_traces=[""] * 3, **kwargs)
            self.assertEqual(code.saved_outputs, saved)
        code = describe(None, (), stack_traces=[""] * 3, **TRAINING)
        self.assertEqual(code.saved_outputs, set())

    def test_line(self):
        inputs = {"placeholders": [placeholder(5)], "stack_traces": [None, trace(7)]}
        self.assertIn("/model.py:5", describe(None, (), **inputs, **KNOWN).source)
        inputs["placeholders"] = []
        self.assertIn("/model.py:7", describe(None, (), **inputs, **KNOWN).source)
        graph = SimpleNamespace(
            relaunch_partitions=Partitions(((4, "a kernel's", ()),)).plain()
        )
        self.assertEqual(describe(graph, (), **inputs, **KNOWN).source, "a kernel's")
        self.assertEqual(describe(None, (), **KNOWN).source, "")

    def test_frame_that_can_be_compiled_again(self):
        """Only code that was cut for relaunch is cut otherwise the next time."""
        self.assertIsNone(describe(None, (), **KNOWN).compile_id)
        graph = SimpleNamespace(relaunch_partitions=())
        self.assertEqual(str(describe(graph, (), **KNOWN).compile_id), "3/0")

    def test_device_of_this_rank(self):
        with (
            mock.patch.object(module, "written_index", lambda device: -1),
            mock.patch.object(module, "index_now", lambda device: 7 + device),
        ):
            self.assertEqual(describe(None, (), **KNOWN).device, 6)

    def test_numbers(self):
        graph = SimpleNamespace(relaunch_numbers=((2, 4), (-1,)))
        self.assertEqual(describe(graph, (), **KNOWN).numbers, {2, 4})

    def test_code_without_a_graph(self):
        graph = SimpleNamespace(
            fx_kwargs={"is_backward": True, "is_inference": False},
            cudagraph_info=None,
            disabled_cudagraphs_reason=f"an op. Found from : \n {trace(9)}",
            device_idxs={1},
        )
        code = describe_whole(graph)
        self.assertEqual(
            (code.name, code.device), ("backward of compiled frame 3/0", 1)
        )
        self.assertIn("/model.py:9", code.source)
        graph.disabled_cudagraphs_reason, graph.device_idxs = None, ()
        self.assertEqual((describe_whole(graph).source, code.is_backward), ("", True))
        graph.cudagraph_info = SimpleNamespace(
            placeholders=[placeholder(5)], stack_traces=None
        )
        self.assertIn("/model.py:5", describe_whole(graph).source)


class TestPartition(DescribeTestCase):
    def setUp(self):
        super().setUp()
        # Of four inputs and three outputs, of which the user sees the first. The first
        # partition's second output is read by the second partition alone.
        self.graph = SimpleNamespace(
            partition_maps=[
                partition([3, 0], [[2], None]),
                partition([None, 1, 2], [[0, 1], [1], []]),
            ],
            relaunch_visible_outputs=(0,),
            relaunch_numbers=((2,), (), (-1,)),
            relaunch_partitions=Partitions(((4, "one", ()), (2, "two", ()))).plain(),
        )
        self.known = TRAINING | {
            "stack_traces": [trace(k) for k in range(3)],
            "placeholders": [placeholder(k) for k in range(4)],
            "mutated_input_idxs": [0, 1],
        }

    def test_inputs_and_outputs(self):
        one, two = (
            describe_partition(self.graph, k, [2, 3], **self.known) for k in (0, 1)
        )
        self.assertEqual((one.static_inputs, two.static_inputs), ((0,), (2,)))
        self.assertEqual((one.mutated_inputs, two.mutated_inputs), ((1,), (0, 1)))
        self.assertEqual((one.saved_outputs, two.saved_outputs), ({0}, {1}))
        self.assertEqual((one.numbers, two.numbers), (set(), {-1}))
        self.assertEqual((one.source, two.source), ("one", "two"))
        self.assertEqual(one.name, "forward of compiled frame 3/0, partition 0")

    def test_only_partition(self):
        del self.graph.partition_maps[1]
        code = describe_partition(self.graph, 0, [], **self.known)
        self.assertEqual(code.name, "forward of compiled frame 3/0")


if __name__ == "__main__":
    run_tests()
