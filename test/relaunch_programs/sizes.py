"""Regions of many sizes, each with a graph of its own: no launch may see what a launch of another size left."""

from collections.abc import Iterator

import torch
from torch import nn, Tensor

from relaunch_programs._program import Kit, program


def in_turn(k: Kit, sizes: tuple[int, ...], rounds: int = 4) -> Iterator[int]:
    """The sizes twice each, then in turn, forwards and backwards."""
    first = [n for n in sizes for _ in range(2)]
    for n in [*first, *[n for r in range(rounds) for n in (sizes if r % 2 else sizes[::-1])]]:
        k.churn()
        yield n


SIZES = (5, 12, 7, 33, 16, 20, 9, 40, 6, 27)


@program("sizes at which libraries choose other kernels", launches=12)
def products_small_and_large(k: Kit) -> None:
    w = k.randn(256, 256) / 16
    f = k.compile(lambda x: torch.tanh(torch.tanh(x @ w) @ w), dynamic=True)
    for n in in_turn(k, (3, 2048, 17, 512, 130, 64, 9, 1000, 256), 3):
        k.see(f"{n}", f(k.randn(n, 256)))


@program("half precision of many sizes", launches=12, loose=4)
def half_precision(k: Kit) -> None:
    w, v = (k.randn(128, 128, dtype=torch.bfloat16) / 11 for _ in range(2))
    f = k.compile(lambda x: nn.functional.gelu(x @ w) @ v + x, dynamic=True)
    for n in in_turn(k, (8, 24, 9, 200, 64, 48, 136, 56)):
        k.see(f"{n}", f(k.randn(n, 128, dtype=torch.bfloat16)))


@program("attention of many batches and lengths", launches=12, loose=4)
def attention_lengths(k: Kit) -> None:
    layer = k.module(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)).eval()
    f = k.compile(lambda x: layer(x), dynamic=True)
    with torch.no_grad():
        for n in in_turn(k, SIZES):
            k.see(f"{n}", f(k.randn(2 + n % 3, n, 64)))


@program("causal attention in half precision, in training", launches=12, loose=16)
def attention_training(k: Kit) -> None:
    w = k.randn(64, 192, dtype=torch.bfloat16, grad=True)

    def loss(x: Tensor) -> Tensor:
        q, key, v = (x @ w).view(x.shape[0], x.shape[1], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, key, v, is_causal=True).float().square().mean()

    f = k.compile(loss, dynamic=True)
    for n in in_turn(k, (8, 24, 16, 40, 56, 32, 64), 3):
        value = f(k.randn(2, n, 64, dtype=torch.bfloat16))
        value.backward()
        k.see(f"{n}", (value, w.grad))
        w.grad = None


@program("backwards of several sizes are alive", launches=16, loose=4)
def backwards_of_sizes(k: Kit) -> None:
    w = k.randn(32, 32, grad=True)
    f = k.compile(lambda x: (torch.tanh(x @ w) @ w).sin().sum(), dynamic=True)
    for round in range(6):
        values = [f(k.randn(n, 32)) for n in SIZES]
        for value in values if round % 2 else reversed(values):
            value.backward()
        k.see(f"round {round}", w.grad)
        w.grad = None


@program("outputs of a size live while other sizes run", launches=12)
def outputs_of_sizes(k: Kit) -> None:
    f = k.compile(lambda x: (x.sin() @ x.t(), x * 2, x[1:]), dynamic=True)
    held = [f(k.randn(n, 16)) for n in in_turn(k, SIZES)]
    k.see("all", held)


@program("an output of one size is the input of another", launches=12)
def chained_sizes(k: Kit) -> None:
    f = k.compile(lambda x: (x @ x.t())[: x.shape[0] - 1, :16].cos(), dynamic=True)
    for _ in range(5):
        x = k.randn(24, 16)
        for _ in range(6):
            x = f(x)
        k.see("end", x)


@program("an input is written in place, at many sizes", launches=12)
def written_sizes(k: Kit) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2).add_(y)
        return x.sum(0)

    f = k.compile(fn, dynamic=True)
    for n in in_turn(k, SIZES):
        x = k.randn(n, 16)
        k.see(f"{n}", (f(x, k.randn(n, 16)), x))


@program("a cache grows by a position at each call", launches=8)
def growing_cache(k: Kit) -> None:
    def fn(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grown = torch.cat([cache, x[None]])
        return grown, (grown @ x).softmax(0) @ grown

    f = k.compile(fn, dynamic=True)
    for _ in range(4):
        cache = k.randn(2, 16)
        for _ in range(12):
            k.churn()
            cache, out = f(cache, k.randn(16))
            k.see(f"{len(cache)}", (cache, out))


@program("views of a buffer, by size", launches=8)
def views_by_size(k: Kit) -> None:
    buffer = k.randn(64, 16)
    f = k.compile(lambda x: x.exp() @ x.t(), dynamic=True)
    for n in in_turn(k, SIZES):
        k.see(f"{n}", f(buffer[n : 2 * n - 1]))


@program("dropout of many sizes draws what it draws without graphs", random=True, launches=12)
def dropout_sizes(k: Kit) -> None:
    f = k.compile(lambda x: nn.functional.dropout(x, 0.3) @ x.t(), dynamic=True)
    for i, n in enumerate(in_turn(k, SIZES)):
        k.seed(i)
        k.see(f"{n}", f(k.randn(n, 64)))


@program("random numbers of a library, which draws more for larger sizes", launches=4)
def library_random_sizes(k: Kit) -> None:
    with torch._inductor.config.patch(fallback_random=True):
        f = k.compile(lambda x: torch.rand_like(x) + x @ x.t(), dynamic=True)
        for i, n in enumerate(in_turn(k, (64, 512, 65, 100, 128, 70, 300, 600))):
            k.seed(i)
            k.see(f"{n}", f(k.randn(n, n)))
            k.see(f"after {n}", torch.rand(3, device=k.device))


@program("convolutions of many images", launches=8, loose=16)
def convolutions(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2)))
    f = k.compile(lambda x: model(x), dynamic=True)
    with torch.no_grad():
        for n in in_turn(k, (16, 24, 20, 33, 18, 28, 40), 3):
            k.see(f"{n}", f(k.randn(2, 3, n, n + 2)))


