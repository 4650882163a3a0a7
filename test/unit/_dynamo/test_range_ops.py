"""`_dynamo.range_ops`: ranges and marks are pushed and popped as often as the program says."""

import threading
from unittest import mock

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo.range_ops import NVTX, range_mark, range_pop, range_push, RECORD_FUNCTION
from torch_overlay._functorch.streams.fx import is_stream_operator


class Nvtx:
    """Stands for torch.cuda.nvtx, which needs CUDA."""

    def __init__(self):
        self.log = []

    def range_push(self, message):
        self.log.append(message)

    def range_pop(self):
        self.log.append("pop")

    def mark(self, message):
        self.log.append(f"mark {message}")


def program():
    range_push(NVTX, "a", None)
    range_mark("here")
    range_push(NVTX, "a", None)
    range_pop(NVTX)
    range_pop(NVTX)


ORDER = ["a", "mark here", "a", "pop", "pop"]


class TestStreamRanges(TestCase):
    def nvtx(self):
        fake = Nvtx()
        patch = mock.patch.object(torch.cuda, "nvtx", fake)
        patch.start()
        self.addCleanup(patch.stop)
        return fake.log

    def names(self, function):
        with profile() as found:
            function()
        return {
            event.name: event.cpu_parent.name if event.cpu_parent else None
            for event in found.events()
            if event.name.startswith("range ")
        }

    def test_ranges_of_nvtx(self):
        log = self.nvtx()
        program()
        self.assertEqual(log, ORDER)

    def test_tracing_opens_none(self):
        log = self.nvtx()
        with FakeTensorMode():
            gm = make_fx(program)()
        self.assertEqual(log, [])
        gm()
        self.assertEqual(log, ORDER)

    def test_ranges_of_the_profiler_nest(self):
        def ranges():
            range_push(RECORD_FUNCTION, "range outer", "details")
            range_push(RECORD_FUNCTION, "range inner", None)
            range_pop(RECORD_FUNCTION)
            range_pop(RECORD_FUNCTION)
            range_push(RECORD_FUNCTION, "range next", None)
            range_pop(RECORD_FUNCTION)

        outer = {"range outer": None, "range inner": "range outer"}
        self.assertEqual(self.names(ranges), {**outer, "range next": None})

    def test_no_range_is_open(self):
        range_pop(RECORD_FUNCTION)
        self.assertEqual(list(self.names(lambda: range_pop(RECORD_FUNCTION))), [])

    def test_open_ranges_are_those_of_the_thread(self):
        opened = []

        class Range:
            def __init__(self, message, details):
                self.message = message

            def __enter__(self):
                opened.append(self.message)

            def __exit__(self, *error):
                opened.remove(self.message)

        with mock.patch.object(torch.profiler, "record_function", Range):
            range_push(RECORD_FUNCTION, "here", None)
            other = threading.Thread(target=range_pop, args=(RECORD_FUNCTION,))
            other.start()
            other.join()
            self.assertEqual(opened, ["here"])
            range_pop(RECORD_FUNCTION)
        self.assertEqual(opened, [])

    def test_passes_keep_them_all(self):
        graph = Graph()
        for _ in range(2):
            graph.call_function(range_mark, ("here",))
        graph.call_function(range_pop, (NVTX,))
        graph.output(())
        graph.eliminate_dead_code()
        self.assertEqual(len(fx_graph_cse(graph).nodes), 4)

    def test_they_belong_to_the_stream_program(self):
        for op in (range_push, range_pop, range_mark):
            self.assertTrue(is_stream_operator(op))
