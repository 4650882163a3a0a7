# Owner(s): ["module: dynamo"]

import functools

import torch
import torch._dynamo.test_case
from torch._dynamo.test_case import run_tests


class Scale:
    def __init__(self, factor):
        self.factor = factor

    @functools.cached_property
    def double(self):
        if self.factor is None:
            raise ValueError("there is no factor")
        return self.factor * 2


class Finer(Scale):
    @functools.cached_property
    def half(self):
        return self.double / 4


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))

    @functools.cached_property
    def table(self):
        return self.weight.detach().sin()

    def forward(self, x):
        return x + self.table


class TestCachedProperty(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.ones(3)

    def compile(self, function):
        return torch.compile(function, backend="eager", fullgraph=True)

    def test_value_is_stored_in_the_object(self):
        compiled = self.compile(lambda x, scale: x * scale.double)
        scale = Scale(3)
        self.assertEqual(compiled(self.x, scale), self.x * 6)
        self.assertEqual(scale.__dict__["double"], 6)
        scale.factor = 4
        self.assertEqual(compiled(self.x, scale), self.x * 6)
        del scale.double
        self.assertEqual(compiled(self.x, scale), self.x * 8)
        self.assertEqual(compiled(self.x, Scale(5)), self.x * 10)

    def test_property_that_reads_another(self):
        compiled = self.compile(lambda x, finer: x * finer.half * finer.half)
        finer = Finer(6)
        self.assertEqual(compiled(self.x, finer), self.x * 9)
        self.assertEqual(finer.__dict__, {"factor": 6, "double": 12, "half": 3.0})

    def test_tensor_of_a_module(self):
        layer = Layer()
        compiled = self.compile(layer)
        wanted = self.x + layer.weight.detach().sin()
        self.assertEqual(compiled(self.x), wanted)
        table = layer.__dict__["table"]
        self.assertFalse(table.requires_grad)
        with torch.no_grad():
            layer.weight.add_(1)
        self.assertEqual(compiled(self.x), wanted)
        self.assertIs(layer.__dict__["table"], table)

    def test_object_of_the_frame(self):
        @self.compile
        def compiled(x, factor):
            scale = Scale(factor)
            return x * scale.double + scale.__dict__["double"], scale

        result, scale = compiled(self.x, 3)
        self.assertEqual(result, self.x * 6 + 6)
        self.assertEqual(scale.__dict__, {"factor": 3, "double": 6})

    def test_property_that_raises(self):
        @self.compile
        def compiled(x, scale):
            try:
                return x * scale.double
            except ValueError:
                return x - 1

        scale = Scale(None)
        self.assertEqual(compiled(self.x, scale), self.x - 1)
        self.assertEqual(scale.__dict__, {"factor": None})


if __name__ == "__main__":
    run_tests()
