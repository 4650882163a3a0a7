# Owner(s): ["module: inductor"]

import threading
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import attention_seeds as module
from torch._inductor.cudagraph_relaunch.attention_seeds import (
    FORWARDS,
    may_be_seed,
    noted,
    OPERATORS,
    register,
    with_seeds,
)
from torch.testing._internal.common_utils import run_tests, TestCase


NAMES = ["grad", "dropout_p", "philox_seed", "philox_offset", "scale"]


class TestSeeds(TestCase):
    def setUp(self):
        super().setUp()
        self.capturing, self.given = False, []
        self.on_device = []  # tensors that are taken for the device's
        self.moved = torch.tensor(99)

        def is_on_device(tensor):
            return any(tensor is each for each in self.on_device)

        for name, function in (
            ("on_device", is_on_device),
            ("is_capturing", lambda: self.capturing),
            ("to_host", lambda tensor: self.moved),
        ):
            self.enterContext(mock.patch.object(module, name, function))

        def operator(*args, **kwargs):
            self.given.append((args, kwargs))
            return "gradients"

        self.call = with_seeds(operator, NAMES)

    def seeds(self, on_device=True):
        made = [torch.tensor(5), torch.tensor(7)]
        self.on_device = made if on_device else []
        return made

    def call_with(self, seeds, dropout=0.1):
        result = self.call("grad", dropout, *seeds, scale=2.0)
        self.assertEqual(result, "gradients")
        args, kwargs = self.given.pop()
        self.assertEqual((args[:2], kwargs), (("grad", dropout), {"scale": 2.0}))
        return args[2:]

    def test_seeds_of_a_graph(self):
        seeds = self.seeds()
        self.assertTrue(all(seed is self.moved for seed in self.call_with(seeds)))

    def test_seeds_that_stay(self):
        for on_device, dropout, capturing in (
            (False, 0.1, False),
            (True, 0.1, True),  # the operator reads them on the device
            (True, 0.0, False),  # it reads none
        ):
            self.capturing, seeds = capturing, self.seeds(on_device)
            found = self.call_with(seeds, dropout)
            self.assertTrue(all(a is b for a, b in zip(found, seeds, strict=True)))

    def test_what_is_no_call_of_the_operator(self):
        """Dispatch keys pass fake tensors, and arguments may be missing."""
        fake = torch.ones(()).as_subclass(type("Fake", (torch.Tensor,), {}))
        self.on_device = [fake]
        with noted() as found:
            self.call("grad", 0.1, fake, fake)
            self.call("grad", 0.1)
        self.assertEqual(found, set())
        self.assertTrue(self.given[0][0][2] is fake)

    def test_noted(self):
        outer_seeds, inner_seeds = self.seeds(), self.seeds(False)
        with noted() as outer:
            with noted() as inner:
                self.call_with(inner_seeds)
            self.call_with(outer_seeds)
            thread = threading.Thread(target=self.call_with, args=(self.seeds(),))
            thread.start()
            thread.join()
        self.call_with(self.seeds())
        self.assertEqual(inner, {seed.data_ptr() for seed in inner_seeds})
        self.assertEqual(outer, {seed.data_ptr() for seed in outer_seeds})

    def test_operators(self):
        overloads = [getattr(torch.ops.aten, name).default for name in OPERATORS]
        before = [overload._op for overload in overloads]
        undo = register(module)
        try:
            for overload, original in zip(overloads, before, strict=True):
                self.assertIsNot(overload._op, original)
                names = [argument.name for argument in overload._schema.arguments]
                self.assertEqual({*module.SEEDS, module.PROBABILITY} - {*names}, set())
        finally:
            undo()
        self.assertEqual([overload._op for overload in overloads], before)
        for name in FORWARDS:
            self.assertTrue(hasattr(torch.ops.aten, name))

    def test_what_may_be_a_seed(self):
        seed = torch.tensor(5)
        self.assertTrue(may_be_seed(seed) and may_be_seed(seed.reshape(1)))
        for value in (
            5,
            torch.tensor(5, dtype=torch.int32),
            torch.tensor([5, 6]),
            None,
        ):
            self.assertFalse(may_be_seed(value))


if __name__ == "__main__":
    run_tests()
