"""Passes over graphs with streams: new nodes get streams, and removed nodes leave their order."""

import copy
import functools
import operator

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
from torch_overlay._inductor.streams.fx_passes import is_write, needs_placement, NewNodes, PassLog, Placed
from torch_overlay.upstream_fixes.aliases import COPY_OF


aten, streams = torch.ops.aten, torch.ops.streams
E1, E5, E9 = map(caller_event, (1, 5, 9))


def hooks(gm):
    return (*gm._create_node_hooks, *gm._replace_hooks, *gm._erase_node_hooks, *gm._deepcopy_hooks)


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
        part = self.call(operator.getitem, self.call(aten.split.Tensor, gone, 2, stream=1), 0, stream=1)
        readers = [self.call(aten.sin.default, name, stream=2) for name in (view, part)]
        self.output(*readers)
        self.run_pass(lambda graph: self.remove(gone))
        for reader in readers:
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

    def test_memory_that_is_computed_in_the_graph(self):
        """It may be read at any time, until the caller has it at the end: then what comes after the node counts."""
        for hazard, is_returned, is_written, promised_to in (
            ("nobody else knows it", False, False, set()),
            ("result", True, False, {E5, state(1)}),
            ("new value of an input", False, True, {E5, state(1)}),
        ):
            with self.subTest(hazard):
                self.setUp()
                made = self.call(aten.relu.default, self.x)
                gone = self.call(aten.mul.Tensor, made, 1, stream=1, after=(E1,), promised_to=(E5,))
                reader = self.call(aten.sin.default, gone, stream=2)
                if is_written:
                    self.graph.call_function(aten.copy_.default, (self.x, made))
                self.output(*[made] * is_returned, reader)
                self.run_pass(lambda graph, gone=gone: self.remove(gone))
                self.assertEqual(self.placed(reader), (2, set(), promised_to))

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


def graph_of(*places):
    """x -> relu -> relu -> ..., one for each of the streams; all are returned. The n-th
    is after event n of the caller, and before event 10 + n."""
    graph = Graph()
    value, made = graph.placeholder("x"), []
    for i, stream in enumerate(places):
        value = graph.call_function(aten.relu.default, (value,), name=f"relu_{i}")
        place_on(value, stream)
        note_fact(value, after=(caller_event(i),), promised_to=(caller_event(10 + i),))
        made.append(value)
    graph.output(tuple(made))
    return GraphModule(torch.nn.Module(), graph)


class NewNodesTestCase(TestCase):
    def begin(self, *places):
        self.gm = graph_of(*places)
        self.graph = self.gm.graph
        return self.named("x"), *(self.named(f"relu_{i}") for i in range(len(places)))

    def named(self, name):
        (found,) = (n for n in self.gm.graph.nodes if n.name == name)
        return found

    def run_pass(self, change):
        """Run a pass, and place its nodes. Return what each new node replaces."""
        before = {
            n: Placed(n.meta.get("custom"), frozenset(n.all_input_nodes), frozenset(n.users), is_view=False)
            for n in self.graph.nodes
        }
        log = PassLog(self.gm, before)
        try:
            change()
        finally:
            log.close()
        replaced = log.replaced(self.graph)
        NewNodes(replaced, before).place()
        return {n.name: [old.name for old in gone] for n, gone in replaced.items()}

    def make(self, before, target, *args, **kwargs):
        with self.graph.inserting_before(before):
            return self.graph.call_function(target, args, **kwargs)

    def replace(self, old, target, *args, **kwargs):
        new = self.make(old, target, *(args or old.args), **kwargs)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        return new

    def placed(self, name):
        """Stream of a node, and the numbers of its events; states of streams as -n."""
        node = self.named(name)
        fact = fact_of(node)
        tokens = (
            known and tuple(-t.stream if t.stream is not None else t.event for t in known)
            for known in (fact.after, fact.promised_to)
        )
        return node_stream(node), *tokens


