"""Passes over graphs with streams: new nodes get streams, and removed nodes leave their order."""

import copy

import torch
from torch._inductor.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    MULTIPLE,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay import config
from torch_overlay._functorch.streams.facts import fact_of, ForeignRead, note_fact
from torch_overlay._functorch.streams.fx import node_stream, place_on
from torch_overlay._functorch.streams.tokens import blocking_copy, caller_event, state
from torch_overlay._inductor.streams.fx_passes import PassLog
from torch_overlay.upstream_fixes.no_op_results import COPY_OF


aten = torch.ops.aten
E1, E5, E9 = map(caller_event, (1, 5, 9))


def hooks(gm):
    return (
        *gm._create_node_hooks,
        *gm._replace_hooks,
        *gm._erase_node_hooks,
        *gm._deepcopy_hooks,
    )


@config.patch(streams=True)
class PassesTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target, *args, stream=0, after=(), promised_to=(), **fact):
        node = self.graph.call_function(target, args)
        place_on(node, stream)
        note_fact(node, after=after, promised_to=promised_to, **fact)
        return node

    def output(self, *results):
        self.graph.output(results)
        self.gm = GraphModule(torch.nn.Module(), self.graph)
        self.graph = self.gm.graph

    def run_pass(self, change):
        return GraphTransformObserver(self.gm, "made_up").apply_graph_pass(change)

    def replace(self, old, target):
        with self.graph.inserting_before(old):
            new = self.graph.call_function(target, old.args)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        return new

    def remove(self, node, instead=None):
        """What a pass does with a node that did nothing."""
        node.replace_all_uses_with(instead or node.args[0])
        self.graph.erase_node(node)

    def placed(self, node):
        fact = fact_of(node)
        return node_stream(node), set(fact.after or ()), set(fact.promised_to or ())


class TestNodesOfAPass(PassesTestCase):
    def test_new_node_runs_where_the_one_did_that_it_replaces(self):
        old = self.call(aten.relu.default, self.x, stream=2, after=(E1,), promised_to=(E5,))
        self.output(old)
        made = []
        self.run_pass(lambda graph: made.append(self.replace(old, aten.sin.default)))
        self.assertEqual(self.placed(*made), (2, {E1}, {E5}))

    def test_survivor_keeps_its_stream(self):
        first = self.call(aten.relu.default, self.x, stream=1, after=(E1,))
        second = self.call(aten.relu.default, self.x, stream=2)
        third = self.graph.call_function(aten.cos.default, (self.x,))
        self.output(first, second, third)

        def change(graph):
            first.meta["custom"] = second.meta["custom"]
            third.meta["custom"] = second.meta["custom"]

        self.run_pass(change)
        self.assertEqual(self.placed(first), (1, {E1}, set()))
        self.assertNotIn("custom", third.meta)

    def test_pass_within_a_pass_is_a_part_of_it(self):
        old = self.call(aten.relu.default, self.x, stream=2, after=(E1,))
        self.output(old)
        made = []

        def change(graph):
            with GraphTransformObserver(self.gm, "inner"):
                made.append(self.replace(old, aten.sin.default))
            self.assertIsNotNone(PassLog.of(graph))
            made.append(self.replace(made[0], aten.cos.default))

        self.run_pass(change)
        self.assertEqual(self.placed(made[1]), (2, {E1}, set()))

    def test_pass_that_fails(self):
        node = self.call(aten.relu.default, self.x, stream=1)
        self.output(node)

        def change(graph):
            self.assertIsNotNone(PassLog.of(graph))
            place_on(node, 7)
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.run_pass(change)
        self.assertEqual((hooks(self.gm), PassLog.of(self.graph)), ((), None))
        self.assertEqual(node_stream(node), 7)

    def test_copy_of_the_module_has_no_hooks(self):
        self.output(self.call(aten.relu.default, self.x, stream=1))

        def change(graph):
            self.assertNotEqual(hooks(self.gm), ())
            return copy.deepcopy(self.gm)

        self.assertEqual(hooks(self.run_pass(change)), ())

    def test_graphs_that_are_not_logged(self):
        """Without a stream, and with the option's default."""
        for stream, value in ((0, True), (1, False), (1, True)):
            self.setUp()
            self.output(self.call(aten.relu.default, self.x, stream=stream))
            with config.patch(streams=value):
                logged = self.run_pass(lambda graph: PassLog.of(graph) is not None)
            self.assertEqual(logged, bool(stream) and value)


