"""Mutation: inputs, buffers and caches that are written in place. Upstream's graphs skip most of these programs."""

import torch
from torch import nn

from relaunch_programs._program import Kit, program


@program("an input is written in place (#123231)", launches=6)
def mutated_input(k: Kit) -> None:
    def fn(x, y):
        x.add_(y @ y.t())
        return x.sum(1)

    f = k.compile(fn)
    kept = k.randn(48, 48)
    for i in k.steps():
        x = k.randn(48, 48) if i % 2 else kept
        k.see("outputs", (f(x, k.randn(48, 48)), x))


@program("an input that is written is an output, too: the very same tensor (#154824)", launches=6)
def mutated_and_returned(k: Kit) -> None:
    def fn(x, y):
        z = x * y
        x.mul_(0.5).add_(z)
        return x, z, x.view(-1)

    f = k.compile(fn)
    for _ in k.steps():
        x = k.randn(33, 20)
        same, z, flat = f(x, k.randn(33, 20))
        flat.neg_()
        k.see("outputs", (same, z, flat, x, same is x))


@program("a view of an input is written", launches=6)
def mutated_view(k: Kit) -> None:
    def fn(x, y):
        x[1:3].copy_(y)
        x[:, 5] += 1
        return x.sum()

    f = k.compile(fn)
    for _ in k.steps():
        x = k.randn(8, 32)
        k.see("outputs", (f(x, k.randn(2, 32)), x))


@program("the input is a view, the caller reads its base", launches=6)
def mutated_part_of_a_base(k: Kit) -> None:
    def fn(x):
        x.relu_()
        return x * 2

    f = k.compile(fn)
    for _ in k.steps():
        base = k.randn(4, 16, 16)
        k.see("outputs", (f(base[2]), base))


@program("a misaligned input is written: an aligned copy of it must be written back", launches=0)
def mutated_misaligned(k: Kit) -> None:
    def fn(x, y):
        x.add_(y)
        return x.cos()

    f = k.compile(fn)
    for i in k.steps(12):
        base = k.randn(64 * 64 + 1)
        x = base[1:].view(64, 64) if i % 3 else k.randn(64, 64)
        k.see("outputs", (f(x, k.randn(64, 64)), base, x))


@program("an input is written that another input is a view of", launches=0)
def mutated_alias(k: Kit) -> None:
    # A function for each: upstream's guards don't tell views of one base from strangers.
    views = k.compile(lambda x, y: (x.add_(1).sum(), y * 2))
    same = k.compile(lambda x, y: (x.add_(1).mean(), y * 2))
    strangers = k.compile(lambda x, y: (x.add_(1).amax(), y * 2))
    for _ in k.steps():
        base = k.randn(32, 32)
        k.see("views of one base", (views(base[:16], base[8:24]), base))
        k.see("the same", (same(base, base), base))
        k.see("strangers", strangers(k.randn(16, 32), k.randn(16, 32)))


@program("an input with stride 0 or swapped strides is written", launches=6)
def mutated_transposed(k: Kit) -> None:
    def fn(x, y):
        x.sub_(y)
        return (x * y).sum(0)

    f = k.compile(fn)
    for _ in k.steps():
        base = k.randn(32, 48)
        k.see("outputs", (f(base.t(), k.randn(48, 32)), base))


@program("batch norm in training: running statistics, and a counter", launches=6, loose=10)
def batch_norm(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).train()
    f = k.compile(model)
    for i in k.steps(12):
        model.train(i % 4 != 3)
        with torch.no_grad():
            k.see("output", f(k.randn(4, 3, 12, 12)))
        k.see("buffers", dict(model.named_buffers()))


@program("a module counts its calls and keeps an average in buffers", launches=6)
def counting_module(k: Kit) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("average", torch.zeros(32))

        def forward(self, x):
            self.count += 1
            self.average.lerp_(x.mean(0), 0.1)
            return x - self.average * self.count

    model = k.module(Counter())
    f = k.compile(model)
    for _ in k.steps(12):
        k.see("output", f(k.randn(8, 32)))
        k.see("buffers", dict(model.named_buffers()))


@program("a tensor that is copied on write lies where its base does: the graph writes there", launches=12)
def copied_on_write(k: Kit) -> None:
    def fn(x, cache):
        cache.add_(x)
        return cache * 2

    f, g = k.compile(fn), k.compile(fn)
    kept = k.randn(64)
    for _ in k.steps():
        base = k.randn(64)
        clone = torch._lazy_clone(base)
        k.see("written clone", (f(k.randn(64), clone), clone, base))
        held = torch._lazy_clone(kept)
        k.see("written base", (g(k.randn(64), kept), kept, held))
        k.see("read clone", f(torch._lazy_clone(base), clone))


