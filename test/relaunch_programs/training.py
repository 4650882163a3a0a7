"""Training: forwards and backwards in every order, and what users put between them."""

from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from relaunch_programs._program import Kit, program
from relaunch_programs.parameters import network


def gradients(model: nn.Module) -> dict[str, Any]:
    seen = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return seen


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@program("an ordinary training loop", launches=12, loose=4)
def training_loop(k: Kit) -> None:
    model = k.module(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    f = k.compile(model)
    for _ in k.steps(10):
        optimizer.zero_grad()
        loss = loss_of(f(k.randn(16, 32)))
        loss.backward()
        optimizer.step()
        k.see("loss", loss)
    k.see("parameters", list(model.parameters()))


@program("forward, loss and backward in one compiled function", launches=6)
def step_in_one_function(k: Kit) -> None:
    model = k.module(network())

    def step(x):
        loss = loss_of(model(x))
        loss.backward()
        return loss.detach()

    f = k.compile(step)
    for _ in k.steps():
        k.see("loss", f(k.randn(16, 32)))
        k.see("gradients", gradients(model))


@program("saved activations of several forwards are alive when the first backward runs", launches=12)
def several_forwards(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps():
        losses = [loss_of(f(k.randn(16, 32))) for _ in range(3)]
        k.churn()
        for loss in losses if i % 2 else reversed(losses):
            loss.backward()
            k.see("gradients so far", {n: p.grad for n, p in model.named_parameters()})
        gradients(model)


@program("backward twice over the same saved activations", launches=8)
@functorch_config.patch(donated_buffer=False)  # what upstream asks of whoever retains a graph
def backward_twice(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for _ in k.steps():
        loss = loss_of(f(k.randn(16, 32)))
        loss.backward(retain_graph=True)
        k.churn()
        k.see("first", {n: p.grad for n, p in model.named_parameters()})
        loss.backward()
        k.see("both", gradients(model))


@program("two forwards of different shapes before their backwards", launches=8)
def two_shapes(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model, dynamic=False)
    for _ in k.steps():
        a, b = f(k.randn(16, 32)), f(k.randn(5, 32))
        (loss_of(a) + 2 * loss_of(b)).backward()
        k.see("gradients", gradients(model))
        k.see("outputs", (a, b))


@program("calls with and without gradients take turns", launches=8)
def with_and_without_gradients(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    pending = None
    for i in k.steps(16):
        x = k.randn(16, 32)
        if i % 3 == 0:
            pending = f(x)
        elif i % 3 == 1:
            with torch.no_grad():
                k.see("without", f(x))
        elif pending is not None:
            loss_of(pending).backward()
            k.see("gradients", gradients(model))


@program("gradients are accumulated over several backwards", launches=8)
def accumulation(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(16):
        loss_of(f(k.randn(16, 32))).backward()
        if i % 4 == 3:
            k.see("gradients", {n: p.grad for n, p in model.named_parameters()})
            model.zero_grad(set_to_none=i % 8 == 7)


@program("gradients that the user keeps are overwritten by the next backward", launches=8)
def gradients_stay(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    kept = []
    for _ in k.steps():
        loss_of(f(k.randn(16, 32))).backward()
        kept.append([p.grad for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    k.see("all gradients", kept)


@program("the forward is dropped without a backward", launches=6)
def dropped_forwards(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(12):
        y = f(k.randn(16, 32))
        if i % 3 == 2:
            loss_of(y).backward()
            k.see("gradients", gradients(model))
        del y


@program("backward comes after the module and everything compiled are gone")
def backward_after_deletion(k: Kit) -> None:
    for _ in k.steps(3):
        x = k.randn(16, 32, grad=True)
        model = k.module(network())
        f = k.compile(model)
        for _ in k.steps(4):
            loss = loss_of(f(x))
            loss.backward()
        loss = loss_of(f(x))
        del model, f
        torch._dynamo.reset()
        k.churn()
        loss.backward()
        k.see("gradient of the input", x.grad)


@program("some outputs have no gradient, some inputs need none", launches=8)
def partial_gradients(k: Kit) -> None:
    weight = k.randn(32, 32, grad=True)

    def fn(x, y):
        h = x @ weight
        return h.relu(), (h * y).sum(1), y * 2, h.detach()

    f = k.compile(fn)
    for i in k.steps(12):
        x, y = k.randn(8, 32, grad=True), k.randn(8, 32)
        a, b, c, d = f(x, y)
        (a.sum() if i % 2 else b.sum()).backward()
        k.see("gradients", (x.grad, weight.grad, c, d))
        weight.grad = None


@program("torch.autograd.grad, with gradients that the user hands in", launches=8)
def autograd_grad(k: Kit) -> None:
    f = k.compile(lambda x, w: torch.tanh(x @ w))
    for i in k.steps():
        x, w = k.randn(16, 24, grad=True), k.randn(24, 8, grad=True)
        y = f(x, w)
        tangent = k.randn(16, 8) if i % 2 else k.randn(8, 16).t()
        k.see("gradients", torch.autograd.grad(y, (x, w), tangent))


@program("gradients with respect to an output of an earlier region", launches=12)
def chained_regions(k: Kit) -> None:
    first, second = k.module(nn.Linear(32, 32)), k.module(nn.Linear(32, 32))
    f, g = k.compile(lambda x: first(x).relu()), k.compile(lambda x: second(x).tanh())
    for _ in k.steps():
        x = k.randn(8, 32, grad=True)
        middle = f(x)
        middle.retain_grad()
        loss_of(g(g(middle)) + f(middle)).backward()
        k.see("gradients", (x.grad, middle.grad, gradients(first), gradients(second)))


@program("hooks see gradients, and change them", launches=8)
def hooks(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for _ in k.steps():
        x = k.randn(16, 32, grad=True)
        y = f(x)
        y.register_hook(lambda g: g * 2)
        x.register_hook(lambda g: k.see("in the hook", g))
        loss_of(y).backward()
        k.see("gradients", (x.grad, gradients(model)))


@program("gradients are clipped in place", launches=8)
def clipping(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for _ in k.steps():
        loss_of(f(k.randn(16, 32)) * 100).backward()
        k.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        k.see("gradients", gradients(model))


@program("a custom autograd function", launches=8)
def custom_function(k: Kit) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y.exp()

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * y.exp() * 2, (g * x).cos()

    f = k.compile(lambda x, y: Scaled.apply(x, y).sum(1))
    for _ in k.steps():
        x, y = k.randn(16, 24, grad=True), k.randn(16, 24, grad=True)
        f(x, y).square().sum().backward()
        k.see("gradients", (x.grad, y.grad))


@program("checkpointing inside the compiled function: backward computes the forward again", launches=8)
def checkpoint_inside(k: Kit) -> None:
    blocks = [k.module(nn.Sequential(nn.Linear(32, 32), nn.GELU())) for _ in range(3)]
    model = nn.ModuleList(blocks)

    def fn(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    f = k.compile(fn)
    for _ in k.steps():
        x = k.randn(16, 32, grad=True)
        loss_of(f(x)).backward()
        k.see("gradients", (x.grad, gradients(model)))


@program("checkpointing around compiled functions: a forward runs in the middle of the backward", launches=12)
def checkpoint_outside(k: Kit) -> None:
    for reentrant in (False, True):
        model = k.module(network())
        f = k.compile(model)
        for _ in k.steps():
            x = k.randn(16, 32, grad=True)
            y = checkpoint(f, x, use_reentrant=reentrant)
            loss_of(y).backward()
            k.see("gradients", (x.grad, gradients(model)))
        torch._dynamo.reset()


@program("autocast to half precision with a gradient scaler, which skips steps", launches=8, loose=20)
def gradient_scaler(k: Kit) -> None:
    model = k.module(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(k.device, init_scale=2.0**10, growth_interval=3)
    f = k.compile(model)
    for i in k.steps(12):
        with torch.autocast(k.device, torch.float16):
            loss = loss_of(f(k.randn(16, 32)))
        if i == 6:
            loss = loss * float("inf")  # this step is skipped
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        k.see("scale", scaler.get_scale())
        k.see("parameters", list(model.parameters()))


@program("saved tensors are moved to the host by the user's hooks", launches=0, refusals=True)
def saved_on_host(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for _ in k.steps():
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(f(k.randn(16, 32)))
        loss.backward()
        k.see("gradients", gradients(model))


@program("the forward's output is read again after backward freed what was saved", launches=8)
def output_after_backward(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    outputs = []
    for _ in k.steps():
        y = f(k.randn(16, 32))
        loss_of(y).backward()
        outputs.append(y)
        gradients(model)
        k.churn()
    k.see("outputs", outputs)


@program("an input is saved for backward, and freed by the caller", launches=8)
def freed_inputs(k: Kit) -> None:
    weight = k.randn(64, 64, grad=True)
    f = k.compile(lambda x: (x @ weight).tanh() * x)
    for _ in k.steps():
        y = f(k.randn(32, 64))
        k.churn()
        loss_of(y).backward()
        k.see("gradient", weight.grad)
        weight.grad = None


@program("embedding and cross entropy of a small transformer", launches=8, loose=20)
def small_transformer(k: Kit) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.out = nn.Linear(32, 64)

        def forward(self, tokens):
            return self.out(self.block(self.embed(tokens)))

    model = k.module(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    f = k.compile(model)
    for _ in k.steps():
        tokens = k.randint(64, 4, 16)
        loss = nn.functional.cross_entropy(f(tokens).view(-1, 64), tokens.roll(-1, 1).view(-1))
        loss.backward()
        k.see("loss", loss)
        optimizer.step()
        optimizer.zero_grad()


def wide(k: Kit) -> Any:
    """Layers so large that a backward is launched in stages."""
    n = 1024 if k.gpu else 16
    return k.module(nn.Sequential(*[nn.Sequential(nn.Linear(n, n), nn.GELU()) for _ in range(8)])), n


@program("a backward in stages frees what a stage has used, and what later stages need stays", launches=16, loose=4)
def large_backward(k: Kit) -> None:
    model, n = wide(k)
    f = k.compile(model)
    kept = []
    for _ in k.steps():
        x = k.randn(2 * n, n, grad=True)
        loss_of(f(x)).backward()
        k.see("gradients", (x.grad, [p.grad for p in model.parameters()]))
        kept.append(next(model.parameters()).grad)
        model.zero_grad()
    k.see("gradients that were kept", kept)


@program("somebody keeps a saved activation of a backward in stages", launches=12, loose=4)
def large_saved_and_kept(k: Kit) -> None:
    model, n = wide(k)
    f = k.compile(model)
    for _ in k.steps():
        y = f(k.randn(2 * n, n))
        # The node's saved tensors, as a debugger or a library that inspects the graph gets hold of them.
        held = list(y.grad_fn.saved_tensors) if hasattr(y.grad_fn, "saved_tensors") else []
        loss_of(y).backward()
        k.churn()
        del held
        k.see("gradients", gradients(model))
