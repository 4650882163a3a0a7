"""What upstream's users reported, in training: each is named after what went wrong.

The caller reads what was mutated right after the call that mutates it, and losses and gradients right after `backward`.
"""

from typing import Any

import torch
from torch import nn

from stream_programs._program import fork, join, Kit, matrices, tensors, whole_numbers
from stream_programs.hazards import loaded, MISALIGNED
from stream_programs.training import (
    clone_of_last,
    current,
    leaf,
    one_branch,
    reads_gradient_late,
    take_gradients,
    trained,
    training,
    training_step,
    trains,
    two_branches,
)


# ---- mutation at the user's joins


def _mutates(k: Kit, joined: Any) -> Any:
    """A step whose forward mutates its second argument on a side stream, long after it has launched all the rest."""
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    def forward(x, cache):
        fork(side)
        with torch.cuda.stream(side):
            cache.add_(sleep(sleep(cache)).sign())
        y = (x @ weight).sum()
        joined(side)
        return y

    return trains(k, forward, weight, leaves=0, between=clone_of_last)


@training(
    "the write-back of a mutation comes after the user's join: the caller reads the old value (#197416)", matrices(2)
)
def train_mutation_joined_by_wait_stream(k: Kit) -> Any:
    return _mutates(k, join)


@training("the same, joined by an event (#177576, #177580)", matrices(2))
def train_mutation_joined_by_event(k: Kit) -> Any:
    done = torch.cuda.Event()

    def join_by_event(side):
        done.record(side)
        done.wait()

    return _mutates(k, join_by_event)


@training("the same, joined by the host", matrices(2))
def train_mutation_joined_by_synchronize(k: Kit) -> Any:
    return _mutates(k, lambda side: side.synchronize())


class _Counter(nn.Module):
    """A buffer and a parameter without gradient, both mutated in forward."""

    def __init__(self, k: Kit) -> None:
        super().__init__()
        self.side, self.sleep = k.stream(), k.sleep
        self.weight = nn.Parameter(k.parameter(64, 64))
        self.average = nn.Parameter(k.parameter(64, 64), requires_grad=False)
        self.register_buffer("count", torch.zeros(64, 64, device="cuda"))

    def forward(self, x):
        fork(self.side)
        with torch.cuda.stream(self.side):
            self.count.add_(self.sleep(x).sign())
            self.average.mul_(0).add_(self.sleep(self.weight.detach()))
        y = (x @ self.weight).relu()
        join(self.side)
        return (y * self.average).sum()


@training("a buffer and a parameter of a module are mutated on a side stream (#197416)")
def train_mutated_buffer_and_parameter(k: Kit) -> Any:
    module = _Counter(k)
    forward = k.compile(module)

    def step(x):
        module.count.zero_()
        loss = forward(x)
        seen = module.count.clone(), module.average.detach().clone()
        loss.backward()
        return loss.detach(), seen, take_gradients(module.weight)

    return step


@training(
    "a KV cache updated in place, then a forked layer with private events: refused, or a race (#195573)",
    tensors(whole_numbers(4, 32, 16), whole_numbers(4, 1, 16, low=-1, high=1)),
)
def train_kv_cache_then_forked_layer(k: Kit) -> Any:
    side, sleep, gate_weight, weight = k.stream(), k.sleep, *trained(k, 2, 16, 16)

    def forward(cache, token):
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        cache[:, 5:6].copy_(sleep(token))
        begin.record()
        with torch.cuda.stream(side):
            begin.wait()
            gate = (sleep(token) @ gate_weight).clamp(-1, 1)
            end.record()
        scores = ((cache @ weight) * token).sum(-1, keepdim=True)
        end.wait()
        return (scores * gate).sum()

    return trains(k, forward, gate_weight, weight, leaves=0, between=lambda cache, token: cache.clone())


@training(
    "an input read on one stream and then mutated on another: the backward needs what it was before",
    matrices(2),
    weights=1,
    leaves=0,
    between=clone_of_last,
)
def train_input_read_then_mutated(weight, reader, writer, sleep, /, x, cache):
    fork(reader)
    with torch.cuda.stream(reader):
        a = (sleep(cache) * 2) * weight
    writer.wait_stream(reader)
    with torch.cuda.stream(writer):
        cache.mul_(3)
    join(writer)
    return (a * x).sum()


# ---- events and waits


@training("a frame updates a result of an earlier one, which later frames read on the update's stream", fullgraph=False)
def train_update_of_an_earlier_result(k: Kit) -> Any:
    side, other, sleep, weight = k.stream(), k.stream(), k.sleep, *trained(k, 1)
    updated = torch.cuda.Event()

    def forward(x):
        a = sleep(x @ weight)
        torch._dynamo.graph_break()
        fork(side)
        with torch.cuda.stream(side):
            a.mul_(2)
            updated.record(side)
        late = sleep(x)
        torch._dynamo.graph_break()
        with torch.cuda.stream(side):
            b = a + 1
        with torch.cuda.stream(other):
            other.wait_event(updated)
            c = a - 1
        join(side, other)
        return (b * c + late).sum()

    return trains(k, forward, weight, leaves=0)


