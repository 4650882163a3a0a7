# Owner(s): ["module: inductor"]

import contextlib
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.cudagraph_relaunch import (
    concurrency,
    device as module,
    kernel_names,
    native,
    read as graphs,
    tidy,
)
from torch._inductor.cudagraph_relaunch.arrange import Arrangement
from torch._inductor.cudagraph_relaunch.chunks import CHUNK
from torch._inductor.cudagraph_relaunch.device import check_libraries, Cuda
from torch._inductor.cudagraph_relaunch.driver import DriverError
from torch._inductor.cudagraph_relaunch.nodes import (
    CapturedGraph,
    EmptyNode,
    FillNode,
    KernelNode,
    PointerSlot,
    Refusal,
    Segment,
    Template,
)
from torch.testing._internal.common_utils import run_tests, TestCase


LOW, STREAM = 0x7E00_0000_0000, 0x57
UNSUPPORTED = DriverError("cuGraphClone", 801, "not supported")


def kernel(index, address=0, name="add"):
    shape = (1, 1, 1), (32, 2, 1), 96
    word = address.to_bytes(8, "little")
    return KernelNode(index, 10 + index, name, 7, 0, 0, *shape, ((0, word),))


def graph_of(*nodes, edges=(), address=LOW):
    segments = (Segment(address, 512, 0),)
    return CapturedGraph(nodes, tuple(edges), segments, address, address + (1 << 20))


def captured(fixed=(), lines=None, **fields):
    graph = mock.Mock()
    graph.raw_cuda_graph.return_value = 0x61
    space = SimpleNamespace(low=LOW, high=LOW + (1 << 20))
    recording = SimpleNamespace(graph=graph, space=space, fixed=fixed, lines=lines)
    return SimpleNamespace(recording=recording, segments=(), **fields)


@unittest.skipUnless(torch.backends.cuda.is_built(), "needs a build with CUDA")
class DeviceTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.driver = mock.Mock()
        self.replace(module, "NativeDriver", lambda: self.driver)
        self.replace(native, "torch_functions", lambda: (0, 0, 0))
        self.device = Cuda(0)

    def replace(self, owner, name, value=mock.DEFAULT):
        return self.enterContext(mock.patch.object(owner, name, value, create=True))


class TestNames(DeviceTestCase):
    def test_only_with_the_option_and_a_driver(self):
        for option, available in ((True, True), (True, False), (False, True)):
            asked = mock.Mock(return_value=available)
            with (
                inductor_config.patch({"triton.nvtx": option}),
                mock.patch.object(kernel_names, "are_available", asked),
            ):
                made = Cuda(0)
            self.assertEqual(made.annotates, option and available)
            self.assertEqual(asked.called, option)
            self.assertEqual(made.lines({}, list) is None, not made.annotates)

    def test_concurrency_is_an_option(self):
        self.assertTrue(self.device.concurrent)
        with inductor_config.patch({"triton.cudagraph_concurrency": False}):
            self.assertFalse(Cuda(0).concurrent)


class TestMemory(DeviceTestCase):
    def test_allocator_that_can_not_be_told(self):
        recording = self.replace(module, "Recording")
        backend = self.replace(torch.cuda, "get_allocator_backend")
        backend.return_value = "native"
        self.assertIs(self.device.record(2, 8), recording.return_value)
        recording.assert_called_once_with(self.device, 2, 8)
        backend.return_value = "cudaMallocAsync"
        with self.assertRaisesRegex(Refusal, "cudaMallocAsync can't be") as caught:
            self.device.record(2)
        self.assertEqual(caught.exception.reason, "allocator")

    def test_holes(self):
        def segment(*blocks, **fields):
            return {
                "device": 0,
                "stream": STREAM,
                "segment_pool_id": (0, 0),
                "segment_type": "large",
                "total_size": sum(size for size, _ in blocks),
                "blocks": [{"size": size, "state": state} for size, state in blocks],
                **fields,
            }

        free, used = "inactive", "active_allocated"
        mine = segment((3 << 20, free), (4 << 20, used), (5 << 20, free))
        others = [
            segment((6 << 20, free), (1, used), **field)
            for field in (
                {"stream": STREAM + 1},
                {"device": 1},
                {"segment_pool_id": (0, 1)},
                {"segment_type": "small"},
            )
        ]
        whole = [segment((size, free)) for size in (CHUNK, CHUNK + 1)]
        snapshot = self.replace(torch.cuda, "memory_snapshot")
        snapshot.return_value = [mine, *others, *whole]
        self.device.stream_of = lambda index: STREAM
        self.assertEqual(self.device.holes(), [3 << 20, 5 << 20, CHUNK])

    def test_generators(self):
        own, given = torch.Generator("cpu"), SimpleNamespace(device=self.device.device)
        self.replace(torch.cuda, "default_generators", (own,))
        self.assertEqual(self.device.generators([1, torch.Generator("cpu")]), [own])
        with mock.patch.object(torch, "Generator", SimpleNamespace):
            self.assertEqual(self.device.generators([given, 1]), [own, given])

    def test_broken_capture(self):
        self.device.stream_of = lambda index: STREAM
        self.driver.is_broken = lambda stream: stream == STREAM
        self.assertTrue(self.device.is_capture_broken())

    def test_preparation_is_for_this_device(self):
        inside, found = [], []
        device = Cuda(2)
        self.replace(torch.cuda, "device", lambda index: entered(inside, index))
        loaded = self.replace(module, "prepare")
        loaded.side_effect = lambda index: found.append((index, list(inside)))
        device.prepare()
        self.assertEqual(found, [(2, [2])])

    def test_preparation_that_fails_is_left_to_the_capture(self):
        device = Cuda(2)
        self.replace(torch.cuda, "device", lambda index: contextlib.nullcontext())
        self.replace(module, "prepare").side_effect = ImportError("no compiler")
        with self.assertLogs(module.log, "INFO") as logs:
            device.prepare()
        self.assertIn("no compiler", logs.output[0])


