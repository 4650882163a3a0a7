# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import alignment, capture as captures
from torch._inductor.cudagraph_relaunch.sizes import OWN
from torch._inductor.cudagraph_relaunch.states import State, States, TABLES
from torch.testing._internal.common_utils import run_tests, TestCase


def graph(launched=0, nodes=5):
    return SimpleNamespace(
        totals=[launched, 0],
        launcher=SimpleNamespace(nodes=nodes),
        layout=SimpleNamespace(scratch_size=64),
        call=None,
    )


class TestStates(TestCase):
    def make(self, bound=2, executables=0):
        return States(bound, executables)

    def with_graph(self, states, key, launched=0, shared=None):
        state = states.of(key)
        states.set_graph(state, graph(launched), shared)
        return state

    def test_least_recently_used(self):
        states = self.make()
        first = states.of(1)
        self.assertIs(states.of(1), first)
        states.of(2)
        states.touch(1)
        states.touch("not there")
        states.of(3)
        self.assertEqual(list(states), [1, 3])

    def test_sizes_that_share_an_executable(self):
        states = self.make(executables=8)
        for executables, kept in (([], 2), (["an executable"], 2 * TABLES)):
            states.sizes.executables = executables
            for key in range(3 * TABLES):
                states.of(key)
            self.assertEqual(len(states), kept)

    def test_launches_of_dropped_graphs_count(self):
        states = self.make()
        self.with_graph(states, 1, launched=5)
        state = self.with_graph(states, 2, launched=7)
        self.assertEqual(states.launched(), 12)
        states.of(3)  # drops 1
        states.set_graph(state, graph(launched=1))
        self.assertEqual(states.launched(), 13)
        self.assertEqual([each.nodes for each in states.graphs()], [5])
        states.drop(2)
        self.assertEqual((states.launched(), states.graphs()), (13, []))
        self.with_graph(states, 4, launched=2)
        self.assertEqual(len(states.forget()), 2)
        self.assertEqual((states.launched(), len(states)), (15, 0))

    def test_region_that_was_captured_too_often(self):
        states = self.make()
        known = states.of(1)
        states.captures = states.most_captures
        self.assertTrue(states.has_captured_enough)
        self.assertIs(states.of(1), known)
        self.assertIsNone(states.of(2))
        states.forget()
        self.assertIsNotNone(states.of(2))

    def test_keys_that_never_come_again(self):
        states = self.make()
        self.assertFalse(states.comes_for_the_first_time(1))
        states.of(1)
        states.warm_ups = states.most_captures
        self.assertFalse(states.comes_for_the_first_time(1))
        self.assertTrue(states.comes_for_the_first_time(2))
        self.assertFalse(states.comes_for_the_first_time(2))
        self.assertTrue(states.comes_for_the_first_time(2))
        for key in range(3, 4 + states.most_captures):
            self.assertTrue(states.comes_for_the_first_time(key))
        self.assertEqual(len(states.seen), states.most_captures)
        self.assertTrue(states.comes_for_the_first_time(2))

    def test_graph_for_other_keys(self):
        states = self.make(bound=8)
        waiting, refused = states.of(1), states.of(2)
        refused.refused = "host-tensor"
        kept = self.with_graph(states, 3)
        states.warm_ups = 5
        states.add("any", made := State())
        self.assertEqual(list(states.items()), [(2, refused), (3, kept), ("any", made)])
        self.assertNotIn(waiting, states.values())
        self.assertEqual((states.captures, states.warm_ups), (1, 0))

    def test_executable_that_is_not_kept(self):
        states = self.make(bound=8, executables=1)
        own = self.with_graph(states, 1)
        one = self.with_graph(states, 2, launched=3, shared="one")
        two = self.with_graph(states, 3, shared="two")
        launchers = [SimpleNamespace(shared="two")]
        states.sizes.executables.append(SimpleNamespace(launchers=launchers))
        states.drop_unkept()
        self.assertEqual((one.relaunch, one.shared), (None, None))
        self.assertIsNotNone(own.relaunch)
        self.assertIsNotNone(two.relaunch)
        self.assertEqual(states.launched(), 3)

    def test_size_that_waits(self):
        states = self.make(bound=8, executables=4)
        state = states.of("new")
        self.assertFalse(states.is_shared(state))
        for key in range(OWN):
            self.with_graph(states, key)
        self.assertTrue(states.is_shared(state))
        self.assertFalse(states.waits(state))
        for _ in range(16):
            states.sizes.note_capture(0.5)
        self.assertTrue(states.waits(state))
        state.spent = 0.6
        self.assertFalse(states.waits(state))
        state.spent, state.relaunch = 0.0, graph()
        self.assertFalse(states.waits(state))

    def test_call_without_a_key(self):
        """Whatever takes the graph away, no call finds it any more."""
        for change in (
            lambda states, state: states.set_graph(state),
            lambda states, state: states.replace({(): state}),
            lambda states, state: states.forget(),
            lambda states, state: states.add("any", State()),
        ):
            states = self.make()
            state = self.with_graph(states, ())
            states.attempt = len
            change(states, state)
            self.assertIsNone(states.attempt)


class TestAlignments(TestCase):
    """Tensors in one block of memory, whose start is aligned to `FULL`."""

    def setUp(self):
        super().setUp()
        self.enterContext(
            mock.patch.object(
                captures, "is_region", lambda v: isinstance(v, torch.Tensor)
            )
        )
        memory = torch.empty(4 * alignment.FULL, dtype=torch.uint8)
        start = -memory.data_ptr() % alignment.FULL
        self.at = lambda skew: memory[start + skew :][:16]

    def test_alignments(self):
        state = State()
        for skew, alignments in (
            (0, {1: alignment.FULL, 2: alignment.FULL}),
            (0, {1: alignment.FULL, 2: alignment.FULL}),
            (32, {1: 16, 2: alignment.FULL}),
        ):
            self.assertFalse(state.is_ready([5, self.at(skew), self.at(0)], ()))
            self.assertEqual(state.alignments, alignments)

    def test_less_aligned_than_the_graph(self):
        state = State()
        state.is_ready([self.at(0), self.at(0)], ())
        state.relaunch, state.captured_for = graph(), dict(state.alignments)
        self.assertTrue(state.is_ready([self.at(0), self.at(0)], ()))
        self.assertFalse(state.is_ready([self.at(0), self.at(64)], ()))
        self.assertEqual(state.alignments, {0: 16, 1: 16})  # there is one more at most
        self.assertFalse(state.is_ready([self.at(0), self.at(64)], ()))
        state.relaunch, state.captured_for = graph(), dict(state.alignments)
        self.assertTrue(state.is_ready([self.at(16), self.at(48)], ()))

    def test_static_input_stays_where_it_is(self):
        state = State()
        state.is_ready([self.at(4), self.at(0)], [0])
        self.assertEqual(state.alignments, {0: 4, 1: alignment.FULL})
        state.relaunch, state.captured_for = graph(), dict(state.alignments)
        self.assertTrue(state.is_ready([self.at(4), self.at(0)], [0]))
        self.assertFalse(state.is_ready([self.at(4), self.at(16)], [0]))
        self.assertEqual(state.alignments, {0: 4, 1: 16})


if __name__ == "__main__":
    run_tests()