@training("a stream in a local variable becomes a context at a graph break (#187472, #183504)", fullgraph=False)
def train_stream_across_graph_break(k: Kit) -> Any:
    side, sleep, first, second = k.stream(), k.sleep, *trained(k, 2)

    def forward(x):
        mine = side
        fork(mine)
        with torch.cuda.stream(mine):
            a = sleep(x @ first).relu()
        torch._dynamo.graph_break()
        with torch.cuda.stream(mine):
            b = sleep(a) @ second
        join(mine)
        return (b * x).sum()

    return trains(k, forward, first, second)


# ---- memory, fusion and passes


@training(
    "a misaligned input is saved and read by several streams in forward and backward (#187224)",
    MISALIGNED,
    weights=2,
    leaves=0,
)
def train_misaligned_input(first, second, one, two, sleep, /, x):
    fork(one, two)
    with torch.cuda.stream(one):
        a = sleep(x) @ first
    with torch.cuda.stream(two):
        b = sleep(x) * second
    c = x.sum(0)
    join(one, two)
    return (a + b + c).sum()


@training("a misaligned input that a loader fills is saved, and recorded in forward and backward", MISALIGNED)
def train_misaligned_prefetch(k: Kit) -> Any:
    loader, side, sleep, first, second = k.stream(), k.stream(), k.sleep, *trained(k, 2)

    @k.compile
    def forward(x):
        current = torch.cuda.current_stream()
        current.wait_stream(loader)
        x.record_stream(current)
        x.record_stream(side)
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x) @ first
        b = x * second
        join(side)
        return (a + b).sum()

    return training_step(k, lambda source: forward(loaded(source, loader, sleep)), first, second, leaves=0)


@training(
    "a gradient that comes in misaligned is read by two streams",
    matrices(1),
    forward=lambda k: two_branches(k, lambda a, b: a + b),
)
def train_misaligned_gradient(forward, first, second, /, x):
    y = forward(x)
    gradients = torch.cat([x.new_zeros(1), x.reshape(-1)])
    for offset in (0, 1):
        y.backward(gradients[offset : offset + 4096].view(64, 64), retain_graph=not offset)
    return y.detach(), take_gradients(first, second)


@training(
    "Tensor.record_stream on a saved value and on an input is an error, or lost (ai-toolkit #1012)", weights=2, leaves=0
)
def train_record_stream(first, second, side, sleep, /, x):
    h = (x @ first).relu()
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(h) @ second
        h.record_stream(side)
        x.record_stream(side)
    join(side)
    a.record_stream(current())
    return (a * h).sum()


class _Kept(torch.autograd.Function):
    """Its gradient is what it has saved."""

    @staticmethod
    def forward(ctx, x, y):
        kept = y * 2
        ctx.save_for_backward(kept)
        return (x * kept).sum()

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return kept, None


@training("a gradient that is a saved value in a side stream's memory is freed while the current stream reads it")
def train_saved_value_as_gradient(k: Kit) -> Any:
    side, weight = k.stream(), *trained(k, 1)

    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            loss = _Kept.apply(weight, x @ x)
        join(side)
        return loss

    return reads_gradient_late(k, forward, side, weight)


@training("the same, and the forward leaves it to the caller to join the side stream")
def train_saved_value_as_unjoined_gradient(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, *trained(k, 1)

    @k.compile
    def forward(x):
        fork(side)
        with torch.cuda.stream(side):
            return _Kept.apply(weight, sleep(x @ x))

    def step(x):
        loss = forward(x)
        loss.backward(torch.ones(loss.shape, device="cuda"))
        return take_gradients(weight)

    return step


@training(
    "the current stream is entered in a hook that packs saved tensors (prime-rl #3458)",
    fullgraph=False,
    forward=one_branch,
)
def train_current_stream_in_pack_hook(forward, weight, /, x):
    def pack(t):
        with torch.cuda.stream(current()):
            return t * 1

    x = leaf(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = forward(x)
    loss.backward()
    return loss.detach(), take_gradients(x, weight)


@training(
    "on cuda:1 the raw handle overwrites the user's stream of the same name (#182084)",
    tensors(whole_numbers(64, 64, on="cuda:1")),
    devices=2,
)
def train_on_second_device(k: Kit) -> Any:
    with torch.cuda.device(1):
        side = k.stream(device="cuda:1")
    sleep = k.sleep
    weight = k.parameter(64, 64).to("cuda:1").requires_grad_()

    def forward(x):
        with torch.cuda.device(1):
            fork(side)
            with torch.cuda.stream(side):
                a = sleep(x @ weight).relu()
            b = x * 2
            join(side)
            return (a * b).sum()

    return trains(k, forward, weight)
