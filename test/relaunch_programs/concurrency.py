"""Kernels that a graph runs side by side: what they read and write, and the memory that they share."""

import torch
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.training import gradients, loss_of


class Block(nn.Module):
    """Attention and a gated MLP, with a projection for each of what is multiplied."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 320), nn.Linear(width, 320), nn.Linear(320, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
        x = x + self.out((scores @ v).transpose(-2, -3).flatten(-2))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def blocks(count: int = 3) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count)))


@program("projections of one tensor run side by side", launches=10)
def projections_side_by_side(k: Kit) -> None:
    model = k.module(blocks())
    f = k.compile(lambda x: model(x))
    with torch.no_grad():
        held = []
        for _ in k.steps(14):
            held.append(f(k.randn(2, 48, 128)))
            k.churn()
        k.see("outputs", held)


class Attention(nn.Module):
    def __init__(self, width: int = 128, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = q * torch.sigmoid(q), k + k.roll(1, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


@program("what attention returned is written over by what runs side by side", launches=10)
def attention_side_by_side(k: Kit) -> None:
    model = k.module(nn.Sequential(*(Attention() for _ in range(4)))).bfloat16()
    f = k.compile(lambda x: model(x))
    with torch.no_grad():
        held = []
        for _ in k.steps(14):
            held.append(f(k.randn(2, 64, 128).bfloat16()))
            k.churn()
        k.see("outputs", held)


class Branches(nn.Module):
    """Convolutions of one tensor, which return memory that the program reuses."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(width, width // 4, n, padding=n // 2) for n in (1, 3, 5, 1))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(torch.cat([torch.relu(b(x)) for b in self.branches], 1)) + x)


@program("convolutions of one tensor, and kernels between them", launches=10, loose=40)
def convolutions_side_by_side(k: Kit) -> None:
    model = k.module(nn.Sequential(*(Branches() for _ in range(3)))).eval()
    f = k.compile(lambda x: model(x))
    with torch.no_grad():
        for _ in k.steps(14):
            k.see("features", f(k.randn(2, 32, 20, 20)))
            k.churn()


@program("gradients of weights and of inputs run side by side", launches=12, loose=4)
def gradients_side_by_side(k: Kit) -> None:
    model = k.module(blocks(2))
    f = k.compile(lambda x: model(x))
    for _ in k.steps(10):
        loss_of(f(k.randn(4, 32, 128))).backward()
        k.see("gradients", gradients(model))
        k.churn()


@program("products that the library splits have counters in one workspace", launches=10)
def split_products_side_by_side(k: Kit) -> None:
    weights = [k.randn(8192, n) / 64 for n in (64, 64, 32, 64)]
    f = k.compile(lambda x, *ws: [x @ w for w in ws])
    for _ in k.steps(14):
        x = k.randn(64, 8192)
        k.see("products", f(x, *weights))
        k.see("in half precision", f(x.bfloat16(), *(w.bfloat16() for w in weights)))


@program("inputs of a later call share the memory that a kernel writes beside another one", launches=8)
def written_inputs_side_by_side(k: Kit) -> None:
    w = k.randn(64, 64)

    def step(a, b, c):
        x, y = a @ w, b @ w
        c.mul_(0.5)
        z = torch.tanh(c @ w)
        a.add_(1)
        return x + y, z, b.sum(0)

    f = k.compile(step)
    for i in k.steps(16):
        base = k.randn(192, 64)
        a, b, c = base[:64], base[64:128], base[128:]
        if i % 4 == 3:
            b = c
        k.see("results", f(a, b, c))
        k.see("inputs", base)


@program("temporary memory of kernels that run side by side", launches=10)
def scratch_side_by_side(k: Kit) -> None:
    w = [k.randn(96, 96) / 10 for _ in range(6)]

    def tree(x):
        leaves = [torch.relu(x @ m) for m in w]
        pairs = [(leaves[i] @ w[i]).softmax(-1) + leaves[i + 1] @ w[i + 1] for i in range(0, 6, 2)]
        return pairs[0] * pairs[1] - pairs[2], pairs[1].amax(0)

    f = k.compile(tree)
    for _ in k.steps(14):
        k.see("tree", f(k.randn(96, 96)))


@program("a large kernel and small ones, for many calls in a row", launches=10)
def large_and_small_side_by_side(k: Kit) -> None:
    w = k.randn(256, 256) / 16

    def step(x, big):
        y = x @ w
        z = torch.cos(big) * 0.5
        return (y @ w).sum(0), (x @ w.t()).amax(1), z.sum(0), (x * 2).cumsum(0)

    f = k.compile(step)
    for _ in k.steps(14):
        k.see("results", f(k.randn(32, 256), k.randn(2048, 512)))
