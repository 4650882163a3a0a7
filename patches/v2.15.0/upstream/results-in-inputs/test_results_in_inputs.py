# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._inductor.fx_passes import post_grad
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


@torch.library.custom_op("results_in_inputs::add_one", mutates_args={"x"})
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def update_part(w, x):
    x[0:1].add_(1)
    return (w * x).sin()


def update_list(w, x):
    torch._foreach_add_([x], 1)
    return (w * x).sin()


def update_by_operator(w, x):
    add_one(x)
    return (w * x).sin()


def scatter(x):
    z = torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
    x.copy_(z)
    return (z,)


def scatter_view(x):
    z = torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
    x.copy_(z)
    return z.view(2, 2), z, z[1:].split(1)[1]


def scatter_parts(x):
    z = torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
    x.copy_(z)
    return z.split(2)


def put(x):
    z = x.index_put((torch.tensor([1]),), torch.tensor([7.0]))
    x.copy_(z)
    return (z,)


def updated_input(x):
    x[1:3].mul_(2)
    return x, x[1:3]


class TestResultsInInputs(TestCase):
    @parametrize("fn", (update_part, update_list, update_by_operator))
    def test_backward_leaves_inputs_alone(self, fn):
        found = []
        for run in (fn, torch.compile(fn)):
            w, x = torch.full((4,), 2.0, requires_grad=True), torch.arange(4.0)
            run(w, x).sum().backward()
            found.append((x, w.grad))
        self.assertEqual(*found)

    @parametrize("fn", (scatter, scatter_view, scatter_parts, put, updated_input))
    def test_results_alias_as_in_eager(self, fn):
        def called(fn):
            x = torch.arange(4.0)
            results = (x, *fn(x))
            memory = [t.untyped_storage().data_ptr() for t in results]
            return [memory.index(m) for m in memory], results

        self.assertEqual(called(torch.compile(fn)), called(fn))

    def test_value_that_is_no_output_is_computed_in_place(self):
        def fn(x):
            x.index_put_((torch.tensor([1]),), torch.tensor([7.0]))
            return x.sum()

        seen = []
        run = post_grad.reinplace_inplaceable_ops

        def note(updater, graph):
            run(updater, graph)
            seen.extend(n.target for n in graph.nodes if n.op == "call_function")

        with mock.patch.object(post_grad, "reinplace_inplaceable_ops", note):
            torch.compile(fn)(torch.arange(4.0))
        self.assertIn(torch.ops.aten.index_put_.default, seen)
        self.assertNotIn(torch.ops.aten.clone.default, seen)


instantiate_parametrized_tests(TestResultsInInputs)


if __name__ == "__main__":
    run_tests()
