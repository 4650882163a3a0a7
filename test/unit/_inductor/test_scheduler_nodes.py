"""`_inductor.scheduler_nodes`: the stream, place and memory of a scheduler's node."""

import operator
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import Program
from torch_overlay._functorch import device_peaks
from torch_overlay._inductor.scheduler_nodes import (
    device_us,
    element_size,
    flops_of,
    fx_origins,
    is_gpu,
    is_part,
    kernel_of,
    owner_of,
    parts_of,
    stream_operation,
    user_stream,
    viewed_by_call,
)


aten, streams = torch.ops.aten, torch.ops.streams
BYTES_PER_US = 2 * 1e9 * 4096 / 8 / 1e6  # of the device of inductor_schedules
FLOPS_PER_US = 100 * 256 * 1e3  # of float32


class SchedulerNodesTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()
        self.call = self.program.call
        for rate in (device_peaks.bytes_per_us, device_peaks.flops_per_us):
            rate.cache_clear()
            self.addCleanup(rate.cache_clear)


class TestPlace(SchedulerNodesTestCase):
    def test_stream_that_the_user_gave_a_node(self):
        x = self.program.input(4)
        first = self.call(aten.relu.default, x)
        second = self.call(aten.mm.default, *[self.program.input(2, 2)] * 2, stream=7)
        third = self.call(aten.sum.default, first, stream=3)
        with self.program.scheduled(first, second, third) as scheduler:
            found = {n: user_stream(scheduler, node) for node in scheduler.nodes for n in fx_origins(node)}
            self.assertEqual(found, {first: 0, second: 7, third: 3})

    def test_origins_are_operations_of_this_graph(self):
        x = self.program.input(4)
        inlined = self.call(aten.relu.default, x)
        result = self.call(aten.sin.default, inlined)
        self.program.output(result)
        other = torch.fx.Graph().call_function(aten.cos.default, ())
        with self.program.scheduled() as scheduler:
            (node,) = scheduler.nodes
            self.assertEqual(set(fx_origins(node)), {inlined, result})
            node.node.origins.add(other)
            self.assertEqual(set(fx_origins(node)), {inlined, result})

    def test_stream_operation(self):
        x = self.program.input(4)
        y = self.call(aten.relu.default, x)
        self.call(streams.record_event.default, 5, 1)
        z = self.call(aten.histc.default, x)
        with self.program.scheduled(y, z) as scheduler:
            found = [stream_operation(node) for node in scheduler.nodes]
            self.assertEqual(found, [None, streams.record_event.default, None])

    def test_gpu(self):
        devices = (None, torch.device("cpu"), torch.device("meta"))
        self.assertFalse(any(map(is_gpu, devices)))
        self.assertTrue(is_gpu(torch.device("cuda", 1)))


class TestMemory(SchedulerNodesTestCase):
    def test_slices_of_a_concatenation(self):
        x = self.program.input(4, 4)
        halves = [self.call(aten.mm.default, x, x) for _ in range(2)]
        with self.program.scheduled(self.call(aten.cat.default, halves)) as scheduler:
            *slices, whole = scheduler.nodes
            (whole,) = whole.get_outputs()
            parts = [output for node in slices for output in node.get_outputs()]
            self.assertEqual([is_part(b) for b in parts], [True, True])
            self.assertFalse(is_part(whole))
            name, names = whole.get_name(), {b.get_name() for b in parts}
            self.assertEqual({owner_of(n) for n in (*names, name)}, {name})
            self.assertEqual(parts_of(whole.node), names)
            self.assertEqual(parts_of(parts[0].node), set())

    def test_outputs_of_one_kernel(self):
        x = self.program.input(4, 4)
        first = self.call(aten.linalg_qr.default, x)
        results = [self.call(operator.getitem, first, i) for i in range(2)]
        with self.program.scheduled(*results) as scheduler:
            kernel, *outputs = [n.get_outputs()[0] for n in scheduler.nodes]
            self.assertEqual(len(outputs), 2)
            for output in outputs:
                self.assertEqual(kernel_of(output.node), kernel.get_name())
                self.assertEqual(parts_of(output.node), {kernel.get_name()})
            self.assertEqual([kernel_of(value) for value in V.graph.graph_outputs], [kernel.get_name()] * 2)
            self.assertIsNone(kernel_of(kernel.node))

    def test_call_that_returns_a_view(self):
        x = self.program.input(4, dtype=torch.complex64)
        made = self.call(aten.mul.Tensor, x, x)
        view = self.call(aten.view_as_real.default, made)
        with self.program.scheduled(view) as scheduler:
            kernel, call, *_ = [n.get_outputs()[0] for n in scheduler.nodes]
            self.assertEqual(viewed_by_call(call.node), {kernel.get_name()})
            self.assertEqual(viewed_by_call(kernel.node), set())
            self.assertEqual(owner_of(kernel.get_name()), kernel.get_name())
            self.assertEqual(owner_of(call.get_name()), kernel.get_name())


class TestTime(SchedulerNodesTestCase):
    def times(self, *results):
        with self.program.scheduled(*results) as scheduler:
            return [device_us(node) for node in scheduler.nodes]

    def test_time_of_what_is_read_and_written(self):
        x = self.program.input(1 << 20)
        (time,) = self.times(self.call(aten.relu.default, x))
        self.assertEqual(time, 2 * (4 << 20) / BYTES_PER_US)

    def test_time_of_what_is_computed(self):
        x = self.program.input(1024, 1024)
        (time,) = self.times(self.call(aten.mm.default, x, x))
        self.assertEqual(time, 2 * 1024**3 / FLOPS_PER_US)

    def test_matrices_that_take_longer_to_read(self):
        x, y = self.program.input(4096, 4096), self.program.input(4096, 1)
        (time,) = self.times(self.call(aten.mm.default, x, y))
        self.assertEqual(time, 4 * (4096 * 4096 + 2 * 4096) / BYTES_PER_US)

    def test_what_is_not_known(self):
        on_host = self.call(aten.relu.default, self.program.input(4, device="cpu"))
        by_library = self.call(aten.histc.default, self.program.input(4))
        self.assertEqual(set(self.times(on_host, by_library)), {None})

    def test_size_that_is_not_known(self):
        x = self.program.input(self.program.size(8), 4)
        self.assertEqual(self.times(self.call(aten.relu.default, x)), [None])

    def test_nothing_to_launch(self):
        x = self.program.input(1024, 1024)
        halves = [self.call(aten.mm.default, x, x) for _ in range(2)]
        times = self.times(self.call(aten.cat.default, halves))
        self.assertEqual(times[-1], 0)
        self.assertGreater(min(times[:-1]), 1)

    def test_statistics_stay(self):
        x = self.program.input(16, 16)
        with self.program.scheduled(self.call(aten.mm.default, x, x)) as scheduler:
            (node,) = scheduler.nodes
            for known in ({}, {"flop_count": 3}):
                with mock.patch.dict(counters["inductor"], known, clear=True):
                    self.assertEqual(flops_of(node), 2 * 16**3)
                    self.assertEqual(dict(counters["inductor"]), known)

    def test_width_of_an_element(self):
        x = self.program.input(4, dtype=torch.float64)
        widths = self.call(aten.relu.default, x), self.call(aten.sum.default, x)
        with self.program.scheduled(*widths) as scheduler:
            self.assertEqual(list(map(element_size, scheduler.nodes)), [8, 4])
