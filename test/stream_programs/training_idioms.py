"""What users put around a forward with streams: hooks, optimizers, checkpoints, precision, transforms, threads."""

import contextlib
import functools
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, CheckpointPolicy, create_selective_checkpoint_contexts

from stream_programs._program import fork, join, Kit, matrices
from stream_programs.python_idioms import settings_of_the_overlay
from stream_programs.training import (
    accumulates,
    current,
    leaf,
    make_whole,
    signs,
    take_gradients,
    trained,
    training,
    trains,
)


def _two_branches(k: Kit, weights: list[torch.Tensor]) -> Any:
    side, sleep = k.stream(), k.sleep
    first, second = weights

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu().clamp(max=2)
        b = (x @ second).clamp(-2, 2)
        join(side)
        return a + b

    return forward


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


# ---- hooks


class _Layer(nn.Module):
    def __init__(self, k: Kit) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(k.parameter(64, 64)) for _ in range(2))
        self.run = _two_branches(k, [self.first, self.second])

    def forward(self, x):
        return self.run(x)


@training("hooks of a module before and after its backward, which read and change gradients", fullgraph=False)
def train_module_hooks(k: Kit) -> Any:
    layer = _Layer(k)
    forward, sleep = k.compile(layer), k.sleep

    def step(x):
        seen = []

        def before(module, gradients):
            seen.append(sleep(gradients[0]) * 1)
            return tuple(g * 2 for g in gradients)

        def after(module, given, made):
            seen.append(given[0] * 1)

        handles = layer.register_full_backward_pre_hook(before), layer.register_full_backward_hook(after)
        x = leaf(x)
        y = forward(x)
        y.sum().backward()
        for handle in handles:
            handle.remove()
        return y.detach(), seen, take_gradients(x, layer.first, layer.second)

    return step


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@training("a hook on a value inside of the compiled function changes its gradient, on the value's stream", weights=2)
def train_hook_inside(first, second, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = _Doubled.apply(sleep(x @ first)).relu()
    b = _Doubled.apply(x @ second)
    join(side)
    return (a - b).sum()


@training("a hook after accumulation hands the gradient to a stream of its own, as a reducer does")
def train_reducer_in_hook(k: Kit) -> Any:
    first, second = trained(k, 2)
    reducing, sleep = k.stream(), k.sleep
    forward = k.compile(_two_branches(k, [first, second]))
    sums = [torch.zeros(64, 64, device="cuda") for _ in range(2)]

    def reduce(total, parameter):
        reducing.wait_stream(current())
        with torch.cuda.stream(reducing), torch.no_grad():
            total.copy_(sleep(parameter.grad))
        parameter.grad.record_stream(reducing)
        parameter.grad = None

    for parameter, total in zip((first, second), sums):
        parameter.register_post_accumulate_grad_hook(functools.partial(reduce, total))

    def step(x):
        fork(reducing)
        loss = forward(x).sum()
        loss.backward()
        join(reducing)
        return loss.detach(), [total.clone() for total in sums]

    return step


# ---- optimizers


@training("a fused optimizer for each parameter, run as soon as its gradient is there")
def train_fused_optimizer_in_backward(k: Kit) -> Any:
    first, second = trained(k, 2)
    forward = k.compile(_two_branches(k, [first, second]))
    fused = not _is_fake(first)  # the fused kernel knows no fake tensors
    optimizers = {p: torch.optim.SGD([p], lr=2.0**-4, fused=fused) for p in (first, second)}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)

    def step(x):
        make_whole(first, second)
        loss = forward(x).sum()
        loss.backward()
        return loss.detach(), first.detach().clone(), second.detach().clone()

    return step


@training("the optimizer's step is compiled, with a side stream in it for half of the parameters", fullgraph=False)
def train_compiled_optimizer(k: Kit) -> Any:
    first, second = trained(k, 2)
    side, sleep = k.stream(), k.sleep
    forward = k.compile(_two_branches(k, [first, second]))

    @k.compile
    def update():
        with torch.no_grad():
            fork(side)
            with torch.cuda.stream(side):
                first.sub_(sleep(first.grad) * 2.0**-4)
            second.sub_(second.grad * 2.0**-4)
            join(side)

    def step(x):
        make_whole(first, second)
        loss = forward(x).sum()
        loss.backward()
        update()
        take_gradients(first, second)
        return loss.detach(), first.detach().clone(), second.detach().clone()

    return step


# ---- checkpoints


@training("a block is checkpointed inside of a stream's context", tolerance=1e-4, weights=2)
def train_checkpoint_in_stream_context(first, second, side, sleep, /, x):
    def block(x):
        return sleep((x @ first).relu().clamp(max=2)) @ second

    fork(side)
    with torch.cuda.stream(side):
        a = checkpoint(block, x, use_reentrant=False)
        a = checkpoint(block, a.clamp(-1, 1), use_reentrant=True)
    b = x * 2
    join(side)
    return (a * b).sum()


def _saves_products(ctx, operation, *args, **kwargs):
    product = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


