"""Lifetime: exceptions, resets, deletion, exit. The check of every program adds: nothing is left behind."""

import contextvars
import gc
import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.outputs import mix
from relaunch_programs.parameters import network


class Fault(RuntimeError):
    pass


_armed = False


@torch.library.custom_op("relaunch_test::fault", mutates_args=())
def fault(x: torch.Tensor) -> torch.Tensor:
    """A copy; or an exception, while it is armed."""
    if _armed:
        raise Fault("armed")
    return x.clone()


@fault.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def arm(on: bool) -> None:
    global _armed
    _armed = on


def faulty_calls(k: Kit, at: int) -> None:
    f = k.compile(lambda x: (fault(x @ x) + x).relu().sum(1))
    for i in k.steps(12):
        arm(i == at)
        try:
            if i == at:
                k.raises("armed", lambda: f(k.randn(64, 64)))
            else:
                k.see("output", f(k.randn(64, 64)))
        finally:
            arm(False)


@program(
    "a finalizer calls compiled code in the middle of a launch, and waits for the lock of that launch", launches=64
)
def finalizers_in_a_launch(k: Kit) -> None:
    """Wherever the collector runs. Torch's replay draws random numbers in Python; no result shows them."""
    f = k.compile(lambda x: x * (torch.rand_like(x) < 2))
    x, called = k.randn(64), []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            called.append(f(x))

    for _ in range(4):
        k.see("before", f(x))
    before = gc.get_threshold()
    try:
        for i in range(64):
            gc.collect(0)
            Garbage()
            gc.set_threshold(1 + i, 1 << 20)
            k.see("output", f(x))
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    k.see("of finalizers", called)


@program("an operator raises in the first call", launches=4)
def exception_at_first(k: Kit) -> None:
    faulty_calls(k, 0)


@program("an operator raises while the graph is captured: the capture must be ended", launches=0, refusals=True)
def exception_at_capture(k: Kit) -> None:
    faulty_calls(k, 1)
    other = k.compile(mix)
    for _ in k.steps(4):
        k.see("another function", other(k.randn(32, 32)))


@program("a backward raises while it is captured", launches=4, refusals=True)
def exception_at_capture_of_backward(k: Kit) -> None:
    weight = k.randn(32, 32, grad=True)

    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return torch.ops.relaunch_test.fault(g) * 2

    f = k.compile(lambda x: Faulty.apply(x @ weight).sum(1))
    for i in k.steps(10):
        loss = f(k.randn(16, 32)).square().mean()
        arm(i == 1)
        try:
            if i == 1:
                k.raises("armed", loss.backward)
            else:
                loss.backward()
                k.see("gradient", weight.grad)
        finally:
            arm(False)
        weight.grad = None


@program("the user's code raises between two regions", launches=8)
def exception_between_regions(k: Kit) -> None:
    @torch._dynamo.disable
    def look(bad):
        if bad:
            raise Fault("bad")

    def fn(x, bad):
        y = mix(x)
        look(bad)
        return y.cumsum(0) * 2

    f = k.compile(fn)
    for i in k.steps(12):
        x = k.randn(32, 32)
        if i % 4 == 3:
            k.raises("bad", lambda x=x: f(x, True))
        else:
            k.see("output", f(x, False))


@program("a hook raises in the middle of a backward", launches=8)
def exception_in_a_hook(k: Kit) -> None:
    model = k.module(network())
    f, g = k.compile(model[:2]), k.compile(model[2:])
    for i in k.steps(12):
        middle = f(k.randn(16, 32))
        loss = g(middle).square().mean()
        if i % 4 == 3:

            def refuse(_: Any) -> None:
                raise Fault("hook")

            middle.register_hook(refuse)
            k.raises("hook", loss.backward)
        else:
            loss.backward()
            k.see("gradients", [p.grad for p in model.parameters()])
        model.zero_grad()


@program("a call with shapes that don't fit", launches=5)
def exception_while_tracing(k: Kit) -> None:
    f = k.compile(lambda x, y: (x @ y).relu())
    for i in k.steps(12):
        if i % 4 == 3:
            try:
                f(k.randn(8, 16), k.randn(8, 16))
            except Exception as e:  # of another class in each side
                e.__traceback__ = None
            else:
                raise AssertionError("shapes that don't fit were accepted")
        else:
            k.see("output", f(k.randn(8, 16), k.randn(16, 8)))


