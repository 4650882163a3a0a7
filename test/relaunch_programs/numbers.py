"""Numbers: one graph computes with the number of each launch, or there is a graph for each number."""

import math

import torch
from torch import nn

from relaunch_programs._program import Kit, program


MANY = (3, 5, 5, 8, 13, -2, 0, 1, 2**31 - 1, 2**31, -(2**40), 7)


def mixed(x: torch.Tensor, w: torch.Tensor, n: int) -> torch.Tensor:
    for k in range(3):
        x = torch.relu(x @ w) + n * k
    return x


@program("an integer that is another one at each call", launches=10)
def integer_that_changes(k: Kit) -> None:
    f = k.compile(mixed, dynamic=True)
    w = k.randn(32, 32)
    for n in MANY:
        k.churn()
        k.see(f"n = {n}", f(k.randn(16, 32), w, n))


@program("numbers are computed with in Python, and returned", launches=9)
def computed_numbers(k: Kit) -> None:
    f = k.compile(lambda x, n, m: (x * (3 * n - m // 2) + (n % 5), n * m + 1, -n), dynamic=True)
    for n, m in zip(MANY, reversed(MANY)):
        k.see(f"{n}, {m}", f(k.randn(64), n % 1000, m % 77))


@program("a float that is another one at each call, zeros and infinities among them", launches=8)
def float_that_changes(k: Kit) -> None:
    f = k.compile(lambda x, w, a: torch.relu(x @ w) * a + a, dynamic=True)
    w = k.randn(32, 32)
    for a in (0.5, 2.0, -0.0, 0.0, math.inf, -1e-30, 3.0, 0.1, 2.5, 1e10):
        k.see(f"a = {a}", f(k.randn(8, 32), w, a))


@program("an integer of the batch that is a size and a number", launches=4)
def size_and_number(k: Kit) -> None:
    f = k.compile(lambda x, n: (x[:n] * n).sum(0) + x.new_ones(n, 8).sum(), dynamic=True)
    for i in k.steps(24):
        k.see("out", f(k.randn(16, 8), 4 + i % 3))


@program("a number changes beside sizes that change", launches=12)
def numbers_and_sizes(k: Kit) -> None:
    f = k.compile(lambda x, n: (x @ x.t()).softmax(-1) * n + x.shape[0], dynamic=True)
    for i in range(24):
        k.churn()
        k.see(f"call {i}", f(k.randn(4 + i % 3, 16), 10 * i + 2))


@program("the step's number in a training step", launches=6, loose=3)
def number_in_training(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)))
    f = k.compile(lambda x, step: model(x * (step + 1)).square().mean() / (2 * step + 3), dynamic=True)
    for step in range(2, 14):
        loss = f(k.randn(16, 32), step)
        loss.backward()
        k.see(f"step {step}", (loss, [p.grad for p in model.parameters()]))
        model.zero_grad()


@program("several backwards are alive, each with a number of its own", launches=4, loose=2)
def number_of_each_backward(k: Kit) -> None:
    w = k.randn(16, 16, grad=True)
    f = k.compile(lambda x, n: ((x @ w) * n).sin().sum() * n, dynamic=True)
    for i in range(8):
        losses = [f(k.randn(8, 16), n) for n in (2 + i, 5 * i + 3, 11)]
        for loss in reversed(losses):
            loss.backward()
        k.see(f"round {i}", w.grad)
        w.grad = None


@program("the position of a decode loop is a Python integer: an input is written there", launches=6)
def decode_position(k: Kit) -> None:
    cache, w = k.randn(32, 16) * 0, k.randn(16, 16)

    def token(x: torch.Tensor, position: int) -> torch.Tensor:
        cache[position] = x @ w
        mask = torch.arange(32, device=x.device) <= position
        scores = (cache @ x).masked_fill(~mask, -1e4)
        return scores.softmax(0) @ cache

    f = k.compile(token, dynamic=True)
    for position in range(2, 20):
        k.see(f"position {position}", f(k.randn(16), position))
    k.see("cache", cache)


@program("a number decides in Python: a graph for each side of the decision", launches=4)
def number_decides(k: Kit) -> None:
    f = k.compile(lambda x, n: x * max(n, 10) + min(n, 3), dynamic=True)
    for n in (2, 3, 20, 21, 22, 5, 5, 5, 30, 30, 2, 2):
        k.see(f"n = {n}", f(k.randn(64), n))


@program("a number that no parameter holds", launches=2)
def number_too_large(k: Kit) -> None:
    f = k.compile(lambda x, n: x + n // 3, dynamic=True)
    for n in (5, 6, 7, 2**62, 2**40, 8, -(2**62), 9):
        k.see(f"n = {n}", f(k.randn(64).double(), n))


@program("a number of a mutated input", launches=6)
def number_and_mutation(k: Kit) -> None:
    held = k.randn(64)

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        held.mul_(0.5).add_(x, alpha=n)
        return held * n

    f = k.compile(step, dynamic=True)
    for n in range(3, 15):
        k.see(f"n = {n}", (f(k.randn(64), n), held))


@program("alpha and beta of a product are numbers", launches=2)
def number_of_a_product(k: Kit) -> None:
    f = k.compile(lambda c, a, b, n: torch.addmm(c, a, b, alpha=n, beta=2 * n), dynamic=True)
    for n in (2, 3, 3, 3, 5, 5, 5, 7, 2, 2):
        k.see(f"n = {n}", f(k.randn(8, 8), k.randn(8, 8), k.randn(8, 8), n))


@program("a number with dropout", random=True, launches=6)
def number_and_dropout(k: Kit) -> None:
    f = k.compile(lambda x, n: nn.functional.dropout(x * n, 0.5) + n, dynamic=True)
    for n in range(3, 12):
        torch.manual_seed(n)
        k.see(f"n = {n}", f(k.randn(256), n))


@program("True, 1 and 1.0 are three numbers", launches=0)
def kinds_of_one(k: Kit) -> None:
    f = k.compile(lambda x, n: x * n + n, dynamic=True)
    for n in (1, True, 1.0, 2, 2.0, False, 0, 0.0, -0.0, 3, 4, 5.5):
        k.see(f"n = {n!r}", f(k.randn(64), n))
