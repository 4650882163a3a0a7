"""`_inductor.streams.planned_region`: one region at a time is written, also around partitions."""

import torch
from torch._inductor.virtualized import V
from torch.fx import symbolic_trace

import form  # noqa: F401
from stand_ins.schedules import ProgramCase
from torch_overlay import config
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.tokens import CALLER, state
from torch_overlay._inductor.notes import active_region, ScheduleNotes
from torch_overlay._inductor.streams.planned_region import (
    nested_streams,
    planned,
    stream_of_memory,
    subscribe_to_plans,
)
from torch_overlay._inductor.streams.switching import BeginRegion, EndRegion


aten = torch.ops.aten


class TestRegions(ProgramCase):
    def setUp(self):
        super().setUp()
        self.x = self.program.input(4, 4)

    def product(self, *args, stream=0):
        tokens = (CALLER,) if stream else ()
        return self.call(aten.mm.default, *(args or (self.x, self.x)), stream=stream, after=tokens, promised_to=tokens)

    def schedule(self, *results, **options):
        self.enterContext(config.patch(fold_branches_below_us=0.0))
        self.enterContext(torch._inductor.config.patch(options))
        self.scheduler = self.enterContext(self.program.scheduled(*results))
        self.wrapper = V.graph.wrapper_code

    def fork_and_join(self, **options):
        side = self.product(stream=1)
        self.schedule(self.product(side, side), **options)

    def generate(self, first=0, last=None):
        """Generate a region of some nodes, and return what wrote it."""
        nodes = self.scheduler.nodes[first:last]
        with planned(self.scheduler, nodes):
            emitter = active_region(self.scheduler)
            for node in nodes:
                emitter.before(node)
        return emitter

    def test_region(self):
        self.fork_and_join()
        plans = []
        self.addCleanup(subscribe_to_plans(plans.append))
        self.assertIsNone(active_region(self.scheduler))
        self.assertIsNone(active_region(None))
        before = len(self.wrapper.lines)
        emitter = self.generate()
        self.assertIsNone(active_region(self.scheduler))
        first, *_, last = self.wrapper.lines[before:]
        self.assertEqual((type(first), type(last)), (BeginRegion, EndRegion))
        self.assertIs(first.emitter, emitter)
        self.assertIs(last.emitter, emitter)
        self.assertEqual(len(emitter.plan.ops), 2)
        self.assertEqual(plans, [emitter.plan])
        self.assertFalse(emitter.region.enclosed)

    def test_code_that_is_several_regions(self):
        for options in ({}, {"triton.cudagraphs": True}):
            self.setUp()
            self.fork_and_join(**options)
            self.assertEqual(self.generate().region.enclosed, bool(options))

    def test_region_of_a_partition(self):
        self.fork_and_join()
        self.wrapper.parent_wrapper = V.graph.wrapper_code.__class__()
        self.assertTrue(self.generate().region.enclosed)

    def test_region_of_a_nested_graph(self):
        self.fork_and_join()
        V.graph.name = "body"
        self.assertTrue(self.generate().region.enclosed)

    def test_region_inside_of_a_region(self):
        self.fork_and_join()
        nodes = self.scheduler.nodes
        with planned(self.scheduler, nodes[1:]):
            outer = active_region(self.scheduler)
            inner = self.generate(last=1)
            self.assertIs(active_region(self.scheduler), outer)
        self.assertNotEqual(inner.name, outer.name)

    def test_error_while_lines_are_generated(self):
        self.fork_and_join()
        region = planned(self.scheduler, self.scheduler.nodes)
        with self.assertRaisesRegex(ValueError, "of a node"), region:
            raise ValueError("of a node")
        self.assertIsNone(active_region(self.scheduler))

    def test_memory_of_earlier_regions(self):
        self.fork_and_join()
        self.assertIsNone(stream_of_memory(self.scheduler, "buf0"))
        self.generate(last=1)
        self.assertEqual(stream_of_memory(self.scheduler, "buf0"), 1)
        self.assertEqual(stream_of_memory(self.scheduler, "other"), 0)
        second = self.generate(first=1)
        self.assertEqual(second.plan.memory["buf1"], 0)
        self.assertEqual(stream_of_memory(self.scheduler, "buf0"), 1)
        self.scheduler.mutation_real_name["buf7"] = "buf0"
        self.assertEqual(stream_of_memory(self.scheduler, "buf7"), 1)

    def test_streams_of_nested_graphs(self):
        self.fork_and_join()
        self.assertEqual(nested_streams(), [])
        body = symbolic_trace(lambda x: x.sin().cos())
        for node, stream in zip(body.graph.find_nodes(op="call_method"), (3, 2)):
            place_on(node, stream)
        V.graph.module.add_module("body", body)
        self.assertEqual(nested_streams(), [2, 3])

    def between_partitions(self):
        """A schedule after which stream 1 has waited for all that is ordered."""
        other = self.product(stream=2)
        side = self.product(self.product(), other, stream=1)
        self.schedule(side, **{"triton.cudagraphs": True})
        notes = ScheduleNotes.of(self.scheduler)
        joined = frozenset([state(1), state(2)])
        notes.known = {0: joined, 1: frozenset(), 2: frozenset()}
        notes.settled = frozenset([1, 2, 3])
        return notes, joined

    def test_streams_after_a_region_between_partitions(self):
        notes, joined = self.between_partitions()
        self.generate()
        self.assertEqual(notes.known, {0: joined, 1: joined | {CALLER}, 2: set()})
        self.assertEqual(notes.settled, {1, 3})

    def test_streams_after_a_partition(self):
        """Its work is the caller's stream's, which the others have not waited for."""
        notes, joined = self.between_partitions()
        self.wrapper.parent_wrapper = V.graph.wrapper_code.__class__()
        emitter = self.generate()
        self.assertEqual(emitter.plan.known, {0: joined})
        self.assertEqual(notes.known, {0: joined, 1: set(), 2: set()})
        self.assertEqual(notes.settled, {3})
