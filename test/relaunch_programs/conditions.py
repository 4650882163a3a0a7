"""Conditions: a tensor on the device decides which branch is taken, and one graph holds both."""

import torch
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.training import gradients, loss_of


def outcome(k: Kit, i: int) -> torch.Tensor:
    """A predicate: false, true, true, false ..."""
    return k.randn() + (9 if i % 3 else -9) > 0


@program("a tensor decides which branch is taken", launches=6)
def branches(k: Kit) -> None:
    def fn(x, gate):
        return torch.cond(gate.sum() > 0, lambda x: (x.sin() * 2,), lambda x: (x.cos() - 1,), (x,))[0] + x

    f = k.compile(fn)
    for i in k.steps():
        k.see("output", f(k.randn(64, 8), k.randn(4) + (5 if i % 3 else -5)))


@program(
    "products of libraries and kernels of Triton are in both branches, with temporaries of other sizes", launches=6
)
def products_in_branches(k: Kit) -> None:
    w, v = k.randn(64, 256) / 8, k.randn(256, 64) / 16

    def fn(p, x):
        y = x @ w
        z, s = torch.cond(
            p,
            lambda y: (torch.relu(y @ v) @ w, y.sum(1)),
            lambda y: ((y.t() @ y).softmax(-1)[:32], y.amax(1)),
            (y,),
        )
        return (z * y).sin() + s[:, None], z

    f = k.compile(fn)
    held = [f(outcome(k, i), k.randn(32, 64)) for i in k.steps()]
    k.see("outputs", held)


@program("a branch returns what it got, or one value twice", launches=6)
def branches_that_copy(k: Kit) -> None:
    def fn(p, x):
        y = x.sin()
        a, b = torch.cond(p, lambda y: (y.clone(), y + 1), lambda y: ((z := y * 2), z.clone()), (y,))
        return a + y, b

    f = k.compile(fn)
    for i in k.steps():
        k.see("output", f(outcome(k, i), k.randn(32, 64)))


@program("a branch has a condition of its own", launches=6)
def condition_in_a_branch(k: Kit) -> None:
    w = k.randn(64, 64) / 8

    def outer(y):
        z = (y @ w).relu()
        return torch.cond(z.sum() > 440, lambda z, y: z @ w + y, lambda z, y: (z - y).tanh(), (z, y)) * 2

    f = k.compile(lambda p, x: torch.cond(p, outer, torch.sin, (x @ w,)) @ w)
    for i in k.steps(16):
        k.see("output", f(outcome(k, i), k.randn(16, 64) * (1 + i % 2)))


@program("forward and backward choose by one predicate", launches=8, loose=4)
def condition_in_training(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))

    def fn(p, x):
        y = model[0](x).sin()
        return loss_of(torch.cond(p, lambda y: model[1](y).relu(), lambda y: model[1](y.cos()) - y, (y,)))

    f = k.compile(fn)
    for i in k.steps(10):
        loss = f(outcome(k, i), k.randn(16, 32))
        k.churn()
        loss.backward()
        k.see("loss", loss)
        k.see("gradients", gradients(model))


@program("each layer of a model is left out where its router says so", launches=3, loose=4)
def mixture_of_depths(k: Kit) -> None:
    layers = k.module(nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(6)))

    def fn(x):
        for layer in layers:
            x = torch.cond(x.sum() > 0, lambda x, layer=layer: x + torch.tanh(layer(x)), lambda x: x - 0.25, (x,))
        return x

    f = k.compile(fn)
    with torch.no_grad():
        for _ in k.steps(16):
            k.see("output", f(k.randn(8, 32)))


@program("a branch writes to a cache, and the other one reads it", launches=6)
def branch_that_writes(k: Kit) -> None:
    cache = k.randn(16, 32)

    def write(y, cache):
        cache.copy_(y * 2)
        return y + 1

    f = k.compile(lambda p, x, cache: torch.cond(p, write, lambda y, cache: y - cache, (x.sin(), cache)).exp())
    with torch.no_grad():
        for i in k.steps():
            k.see("output", f(outcome(k, i), k.randn(16, 32), cache))
            k.see("cache", cache)


@program("a branch of many sizes, each captured by itself", launches=12)
def conditions_of_sizes(k: Kit) -> None:
    w = k.randn(32, 32) / 8
    f = k.compile(
        lambda p, x: torch.cond(p, lambda x: x @ w, lambda x: x.cumsum(-1), (x.sin(),)) + x.shape[0], dynamic=True
    )
    for i in k.steps(20):
        k.see("output", f(outcome(k, i // 2), k.randn(8 * (1 + i % 4), 32)))


@program("a branch that draws random numbers is split off", launches=6, random=True)
def random_branch(k: Kit) -> None:
    f = k.compile(lambda p, x: torch.cond(p, lambda x: x + torch.rand_like(x), torch.cos, ((x @ x).sin(),)).exp() @ x)
    for i in k.steps():
        k.seed(i)
        k.see("output", f(outcome(k, i), k.randn(32, 32)))
