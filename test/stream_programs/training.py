"""Training: a forward with streams, its backward, and what users put around them.

Each program is a step that returns its losses and gradients. The parts that a user would compile are compiled; the
rest, the call of `backward` above all, is eager. The caller reads losses and gradients on its current stream right
after `backward`, as autograd allows.
"""

import threading
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stream_programs import compute
from stream_programs._program import built, fork, join, Kit, matrices, program, tensors, whole_numbers


def take_gradients(*leaves: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of leaves, which have none afterwards."""
    found = tuple(leaf.grad for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    return found


def trained(k: Kit, count: int, *shape: int) -> list[torch.Tensor]:
    return [k.parameter(*(shape or (64, 64))).requires_grad_() for _ in range(count)]


def signs(k: Kit, count: int) -> list[torch.Tensor]:
    return [weight.detach().sign().requires_grad_() for weight in trained(k, count)]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def trains(k: Kit, forward: Any, *weights: torch.Tensor, **options: Any) -> Any:
    """A `training_step` of a forward that is compiled."""
    return training_step(k, k.compile(forward), *weights, **options)


def training_step(
    k: Kit,
    forward: Any,
    *weights: torch.Tensor,
    leaves: int = 1,
    loss: Any = lambda result: result,
    between: Any = lambda *inputs: None,
    after: Any = lambda: None,
) -> Any:
    """A step: forward, backward, and the gradients of the first inputs, the leaves, and of weights.

    `loss` computes the loss from forward's results, which the step returns. `between` is called with the inputs ahead
    of the backward, `after` between that and the reading of gradients; what they have seen is returned.
    """

    def step(*inputs):
        inputs = [leaf(x) for x in inputs[:leaves]] + list(inputs[leaves:])
        results = forward(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        seen = between(*inputs)
        with k.engine():
            loss(*results).backward()
        seen = seen, after()
        return *(result.detach() for result in results), seen, take_gradients(*inputs[:leaves], *weights)

    return step


def accumulates(k: Kit, forward: Any, *weights: torch.Tensor) -> Any:
    """A step of several batches: each one's gradients are added to those of the batches before it."""

    def step(*batches):
        losses = []
        for batch in batches:
            loss = forward(batch)
            with k.engine():
                loss.backward()
            losses.append(loss.detach())
        return losses, take_gradients(*weights)

    return step


def clone_of_last(*inputs: torch.Tensor) -> torch.Tensor:
    """For programs that update their last input."""
    return inputs[-1].clone()


def clone_joined(tensor: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    """For programs that leave it to the caller to join the stream that updates a tensor."""
    join(side)
    return tensor.clone()


def training(hazard: str, inputs: Any = None, *, weights: int = 0, forward: Any = None, **fields: Any) -> Any:
    """Decorates a build function; or a forward whose first parameters, ahead of the `/`, are `weights`; or a step whose
    first parameters are those that `forward` makes of a kit: a compiled forward and its weights.

    A forward takes the options of `training_step`, too.
    """
    options = {name: fields.pop(name) for name in ("leaves", "loss", "between") if name in fields}
    register = program(hazard, inputs, **{"frames": True, "ordered": True, **fields})

    def of_part(part: Any) -> Any:
        def build(k: Kit) -> Any:
            if forward is not None:
                return built(part, *forward(k))(k)
            given = trained(k, weights)
            return trains(k, built(part, *given)(k), *given, **options)

        build.__name__, build.__module__ = part.__name__, part.__module__
        return register(build)

    return of_part if weights or forward else register


def overwrite(side: torch.Stream, like: torch.Tensor) -> None:
    """Writes to memory that the allocator of the stream has free."""
    with torch.cuda.stream(side):
        for _ in range(4):
            torch.full_like(like, float("nan"))


current = torch.cuda.current_stream


def one_branch(k: Kit, joined: Any = lambda a, x: (a * x).sum()) -> Any:
    """A forward with a layer on a side stream, from which the caller's computes what is `joined`; and its weight."""
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ weight).relu()
        join(side)
        return joined(a, x)

    return forward, weight


def two_branches(k: Kit, joined: Any) -> Any:
    """A forward with a layer on a side stream beside a product on the caller's; and their weights."""
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu()
        b = x @ second
        join(side)
        return joined(a, b)

    return forward, first, second


def residual_layer(k: Kit, limit: int) -> Any:
    """A forward that adds to its input what a side stream computes from it; and its weight."""
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ weight).relu().clamp(max=limit)
        join(side)
        return a + x

    return forward, weight


