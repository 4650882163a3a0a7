"""Random numbers: the same seed gives the same numbers as without graphs, and other ones from call to call.

Eager and compiled code draw different numbers, so the oracle is the function compiled without graphs. One program asks
Inductor for eager's generators, and has eager as its oracle, too.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from relaunch_programs._program import Kit, program


@program("dropout repeats the mask of the capture", random=True, launches=6)
def dropout(k: Kit) -> None:
    f = k.compile(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(64, 64, device=k.device)
    k.seed(1)
    masks = [f(x) for _ in k.steps(10)]
    k.see("masks", masks)
    k.see("all different", len({tuple(m.view(-1).tolist()) for m in masks}))


@program("a seed that is set again gives the same numbers again", random=True, launches=10)
def seed_again(k: Kit) -> None:
    f = k.compile(lambda x: (nn.functional.dropout(x, 0.3), torch.rand_like(x), torch.randn(3, 5, device=x.device)))
    x = k.randn(32, 32)
    f(x), f(x), f(x)
    runs = []
    for _ in range(3):
        k.seed(7)
        runs.append([f(x) for _ in k.steps(4)])
    k.see("runs", runs)
    k.see("equal", all(torch.equal(a, b) for one in runs for x, y in zip(runs[0], one) for a, b in zip(x, y)))


@program("random operators of the user between the calls go on where the call ended", random=True, launches=6)
def eager_between(k: Kit) -> None:
    f = k.compile(lambda x: nn.functional.dropout(x, 0.5).cos())
    k.seed(3)
    for _ in k.steps(10):
        x = k.randn(64, 64)
        k.see("compiled", f(x))
        k.see("eager", torch.rand(8, device=k.device))


@program("dropout in forward and backward uses one mask", random=True, launches=10)
def dropout_in_training(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8)))
    f = k.compile(model)
    k.seed(5)
    for _ in k.steps():
        x = k.randn(16, 32, grad=True)
        y = f(x)
        y.sum().backward()
        k.see("output and gradients", (y, x.grad, [p.grad for p in model.parameters()]))
        model.zero_grad()


@program("the generator's state is read, kept and set", random=True, launches=6)
def generator_state(k: Kit) -> None:
    f = k.compile(lambda x: torch.rand_like(x) + nn.functional.dropout(x, 0.5))
    get, put = (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if k.gpu else (torch.get_rng_state, torch.set_rng_state)
    )
    x = k.randn(16, 16)
    k.seed(9)
    for _ in k.steps(4):
        f(x)
    state = get()
    k.see("state", state)
    first = [f(x) for _ in k.steps(3)]
    put(state)
    second = [f(x) for _ in k.steps(3)]
    k.see("numbers", (first, second, get()))
    k.see("equal", all(torch.equal(a, b) for a, b in zip(first, second)))


@program("fork_rng around a call", random=True, launches=6)
def forked_rng(k: Kit) -> None:
    f = k.compile(lambda x: torch.rand_like(x))
    x = k.randn(32)
    k.seed(4)
    for _ in k.steps(10):
        with torch.random.fork_rng(devices=[0] if k.gpu else []):
            k.see("inside", f(x))
        k.see("outside", f(x))


@program("checkpointing draws the forward's numbers again in backward", random=True, launches=8)
def checkpointed_dropout(k: Kit) -> None:
    linear = k.module(nn.Linear(32, 32))
    block = nn.Sequential(linear, nn.Dropout(0.5), nn.GELU())
    inside = k.compile(lambda x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=True))
    compiled_block = k.compile(block)

    def outside(x):
        return checkpoint(compiled_block, x, use_reentrant=False, preserve_rng_state=True)

    for f in (inside, outside):
        k.seed(8)
        for _ in k.steps():
            x = k.randn(16, 32, grad=True)
            y = f(x)
            y.sum().backward()
            k.see("output and gradients", (y, x.grad, linear.weight.grad))
            linear.zero_grad()


@program("two functions share the generator", random=True, launches=10)
def two_random_functions(k: Kit) -> None:
    f = k.compile(lambda x: nn.functional.dropout(x, 0.5))
    g = k.compile(lambda x: x + torch.randn_like(x) * torch.rand((), device=x.device))
    k.seed(2)
    for i in k.steps(12):
        x = k.randn(40, 20)
        k.see("numbers", (f(x), g(x)) if i % 3 else (g(x), f(g(x))))


@program("eager's generators, used by operators of ATen inside the graph", random=True, launches=6)
def eager_generators(k: Kit) -> None:
    with torch._inductor.config.patch(fallback_random=True):
        f = k.compile(lambda x: (nn.functional.dropout(x, 0.5), torch.rand_like(x), torch.bernoulli(x.sigmoid())))
        k.seed(11)
        for _ in k.steps(10):
            k.see("numbers", f(k.randn(16, 16)))
            k.see("eager", torch.rand(4, device=k.device))


@program("random integers, permutations and samples", random=True, launches=0, refusals=True)
def other_distributions(k: Kit) -> None:
    def fn(p):
        return (
            torch.randint(0, 10, (20,), device=p.device),
            torch.multinomial(p, 3),
            torch.randperm(16, device=p.device),
        )

    f = k.compile(fn)
    k.seed(12)
    for _ in k.steps():
        k.see("numbers", f(k.randn(4, 8).softmax(-1)))


@program("a generator of the user's own", random=True, launches=0, refusals=True)
def own_generator(k: Kit) -> None:
    generator = torch.Generator(k.device).manual_seed(13)

    def fn(x):
        return x + torch.rand(x.shape, device=x.device, generator=generator), nn.functional.dropout(x, 0.5)

    f = k.compile(fn)
    k.seed(13)
    for i in k.steps(12):
        if i == 8:
            generator.manual_seed(13)
        k.see("numbers", f(k.randn(16, 16)))


@program("the capture itself moves the generator", random=True, launches=1)
def capture_moves_nothing(k: Kit) -> None:
    f = k.compile(lambda x: torch.rand_like(x))
    x = k.randn(16)
    for calls in (1, 2, 3):
        k.seed(14)
        for _ in range(calls):
            f(x)
        k.see("next number of the user", torch.rand(4, device=k.device))