@contextlib.contextmanager
def entered(inside, index):
    inside.append(index)
    yield
    inside.remove(index)


class TestGraphs(DeviceTestCase):
    def test_graph_is_tidied_and_read(self):
        found = captured()
        order = mock.Mock()
        self.replace(tidy, "tidy", order.tidy).return_value.kept = ["memset 3"]
        read = self.replace(graphs, "read", order.read)
        read.return_value = graph_of(kernel(0), kernel(1))
        with self.assertLogs(module.log, "INFO") as logs:
            self.assertIs(self.device.read(found), read.return_value)
        self.assertIn("stays in the graph as it is: memset 3", logs.output[0])
        self.assertEqual([call[0] for call in order.mock_calls], ["tidy", "read"])
        self.assertEqual(read.call_args.args[2:], (LOW, LOW + (1 << 20)))
        self.assertEqual(self.device.handle_of(found, 1), 11)

    def test_collectives_of_operators(self):
        name = "ncclDevKernel_AllReduce"
        check_libraries(graph_of(kernel(0)))
        with self.assertRaisesRegex(Refusal, f"kernel {name}.*custom_should") as caught:
            check_libraries(graph_of(kernel(0), kernel(1, name=name)))
        self.assertEqual(caught.exception.reason, "collective")

    def test_proof(self):
        first = graph_of(kernel(0, LOW + 16))
        elsewhere = LOW + (1 << 30) + 4096
        second = graph_of(kernel(0, elsewhere + 16), address=elsewhere)
        template = self.device.prove((first, second), {})
        self.assertEqual(template.slots, (PointerSlot(0, 0, 0, 0, 16),))

    def test_edges_that_are_not_needed(self):
        graph = graph_of(kernel(0), kernel(1), kernel(2), edges=[(0, 1), (1, 2)])
        layout, fewer = SimpleNamespace(inputs=(0, 1)), [(0, 2), (1, 2)]
        found = captured(products={}, results=(), layout=layout)
        self.replace(torch.cuda, "get_device_properties")
        relaxed = self.replace(concurrency, "relaxed")
        set_edges = self.replace(tidy, "set_edges")

        def relax():
            return self.device.relax(found, graph, Template(1, graph.nodes, ()), {})

        relaxed.return_value, set_edges.return_value = fewer, True
        self.assertEqual(relax(), tuple(fewer))
        handles = [10, 11, 12]
        set_edges.assert_called_once_with(
            found.recording.graph, handles, fewer, driver=self.driver
        )
        self.assertEqual(relaxed.call_args.kwargs["inputs"], 2)
        set_edges.return_value = False  # the driver refuses
        self.assertEqual(relax(), graph.edges)
        relaxed.return_value, set_edges.return_value = None, True
        self.assertEqual(relax(), graph.edges)
        found.products = None
        relaxed.reset_mock()
        self.assertEqual(relax(), graph.edges)
        relaxed.assert_not_called()

    def test_order_in_which_kernels_can_be_launched_one_by_one(self):
        fill = FillNode(1, 11, LOW, 0, 4, 16, 1, 0)
        for node, edges, fixed, wanted in (
            (kernel(1), [(1, 0)], (), (1, 0)),
            (EmptyNode(1, 11), [(1, 0)], (), (1, 0)),
            (fill, [(1, 0)], (), None),
            (kernel(1), [(1, 0)], [LOW], None),  # torch launches it, which draws
            (kernel(1), [], (), None),  # they may run side by side
        ):
            graph = graph_of(kernel(0), node, edges=edges)
            self.assertEqual(self.device.order_of(captured(fixed), graph), wanted)

    def test_graph_without_an_executable(self):
        made, template = self.replace(module, "ByNode"), object()
        self.assertIs(self.device.by_node(template, (1, 0)), made.return_value)
        made.assert_called_once_with(template, (1, 0))

    def test_blocks_that_run_at_once(self):
        properties = SimpleNamespace(multi_processor_count=132)
        self.replace(torch.cuda, "get_device_properties").return_value = properties
        for at_once, blocks in ((3, 396), (0, 132), (UNSUPPORTED, 132)):
            self.driver.blocks_at_once = mock.Mock(side_effect=[at_once])
            self.assertEqual(self.device._room()(kernel(0)), blocks)
            self.driver.blocks_at_once.assert_called_once_with(7, 64, 96)


