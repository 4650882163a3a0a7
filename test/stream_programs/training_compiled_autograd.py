"""Training with compiled autograd, which traces a whole backward pass instead of running it in autograd's engine."""

import contextlib
import functools
from typing import Any

import torch

from stream_programs._program import fork, join, Kit, matrices
from stream_programs.training import (
    accumulates,
    leaf,
    one_branch,
    residual_layer,
    take_gradients,
    train_gradient_memory,
    train_saved_memory,
    trained,
    training,
    training_step,
    two_branches,
    update_in_backward,
)


def compiled_backward(k: Kit, **options: Any) -> Any:
    """Compiled autograd around a backward, in the place of autograd's engine; the oracle uses the engine."""
    if k.compiler is None:
        return contextlib.nullcontext()
    return torch._dynamo.compiled_autograd._enable(k.compiler, **options)


def with_compiled_backward(k: Kit, **options: Any) -> Kit:
    """The kit, whose steps have compiled autograd run their backwards."""
    k.engine = functools.partial(compiled_backward, k, **options)
    return k


@training("compiled autograd traces the backward, whose streams have other numbers in that graph")
def train_compiled_autograd(k: Kit) -> Any:
    forward, first = one_branch(k, lambda a, x: (a @ second).sum())
    (second,) = trained(k, 1)
    return training_step(with_compiled_backward(k), forward, first, second)


@training("compiled autograd: two branches, of which one is on a side stream, with fixed shapes", matrices(2))
def train_compiled_autograd_of_two_branches(k: Kit) -> Any:
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep((x @ first).relu()) @ second
        b = (x @ second).relu() @ first
        join(side)
        return (a + b).sum()

    return accumulates(with_compiled_backward(k, dynamic=False), forward, first, second)


@training("compiled autograd: two functions in one graph, each with streams of its own, and eager code between them")
def train_compiled_autograd_of_two_functions(k: Kit) -> Any:
    (run_one, first), (run_two, second) = residual_layer(k, 2), residual_layer(k, 2)

    def forward(x):
        return run_two(run_one(x).clamp(-2, 2) * 2)  # a number that is saved: `upstream_fixes.wrapped_numbers`

    return training_step(with_compiled_backward(k), forward, first, second, loss=torch.sum)


@training("compiled autograd: one function called three times, so its graph is copied three times", matrices(3))
def train_compiled_autograd_of_three_calls(k: Kit) -> Any:
    forward, weight = one_branch(k)

    def step(*batches):
        xs = [leaf(b) for b in batches]
        with compiled_backward(k):
            sum(forward(x) for x in xs).backward()
        return take_gradients(*xs, weight)

    return step


@training("compiled autograd: a saved value in a side stream's memory, read by the current stream and dropped there")
def train_compiled_autograd_of_saved_memory(k: Kit) -> Any:
    return train_saved_memory.build(with_compiled_backward(k))


@training("compiled autograd: the same with a gradient, which the current stream still reads when it is freed")
def train_compiled_autograd_of_gradient_memory(k: Kit) -> Any:
    return train_gradient_memory.build(with_compiled_backward(k))


@training("compiled autograd runs on the stream of whoever calls backward, which nobody ordered after the forward's")
def train_compiled_autograd_under_other_stream(k: Kit) -> Any:
    forward, weight = one_branch(k, lambda a, x: k.sleep(a * x).sum())
    other = k.stream()

    def step(x):
        x = leaf(x)
        loss = forward(x)
        with torch.cuda.stream(other), compiled_backward(k):
            loss.backward(torch.ones_like(loss))
            seen = [x.grad * 1, weight.grad * 1]
        join(other)
        take_gradients(x, weight)
        return loss.detach(), seen

    return step


@training("compiled autograd: hooks before, between and after the compiled backwards, which read and change gradients")
def train_compiled_autograd_with_hooks(k: Kit) -> Any:
    forward, first, second = two_branches(k, lambda a, b: a + b)
    update_in_backward(first, second)

    def step(x):
        x = leaf(x)
        y = forward(x)
        y.register_hook(lambda g: g * 2)
        x.register_hook(lambda g: g - 1)
        with compiled_backward(k):
            y.sum().backward()
        # Not the gradient of x: compiled autograd computes that from parameters that were updated, on stock as well.
        return y.detach(), first.detach().clone(), second.detach().clone()

    return step
