# Owner(s): ["module: inductor"]

import torch
from torch._functorch._streams.facts import note_fact
from torch._functorch._streams.tokens import blocking_copy, record
from torch._inductor import config
from torch._inductor.streams.scheduler_nodes import fx_origins
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
R5, C0 = record(5, 0), blocking_copy(0)
CPU = torch.device("cpu")


PLACED = {"after": (), "before": ()}


@config.patch({"triton.streams": True, "max_fusion_size": 1})
class TestDependencies(TestCase):
    def setUp(self):
        super().setUp()
        self.program = Program()

    def call(self, target, *args, stream=0, **fact):
        node = self.program.call(target, *args, stream=stream)
        note_fact(node, **PLACED | fact)
        return node

    def ancestors(self, *results):
        """Which nodes have to come before each node."""
        self.program.output(*results)
        with self.program.scheduled() as scheduler:
            made = {
                n.get_name(): origin
                for n in scheduler.nodes
                for origin in fx_origins(n)
            }
            return {
                made[n.get_name()]: {made[name] for name in n.ancestors}
                for n in scheduler.nodes
            }

    def recorded(self):
        covered = self.call(aten.sin.default, self.program.input(4), before=(R5,))
        visible = self.call(streams.record_event.default, 5, 0, requires=R5)
        later = self.call(aten.cos.default, self.program.input(4))
        return covered, visible, later, self.ancestors(covered, later)

    def test_record_comes_after_what_it_is_to_cover(self):
        covered, visible, later, found = self.recorded()
        self.assertEqual(found, {covered: set(), visible: {covered}, later: set()})

    def test_copy_that_blocks_the_host_comes_after_its_stream(self):
        same, other = (
            self.call(aten.sin.default, self.program.input(size), stream=stream)
            for stream, size in ((1, 4), (2, 6))
        )
        args = self.program.input(8), CPU, False
        copy = self.call(prims.device_put.default, *args, stream=1, requires=C0)
        found = self.ancestors(same, other, copy)
        self.assertEqual(found, {same: set(), other: set(), copy: {same}})

    @config.patch({"triton.streams": False})
    def test_without_the_option(self):
        covered, visible, later, found = self.recorded()
        self.assertEqual(found, {covered: set(), visible: set(), later: set()})


if __name__ == "__main__":
    run_tests()