class TestExecutables(DeviceTestCase):
    def setUp(self):
        super().setUp()
        self.done = []
        self.replace(module, "upload", lambda graph: self.done.append("upload"))
        self.launcher = self.replace(module, "Launcher")
        self.shared = self.replace(native, "shared")
        self.annotate = self.replace(kernel_names, "annotate")
        self.template = Template(1, (kernel(0), kernel(1)), ())
        self.halves = [Template(1, (kernel(i),), ()) for i in range(2)]
        self.stages = tuple(SimpleNamespace(template=half) for half in self.halves)

    def instantiate(self, *given, stages=(), **fields):
        found = captured(**fields)
        self.whole = Arrangement(None, self.template)
        arrangement = Arrangement(None, self.template, stages, whole=self.whole)
        found.recording.graph.instantiate = lambda: self.done.append("instantiate")
        self.graph = found.recording.graph
        return self.device.instantiate(found, arrangement, *given)

    def test_whole_graph(self):
        arrangement, launchers = self.instantiate()
        self.assertEqual(self.done, ["instantiate", "upload"])
        self.assertEqual(launchers, [self.launcher.return_value])
        self.launcher.assert_called_once_with(self.graph, self.template, True, None)
        self.assertEqual(arrangement.stages, ())
        self.graph.reset.assert_not_called()

    def test_random_numbers(self):
        self.instantiate(graph_of(kernel(0)), fixed=[LOW])
        self.assertIs(self.launcher.call_args.args[2], False)  # torch launches it
        self.shared.assert_called_once_with(self.template, None)

    def test_executable_that_is_shared(self):
        nodes = kernel(0), kernel(1)
        for edges, order in (([(1, 0)], (1, 0)), ([], None)):
            self.instantiate(graph_of(*nodes, edges=edges))
            self.shared.assert_called_with(self.template, order)
        self.assertIs(self.launcher.call_args.args[3], self.shared.return_value)

    def test_stages(self):
        part = self.replace(module, "Part")
        part.return_value.renamed = lambda template: template
        arrangement, launchers = self.instantiate(stages=self.stages)
        self.assertEqual(len(launchers), 2)
        nodes = [call.args for call in part.call_args_list]
        self.assertEqual(nodes, [(0x61, [k], self.device) for k in (10, 11)])
        self.assertEqual(self.done, ["upload"] * 2)
        self.assertEqual(arrangement.stages, self.stages)
        self.graph.reset.assert_called_once_with()

    def test_graph_that_can_not_be_cut(self):
        self.replace(module, "Part").side_effect = UNSUPPORTED
        with self.assertLogs(module.log, "WARNING") as logs:
            arrangement, launchers = self.instantiate(stages=self.stages)
        self.assertIn("a backward is launched as a whole", logs.output[0])
        self.assertIs(arrangement, self.whole)
        self.assertEqual(len(launchers), 1)
        self.launcher.assert_called_once_with(self.graph, self.template, True, None)
        self.graph.reset.assert_not_called()

    def test_kernels_are_named(self):
        self.replace(module, "Part").return_value.renamed = lambda template: template
        lines = mock.Mock()
        _, launchers = self.instantiate(lines=lines)
        places = lines.places.return_value
        self.annotate.assert_called_once_with(places, [10, 11], launchers[0])
        self.annotate.reset_mock()
        self.instantiate(lines=lines, stages=self.stages)
        handles = [call.args[1] for call in self.annotate.call_args_list]
        self.assertEqual(handles, [[10], [11]])
        self.annotate.reset_mock()
        self.instantiate()
        self.annotate.assert_not_called()


if __name__ == "__main__":
    run_tests()