class TestReplacements(NewNodesTestCase):
    def replace_both(self, first, second, operand):
        both = self.make(first, aten.sin.default, operand)
        for old in (second, first):
            old.replace_all_uses_with(both)
            self.graph.erase_node(old)

    def both_by_one(self, *places):
        x, first, second = self.begin(*places)

        found = self.run_pass(lambda: self.replace_both(first, second, x))
        self.assertEqual(set(found["sin_default"]), {"relu_0", "relu_1"})
        stream, after, before = self.placed("sin_default")
        return stream, set(after), set(before)

    def test_several_nodes_by_one(self):
        self.assertEqual(self.both_by_one(1, 1), (1, {0, 1}, {10, 11}))

    def test_nodes_of_several_streams_by_one(self):
        self.assertEqual(self.both_by_one(1, 2), (2, {0, 1, -1}, {10, 11, -1}))

    def test_operand_decides_between_streams(self):
        for place in (2, 3):
            _, first, second, third = self.begin(place, 2, 3)
            for node in (second, third):
                note_fact(node, reads=(ForeignRead(7, "freed"),))

            self.run_pass(functools.partial(self.replace_both, second, third, first))
            self.assertEqual(self.placed("sin_default")[0], place)
            self.assertIsNone(fact_of(self.named("sin_default")).reads)

    def test_reads_of_other_streams_memory(self):
        _, _, second = self.begin(1, 2)
        reads = (ForeignRead(1, "freed"),)
        note_fact(second, reads=reads)
        self.run_pass(lambda: self.replace(second, aten.sin.default))
        self.assertEqual(fact_of(self.named("sin_default")).reads, reads)

    def test_node_that_is_made_and_replaced_in_the_pass(self):
        _, _, second = self.begin(0, 1)

        def change():
            self.replace(self.replace(second, aten.sin.default), aten.neg.default)

        self.assertEqual(self.run_pass(change), {"neg_default": ["relu_1"]})
        self.assertEqual(self.placed("neg_default"), (1, (1,), (11,)))

    def test_node_in_between_whose_readers_get_nothing_else(self):
        """relu(relu(x)) becomes sin(x): the inner one is erased, not replaced."""
        x, first, second = self.begin(1, 2)
        self.graph.output_node().args = ((second,),)

        def change():
            self.replace(second, aten.sin.default, x)
            self.graph.erase_node(first)

        self.assertEqual(set(self.run_pass(change)["sin_default"]), {"relu_0", "relu_1"})
        self.assertEqual(self.placed("sin_default")[0], 2)

    def test_writes_in_place(self):
        """Two nodes become writes into the first one's memory."""
        _, first, *rest = self.begin(1, 2, 3)

        def change():
            for old in rest:
                self.make(old, aten.relu_.default, first, name=f"{old.name}_write")
                old.replace_all_uses_with(first)
                self.graph.erase_node(old)

        found = self.run_pass(change)
        self.assertEqual(found["relu_1_write"], ["relu_1"])
        self.assertEqual(self.placed("relu_1_write"), (2, (1,), (11,)))
        self.assertEqual(self.placed("relu_2_write"), (3, (2,), (12,)))
        self.assertEqual(self.placed("relu_0"), (1, (0,), (10,)))

    def test_node_that_is_placed(self):
        _, _, second = self.begin(1, 2)

        def change():
            new = self.replace(second, aten.sin.default)
            place_on(new, 5)
            note_fact(new, after=(), promised_to=())

        self.run_pass(change)
        self.assertEqual(self.placed("sin_default"), (5, (), ()))

    def test_marks(self):
        _, first, second = self.begin(1, 1)
        note_fact(first, is_dropped=True, requires=blocking_copy(0))
        first.meta["val"] = torch.empty(4, device="meta")

        def change():
            self.replace(first, aten.sin.default)
            self.replace(second, aten.neg.default)

        self.run_pass(change)
        facts = [fact_of(self.named(f"{name}_default")) for name in ("sin", "neg")]
        self.assertEqual([fact.is_dropped for fact in facts], [True, False])
        self.assertEqual([fact.requires for fact in facts], [None, None])

    def test_number_for_which_the_host_waits(self):
        _, first = self.begin(1)
        note_fact(first, requires=blocking_copy(0))
        target = aten._local_scalar_dense.default
        self.run_pass(lambda: self.replace(first, target))
        found = fact_of(self.named("_local_scalar_dense_default"))
        self.assertEqual(found.requires, blocking_copy(0))


