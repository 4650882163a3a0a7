"""What ends a graph in Dynamo, so that two regions get graphs of their own."""

import logging
from typing import Any

import torch

from outside_programs._program import program


def whole(x: Any, w: Any) -> Any:
    y = (x @ w).sin()
    return (y @ w).cos()


def scaled(x: Any, w: Any) -> Any:
    y = (x @ w).sin()
    return (y @ w).cos() * y.sum()


def chosen(x: Any, w: Any) -> Any:
    y = (x @ w).sin()
    return torch.where(y.sum() > 0, (y @ w).cos(), (y @ w).sin())


@program(fixed=whole)
def print_in_between(x, w):
    y = (x @ w).sin()
    print(end="")  # outside: graph-break
    return (y @ w).cos()


@program(fixed=scaled)
def item_in_between(x, w):
    y = (x @ w).sin()
    n = y.sum().item()  # outside: graph-break
    return (y @ w).cos() * n


@program(fixed=chosen)
def branch(x, w):
    y = (x @ w).sin()
    if y.sum() > 0:  # outside: graph-break
        return (y @ w).cos()
    return (y @ w).sin()


@torch.compiler.disable
def not_compiled(y: Any) -> Any:
    return y


@program(fixed=whole)
def disabled_function(x, w):
    y = (x @ w).sin()
    y = not_compiled(y)  # outside: graph-break
    return (y @ w).cos()


@program(fixed=whole)
def asked_for(x, w):
    y = (x @ w).sin()
    torch._dynamo.graph_break()  # outside: graph-break
    return (y @ w).cos()


@program(fixed=whole, also=("graph-break",))
def logs(x, w):
    y = (x @ w).sin()
    logging.getLogger("outside").debug("now")  # outside: graph-break
    return (y @ w).cos()


@program(fixed=whole)
def sizes_of_data(x, w):
    y = (x @ w).sin()
    y = y * (y > 2).nonzero().size(0) + y  # outside: graph-break
    return (y @ w).cos()


@program(fixed=whole)
def synchronises(x, w):
    y = (x @ w).sin()
    torch.cuda.synchronize()  # outside: split-streams streams::synchronize_device.default
    return (y @ w).cos()
