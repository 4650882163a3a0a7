"""`_dynamo.ops`: what the operators on streams do, and to which object."""

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo import objects, ops
from torch_overlay._dynamo.ops import NVTX, range_mark, range_pop, range_push, RECORD_FUNCTION


class Work:
    """Stands for an event, which happens when `done` says so."""

    def __init__(self, done=False, at=0.0):
        self.done, self.at = done, at

    def query(self):
        return self.done

    def elapsed_time(self, end):
        return end.at - self.at


class TestStreamOperators(TestCase):
    def setUp(self):
        super().setUp()
        stream = SimpleNamespace(cuda_stream=1 << 47, stream_id=7)
        self.early, self.late = Work(True, 1.5), Work(False, 4.75)
        self.addCleanup(objects.enter(stream, self.early, self.late, stream, "s"))

    def test_answers_of_the_call(self):
        for value, want, dtype in (
            (ops.query_event(1), 1, torch.int64),
            (ops.query_event(2), 0, torch.int64),
            (ops.query_stream(2), 0, torch.int64),
            (ops.elapsed_time(1, 2), 3.25, torch.float64),
            (ops.stream_handle(0), 1 << 47, torch.int64),
            (ops.stream_id(0), 7, torch.int64),
            (ops.same_stream(0, 3), 1, torch.int64),
            (ops.same_stream(0, 4), 0, torch.int64),
        ):
            self.assertEqual(value, torch.tensor(want, dtype=dtype))

    def test_capture_from_either_stream(self):
        captured = {"a"}
        current = []

        @contextlib.contextmanager
        def stream(name):
            current.append(name)
            yield
            current.pop()

        leave = objects.enter("a", "b", "c")
        with (
            mock.patch.object(torch.cuda, "stream", stream),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in captured),
        ):
            found = [ops.is_capturing(*pair).item() for pair in ((0, 1), (1, 0), (1, 2))]
        leave()
        self.assertEqual(found, [1, 1, 0])

    def test_passes_keep_them_all(self):
        graph = Graph()
        asked = [graph.call_function(ops.query_event, (1,)) for _ in range(2)]
        graph.call_function(ops.elapsed_time, (1, 2))
        graph.output(asked[0])
        graph.eliminate_dead_code()
        count = len(graph.find_nodes(op="call_function", target=ops.query_event))
        self.assertEqual(count, 2)
        self.assertEqual(len(fx_graph_cse(graph).nodes), 4)


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
