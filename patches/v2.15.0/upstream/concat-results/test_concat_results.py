# Owner(s): ["module: inductor"]

import torch
from torch._inductor.test_case import run_tests, TestCase


class TestConcatResults(TestCase):
    def check(self, fn):
        x = torch.arange(16.0).view(4, 4)
        expected, results = fn(x), torch.compile(fn)(x)
        for values in (expected, results):
            values[1].add_(1)
        self.assertEqual(results, expected)

    def test_view_of_input_is_result(self):
        def fn(x):
            y = x * 2
            return torch.cat([y, x]), y.view(2, 8)

        self.check(fn)

    def test_slices_of_concat_and_input(self):
        def fn(x):
            y = torch.mul(x, 2, out=torch.empty_like(x))
            return torch.cat([x, y])[2:], y[:2]

        self.check(fn)

    def test_concat_of_views_is_copied(self):
        def fn(x):
            y = x * 2
            return torch.cat([y[:2], x]), y[:2]

        self.check(fn)


if __name__ == "__main__":
    run_tests()
