"""Composition: several compiled functions, graph breaks, threads and streams in one program."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.outputs import mix


@program("two compiled functions take turns in changing order", launches=12)
def interleaved(k: Kit) -> None:
    f, g = k.compile(mix), k.compile(lambda x, y: (x * y, (x + y) @ x.t()))
    last = k.randn(32, 32)
    for i in k.steps(12):
        x = k.randn(32, 32)
        if i % 3:
            last = f(x)
        k.see("g", g(x, last))
        if i % 4 == 0:
            k.see("f", f(last))


@program("a compiled function calls another one", launches=6)
def nested(k: Kit) -> None:
    inner = k.compile(lambda x: (x @ x).tanh())

    def outer(x):
        return inner(x) + inner(x * 2).relu()

    f = k.compile(outer)
    for _ in k.steps():
        x = k.randn(32, 32)
        k.see("both", (f(x), inner(x)))


@program("a compiled function is called from one that is not compiled inside one that is", launches=6)
def nested_behind_a_break(k: Kit) -> None:
    inner = k.compile(lambda x: (x @ x).tanh())

    @torch._dynamo.disable
    def eager(x):
        return inner(x) + 1

    f = k.compile(lambda x: eager(x * 2).cos() @ x)
    for _ in k.steps():
        k.see("output", f(k.randn(32, 32)))


@program("a graph break in the middle: outputs of one region are inputs of the next", launches=12)
def graph_break(k: Kit) -> None:
    def fn(x, y):
        h = x @ y
        torch._dynamo.graph_break()
        z = h.relu() - x
        torch._dynamo.graph_break()
        return h, z, (z @ h).tanh()

    f = k.compile(fn)
    held = []
    for _ in k.steps(10):
        held.append(f(k.randn(32, 32), k.randn(32, 32)))
    k.see("outputs", held)


@program("the host reads a value in the middle, and decides", launches=6)
def host_decides(k: Kit) -> None:
    def fn(x):
        y = torch.tanh(x @ x)
        return y * 2 if y.sum().item() > 0 else y - 1

    f = k.compile(fn)
    for _ in k.steps(12):
        k.see("output", f(k.randn(16, 16)))


@program("a model of 32 blocks, each compiled by itself, in training", launches=64, loose=10)
def many_blocks(k: Kit) -> None:
    blocks = [k.module(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU())) for _ in range(32)]
    compiled = [k.compile(block) for block in blocks]
    for _ in k.steps(5):
        x = start = k.randn(8, 24, grad=True)
        for block in compiled:
            x = x + block(x) / 8
        x.square().mean().backward()
        k.see("gradients", (start.grad, blocks[0][1].weight.grad, blocks[-1][1].weight.grad))
        for block in blocks:
            block.zero_grad()


@program("a method of a class, called on several objects", launches=6)
def methods(k: Kit) -> None:
    class Scale(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((16, 16), by))

        def forward(self, x):
            return x @ self.weight

    models = [Scale(0.1).to(k.device), Scale(0.2).to(k.device), Scale(0.3).to(k.device)]
    compiled = [k.compile(m) for m in models]
    for i in k.steps(18):
        with torch.no_grad():
            k.see("output", compiled[i % 3](k.randn(4, 16)))


def in_threads(k: Kit, *bodies: Any) -> None:
    """Run the bodies in threads that see the options of this one; raise what they raise."""
    errors: list[BaseException] = []

    def run(body: Any) -> None:
        try:
            body()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def thread_kits(k: Kit, count: int) -> list[Kit]:
    kits = [Kit(k.side, k.device) for _ in range(count)]
    for i, kit in enumerate(kits):
        kit.generator.manual_seed(100 + i)
    return kits


def run_in_two_threads(k: Kit, function_of: Callable[[Kit], Callable[..., Any]], calls: int) -> None:
    """Two threads at the same time, each with a stream of its own, call what `function_of` gives them."""
    kits = thread_kits(k, 2)

    def body(kit: Kit) -> Callable[[], None]:
        def run() -> None:
            f = function_of(kit)
            with kit.on(kit.stream()):
                for _ in kit.steps(calls):
                    kit.see("outputs", f(kit.randn(48, 48)))
            kit.synchronize()

        return run

    in_threads(k, *map(body, kits))
    for kit in kits:
        k.seen += kit.seen


@program("two threads, each with its own function and its own stream (#123177)", launches=12)
def two_threads(k: Kit) -> None:
    run_in_two_threads(k, lambda kit: kit.compile(lambda x: (mix(x), x.sum(0))), calls=20)


@program("two threads call one function at the same time, each on its own stream", launches=12)
def one_function_two_threads(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    for _ in k.steps(3):
        f(k.randn(48, 48))
    k.synchronize()
    run_in_two_threads(k, lambda kit: f, calls=30)


@program("the function is compiled in one thread, and called in others that come and go", launches=6)
def threads_come_and_go(k: Kit) -> None:
    f = k.compile(lambda x: mix(x).cos())
    for _ in k.steps(3):
        k.see("main", f(k.randn(32, 32)))
    for _ in k.steps():
        x = k.randn(32, 32)

        def body(x: torch.Tensor = x) -> None:
            k.see("output", f(x))
            k.synchronize()

        in_threads(k, body)


@program("training in a thread that is not the main one", launches=6)
def training_in_a_thread(k: Kit) -> None:
    model = k.module(nn.Linear(24, 24))
    f = k.compile(lambda x: model(x).tanh())

    def body() -> None:
        for _ in k.steps():
            f(k.randn(8, 24)).square().mean().backward()
            k.see("gradient", model.weight.grad)
            model.zero_grad()
        k.synchronize()

    in_threads(k, body)


@program("side streams inside the function become branches of the graph", launches=6, gpu_only=True)
def streams_inside(k: Kit) -> None:
    streams = [k.stream() for _ in range(4)]
    weights = [k.randn(64, 64) / 8 for _ in streams]

    def fn(x):
        current = torch.cuda.current_stream()
        outputs = []
        for stream, w in zip(streams, weights):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append((x @ w).relu() @ w)
        for stream in streams:
            current.wait_stream(stream)
        return torch.stack(outputs).sum(0), outputs[1]

    f = k.compile(fn)
    for _ in k.steps(12):
        k.see("outputs", f(k.randn(32, 64)))


@program("an operator of the host splits the region", launches=6, refusals=True)
def split_region(k: Kit) -> None:
    def fn(x):
        y = torch.tanh(x @ x)
        total = y.sum().cpu() + 1
        z = (y - x).relu() @ x
        return z, total, z.softmax(0)

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(32, 32)))
