# Owner(s): ["module: inductor"]

import contextlib

import torch
from torch._functorch._streams.facts import fact_of, note_fact
from torch._guards import tracing, TracingContext
from torch._inductor import config
from torch._inductor.streams.plan import Plan
from torch._inductor.streams.saved_memory import (
    note_owners,
    owners_of,
    settle_owners,
)
from torch._inductor.virtualized import V
from torch.fx import Graph
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten


class OwnersTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.backward = Graph()
        self.context = TracingContext(None)
        context = tracing(self.context)
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def save(self, **streams):
        """Say that a forward saves values, each maybe in a stream's memory."""
        values = []
        for name, stream in streams.items():
            values.append(self.backward.placeholder(name))
            note_fact(values[-1], memory=stream)
        self.context.stream_saved = list(streams), self.backward
        return values

    def memory(self, values):
        return [(fact_of(v).memory, fact_of(v).is_owned) for v in values]

    def schedule(self, **options):
        """Two products, of which the second one is on a side stream."""
        program = Program()
        x = program.input(4, 4)
        products = [program.call(aten.mm.default, x, x, stream=s) for s in (0, 1)]
        program.output(*products)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        return stack.enter_context(program.scheduled(is_inference=False, **options))

    def noted(self, memory, real_names=(), **options):
        self.schedule(**options)
        note_owners(Plan((), memory=memory), dict(real_names))
        return owners_of(V.graph)


class TestNotes(OwnersTestCase):
    MEMORY = {"buf0": 0, "buf1": 1}

    def test_streams_of_results(self):
        self.save(y=1)
        self.assertEqual(self.noted(self.MEMORY), (0, 1))

    def test_result_in_memory_of_another_name(self):
        self.save(y=1)
        self.assertEqual(self.noted({"buf7": 2}, {"buf1": "buf7"}), (None, 2))

    def test_graphs_of_which_nothing_is_saved(self):
        self.assertEqual(self.noted(self.MEMORY), ())

    def test_backward(self):
        self.save(y=1)
        self.assertEqual(self.noted(self.MEMORY, is_backward=True), ())

    def test_captured_graphs(self):
        """All memory of a graph that is captured is the caller's stream's."""
        self.save(y=1)
        with config.patch("triton.cudagraphs", True):
            self.assertEqual(self.noted(self.MEMORY), ())


class TestSettled(OwnersTestCase):
    def test_owner_is_as_guessed_or_the_callers_stream(self):
        values = self.save(a=1, b=2, c=3, d=None)
        settle_owners((1, 0, 4, 1))
        wanted = [(1, True), (None, False), (3, False), (None, False)]
        self.assertEqual(self.memory(values), wanted)

    def test_value_that_is_not_returned(self):
        self.save(a=1)
        other = self.backward.placeholder("other")
        note_fact(other, memory=1)
        settle_owners((1,))
        self.assertEqual(self.memory([other]), [(1, False)])

    def test_results_that_hooks_changed(self):
        values = self.save(a=1, b=1)
        settle_owners((1,))
        self.assertEqual(self.memory(values), [(1, False)] * 2)


if __name__ == "__main__":
    run_tests()
