# Owner(s): ["module: inductor"]

import torch
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


@torch.library.custom_op("test_mutation_order::add_to", mutates_args={"x"})
def add_to(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def whole(x, weight):
    total = x + x.sin()
    before = total + 1
    add_to(total, x)
    return before + weight, total


def view(x, weight):
    total = x + x.sin()
    before = total + 1
    add_to(total[1:3], x[1:3])
    return before + weight, total


def twice(x, weight):
    total, other = x + x.sin(), x + x.cos()
    before, later = total + other, other + 1
    add_to(total, other)
    after = total * 2
    add_to(other, total)
    return before + weight, later + weight, after + weight, total, other


class TestMutationOrder(TestCase):
    @parametrize("fn", (whole, view, twice))
    def test_reader_of_old_value_runs_before_mutation(self, fn):
        x, weight = torch.arange(4.0), torch.zeros(4, requires_grad=True)
        self.assertEqual(torch.compile(fn)(x, weight), fn(x, weight))


instantiate_parametrized_tests(TestMutationOrder)


if __name__ == "__main__":
    run_tests()