@program("batch norm counts and averages at many sizes", launches=8, loose=4)
def batch_norm_sizes(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())).train()
    f = k.compile(lambda x: model(x).sum(), dynamic=True)
    for n in in_turn(k, SIZES):
        f(k.randn(n, 16)).backward()
        k.see(f"{n}", [*model.buffers(), *[p.grad for p in model.parameters()]])
        model.zero_grad()


@program("sorts, counts and sums whose kernels depend on the size", launches=4)
def algorithms(k: Kit) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.sort(0).values, x.cumsum(0), x.argmax(0), x.topk(3, 0).indices, x.sum()

    f = k.compile(fn, dynamic=True)
    for n in in_turn(k, (5, 40, 300, 3000, 1500, 50, 400, 2000), 3):
        k.see(f"{n}", f(k.randn(n, 8)))


@program("embedding and cross entropy of drawn lengths, in training", launches=8, loose=8)
def language_training(k: Kit) -> None:
    table, w = k.randn(50, 32, grad=True), k.randn(32, 50, grad=True)

    def loss(ids: Tensor) -> Tensor:
        hidden = nn.functional.embedding(ids[:, :-1], table)
        return nn.functional.cross_entropy((hidden @ w).flatten(0, 1), ids[:, 1:].flatten())

    f = k.compile(loss, dynamic=True)
    for n in in_turn(k, SIZES):
        value = f(k.randint(50, 3, n))
        value.backward()
        k.see(f"{n}", (value, table.grad, w.grad))
        table.grad = w.grad = None


@program("a part that the data sizes stands between two graphs", launches=8, refusals=True)
def data_between_sizes(k: Kit) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ x.t()).sin()
        picked = y[y > 0.5]
        return y.cos() * picked.sum(), y.sum(0)

    f = k.compile(fn, dynamic=True)
    for n in in_turn(k, SIZES, 3):
        k.see(f"{n}", f(k.randn(n, 16)))


@program("two functions with sizes of their own, in turn", launches=16)
def two_functions(k: Kit) -> None:
    f = k.compile(lambda x: (x @ x.t()).relu(), dynamic=True)
    g = k.compile(lambda x: (x.t() @ x).tanh().sum(0), dynamic=True)
    for n in in_turn(k, SIZES):
        x = k.randn(n, 16)
        k.see(f"{n}", (f(x), g(x), f(x[: n // 2 + 2])))


@program("more sets of nodes than graphs are kept", launches=8, refusals=True, config={"cudagraph_templates": 2})
def few_graphs(k: Kit) -> None:
    f = k.compile(lambda x: (x.sort(0).values, (x @ x.t()).sum(0)), dynamic=True)
    for n in in_turn(k, (4, 600, 2100, 70, 5000, 1200, 50, 700, 2500), 3):
        k.see(f"{n}", f(k.randn(n, 8)))


@program("more sizes than are kept", launches=1, refusals=True, config={"cudagraph_templates": 1})
def many_sizes(k: Kit) -> None:
    f = k.compile(lambda x: (x @ x.t()).sin().sum(0), dynamic=True)
    for n in [*range(3, 24), *range(3, 24), *range(23, 3, -1), *range(3, 24)]:
        k.see(f"{n}", f(k.randn(n, 16)))


@program("a misaligned input of one of many sizes", launches=8)
def misaligned_sizes(k: Kit) -> None:
    f = k.compile(lambda x: (x * 2) @ x.t(), dynamic=True)
    for i, n in enumerate(in_turn(k, SIZES)):
        x = k.randn(16 * n + 4).view(-1)
        k.see(f"{n}", f(x[i % 4 : i % 4 + 16 * n].view(n, 16)))


@program("sizes after torch.compiler.reset", launches=8)
def sizes_after_reset(k: Kit) -> None:
    f = k.compile(lambda x: (x @ x.t()).sin(), dynamic=True)
    for _ in range(2):
        for n in in_turn(k, SIZES[:7], 2):
            k.see(f"{n}", f(k.randn(n, 16)))
        torch._dynamo.reset()


@program("grouped products and gathered rows of many sizes", launches=8)
def gathered(k: Kit) -> None:
    table = k.randn(40, 16)
    f = k.compile(lambda i, x: torch.bmm(table[i].view(2, -1, 16), x).sum(1), dynamic=True)
    for n in in_turn(k, (4, 10, 6, 18, 14, 22, 8), 3):
        k.see(f"{n}", f(k.randint(40, n), k.randn(2, 16, n)))
