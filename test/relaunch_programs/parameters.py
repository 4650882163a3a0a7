"""Parameters: static inputs whose address stays, until the user moves them."""

import copy
from typing import Any

import torch
from torch import nn

from relaunch_programs._program import Kit, program


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 8))


def moved(k: Kit, p: torch.Tensor) -> torch.Tensor:
    """Other values at another address."""
    return k.randn(*p.shape) / 4


def observe(k: Kit, model: nn.Module, f: Any, train: bool = False) -> None:
    x = k.randn(16, 32)
    if not train:
        with torch.no_grad():
            k.see("output", f(x))
        return
    f(x).square().mean().backward()
    k.see("gradients", {n: p.grad for n, p in model.named_parameters()})
    model.zero_grad()


@program("p.data = other: the graph goes on reading the old parameter", launches=8)
def data_swap(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(12):
        if i % 3 == 2:
            for p in model.parameters():
                p.data = moved(k, p)
        observe(k, model, f)


@program("load_state_dict writes in place, or assigns", launches=4)
def load_state_dict(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(16):
        if i % 4 == 3:
            model.load_state_dict({n: moved(k, p) for n, p in model.state_dict().items()}, assign=i % 8 == 7)
        observe(k, model, f, train=i % 2 == 1)


@program("a parameter object is replaced by another", launches=4)
def new_parameters(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(16):
        if i % 6 == 5:
            model[3].weight = nn.Parameter(moved(k, model[3].weight))
        observe(k, model, f, train=True)


@program("the optimizer writes parameters in place between forward and forward", launches=8, loose=4)
def optimizers(k: Kit) -> None:
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        model = k.module(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        f = k.compile(model)
        for _ in k.steps():
            f(k.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=options != {"fused": True})
            k.see(str(options), list(model.parameters()))
        torch._dynamo.reset()


@program("functional_call with other parameters each time", launches=4)
def functional_call(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(lambda ps, x: torch.func.functional_call(model, ps, (x,)))
    for _ in k.steps(10):
        ps = {n: moved(k, p) for n, p in model.named_parameters()}
        with torch.no_grad():
            k.see("output", f(ps, k.randn(16, 32)))


@program("two sets of parameters take turns: the model and its average", launches=8)
def alternating_parameters(k: Kit) -> None:
    model = k.module(network())
    average = copy.deepcopy(model)
    f, g = k.compile(model), k.compile(average)
    for i in k.steps(12):
        observe(k, model, f, train=i % 2 == 1)
        with torch.no_grad():
            for p, a in zip(model.parameters(), average.parameters()):
                p.add_(0.01)
                a.lerp_(p, 0.1)
            k.see("average", g(k.randn(16, 32)))


@program("parameters are frozen and thawed", launches=4)
def frozen(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(20):
        if i % 5 == 4:
            model[0].requires_grad_(not model[0].weight.requires_grad)
        observe(k, model, f, train=True)


@program("no parameter needs a gradient", launches=6)
def all_frozen(k: Kit) -> None:
    model = k.module(network()).requires_grad_(False)
    f = k.compile(model)
    for _ in k.steps():
        x = k.randn(16, 32, grad=True)
        f(x).sum().backward()
        k.see("gradient of the input", x.grad)


@program("the module goes to the host and comes back to other addresses", launches=4)
def moved_to_the_host_and_back(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(12):
        if i % 4 == 3:
            model.to("cpu")
            k.churn()
            model.to(k.device)
        observe(k, model, f, train=i % 2 == 1)


@program("tied weights are one region", launches=6)
def tied(k: Kit) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, i):
            return self.out(self.embed(i).tanh())

    model = k.module(Tied())
    f = k.compile(model)
    for _ in k.steps():
        f(k.randint(50, 4, 6)).logsumexp(-1).sum().backward()
        k.see("gradient", model.embed.weight.grad)
        model.zero_grad()
        with torch.no_grad():
            model.embed.weight.mul_(0.9)


@program("inference mode, and tensors made in it", launches=6)
def inference_mode(k: Kit) -> None:
    model = k.module(network()).eval()
    f = k.compile(model)
    with torch.inference_mode():
        for _ in k.steps():
            k.see("output", f(k.randn(16, 32)))


@program("a deep copy of a compiled module is a module of its own", launches=4)
def copied_module(k: Kit) -> None:
    f = k.compile(k.module(network()))
    for _ in k.steps(4):
        with torch.no_grad():
            k.see("first", f(k.randn(16, 32)))
    g = copy.deepcopy(f)
    with torch.no_grad():
        for p in g.parameters():
            p.neg_()
        for _ in k.steps():
            x = k.randn(16, 32)
            k.see("both", (f(x), g(x)))


@program("one of many parameters moves: only its pointer slots are patched", launches=10)
def one_of_many_moves(k: Kit) -> None:
    layers = [nn.Linear(24, 24) for _ in range(24)]
    model = k.module(nn.Sequential(*layers))
    f = k.compile(model)
    for i in k.steps(24):
        layers[i].bias.data = k.randn(24)
        with torch.no_grad():
            k.see("output", f(k.randn(8, 24)))
