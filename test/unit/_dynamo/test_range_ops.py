"""`_dynamo.range_ops`: ranges and marks are pushed and popped as often as the program says."""

import threading
from unittest import mock

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo.range_ops import NVTX, range_mark, range_pop, range_push, RECORD_FUNCTION


class TestStreamRanges(TestCase):
    def test_no_range_is_open(self):
        range_pop(RECORD_FUNCTION)
        range_pop(RECORD_FUNCTION)

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