@program("torch._dynamo.reset() between the calls: the compiled code goes, its kernels are unloaded", launches=8)
def reset_between(k: Kit) -> None:
    model = k.module(network())
    f, g = k.compile(model), k.compile(mix)
    held = []
    for i in k.steps(16):
        if i % 5 == 4:
            torch._dynamo.reset()
        f(k.randn(16, 32)).square().mean().backward()
        held.append((g(k.randn(32, 32)), [p.grad for p in model.parameters()]))
        model.zero_grad()
    k.see("all", held)


@program("a function is reset between its forward and its backward", launches=4)
def reset_before_backward(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for i in k.steps(10):
        loss = f(k.randn(16, 32)).square().mean()
        if i % 5 == 4:
            torch._dynamo.reset()
            gc.collect()
            k.churn()
        loss.backward()
        k.see("gradients", [p.grad for p in model.parameters()])
        model.zero_grad()


@program("the graph keeps a module alive that the user dropped")
def dropped_module_dies(k: Kit) -> None:
    model = k.module(network())
    ref = weakref.ref(model[0].weight)
    f = k.compile(model)
    for _ in k.steps():
        with torch.no_grad():
            k.see("output", f(k.randn(16, 32)))
    del f, model
    torch._dynamo.reset()
    gc.collect()
    k.see("dead", ref() is None)


@program("inputs and outputs of a call are kept alive by the graph")
def dropped_tensors_die(k: Kit) -> None:
    f = k.compile(lambda x, y: (mix(x), y.add_(1).sum(0)))
    for _ in k.steps():
        x, y = k.randn(64, 64), k.randn(64, 64)
        outputs = f(x, y)
        refs = [weakref.ref(t) for t in (x, y, *outputs)]
        del x, y, outputs
        k.see("dead", [r() is None for r in refs])


@program("memory of the device grows with every function that comes and goes", launches=12, exclusive=True)
def functions_come_and_go(k: Kit) -> None:
    used = []
    for i in range(12 if k.gpu else 2):
        model = k.module(nn.Sequential(*[nn.Linear(32 + i, 32 + i) for _ in range(4)]))
        f = k.compile(model)
        for _ in k.steps(4):
            with torch.no_grad():
                k.see("output", f(k.randn(8, 32 + i)))
        del model, f
        torch._dynamo.reset()
        gc.collect()
        if k.gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free - torch.cuda.memory_reserved())
    k.see("flat", not used or used[-1] - used[4] < 64 << 20)


@program("a cycle with tensors and events is collected in the middle of a capture", launches=6)
def garbage(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), torch.sort(x, 1).values))
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in k.steps():
            for _ in range(5):
                cycle: list[Any] = [k.randn(64, 64)]
                if k.gpu:
                    cycle += [torch.cuda.Event(), torch.cuda.Stream()]
                    cycle[1].record()
                cycle.append(cycle)
                del cycle
            k.see("outputs", f(k.randn(64, 64)))
    finally:
        gc.set_threshold(*thresholds)


@program("deep recursion leaves little of Python's stack", launches=4)
def deep_in_the_stack(k: Kit) -> None:
    f = k.compile(mix)

    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        else:
            k.see("output", f(k.randn(32, 32)))

    f(k.randn(32, 32))
    f(k.randn(32, 32))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(2000)
    try:
        for _ in k.steps():
            descend(400)
    finally:
        sys.setrecursionlimit(limit)


@program("the process exits with graphs, outputs and a backward alive", launches=8, alone=True)
def exit_with_everything_alive(k: Kit) -> None:
    model = k.module(network())
    f, g = k.compile(model), k.compile(mix)
    for _ in k.steps():
        loss = f(k.randn(16, 32)).square().mean()
        loss.backward()
        y = g(k.randn(32, 32))
        k.see("loss", (loss, y))
    k.outlives((model, f, g, y, f(k.randn(16, 32)).sum()))


@program("the process exits while launches are under way", launches=6, alone=True)
def exit_without_waiting(k: Kit) -> None:
    f = k.compile(lambda x: mix(x) @ x)
    n = 1024 if k.gpu else 32
    for _ in k.steps():
        y = f(k.randn(n, n))
    k.see("output", y)
    k.outlives([f] + [f(y) for _ in range(50)])


@program("the process exits while a thread that called the function is alive", launches=6, alone=True)
def exit_beside_a_thread(k: Kit) -> None:
    f = k.compile(mix)
    ready = threading.Event()

    def body() -> None:
        for _ in k.steps():
            k.see("output", f(k.randn(32, 32)))
        k.synchronize()
        ready.set()
        threading.Event().wait()

    # Options of torch, such as the policy, are those of the thread in which they were set.
    threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=True).start()
    if not ready.wait(100):
        raise AssertionError("the thread did not finish its calls")
    k.outlives(f)
