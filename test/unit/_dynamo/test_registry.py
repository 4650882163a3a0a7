"""`_dynamo.registry`: the facts that a frame hands to the layers that compile its graph."""

import torch
from torch._guards import tracing, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay import frame_facts
from torch_overlay._dynamo import registry
from torch_overlay.frame_facts import FrameFacts


OUTER, INNER = FrameFacts(goes_on=True), FrameFacts(is_resumed=True)


class TestFacts(TestCase):
    def setUp(self):
        super().setUp()
        registry.reset()
        self.addCleanup(registry.reset)

    def test_first_reader_of_an_input_that_dynamo_sorts_later(self):
        graph = Graph()
        first, last = (graph.placeholder(n) for n in "xy")
        registry.current().first_readers[last] = 5
        first.prepend(last)
        self.assertEqual(registry.facts().first_readers, {0: 5})

    def test_backend_gets_the_facts_of_its_own_graph(self):
        seen = []

        def backend(gm, inputs):
            seen.append(frame_facts.current())
            return gm.forward

        def f(x):
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        torch.compile(f, backend=backend)(torch.ones(2))
        self.assertEqual([facts.is_resumed for facts in seen], [False, True])
        self.assertEqual(frame_facts.current(), FrameFacts())

    def test_graph_that_is_compiled_while_another_is(self):
        with frame_facts.compiling(OUTER):
            with self.assertRaises(ZeroDivisionError), frame_facts.compiling(INNER):
                raise ZeroDivisionError
            self.assertIs(frame_facts.current(), OUTER)

    def test_backward_that_is_compiled_after_other_frames(self):
        context = TracingContext(FakeTensorMode())
        with tracing(context), frame_facts.compiling(OUTER):
            frame_facts.remember()
        with frame_facts.compiling(INNER):
            with tracing(context):
                self.assertIs(frame_facts.current(), OUTER)
            self.assertIs(frame_facts.current(), INNER)