class TestOtherNodes(NewNodesTestCase):
    def test_helper_runs_where_its_reader_does(self):
        x, first, second = self.begin(1, 2)

        def change():
            self.replace(second, aten.neg.default, self.make(second, aten.abs.default, x))

        self.run_pass(change)
        self.assertEqual(self.placed("abs_default"), (2, (1,), (11,)))

    def test_helper_of_nodes_that_remain(self):
        """Readers through a view count; what they read in eager is not read here."""
        x, first, second = self.begin(0, 2)
        reads = (ForeignRead(1, "freed"),)
        note_fact(second, reads=reads)
        note_fact(first, reads=reads)

        def change():
            made = self.make(first, aten.abs.default, x)
            view = self.make(first, aten.alias.default, made)
            second.args = (view,)

        self.run_pass(change)
        self.assertEqual(self.placed("abs_default"), (2, (1,), (11,)))
        self.assertIsNone(fact_of(self.named("abs_default")).reads)

    def test_view_that_was_there(self):
        """The readers of a view decide, and the view itself only where it has none."""
        for is_read, place in ((True, 2), (False, 1)):
            x, view, reader = self.begin(1, 2)
            view.target = aten.alias.default
            if not is_read:
                self.graph.output_node().args = ((view,),)
                self.graph.erase_node(reader)

            def change(x=x, view=view):
                view.args = (self.make(view, aten.abs.default, x),)

            self.run_pass(change)
            self.assertEqual(self.placed("abs_default")[0], place)

    def test_result_for_the_caller(self):
        _, first = self.begin(1)

        def change():
            made = self.make(self.graph.output_node(), aten.clone.default, first)
            self.graph.output_node().args = ((first, made),)

        self.assertEqual(self.run_pass(change), {"clone_default": []})
        self.assertEqual(self.placed("clone_default"), (1, (0,), (10,)))

    def test_operations_of_the_stream_program(self):
        _, first = self.begin(1)
        output = self.graph.output_node()
        self.run_pass(lambda: self.make(output, streams.record_event.default, 5, 1))
        self.assertEqual(self.placed("record_event_default"), (0, None, None))

    def test_streams_without_tokens(self):
        """As in the body of a region, whose nodes have streams only."""
        _, first, second = self.begin(0, 2)
        for node in (first, second):
            node.meta["custom"].pop("stream_fact")
        self.run_pass(lambda: self.replace(second, aten.sin.default))
        self.assertEqual(self.placed("sin_default"), (2, None, None))

    def test_graphs_that_need_streams(self):
        node = graph_of(0).graph.output_node().args[0][0]
        self.assertTrue(needs_placement([node]))
        note_fact(node, after=(), promised_to=())
        self.assertFalse(needs_placement([node]))
        place_on(node, 1)
        self.assertTrue(needs_placement([node]))
        self.assertFalse(needs_placement([]))
        note_fact(node, promised_to=(state(2),))
        place_on(node, 0)
        self.assertTrue(needs_placement([node]))


class TestPassLog(NewNodesTestCase):
    def test_writes(self):
        _, first, second = self.begin(1, 2)
        self.graph.output_node().args = ((first,),)
        update = self.make(second, aten.relu_.default, first)
        reader = self.make(second, aten.neg.default, update)
        found = [is_write(n) for n in (first, second, update, reader)]
        self.assertEqual(found, [False, True, True, True])
