"""`_inductor.relaunch.states`: calls that one graph serves."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._inductor.relaunch import attention_seeds, causes, keys
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.relaunch.states import CallKeys, States


DEVICE = torch.device("cpu")


def on_device(*size):
    return torch.randn(*size)


def on_host(value):
    return torch.tensor(value)


class TestStates(TestCase):
    def make(self, graphs=(), waiting=()):
        """States of a region that keeps two graphs: those of these keys have one, or have none yet."""
        made = States(2)
        for key in (*graphs, *waiting):
            state = made.add(key)
            if key in graphs:
                made.set_graph(state, object())
        return made

    def test_sizes_that_wait_take_no_graph_s_place(self):
        made = self.make("ab", "12345678")
        self.assertEqual("".join(made), "ab345678")
        made["3"].used = made.now()
        made.add("9")
        self.assertEqual("".join(made), "ab356789", "the one that came last a long time ago is dropped")

    def test_graph_takes_the_place_of_the_one_that_was_launched_a_long_time_ago(self):
        made = self.make("ab", "1")
        made["a"].used = made.now()
        made["1"].used = made.now()
        made.set_graph(made["1"], object())
        self.assertEqual("".join(made), "a1")

    def test_state_that_another_thread_has_made_meanwhile(self):
        made = self.make(waiting="1")
        self.assertIs(made.add("1"), made["1"])


class TestCallKeys(TestCase):
    """Tensors of floating point numbers stand for those on the device."""

    def setUp(self):
        super().setUp()
        self.enterContext(
            mock.patch.object(capture, "is_region", lambda v: isinstance(v, torch.Tensor) and v.is_floating_point())
        )

    def make(self, numbers=()):
        return CallKeys(CodeFacts("a region", 0, numbers=frozenset(numbers)))

    def test_first_call(self):
        made = self.make()
        self.assertIsNone(made.key_of)
        inputs = [on_host(7), on_device(4), 3, None]
        key = made.choose(inputs)(inputs)
        self.assertEqual((made.keyed, made.scalars), ((2, 3, 0), {0}))
        self.assertEqual(key, keys.key_of([2, 3], [0])(inputs))
        self.assertEqual(made.key_of(inputs), key)
        self.assertNotEqual(made.key_of([on_host(8), *inputs[1:]]), key)
        self.assertNotEqual(made.key_of([*inputs[:2], 3.0, None]), key)
        self.assertEqual(made.key_of([inputs[0], on_device(9), 3, None]), key)

    def test_numbers_that_no_size_depends_on(self):
        made = self.make([1, -1])
        inputs = [on_device(4), 2, 3, 0.5]
        key = made.choose(inputs)(inputs)
        self.assertEqual((made.free, made.keyed), ((1, 3), (2,)))
        self.assertEqual(made.key_of([on_device(4), 8, 3, 0.7]), key)
        self.assertNotEqual(made.key_of([on_device(4), 2, 4, 0.5]), key)

    def test_what_is_no_number_after_all(self):
        made = self.make([0, 1])
        made.choose([on_device(4), None, 3])
        self.assertEqual((made.free, made.keyed), ((), (1, 2)))

    def test_number_that_has_to_be_in_the_key(self):
        made = self.make([1, 2])
        inputs = [on_device(4), 2, 3]
        made.choose(inputs)
        with self.assertLogs(causes.log, "INFO") as logs:
            made.keep([2], "a decision")
        self.assertIn("a region: each value of the number at input 2", logs.output[0])
        self.assertIn("a decision", logs.output[0])
        self.assertIsNone(made.key_of)
        made.choose(inputs)
        self.assertEqual((made.free, made.keyed), ((1,), (2,)))
        made.keep([], "it is not known which")
        made.choose(inputs)
        self.assertEqual((made.free, made.keyed), ((), (1, 2)))
        self.assertEqual(made.kept, {2: "a decision", 1: "it is not known which"})

    def test_seeds(self):
        made = self.make()
        inputs = [5, on_host(7), on_host(8), on_device(4), on_host(9)]
        key = made.choose(inputs)(inputs)
        made.seeds = frozenset([1, 4])
        shorter = made.drop_seeds(key)
        self.assertEqual((made.keyed, made.scalars), ((0, 2), {2}))
        self.assertEqual(made.key_of(inputs), shorter)
        self.assertEqual(made.key_of([5, on_host(1), *inputs[2:]]), shorter)
        self.assertNotEqual(made.key_of([5, on_host(7), on_host(1)]), shorter)
        made.choose(inputs)  # after the region was told to forget
        self.assertEqual(made.keyed, (0, 2))

    def test_seeds_are_moved(self):
        made, captured = self.make(), []
        made.seeds = frozenset([0, 1])
        device = SimpleNamespace(device=DEVICE, is_capturing=lambda: bool(captured))
        seed, moved = on_host(7), on_device(1)
        given = [seed, there := on_device(1), on_host(3)]
        with mock.patch.object(attention_seeds, "to_device", return_value=moved) as to:
            captured.append(True)
            made.place_seeds(inputs := list(given), device)
            self.assertEqual(to.call_count, 0)
            captured.clear()
            made.place_seeds(inputs, device)
        to.assert_called_once_with(seed, DEVICE)
        self.assertIs(inputs[0], moved)
        self.assertIs(inputs[1], there)
        self.assertIs(inputs[2], given[2])