@training("a selective checkpoint: products are saved, the rest is computed again on the stream of its consumer")
def train_selective_checkpoint(k: Kit) -> Any:
    first, second = trained(k, 2)
    side, sleep = k.stream(), k.sleep
    contexts = functools.partial(create_selective_checkpoint_contexts, _saves_products)

    def block(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep((x @ first).relu()).clamp(max=2)
        b = (x @ second).clamp(-2, 2)
        join(side)
        return a * b

    def forward(x):
        return (checkpoint(block, x, use_reentrant=False, context_fn=contexts) * 2).sum()

    return trains(k, forward, first, second)


# ---- precision


@training("half precision, a scaler, and a gradient clipped by its norm", matrices(1, low=-1, high=1), tolerance=1e-2)
def train_half_precision(k: Kit) -> Any:
    first, second = signs(k, 2)
    inner = _two_branches(k, [first, second])
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=1_000_000)
    optimizer = torch.optim.SGD([first, second], lr=2.0**-10)

    @k.compile
    def forward(x):
        with torch.autocast("cuda", torch.float16):
            return inner(x).float().sum() / 64

    def step(x):
        optimizer.zero_grad()
        loss = forward(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([first, second], 1.0)
        seen = [norm / 64, *(g.clone() for g in (first.grad, second.grad))]
        take_gradients(first, second)
        scaler.update(4.0)
        return loss.detach() / 64, seen

    return step


# ---- gradients of gradients


@training("torch.func.grad inside of the compiled function, whose gradient is taken again", tolerance=1e-4)
def train_gradient_of_gradient(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def inner(x):
        return ((x @ weight).clamp(-2, 2) * x * x).sum()

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            slope = torch.func.grad(inner)(sleep(x))
        b = x * 2
        join(side)
        return (slope * b).sum()

    return trains(k, forward, weight)


@training("the same gradient twice, in the order in which autograd.grad is asked for it, with the graph retained")
def train_gradients_in_parts(k: Kit) -> Any:
    first, second = trained(k, 2)
    forward = k.compile(_two_branches(k, [first, second]))

    def step(x):
        x = leaf(x)
        y = forward(x)
        (one,) = torch.autograd.grad(y.sum(), second, retain_graph=True)
        (two,) = torch.autograd.grad(y.sum(), first, retain_graph=True)
        three = torch.autograd.grad((y * 2).sum(), (x, first, second))
        return y.detach(), one, two, three

    return step


# ---- several frames alive


@training("two batches at once: each has a stream of its own, and both meet in the parameters", matrices(4))
def train_two_batches_at_once(k: Kit) -> Any:
    one, two, sleep, first, second = k.stream(), k.stream(), k.sleep, *trained(k, 2)

    @k.compile
    def forward(x, y):
        losses = []
        fork(one, two)
        for stream, batch in ((one, x), (two, y)):
            with torch.cuda.stream(stream):
                losses.append(((sleep(batch) @ first).relu().clamp(max=2) @ second).sum())
        join(one, two)
        return losses[0] + losses[1]

    step = accumulates(k, lambda pair: forward(*pair), first, second)
    return lambda *batches: step(batches[:2], batches[2:])


@training("four frames of two functions are alive at once, and their backwards interleave in one call", matrices(2))
def train_frames_interleaved(k: Kit) -> Any:
    first, second, third, fourth = trained(k, 4)
    run_one = k.compile(_two_branches(k, [first, second]))
    run_two = k.compile(_two_branches(k, [third, fourth]))

    def step(x, y):
        x, y = leaf(x), leaf(y)
        a, b = run_one(x), run_two(y)
        c, d = run_two(a.clamp(-1, 1)), run_one(b.clamp(-1, 1))
        (c * d.detach() + d).sum().backward()
        return c.detach(), d.detach(), take_gradients(x, y, first, second, third, fourth)

    return step


def _turns(x: torch.Tensor) -> Any:
    """Fake tensors are for one thread at a time."""
    return threading.Lock() if _is_fake(x) else contextlib.nullcontext()


@training("two threads train at once, each with its own forward and backward", matrices(2))
def train_two_threads(k: Kit) -> Any:
    weights = trained(k, 4)
    functions = [k.compile(_two_branches(k, weights[2 * i : 2 * i + 2])) for i in range(2)]

    def step(*batches):
        stream, seen = current(), [None, None]
        xs = [leaf(b) for b in batches]
        for run, x in zip(functions, batches):  # what is to be compiled is compiled by one thread
            run(x).sum().backward()
        take_gradients(*weights)
        y, turn = [run(x) for run, x in zip(functions, xs)], _turns(xs[0])
        begin = threading.Barrier(2)

        def run(i):
            begin.wait()
            with torch.cuda.stream(stream), turn:
                z = functions[i](xs[i])
                (y[i] * 2 + z).sum().backward()
                seen[i] = z.detach()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen, take_gradients(*xs, *weights)

    return step


# ---- Python around streams, and profiler ranges


def _annotated_step(k: Kit, **settings: Any) -> Any:
    side, first, second = k.stream(), *trained(k, 2)

    class Branch:
        def __init__(self, weight):
            self.weight = weight

        def run(self, x):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.nvtx.range("branch"))
                stack.callback(torch.cuda.nvtx.mark, "joined")
                stack.callback(join, side)
                fork(side)
                stack.enter_context(torch.cuda.stream(side))
                return k.sleep(x @ self.weight).relu()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            with torch.cuda.nvtx.range("of the backward"), torch.profiler.record_function("too"):
                return k.sleep(gradient) * 2

    @k.compile
    def forward(x):
        y = Branch(first).run(x)
        return (Scaled.apply(y) + (x @ second)).sum()

    def step(x):
        x = leaf(x)
        with settings_of_the_overlay(**settings):
            loss = forward(x)
            loss.backward()
        return loss.detach(), take_gradients(x, first, second)

    return step


@training("an object that the forward makes enters a stream through a stack of contexts; ranges are left out")
def train_contexts_and_ranges(k: Kit) -> Any:
    return _annotated_step(k)


@training("the same with its ranges, which stay in forward and backward, each in its own order")
def train_ranges_kept(k: Kit) -> Any:
    return _annotated_step(k, nvtx=True)
