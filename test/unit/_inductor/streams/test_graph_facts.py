"""Whose memory a forward saves, as code from a cache knows it, too."""

import pickle

import torch
from torch._guards import tracing, TracingContext
from torch._inductor.output_code import CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import Graph
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins.schedules import compiled_graph, Program
from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.saved_values import ContextNotes
from torch_overlay._inductor.notes import GraphNotes


AS_GUESSED = [(1, False)] * 2
SETTLED = [(None, False), (1, True)]


class TestCompiledGraph(TestCase):
    """A forward that saves two values, of which one is the caller's stream's memory."""

    def setUp(self):
        super().setUp()
        self.context = TracingContext(None)

    def compiled(self, *owners):
        """What Inductor makes of a graph whose code was generated."""
        program = Program()
        x = program.input(4, 4)
        program.output(program.call(torch.ops.aten.mm.default, x, x))
        with program.scheduled(is_inference=False):
            if owners:
                GraphNotes.of(V.graph).owners = owners
            return compiled_graph()

    def saved(self, compiled):
        """What is known of the memory of the backward's inputs afterwards."""
        backward = Graph()
        values = [backward.placeholder(name) for name in "ab"]
        for value in values:
            note_fact(value, memory=1)
        ContextNotes(["a", "b"], backward).put(self.context)
        options = {"cudagraphs": BoxedBool(False), "is_backward": False}
        with tracing(self.context):
            compiled.post_compile((), CompiledFxGraphConstants(), options)
        return [(fact_of(v).memory, fact_of(v).is_owned) for v in values]

    def test_code_that_was_just_generated(self):
        self.assertEqual(self.saved(self.compiled(0, 1)), SETTLED)

    def test_code_from_a_cache(self):
        compiled = pickle.loads(pickle.dumps(self.compiled(0, 1)))
        self.assertEqual(self.saved(compiled), SETTLED)

    def test_code_without_a_plan(self):
        compiled = self.compiled()
        self.assertEqual(self.saved(compiled), AS_GUESSED)