@program("a parameter is updated while a lazy clone holds what it was", launches=6)
def snapshot_of_parameters(k: Kit) -> None:
    model = k.module(nn.BatchNorm1d(16)).train()
    f = k.compile(model)
    for _ in k.steps(12):
        before = [torch._lazy_clone(t.detach()) for t in model.state_dict().values()]
        with torch.no_grad():
            k.see("output", f(k.randn(8, 16)))
        k.see("before and after", (before, list(model.state_dict().values())))


@program("buffers are replaced by other tensors between the calls", launches=4)
def swapped_buffers(k: Kit) -> None:
    model = k.module(nn.BatchNorm1d(16)).train()
    f = k.compile(model)
    for i in k.steps(12):
        if i % 3 == 2:
            model.running_mean = k.randn(16)
        with torch.no_grad():
            k.see("output", (f(k.randn(8, 16)), model.running_mean, model.num_batches_tracked))


class Decoder(nn.Module):
    """One attention layer with a cache for `length` tokens, written in place at a position that a tensor holds."""

    def __init__(self, width: int = 64, heads: int = 4, length: int = 32) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.embed = nn.Embedding(100, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def caches(self, k: Kit, batch: int) -> list[torch.Tensor]:
        width = self.out.in_features
        return [torch.zeros(batch, self.heads, self.length, width // self.heads, device=k.device) for _ in range(2)]

    def forward(self, tokens, position, keys, values):
        x = self.embed(tokens)
        batch, count, width = x.shape
        q, key, value = (t.view(batch, count, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=-1))
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        mask = torch.arange(self.length, device=x.device)[None, :] <= position[:, None]
        y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(batch, count, width)) @ self.embed.weight.t()


@program("a decode loop updates its cache in place and feeds its output back", launches=20, loose=4)
def decode_loop(k: Kit) -> None:
    model = k.module(Decoder())
    f = k.compile(model)
    with torch.no_grad():
        for _ in range(2):  # the second sequence has caches of its own
            caches = model.caches(k, 2)
            f(k.randint(100, 2, 4), torch.arange(4, device=k.device), *caches)
            token = k.randint(100, 2, 1)
            for i in k.steps(16):
                scores = f(token, torch.tensor([4 + i], device=k.device), *caches)
                token = k.randint(100, 2, 1)
                k.see("scores", scores)
            k.see("caches", caches)


@program("a decode loop whose position is a Python number", launches=0, loose=4)
def decode_loop_with_a_number(k: Kit) -> None:
    def step(x, cache, position):
        cache[:, position] = x
        return torch.softmax(cache @ x[:, :, None] / 4, 1).squeeze(-1)

    f = k.compile(step, dynamic=True)
    cache = torch.zeros(2, 24, 16, device=k.device)
    for i in k.steps(20):
        k.see("scores", f(k.randn(2, 16), cache, i + 2))
    k.see("cache", cache)


@program("two caches alternate: pointers of mutated inputs move on every call", launches=10)
def alternating_caches(k: Kit) -> None:
    def step(x, cache, at):
        cache.index_add_(0, at, x)
        return cache.cumsum(0)

    f = k.compile(step)
    caches = [torch.zeros(16, 32, device=k.device) for _ in range(3)]
    for i in k.steps(15):
        k.see("output", f(k.randn(4, 32), caches[i % 3], torch.arange(4, device=k.device) + i % 12))
    k.see("caches", caches)


@program("mutation on top of mutation: many inputs by foreach operators", launches=6)
def foreach_mutation(k: Kit) -> None:
    def fn(ps, gs):
        torch._foreach_mul_(ps, 0.99)
        torch._foreach_add_(ps, gs, alpha=-0.1)
        return [p.square().sum().sqrt() for p in ps]

    f = k.compile(fn)
    ps = [k.randn(n, 7) for n in range(1, 20)]
    for _ in k.steps():
        k.see("norms", f(ps, [k.randn(*p.shape) for p in ps]))
    k.see("ps", ps)


@program(
    "norms by foreach: the operator copies from host memory, which isn't there at the next call",
    launches=0,
    refusals=True,
)
def foreach_norms(k: Kit) -> None:
    f = k.compile(lambda ps: torch._foreach_norm(torch._foreach_mul(ps, 0.99)))
    for _ in k.steps():
        k.see("norms", f([k.randn(n, 7) for n in range(1, 20)]))


@program("a compiled optimizer step", launches=4)
def compiled_optimizer(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    step = k.compile(optimizer.step)
    for _ in k.steps(10):
        model(k.randn(8, 16)).square().mean().backward()
        with torch.no_grad():
            step()
        optimizer.zero_grad()
        k.see("parameters", list(model.parameters()))
