"""Shapes: one template for each, bounded; what was compiled for any size is captured for this one."""

import torch
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.parameters import network


@program("fifty sizes of one dynamic function, each several times (#105064)", launches=50)
def fifty_sizes(k: Kit) -> None:
    f = k.compile(lambda x: ((x @ x.t()).softmax(-1) @ x, x.sum(0)), dynamic=True)
    for _ in range(4):
        for n in range(2, 52):
            k.see(f"size {n}", f(k.randn(n, 32)))
        k.churn()


@program(
    "more sizes than templates are kept: the oldest go, and come back",
    launches=6,
    refusals=True,
    config={"cudagraph_templates": 4},
)
def more_sizes_than_templates(k: Kit) -> None:
    f = k.compile(lambda x: (torch.tanh(x @ x.t()), x * 2), dynamic=True)
    for n in [4, 5, 4, 5, 4, 6, 7, 8, 4, 9, 10, 11, 5, 5, 5, 12, 4, 4, 4, 8, 8, 8, 8]:
        k.churn()
        k.see(f"size {n}", f(k.randn(n, 16)))


@program("a dynamic batch in training", launches=8, loose=4)
def dynamic_training(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model, dynamic=True)
    pending = []
    for i in k.steps(24):
        pending.append(f(k.randn(3 + i % 4, 32)))
        if i % 2:
            for y in pending:
                y.square().mean().backward()
            pending.clear()
            k.see("gradients", [p.grad for p in model.parameters()])
            model.zero_grad()


@program("two dynamic dimensions, and a Python number that is a size", launches=4)
def two_dynamic_dimensions(k: Kit) -> None:
    f = k.compile(lambda x, y, n: (x @ y, x[:n].sum(0), y.new_zeros(n, 3) + n), dynamic=True)
    for i in k.steps(24):
        a, b = 4 + i % 3, 6 + i % 2
        k.see("outputs", f(k.randn(a, 16), k.randn(16, b), a - 1))


@program("a size is marked dynamic by the user", launches=8)
def marked_dynamic(k: Kit) -> None:
    f = k.compile(lambda x: nn.functional.layer_norm(x, x.shape[-1:]).sum(0))
    for i in k.steps(20):
        x = k.randn(10 + i % 5, 24)
        torch._dynamo.mark_dynamic(x, 0)
        k.see("output", f(x))


@program("a shape that Dynamo made dynamic at its second size", launches=4)
def automatic_dynamic(k: Kit) -> None:
    f = k.compile(lambda x: (x.cumsum(0), x.mean(1)))
    for n in [8, 8, 8, 9, 9, 9, 10, 10, 10, 8, 8, 8, 1, 1, 1]:
        k.churn()
        k.see(f"size {n}", f(k.randn(n, 24)))


@program("a size that only the data knows", launches=0, refusals=True)
def size_from_data(k: Kit) -> None:
    def fn(x):
        picked = x[x > 0]
        return picked.sum() + x.sum(), (x * 2).relu()

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(32, 8)))


@program("strides depend on a dynamic size", launches=4)
def dynamic_strides(k: Kit) -> None:
    f = k.compile(lambda x: (x.t() * 2, x[:, 1:].contiguous()), dynamic=True)
    for i in k.steps(18):
        width = 5 + i % 3
        k.see("outputs", f(k.randn(12, 16)[:, :width] if i % 2 else k.randn(12, width)))