class TestRemovedNodes(PassesTestCase):
    """Who reads what a node read that did nothing, and what the caller relies on."""

    def test_callers_memory_is_read_when_it_was(self):
        gone = self.call(aten.mul.Tensor, self.x, 1, stream=1, after=(E1,), promised_to=(E5,))
        reader = self.call(aten.sin.default, gone, stream=2)
        other = self.call(aten.cos.default, self.x, stream=2)
        self.output(reader, other)
        self.run_pass(lambda graph: self.remove(gone))
        self.assertEqual(self.placed(reader), (2, {E1, state(1)}, {E5, state(1)}))
        self.assertEqual(self.placed(other), (2, set(), set()))

    def test_through_a_view(self):
        gone = self.call(aten.mul.Tensor, self.x, 1, stream=1, after=(E1,))
        view = self.call(aten.alias.default, gone, stream=1)
        reader = self.call(aten.sin.default, view, stream=2)
        self.output(reader)
        self.run_pass(lambda graph: self.remove(gone))
        self.assertEqual(self.placed(reader), (2, {E1, state(1)}, {state(1)}))

    def test_several_nodes_in_a_row(self):
        first = self.call(aten.mul.Tensor, self.x, 1, stream=1, after=(E1,))
        second = self.call(aten.add.Tensor, first, 0, stream=1, after=(E5,))
        reader = self.call(aten.sin.default, second, stream=2)
        self.output(reader)

        def change(graph):
            self.remove(first)
            self.remove(second)

        self.run_pass(change)
        self.assertEqual(self.placed(reader), (2, {E1, E5, state(1)}, {state(1)}))

    def test_memory_that_nobody_else_knows(self):
        """What is computed in the graph may be read at any time."""
        made = self.call(aten.relu.default, self.x)
        gone = self.call(aten.mul.Tensor, made, 1, stream=1, after=(E1,), promised_to=(E5,))
        reader = self.call(aten.sin.default, gone, stream=2)
        self.output(reader)
        self.run_pass(lambda graph: self.remove(gone))
        self.assertEqual(self.placed(reader), (2, set(), set()))

    def test_memory_of_a_result(self):
        """The caller has it at the end: only what comes after the node counts."""
        made = self.call(aten.relu.default, self.x)
        gone = self.call(aten.mul.Tensor, made, 1, stream=1, after=(E1,), promised_to=(E5,))
        reader = self.call(aten.sin.default, gone, stream=2)
        self.output(made, reader)
        self.run_pass(lambda graph: self.remove(gone))
        self.assertEqual(self.placed(reader), (2, set(), {E5, state(1)}))

    def test_new_value_of_an_input(self):
        made = self.call(aten.relu.default, self.x)
        gone = self.call(aten.mul.Tensor, made, 1, stream=1, promised_to=(E5,))
        reader = self.call(aten.sin.default, gone, stream=2)
        self.graph.call_function(aten.copy_.default, (self.x, made))
        self.output(reader)
        self.run_pass(lambda graph: self.remove(gone))
        self.assertEqual(self.placed(reader), (2, set(), {E5, state(1)}))

    def test_copy_that_blocked_the_host(self):
        """The reader may come after such a copy that the node came before."""
        blocks = blocking_copy(0)
        gone = self.call(aten.mul.Tensor, self.x, 1, stream=1, promised_to=(blocks, E5))
        reader = self.call(aten.sin.default, gone, stream=2)
        self.output(reader)
        self.run_pass(lambda graph: self.remove(gone))
        self.assertEqual(self.placed(reader)[2], {E5, state(1)})

    def test_copy_that_the_pass_keeps(self):
        """It is read when the node was that it stands for, and is not the next one."""
        first = self.call(aten.mul.Tensor, self.x, 1, stream=1, promised_to=(E9,))
        second = self.call(aten.add.Tensor, first, 0, stream=1, promised_to=(E5,))
        reader = self.call(aten.sin.default, second, stream=2)
        self.output(first, reader)

        def change(graph):
            with graph.inserting_before(first):
                kept = graph.call_function(aten.clone.default, (self.x,))
            kept.meta = {**first.meta, COPY_OF: first.name}
            self.remove(first)
            self.remove(second)
            for user in (reader, graph.output_node()):
                user.replace_input_with(self.x, kept)

        self.run_pass(change)
        kept = reader.args[0]
        self.assertEqual(self.placed(reader), (2, set(), {E5, state(1)}))
        self.assertEqual(self.placed(kept), (1, set(), {E9}))
        self.assertNotIn(COPY_OF, kept.meta)

    def test_memory_of_another_stream(self):
        """Whose memory is read goes along on the same stream only."""
        reads = (ForeignRead(3, "freed"),)
        for stream in (1, 2):
            self.setUp()
            made = self.call(aten.relu.default, self.x, stream=3)
            gone = self.call(aten.mul.Tensor, made, 1, stream=1, promised_to=(state(3),), reads=reads)
            reader = self.call(aten.sin.default, gone, stream=stream)
            self.output(reader)
            self.run_pass(lambda graph, gone=gone: self.remove(gone))
            same = stream == 1
            self.assertEqual(fact_of(reader).reads, reads if same else None)
            self.assertEqual(self.placed(reader)[2], {state(3)} if same else set())


class TestPatterns(PassesTestCase):
    def test_replacement_does_what_the_nodes_did(self):
        """Also what one does that stays, because another node reads it."""
        patterns = PatternMatcherPass()
        inner = CallFunction(aten.sin.default, KeywordArg("x"), _users=MULTIPLE)

        @register_graph_pattern(CallFunction(aten.cos.default, inner), pass_dict=patterns)
        def _(match: Match, x):
            match.replace_by_example(lambda x: aten.tanh.default(x), [x])

        one = self.call(aten.sin.default, self.x, stream=1, after=(E1,), promised_to=(E5,))
        two = self.call(aten.cos.default, one, stream=1, promised_to=(E9,))
        other = self.call(aten.neg.default, one, stream=2)
        self.output(two, other)
        with FakeTensorMode() as mode:
            value = torch.empty(4, device="cuda")
        for node in (self.x, one, two, other):
            node.meta["val"] = value
        with V.set_fake_mode(mode):
            self.assertEqual(patterns.apply(self.graph), 1)
        made = self.graph.output_node().args[0][0]
        self.assertIs(made.target, aten.tanh.default)
        self.assertEqual(self.placed(made), (1, {E1}, {E5, E9}))
        self.assertEqual(self.placed(one), (1, {E1}, {E5}))