# ---- branches


@training("the two branches of a layer, one of them on a side stream", weights=2)
def train_two_branches(first, second, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep((x @ first).relu()) @ second
    b = (x @ second).relu() @ first
    join(side)
    return (a + b).sum()


@training("the same with private events in the place of wait_stream (#195573)", weights=1)
def train_private_events(weight, side, sleep, /, x):
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record()
    with torch.cuda.stream(side):
        begin.wait()
        a = sleep(x @ weight).relu()
        end.record()
    b = x * 2
    end.wait()
    return (a * b).sum()


@training("four experts on four streams, weighted by a router on the caller's", matrices(1, low=-1, high=1))
def train_experts(k: Kit) -> Any:
    sides, sleep = [k.stream() for _ in range(4)], k.sleep
    router, *weights = trained(k, 1, 64, 4) + trained(k, 8)

    def forward(x):
        gate = (x @ router).sign()
        fork(*sides)
        outputs = []
        for i, side in enumerate(sides):
            with torch.cuda.stream(side):
                hidden = sleep(x @ weights[2 * i]).relu().clamp(max=1)
                outputs.append((hidden @ weights[2 * i + 1]) * gate[:, i : i + 1])
        join(*sides)
        return torch.stack(outputs).sum(0)

    return trains(k, forward, *weights, loss=lambda y: (y * 2).sum())


@training("experts on four streams write their results to rows of one tensor", weights=4)
def train_rows_of_new_tensor(w0, w1, w2, w3, one, two, three, four, sleep, /, x):
    out, sides = torch.empty(4, *x.shape, device=x.device), (one, two, three, four)
    fork(*sides)
    for i, (side, weight) in enumerate(zip(sides, (w0, w1, w2, w3))):
        with torch.cuda.stream(side):
            out[i] = sleep(x @ weight).relu()
    join(*sides)
    return (out * 2).sum()


@training("rows overlap, in part and wholly, and some keep values whose gradients are needed", weights=2)
def train_overlapping_rows(first, second, one, two, sleep, /, x):
    out = (x @ first) * 2
    fork(one)
    with torch.cuda.stream(one):
        out[:24] = sleep(x[:24] @ second)
    two.wait_stream(one)
    with torch.cuda.stream(two):
        out[16:32] = (x[:16] @ first).relu()
        out[40::2] = x[40::2] @ second
        out[41] = sleep(x)[41] * 3
    join(one, two)
    out[20] = x[20]
    return (out * out).sum()


@training("a chain that changes streams at each layer", weights=3)
def train_chain_over_streams(first, second, third, one, two, sleep, /, x):
    fork(one)
    with torch.cuda.stream(one):
        x = sleep(x @ first).relu()
    two.wait_stream(one)
    with torch.cuda.stream(two):
        x = sleep(x).clamp(max=2) @ second
    join(two)
    return (x.clamp(-3, 3) @ third).sum()


@training("outputs that the function leaves unjoined: the caller joins them before the loss")
def train_unjoined_outputs(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ weight).relu()
        return a, x * 3

    def loss(a, b):
        join(side)
        return (a * b).sum()

    return trains(k, forward, weight, loss=loss)


@training("the loss is computed on the side stream that the function left its output on")
def train_loss_on_side_stream(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            return sleep(x @ weight).relu()

    def step(x):
        x = leaf(x)
        y = forward(x)
        with torch.cuda.stream(side):
            loss = (sleep(y) * 2).sum()
            loss.backward()
        join(side)
        return loss.detach(), take_gradients(x, weight)

    return step


@training("an input read on three streams: three gradients are summed on the caller's", weights=3)
def train_input_of_three_streams(first, second, third, one, two, sleep, /, x):
    fork(one, two)
    with torch.cuda.stream(one):
        a = sleep(x) @ first
    with torch.cuda.stream(two):
        b = sleep(x) @ second
    c = x @ third
    join(one, two)
    return (a + b + c).relu().sum()


@training(
    "a weight shared by three streams, made on the caller's stream: its gradients are summed where it was made",
    weights=1,
    leaves=0,
)
def train_weight_of_three_streams(weight, one, two, sleep, /, x):
    scaled = weight * 2
    fork(one, two)
    with torch.cuda.stream(one):
        a = sleep(x) @ scaled
    with torch.cuda.stream(two):
        b = (x @ scaled).relu()
    join(one, two)
    return (a + b + scaled).sum()


@training(
    "cheap operations of a side stream are computed again for consumers on the caller's", tolerance=1e-2, weights=2
)
def train_recomputed(first, second, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x @ first)
        b = a.sin().cos()
    join(side)
    c = b.exp() * 2
    return (c @ second).sum()


@training(
    "a value of a side stream is saved once and read under two views: it must not be written over between (S3)",
    weights=2,
    loss=lambda loss, part: loss + part.sum(),
)
def train_saved_views(first, second, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        h = sleep(x @ first).relu()
    join(side)
    y = h.clamp(max=1) @ second
    fork(side)
    with torch.cuda.stream(side):
        z = h.t().clamp(max=1) @ second
    join(side)
    return (y + z + h).sum(), h[:32] * 2


@training("only one of two outputs gets a gradient", forward=lambda k: two_branches(k, lambda a, b: (a + 1, b + 1)))
def train_partly_used_outputs(forward, first, second, /, x):
    x = leaf(x)
    a, b = forward(x)
    (b * 2).sum().backward()
    partly = take_gradients(x, second)
    a, b = forward(x)
    (a * 2).sum().backward()
    return a.detach(), b.detach(), partly, take_gradients(x, first)


@training("torch.autograd.grad in the place of backward", forward=one_branch)
def train_autograd_grad(forward, weight, /, x):
    x = leaf(x)
    return torch.autograd.grad(forward(x), (x, weight))


# ---- several frames


@training("gradients of three micro-batches accumulate in the parameters", matrices(3))
def train_gradient_accumulation(k: Kit) -> Any:
    return accumulates(k, *two_branches(k, lambda a, b: (a - b).sum()))


@training("three forwards, then their backwards, the last first", matrices(3))
def train_several_forwards(k: Kit) -> Any:
    forward, first = one_branch(k, lambda a, x: (a @ second * x).sum())
    (second,) = trained(k, 1)

    def step(*batches):
        xs = [leaf(b) for b in batches]
        losses = [forward(x) for x in xs]
        for loss in reversed(losses):
            loss.backward()
        return [loss.detach() for loss in losses], take_gradients(*xs, first, second)

    return step


@training("two functions with streams of their own: each backward runs on its forward's (S1, #186025)", matrices(2))
def train_interleaved_functions(k: Kit) -> Any:
    (run_one, first), (run_two, second) = one_branch(k), one_branch(k)

    def step(x, y):
        x, y = leaf(x), leaf(y)
        a, b = run_one(x), run_two(y)
        a.backward()
        b.backward()
        return a.detach(), b.detach(), take_gradients(x, y, first, second)

    return step


@training("the second of two layers is another compiled function: their gradients meet in eager", matrices(1))
def train_two_functions_in_a_row(k: Kit) -> Any:
    (run_one, first), (run_two, second) = residual_layer(k, 2), residual_layer(k, 2)

    def step(x):
        x = leaf(x)
        hidden = run_one(x)
        y = run_two(hidden) + hidden
        y.sum().backward()
        return y.detach(), take_gradients(x, first, second)

    return step


@training("one function is called on its own output, which is saved twice", matrices(1, low=-1, high=1))
def train_function_of_its_output(k: Kit) -> Any:
    layer, weight = residual_layer(k, 1)
    return training_step(k, lambda x: layer(layer(x)), weight, loss=torch.sum)


@training("backward twice over a retained graph", forward=one_branch)
def train_retain_graph(forward, weight, /, x):
    x = leaf(x)
    loss = forward(x)
    loss.backward(retain_graph=True)
    once = [g.clone() for g in (x.grad, weight.grad)]
    loss.backward()
    return once, take_gradients(x, weight)


@training("a graph break inside the block of a stream", fullgraph=False)
def train_graph_break_in_block(k: Kit) -> Any:
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu()
            torch._dynamo.graph_break()
            b = sleep(a) @ second
        join(side)
        return (b * x).sum()

    return trains(k, forward, first, second)


@training("forward, backward and the reading of gradients in one compiled function", fullgraph=False)
def train_step_in_one_function(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def step(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ weight).relu()
        join(side)
        loss = (a * x).sum()
        loss.backward()
        return loss.detach()

    step = k.compile(step)
    return lambda x: (step(x), take_gradients(weight))


# ---- checkpoints


def _block(k: Kit) -> Any:
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)

    def block(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu().clamp(max=2) @ second
        b = x.relu()
        join(side)
        return a * b

    return block, first, second


@training("a checkpointed block inside of the compiled function")
def train_checkpoint(k: Kit) -> Any:
    block, first, second = _block(k)
    return trains(k, lambda x: (checkpoint(block, x, use_reentrant=False) * 2).sum(), first, second)


@training("the reentrant kind of checkpoint")
def train_reentrant_checkpoint(k: Kit) -> Any:
    block, first, second = _block(k)
    return trains(k, lambda x: (checkpoint(block, x, use_reentrant=True) * 2).sum(), first, second)


def _checkpointed_around(k: Kit, use_reentrant: bool) -> Any:
    block, first, second = _block(k)
    block = k.compile(block)

    def forward(x):
        hidden = checkpoint(block, x, use_reentrant=use_reentrant)
        return checkpoint(block, hidden.clamp(-1, 1), use_reentrant=use_reentrant)

    return training_step(k, forward, first, second, loss=torch.sum)


@training("a compiled block is checkpointed from outside: its forward runs again inside of backward")
def train_checkpoint_around(k: Kit) -> Any:
    return _checkpointed_around(k, use_reentrant=False)


@training("the same with the reentrant kind, which runs a backward inside of a backward")
def train_reentrant_checkpoint_around(k: Kit) -> Any:
    return _checkpointed_around(k, use_reentrant=True)


# ---- precision, custom functions, partial gradients


@training("autocast around two branches", matrices(1, low=-1, high=1))
def train_autocast(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    first, second = signs(k, 2)

    def forward(x):
        with torch.autocast("cuda", torch.bfloat16):
            fork(side)
            with torch.cuda.stream(side):
                a = sleep((x @ first).relu().clamp(max=1)) @ second
            b = x @ second
            join(side)
            return (a + b).float().sum()

    return trains(k, forward, first, second)


def scales(k: Kit, forward: Any, *weights: torch.Tensor) -> Any:
    """A step with a gradient scaler."""
    forward = k.compile(forward)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=1_000_000)
    optimizer = torch.optim.SGD(weights, lr=2.0**-10)

    def step(x):
        optimizer.zero_grad()
        loss = forward(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen = [weight.grad.clone() for weight in weights]
        take_gradients(*weights)
        scaler.update(4.0)
        return loss.detach(), seen

    return step


@training("a gradient scaler, whose check for infinities reads all gradients at once", matrices(1, low=-1, high=1))
def train_gradient_scaler(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    first, second = signs(k, 2)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).sign() * (x @ first)
        join(side)
        return (a + x @ second).sum()

    return scales(k, forward, first, second)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).relu()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient * ((x @ weight) > 0)
        return gradient @ weight.t(), x.t() @ gradient


@training("an autograd.Function on a side stream: its backward computes again what the forward didn't save", weights=1)
def train_autograd_function(weight, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = _Scaled.apply(sleep(x), weight)
    join(side)
    return (a * x).sum()


if compute.scaled is not None:

    class _Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return compute.scaled(x, 3)

        @staticmethod
        def backward(ctx, gradient):
            return compute.scaled(gradient.contiguous(), 3)

    @training(
        "Triton kernels of the user in forward and backward, writing memory that the user made for them", weights=2
    )
    def train_user_kernels(first, second, side, sleep, /, x):
        def branch(x, weight):
            for _ in range(3):
                x = _Tripled.apply(x.clamp(-2, 2) * weight)
            return x

        fork(side)
        with torch.cuda.stream(side):
            a = branch(sleep(x), first)
        b = branch(x, second)
        join(side)
        return (a + b).sum() / 4

    class _Filled(torch.autograd.Function):
        """Its memory is made on the stream that is current, and written on another one, in forward and backward."""

        @staticmethod
        def forward(ctx, x, side):
            ctx.side = side
            return _filled(x, side)

        @staticmethod
        def backward(ctx, gradient):
            return _filled(gradient.contiguous(), ctx.side), None

    def _filled(x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
        out = torch.empty_like(x)
        fork(side)
        with torch.cuda.stream(side):
            compute.scaled_into(out, x, 3)
        join(side)
        return out

    def filled_products(k: Kit) -> Any:
        side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

        def forward(x):
            y = _Filled.apply(sleep(x) * weight, side)
            return (y * weight).sum() / 4, y

        return k.compile(forward), weight

    @training(
        "a user's kernel writes the current stream's memory on a side stream, in forward and backward",
        forward=filled_products,
    )
    def train_user_kernels_into_memory_of_another_stream(forward, weight, /, x):
        x = leaf(x)
        loss, y = forward(x)
        loss.backward()
        return loss.detach(), y.detach() * 2, take_gradients(x, weight)


@training("one branch of the loss is computed without gradients, on the side stream", weights=2, leaves=0)
def train_no_grad_branch(first, second, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side), torch.no_grad():
        target = sleep(x @ second).clamp(-1, 1)
    y = (x @ first).clamp(-2, 2)
    join(side)
    return ((y - target) * (y - target)).sum()


@training("a detached value of a side stream is used without a gradient", weights=2)
def train_detached(first, second, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x @ first).clamp(-2, 2)
    join(side)
    return (a * (x @ second) + a.detach() * x).sum()


@training("views of a side stream's value, and gradients through slices, transposes and copies of them", weights=1)
def train_views(weight, side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x @ weight)
        upper, lower = a[:32], a[32:].t()
    join(side)
    b = upper.clamp(-2, 2) @ weight
    side.wait_stream(current())
    with torch.cuda.stream(side):
        c = lower.reshape(32, 64).relu() + b
    join(side)
    return torch.cat([b, c]).sum() + a.as_strided((64,), (65,)).sum()


@training("dropout on both streams: the backward uses the masks of the forward", random=True)
def train_dropout(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = nn.functional.dropout(sleep(x), 0.5)
        b = nn.functional.dropout(x, 0.5)
        join(side)
        return a, b

    def step(x):
        x = leaf(x.abs() + 1)
        a, b = forward(x)
        (da,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
        (db,) = torch.autograd.grad(b.sum(), x)
        return [(d * x == y).all() for d, y in ((da, a), (db, b))]

    return step


@training(
    "the loss leaves the device inside of the compiled function, so the engine knows no stream of it",
    forward=lambda k: one_branch(k, lambda a, x: (a * x).sum().cpu()),
)
def train_loss_on_host(forward, weight, /, x):
    x = leaf(x)
    loss = forward(x)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        loss.backward()
    join(other)
    return loss.detach(), take_gradients(x, weight)


@training("the batch size changes from call to call", dynamic=True)
def train_dynamic_shapes(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ weight).relu() * x.shape[0]
        join(side)
        return (a * x).sum()

    step = trains(k, forward, weight)
    return lambda x: [step(x[:rows]) for rows in (64, 48, 17)]


@training("a stream that the function makes", weights=2)
def train_stream_made_inside(first, second, sleep, /, x):
    side = torch.cuda.Stream()
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x @ first).relu()
    b = x @ second
    join(side)
    return (a * b).sum()


# ---- mutation


class _Normed(nn.Module):
    def __init__(self, k: Kit) -> None:
        super().__init__()
        self.side, self.sleep = k.stream(), k.sleep
        self.norm = nn.BatchNorm1d(64, device="cuda")

    def forward(self, x):
        fork(self.side)
        with torch.cuda.stream(self.side):
            a = self.norm(self.sleep(x))
        b = x * 2
        join(self.side)
        return (a * b).sum()


@training("batch norm on a side stream: running statistics are written there, joined, and read", tolerance=1e-3)
def train_batch_norm(k: Kit) -> Any:
    module = _Normed(k)
    return trains(k, module, *module.norm.parameters(), between=lambda x: module.norm.running_mean.clone())


@training(
    "an input without gradient is mutated on a side stream and joined; the loss reads it",
    matrices(2),
    weights=1,
    leaves=0,
    between=clone_of_last,
)
def train_mutated_input(weight, side, sleep, /, x, cache):
    fork(side)
    with torch.cuda.stream(side):
        y = sleep(x @ weight)
        cache.add_(y.detach())
    join(side)
    return (y * cache).sum()


@training("a tensor on the autograd graph is mutated on a side stream, as a cache between two layers is", matrices(2))
def train_mutated_activation(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    @k.compile
    def forward(x, cache):
        fork(side)
        with torch.cuda.stream(side):
            cache.mul_(2)
            cache.add_(sleep(x @ weight))
        join(side)
        return (cache * x).sum()

    def step(x, cache):
        x, start = leaf(x), leaf(cache)
        cache = start * 1
        loss = forward(x, cache)
        seen = cache.detach().clone()
        loss.backward()
        return loss.detach(), seen, take_gradients(x, start, weight)

    return step


@training("a moving average of a parameter is updated on a side stream that nobody but the next step joins")
def train_moving_average(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)
    average = k.parameter(64, 64)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side), torch.no_grad():
            average.mul_(0.5).add_(sleep(weight))
        return (x @ weight).relu().sum()

    return trains(k, forward, weight, leaves=0, after=lambda: clone_joined(average, side))


# ---- hooks and optimizers


@training(
    "hooks on the output and on the input read and change gradients",
    forward=lambda k: one_branch(k, lambda a, x: a + x),
)
def train_tensor_hooks(forward, weight, /, x):
    seen = []
    x = leaf(x)
    y = forward(x)
    y.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: seen.append(g.clone()))
    y.sum().backward()
    return y.detach(), seen, take_gradients(x, weight)


def update_in_backward(*parameters: torch.Tensor) -> None:
    """Each parameter is updated, and its gradient dropped, as soon as that is there."""

    @torch.no_grad()
    def update(parameter):
        parameter.add_(parameter.grad.sign()).clamp_(-2, 2)
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(update)


@torch.no_grad()
def make_whole(*parameters: torch.Tensor) -> None:
    """So that all sums stay exact: steps are multiples of 1/16, and parameters begin each step whole."""
    for parameter in parameters:
        parameter.round_().clamp_(-2, 2)


@training("an optimizer in the backward: each parameter is updated as soon as its gradient is there")
def train_optimizer_in_backward(k: Kit) -> Any:
    forward, first, second = two_branches(k, lambda a, b: (a + b).sum())
    update_in_backward(first, second)

    def step(x):
        loss = forward(x)
        loss.backward()
        return loss.detach(), first.detach().clone(), second.detach().clone()

    return step


@training("an optimizer's step after each backward, on the current stream; the next forward reads the parameters")
def train_optimizer(k: Kit) -> Any:
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)
    optimizer = torch.optim.SGD([first, second], lr=2.0**-4, momentum=0.5)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep((x @ first).clamp(-4, 4))
        b = (x @ second).clamp(-4, 4)
        join(side)
        return (a * b).sum()

    def step(x):
        make_whole(first, second)
        optimizer.state.clear()
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = forward(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, first.detach().clone(), second.detach().clone()

    return step


@training("the optimizer runs on a stream of its own, which waits for the current one")
def train_optimizer_on_side_stream(k: Kit) -> Any:
    forward, first, second = two_branches(k, lambda a, b: (a + b).sum())
    other, sleep = k.stream(), k.sleep

    def step(x):
        loss = forward(x)
        loss.backward()
        gradients = [first.grad.clone(), second.grad.clone()]
        fork(other)
        with torch.cuda.stream(other), torch.no_grad():
            for parameter in (first, second):
                parameter.add_(sleep(parameter.grad).sign()).clamp_(-2, 2)
        join(other)
        take_gradients(first, second)
        return loss.detach(), gradients, first.detach().clone()

    return step


# ---- memory


def reads_gradient_late(k: Kit, forward: Any, side: torch.cuda.Stream, weight: torch.Tensor) -> Any:
    """A step that drops a gradient while the current stream still reads it, and overwrites the side stream's memory."""
    forward = k.compile(forward)

    def step(x):
        with k.engine():
            forward(x).backward()
        (gradient,) = take_gradients(weight)
        seen = k.sleep(gradient) * 2
        del gradient
        overwrite(side, weight)
        return seen

    return step


@training("a gradient in a side stream's memory is freed while the current stream still reads it")
def train_gradient_memory(k: Kit) -> Any:
    side, weight = k.stream(), *trained(k, 1)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = x @ weight
        join(side)
        return (a * x).sum()

    return reads_gradient_late(k, forward, side, weight)


@training("a saved value in a side stream's memory is dropped by the backward while the caller's stream still reads it")
def train_saved_memory(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = x @ weight
        join(side)
        b = sleep(x)
        return sleep(a * a * b).sum()

    return trains(k, forward, weight, leaves=0, after=lambda: overwrite(side, weight))


@training("a branch saves one value a layer in its stream's memory, which the backward frees layer by layer")
def train_saved_chain(k: Kit) -> Any:
    side, sleep, weights = k.stream(), k.sleep, trained(k, 4)

    def branch(x):
        for weight in weights:
            x = (sleep(x) @ weight).clamp(-1, 1)
        return x

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = branch(x)
        b = branch(x.t()) * 2
        join(side)
        return (a + b).sum()

    return trains(k, forward, *weights, after=lambda: overwrite(side, weights[0]))


@training("freed memory of both streams is overwritten between forward and backward")
def train_memory_between(k: Kit) -> Any:
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x @ first).relu().clamp(max=2) @ second
        b = (x @ second).relu()
        join(side)
        return (a * b).sum()

    def between(x):
        for stream in (side, current()):
            overwrite(stream, first)

    return trains(k, forward, first, second, between=between)


@training("the forward frees a saved value that the backward computes again; eager keeps it until then")
def train_recomputed_memory(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            a = x + 1
        join(side)
        return (sleep(weight) * a).sum()

    return trains(k, forward, weight, leaves=0, between=lambda x: overwrite(side, weight))


def _saves_an_update(k: Kit, side: torch.Stream) -> Any:
    """A side stream updates the caller's memory; the graph saves the new value in memory of that stream."""
    (weight,) = trained(k, 1)
    average = torch.zeros_like(weight, requires_grad=False)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            average.mul_(0).add_(x)
        join(side)
        return k.sleep(k.sleep(weight) * average).sum()

    return k.compile(forward), weight


@training("a backward without streams frees a saved value in a side stream's memory, which in eager is the caller's")
def train_saved_update(k: Kit) -> Any:
    side = k.stream()
    forward, weight = _saves_an_update(k, side)
    return training_step(k, forward, weight, leaves=0, after=lambda: overwrite(side, weight))


@training("the same without a backward: what the forward saved is freed with the loss")
def train_saved_update_without_backward(k: Kit) -> Any:
    side = k.stream()
    forward, weight = _saves_an_update(k, side)

    def step(x):
        loss = forward(x).detach()
        overwrite(side, weight)
        return loss

    return step


def _gradient_through(k: Kit, side: torch.Stream, launches_nothing: Any) -> Any:
    """A step whose side stream has work in the forward and none in the backward, where the engine orders it."""
    (weight,) = trained(k, 1)

    @k.compile
    def forward():
        fork(side)
        with torch.cuda.stream(side):
            a = launches_nothing(weight) + 1
        join(side)
        return a

    def step(x):
        x = leaf(x)
        (forward() * k.sleep(x)).sum().backward()
        overwrite(side, weight)
        return take_gradients(weight, x)

    return step


@training("a side stream's backward launches nothing: its memory, freed after another reader, is taken too early")
def train_gradient_through_addition(k: Kit) -> Any:
    return _gradient_through(k, k.stream(), lambda weight: weight)


@training("the same with a backward that is a view")
def train_gradient_through_view(k: Kit) -> Any:
    return _gradient_through(k, k.stream(), lambda weight: weight.t())


@training("a backward computes in the memory of a saved value, which a side stream of the forward still reads")
def train_saved_value_read_by_unjoined_stream(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)
    seen = torch.zeros_like(weight, requires_grad=False)

    def forward(x):
        a = x + 1
        fork(side)
        with torch.cuda.stream(side):
            seen.copy_(sleep(a))
        return (weight * a).sum()

    return trains(k, forward, weight, leaves=0, after=lambda: clone_joined(seen, side))


# ---- callers


@training("backward is called under another stream than the forward", forward=one_branch)
def train_backward_under_other_stream(forward, weight, other, /, x):
    x = leaf(x)
    loss = forward(x)
    fork(other)
    with torch.cuda.stream(other):
        loss.backward()
        seen = [x.grad * 1, weight.grad * 1]
    join(other)
    take_gradients(x, weight)
    return loss.detach(), seen


@training("forward and backward are called by another thread, after one of this thread", forward=one_branch)
def train_in_another_thread(forward, weight, /, x):
    mine, theirs = leaf(x), leaf(x * 2)
    loss = forward(mine)
    stream, seen = current(), []

    def run():
        with torch.cuda.stream(stream):
            other = forward(theirs)
            other.backward()
            loss.backward()
            seen.append(other.detach())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return loss.detach(), seen, take_gradients(mine, theirs, weight)


@training("the event that the forward waits for is recorded again before the backward, which must not wait for it")
def train_event_of_the_caller(k: Kit) -> Any:
    side, other, sleep, weight = k.stream(), k.stream(), k.sleep, *trained(k, 1)
    ready = torch.cuda.Event()

    @k.compile
    def forward(x):
        with torch.cuda.stream(side):
            side.wait_event(ready)
            a = sleep(x).relu().clamp(max=1)
        join(side)
        return (a @ weight * a).sum()

    def step(x):
        ready.record()
        loss = forward(x)
        with torch.cuda.stream(other):
            sleep(weight.detach())
            ready.record()
        loss.backward()
        return loss.detach(), take_gradients(weight)

    return step


@training(
    "a prefetch loop: the next batch is copied on a copy stream while this one trains",
    tensors(*[whole_numbers(64, 64, pinned=True, on="cpu")] * 3),
)
def train_prefetch_loop(k: Kit) -> Any:
    copy = k.stream()
    forward, first, second = two_branches(k, lambda a, b: (a * b).sum())

    @k.compile
    def fetch(x):
        with torch.cuda.stream(copy):
            return x.to("cuda", non_blocking=True)

    def step(*batches):
        losses = []
        following = fetch(batches[0])
        for i in range(len(batches)):
            current().wait_stream(copy)
            batch = following
            batch.record_stream(current())
            following = fetch(batches[i + 1]) if i + 1 < len(batches) else None
            loss = forward(batch)
            loss.backward()
            losses.append(loss.detach())
        return losses, take_gradients(first, second)

    return step
