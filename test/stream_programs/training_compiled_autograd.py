"""Training with compiled autograd, which traces a whole backward pass instead of running it in autograd's engine."""

import contextlib
import functools
from typing import Any

import torch

from stream_programs._program import Kit, matrices
from stream_programs.training import (
    fork,
    gradient_memory,
    join,
    leaf,
    product,
    saved_memory,
    take_gradients,
    trained,
    training,
)


def compiled_backward(k: Kit, **options: Any) -> Any:
    """Compiled autograd around a backward, in the place of autograd's engine; the oracle uses the engine."""
    if k.compiler is None:
        return contextlib.nullcontext()
    return torch._dynamo.compiled_autograd._enable(k.compiler, **options)


@training("compiled autograd traces the backward, whose streams have other numbers in that graph")
def train_compiled_autograd(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    first, second = trained(k, 2)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu()
        join(side)
        return (a @ second).sum()

    def step(x):
        x = leaf(x)
        loss = forward(x)
        with compiled_backward(k):
            loss.backward()
        return loss.detach(), take_gradients(x, first, second)

    return step


@training("compiled autograd: two branches, of which one is on a side stream, with fixed shapes", matrices(2))
def train_compiled_autograd_of_two_branches(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    first, second = trained(k, 2)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep((x @ first).relu()) @ second
        b = (x @ second).relu() @ first
        join(side)
        return (a + b).sum()

    def step(*batches):
        losses = []
        for batch in batches:  # the second one's gradients are added to the first one's
            loss = forward(batch)
            with compiled_backward(k, dynamic=False):
                loss.backward()
            losses.append(loss.detach())
        return losses, take_gradients(first, second)

    return step


@training("compiled autograd: two functions in one graph, each with streams of its own, and eager code between them")
def train_compiled_autograd_of_two_functions(k: Kit) -> Any:
    one, two, sleep = k.stream(), k.stream(), k.sleep
    first, second = trained(k, 2)

    def make(side, weight):
        def forward(x):
            fork(side)
            with torch.cuda.stream(side):
                a = sleep(x @ weight).relu().clamp(max=2)
            join(side)
            return a + x

        return k.compile(forward)

    run_one, run_two = make(one, first), make(two, second)

    def step(x):
        x = leaf(x)
        y = run_two(run_one(x).clamp(-2, 2) * 2)  # a number that is saved: `upstream_fixes.wrapped_numbers`
        with compiled_backward(k):
            y.sum().backward()
        return y.detach(), take_gradients(x, first, second)

    return step


@training("compiled autograd: one function called three times, so its graph is copied three times", matrices(3))
def train_compiled_autograd_of_three_calls(k: Kit) -> Any:
    forward, weight = product(k)

    def step(*batches):
        xs = [leaf(b) for b in batches]
        with compiled_backward(k):
            sum(forward(x) for x in xs).backward()
        return take_gradients(*xs, weight)

    return step


@training("compiled autograd: a saved value in a side stream's memory, read by the current stream and dropped there")
def train_compiled_autograd_of_saved_memory(k: Kit) -> Any:
    return saved_memory(k, functools.partial(compiled_backward, k))


@training("compiled autograd: the same with a gradient, which the current stream still reads when it is freed")
def train_compiled_autograd_of_gradient_memory(k: Kit) -> Any:
    return gradient_memory(k, functools.partial(compiled_backward, k))


@training("compiled autograd runs on the stream of whoever calls backward, which nobody ordered after the forward's")
def train_compiled_autograd_under_other_stream(k: Kit) -> Any:
    side, other, sleep = k.stream(), k.stream(), k.sleep
    (weight,) = trained(k, 1)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ weight).relu()
        join(side)
        return sleep(a * x).sum()

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
    side, sleep = k.stream(), k.sleep
    first, second = trained(k, 2)

    @torch.no_grad()
    def update(parameter):
        parameter.add_(parameter.grad.sign()).clamp_(-2, 2)
        parameter.grad = None

    for parameter in (first, second):
        parameter.register_post_accumulate_grad_hook(update)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu()
        b = x @ second
        join(side)
        return a + b

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
