# Owner(s): ["module: aotdispatch"]

import copy
import dataclasses
import itertools
import pickle

import torch
from torch._functorch._streams.facts import (
    add_after,
    add_before,
    Fact,
    fact_in,
    fact_of,
    ForeignRead,
    is_placed_program,
    KEY,
    Leave,
    merged,
    note_fact,
    NOTHING,
    replace_fact,
    ResultMemory,
    union_of_facts,
)
from torch._functorch._streams.fx import place_on
from torch._functorch._streams.tokens import caller_event, record, state
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import run_tests, TestCase


FULL = Fact(
    after=(caller_event(5), state(2)),
    before=(record(5, 0),),
    requires=record(5, 1),
    reads=(ForeignRead(1, "kept", "add"), ForeignRead(2, "freed")),
    order=3,
    range=4,
    is_dropped=True,
    leave=(Leave(1, (state(0),), record(5, 0)),),
    results=(ResultMemory("output", (1, 2)),),
    eager_targets=(2, -1),
    eager_storage=(("x", None), None, ("y", 2)),
    memory=2,
    is_owned=True,
    is_computed=True,
)


class TestFacts(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.node = self.graph.call_function(torch.relu, (self.x,))

    def test_node_without_facts(self):
        self.assertEqual(fact_of(self.node), NOTHING)
        self.assertEqual(fact_in(None), NOTHING)
        note_fact(self.node, order=None)
        self.assertNotIn("custom", self.node.meta)

    def test_fields_are_replaced_one_by_one(self):
        note_fact(self.node, order=3)
        note_fact(self.node, memory=2)
        self.assertEqual(fact_of(self.node), Fact(order=3, memory=2))
        replace_fact(self.node, NOTHING)
        self.assertNotIn("custom", self.node.meta)

    def test_facts_go_along_with_nodes(self):
        """Into another graph and through a copy of the module. Nodes that share their
        metadata don't share a fact that one of them gets later."""
        replace_fact(self.node, FULL)
        self.graph.output(self.node)
        other = Graph()
        copied = other.node_copy(self.node, lambda n: other.placeholder(n.name))
        module = copy.deepcopy(GraphModule({}, self.graph))
        (relu,) = module.graph.find_nodes(op="call_function", target=torch.relu)
        for node in (copied, relu):
            self.assertEqual(fact_of(node), FULL)
            note_fact(node, order=9)
        self.assertEqual(fact_of(self.node), FULL)
        self.x.meta["custom"] = self.node.meta["custom"]
        note_fact(self.x, order=7)
        self.assertEqual(fact_of(self.node), FULL)

    def test_text_and_pickle_are_fit_for_a_cache_key(self):
        """No field is a set, whose order is another one in another process."""
        self.assertEqual(pickle.loads(pickle.dumps(FULL)), FULL)
        texts = set()
        for tokens in itertools.permutations([state(3), state(1), caller_event(5)]):
            replace_fact(self.node, NOTHING)
            add_after(self.node, iter(tokens))
            add_before(self.node, {*tokens})
            texts.add(repr(self.node.meta["custom"][KEY]))
        self.assertEqual(len(texts), 1)
        for field in dataclasses.fields(Fact):
            self.assertNotIsInstance(getattr(FULL, field.name), (set, frozenset, dict))
            self.assertNotEqual(getattr(FULL, field.name), field.default, field.name)

    def test_state_of_the_own_stream_is_implied(self):
        place_on(self.node, 2)
        add_after(self.node, (state(2), state(0)))
        add_after(self.node, (state(0), state(1)))
        add_before(self.node, (state(2),))
        fact = fact_of(self.node)
        self.assertEqual((fact.after, fact.before), ((state(0), state(1)), ()))
        self.assertTrue(fact.is_placed)

    def test_none_is_not_known(self):
        self.assertTrue(Fact(after=(), before=()).is_placed)
        self.assertFalse(Fact(after=(), before=()).has_tokens)
        for name in ("after", "before"):
            self.assertFalse(Fact(**{name: (state(0),)}).is_placed)
            self.assertTrue(Fact(**{name: (state(0),)}).has_tokens)
        self.assertTrue(Fact(leave=FULL.leave).has_tokens)
        self.assertEqual(Fact().promises, frozenset())
        self.assertEqual(FULL.promises, {record(5, 0)})

    def test_union(self):
        a = Fact(after=(state(2), state(3)), reads=(ForeignRead(1, "freed"),))
        b = Fact(after=(state(0), state(2)), before=(record(5, 0),), order=1)
        wanted = {
            "after": (state(0), state(2), state(3)),
            "before": (record(5, 0),),
            "reads": (ForeignRead(1, "freed"),),
        }
        self.assertEqual(union_of_facts([a, b]), wanted)
        self.assertEqual(union_of_facts([b, a]), wanted)
        self.assertEqual(union_of_facts([Fact(after=()), Fact()]), {"after": ()})
        self.assertEqual(union_of_facts([]), {})
        found = union_of_facts([NOTHING, FULL, NOTHING])
        self.assertEqual((found["leave"], found["results"]), (FULL.leave, FULL.results))

    def test_merged(self):
        """What one of them waits for, both do; what only one can be is the second's."""
        a = Fact(after=(state(2),), order=1, memory=4)
        b = Fact(after=(state(0),), order=2)
        both = (state(0), state(2))
        self.assertEqual(merged(a, b), Fact(after=both, order=2, memory=4))
        self.assertEqual(merged(b, a), Fact(after=both, order=1, memory=4))
        self.assertEqual(merged(FULL, NOTHING), FULL)
        self.assertEqual(merged(NOTHING, FULL), FULL)

    def test_program_that_was_placed(self):
        self.assertFalse(is_placed_program(self.graph))
        note_fact(self.node, leave=())
        self.assertTrue(is_placed_program(self.graph))
        replace_fact(self.node, NOTHING)
        place_on(self.node, 1)
        self.assertTrue(is_placed_program(self.graph))


if __name__ == "__main__":
    run_tests()
