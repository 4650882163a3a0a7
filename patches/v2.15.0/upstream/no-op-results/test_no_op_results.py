# Owner(s): ["module: inductor"]

import torch
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


def plus_zero(x):
    return (torch.zeros_like(x) + x,)


def views(x):
    return torch.ones_like(x).view(2, 2) * x.view(2, 2), x - torch.zeros_like(x)


def results(x):
    y = x.sin()
    return y, y + torch.zeros_like(x), torch.ones_like(x) * y


def result_and_view(x):
    y = torch.zeros_like(x) + x
    return y, y.view(2, 2)


class TestNoOpResults(TestCase):
    @parametrize("fn", (plus_zero, views, results, result_and_view))
    def test_results_alias_as_in_eager(self, fn):
        def aliases(fn):
            x = torch.arange(4.0)
            memory = [t.untyped_storage().data_ptr() for t in (x, *fn(x))]
            return [memory.index(m) for m in memory]

        self.assertEqual(aliases(torch.compile(fn)), aliases(fn))

    def test_copy_of_updated_input(self):
        def fn(x):
            x[1:3].mul_(2)
            y = x.clone()
            x[0:1].add_(1)
            return y

        x, expected_x = torch.ones(4, 4), torch.ones(4, 4)
        self.assertEqual(torch.compile(fn)(x), fn(expected_x))
        self.assertEqual(x, expected_x)

    def test_no_op_that_is_no_result_is_removed(self):
        def fn(x):
            return ((x + torch.zeros_like(x)) * torch.ones_like(x)).sin()

        seen = []

        def note(graph):
            seen.extend(n.target for n in graph.nodes if n.op == "call_function")

        with torch._inductor.config.patch(post_grad_custom_pre_pass=note):
            torch.compile(fn)(torch.ones(4))
        self.assertIn(torch.ops.aten.sin.default, seen)
        self.assertNotIn(torch.ops.aten.add.Tensor, seen)
        self.assertNotIn(torch.ops.aten.mul.Tensor, seen)


instantiate_parametrized_tests(TestNoOpResults)


if __name__ == "__main__":
    run_tests()
