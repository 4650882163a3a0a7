"""Numbers of the thread in frames with streams, which are constants of their code."""

import threading

import torch
import torch._dynamo.test_case

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream, take_operations
from torch_overlay import config


def in_thread(function):
    """Return what the function returns in a thread of its own."""
    results = []

    def run():
        with config.patch(streams=True):  # a thread has options of its own
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


class TestStreamFrames(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.ones(2)
        self.graphs = 0
        current = stream(7)
        self.enterContext(accelerator(lambda device=None: current))
        self.enterContext(config.patch(streams=True))

    def compile(self, function, fullgraph=False):
        """Compile the function; its graphs run without what they do to streams."""

        def backend(gm, inputs):
            self.graphs += 1
            take_operations(gm)
            return gm

        return torch.compile(function, backend=backend, fullgraph=fullgraph)

    def check_number(self, number):
        @self.compile
        def compiled(x, side):
            y = x + 1
            thread = number()
            side.synchronize()
            return y * 2, thread

        def call():
            result, thread = compiled(self.x, stream(8))
            self.assertEqual(result, (self.x + 1) * 2)
            return thread == number()

        self.assertTrue(call())
        self.assertTrue(call())
        self.assertEqual(self.graphs, 1)
        self.assertTrue(in_thread(call))
        self.assertEqual(self.graphs, 2)

    def test_number_of_the_thread_is_a_constant_of_its_code(self):
        self.check_number(threading.get_ident)

    def test_native_number_of_the_thread(self):
        self.check_number(threading.get_native_id)

    def test_frame_without_streams_is_left_alone(self):
        def function(x):
            y = x + 1
            threading.get_ident()
            return y * 2

        def call():
            return compiled(self.x)

        compiled = self.compile(function)
        for result in (call(), in_thread(call)):
            self.assertEqual(result, (self.x + 1) * 2)
        self.assertEqual(self.graphs, 2)  # before the number, and after it

    def test_full_graph_is_traced_in_any_case(self):
        def function(x):
            return x + 1 if threading.get_ident() > 0 else x

        compiled = self.compile(function, fullgraph=True)
        self.assertEqual(compiled(self.x), self.x + 1)
        self.assertEqual(self.graphs, 1)

    def test_streams_after_a_graph_break(self):
        @self.compile
        def compiled(x, side):
            y = x + 1
            known = threading.get_ident() > 0
            torch._dynamo.graph_break()
            side.synchronize()
            return y * 2 if known else y

        self.assertEqual(compiled(self.x, stream(8)), (self.x + 1) * 2)
