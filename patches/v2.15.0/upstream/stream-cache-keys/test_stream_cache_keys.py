# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
import torch._functorch.config
from torch._dynamo._streams import registry
from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index
from torch._functorch._aot_autograd.autograd_cache import (
    autograd_cache_key,
    BypassAOTAutogradCache,
)
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch._functorch._streams.facts import note_fact
from torch._functorch._streams.tokens import state
from torch._guards import tracing, TracingContext
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.test_case import run_tests, TestCase
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


CALLERS = registry.ObjectInfo(0, "current", False, "stream", None)


def event(escapes):
    return registry.ObjectInfo(1, "frame", escapes, "event", None)


def graph(stream=None, **fact):
    gm = torch.fx.symbolic_trace(lambda x: x * 2 + 1)
    (product,) = (node for node in gm.graph.nodes if node.name == "mul")
    if stream is not None:
        product.meta["custom"] = {"stream": stream}
    if fact:
        note_fact(product, **fact)
    return gm


def looked_up():
    """A graph that looks an object up by its number."""
    gm = graph(stream=1)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.call_function(get_external_object_by_index, (1,))
    gm.recompile()
    return gm


class TestStreamCacheKeys(TestCase):
    def setUp(self):
        super().setUp()
        registry.reset()
        self.addCleanup(registry.reset)
        self.placement(True)

    def placement(self, value):
        patch = torch._functorch.config.patch(stream_placement=value)
        patch.__enter__()
        self.addCleanup(patch.__exit__, None, None, None)

    def inductor_key(self, gm):
        return compiled_fx_graph_hash(gm, [torch.ones(4)], {}, [])[0]

    def autograd_key(self, gm):
        options = dict.fromkeys(("fw_compiler", "bw_compiler", "partition_fn"))
        aot_config = AOTConfig(
            **options,
            decompositions={},
            num_params_buffers=0,
            aot_id=0,
            keep_inference_input_mutations=False,
        )
        context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
        patch = torch._functorch.config.patch(enable_autograd_cache=True)
        with tracing(context), patch:
            return autograd_cache_key(gm, [torch.ones(4)], aot_config)[0]

    def test_what_placement_noted(self):
        facts = ({}, {"after": ()}, {"after": (state(1),)}, {"before": (state(1),)})
        for key in (self.inductor_key, self.autograd_key):
            self.assertEqual(len({key(graph(**fact)) for fact in facts}), 4)
            self.assertEqual(*(key(graph(1, after=(state(1),))) for _ in range(2)))

    def test_callers_stream_by_number(self):
        for key in (self.inductor_key, self.autograd_key):
            self.assertEqual(key(graph()), key(graph(stream=0)))

    def test_objects_of_the_frame(self):
        frames = ((), (CALLERS,), (CALLERS, event(False)), (CALLERS, event(True)))
        found = []
        for frame in frames:
            with mock.patch.object(registry, "describe", return_value=frame):
                gm = graph()
                found.append((self.inductor_key(gm), self.autograd_key(gm)))
        self.assertEqual(found[0], found[1])
        self.assertEqual(len({autograd for _, autograd in found}), 3)
        self.assertEqual(len({inductor for inductor, _ in found}), 1)

    def test_graph_that_looks_an_object_up(self):
        self.assertEqual(*(self.autograd_key(looked_up()) for _ in range(2)))

    def test_graphs_that_are_not_cached(self):
        bypass = BypassAOTAutogradCache, "get_external_object_by_index"
        one_rank = torch.compiler.config.patch(compile_on_one_rank=True)
        with one_rank, self.assertRaisesRegex(*bypass):
            self.autograd_key(looked_up())
        self.placement(False)
        with self.assertRaisesRegex(*bypass):
            self.autograd_key(looked_up())


if __name__ == "__main__":
    run_tests()
