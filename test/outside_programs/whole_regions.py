"""What keeps all of a function's code out of graphs, or most of its calls."""

from typing import Any

import torch

from outside_programs._program import program


@torch.library.custom_op("outside::times", mutates_args=())
def times(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n


@times.register_fake
def _(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty_like(x)


def scaled(x: Any, w: Any, n: Any) -> Any:
    return ((x @ w).sin() @ w).cos() * n


@program(region="warm-up", inputs=lambda n: (n,), fixed=scaled, compiled_at_once=False, dynamic=True)
def number_that_counts_up(x, w, n):
    return times(((x @ w).sin() @ w).cos(), n)  # an operator gets it


@program(inputs=lambda n: (torch.ones(128),), overlay={"cudagraph_rewrites": False}, compiled_at_once=False)
def tensor_on_the_host(x, w, h):
    t = h.cuda()  # outside: split-devices prims::device_put.default
    return ((x @ w).sin() @ w).cos(), t


@program(inputs=lambda n: (torch.arange(16) * 7,), overlay={"cudagraph_rewrites": False})
def index_from_the_host(x, w, rows):
    y = (x @ w)[rows].sin()  # outside: split-devices aten::index.Tensor
    return (y @ w).cos()


@program(inputs=lambda n: (torch.ones(128) + n,))
def small_tensor_on_the_host(x, w, h):
    t = h.cuda()  # rewritten
    return ((x @ w).sin() @ w).cos(), t


@program(inputs=lambda n: (torch.ones(1 << 20),), compiled_at_once=False)
def large_tensor_on_the_host(x, w, h):
    t = h.cuda().sum()  # outside: split-devices prims::device_put.default
    return ((x @ w).sin() @ w).cos(), t


@program(region="cpp-wrapper", inductor={"cpp_wrapper": True})
def wrapper_in_cpp(x, w):
    return ((x @ w).sin() @ w).cos()


@program(region="inductor", inductor={"graph_partition": False}, dynamo={"capture_dynamic_output_shape_ops": True})
def nothing_is_split_off(x, w):
    y = (x @ w).sin()
    return (y > 0).nonzero().sum() + (y @ w).cos().sum()


@program(
    region="templates",
    inputs=lambda n: (n // 2,),
    overlay={"cudagraph_templates": 1},
    dynamic=True,
    compiled_at_once=False,
)
def more_numbers_than_graphs(x, w, n):
    return times(((x @ w).sin() @ w).cos(), n)
