"""Kinds of computation that reach the device in their own way, and larger programs."""

from __future__ import annotations

from typing import Any

import torch

from stream_programs._program import fork, join, joins_all, Kit, matrices, program, tensors, whole_numbers


try:
    from user_kernels import added_into, scaled, scaled_into
except ImportError:  # there is no Triton
    scaled = None


if scaled is not None:

    @program("a Triton kernel of the user is launched on the stream of its block")
    def user_triton_kernel(side, sleep, /, x):
        x = sleep(x + 1)
        fork(side)
        with torch.cuda.stream(side):
            a = scaled(sleep(x), 3.0)
        b = scaled(x, 2.0)
        join(side)
        return scaled(a + b, 2.0)

    @program("a user's kernel writes on another stream what `empty_like` made on the caller's", late_reader="current")
    def user_kernel_fills_memory_of_the_callers_stream(side, sleep, /, x):
        out = torch.empty_like(x)
        fork(side)
        with torch.cuda.stream(side):
            scaled_into(out, sleep(x), 3.0)
        join(side)
        return out

    @program("a user's kernel writes on the caller's stream what a side stream allocated", late_reader="side")
    def user_kernel_fills_memory_of_a_side_stream(side, sleep, /, x):
        with torch.cuda.stream(side):
            out = torch.empty_like(x)
        join(side)
        scaled_into(out, sleep(x), 3.0)
        fork(side)
        return out

    @program("kernels of two streams update views of one tensor, and the result is handed on", late_reader="current")
    def user_kernels_of_two_streams_write_parts(first, second, sleep, /, x):
        out = x.new_empty(2, *x.shape)
        total = torch.empty_like(x)
        fork(first)
        with torch.cuda.stream(first):
            scaled_into(out[0], sleep(x), 2.0)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            scaled_into(out[1], sleep(x), 3.0)
            added_into(total, out[0], out[1])
            scaled_into(total, total, 2.0)
        join(second)
        return out[1], total

    @program("the allocator was told of a stream before a user's kernel updated the tensor", late_reader="current")
    def user_kernel_updates_a_recorded_tensor(first, second, sleep, /, x):
        out = sleep(x) + 1
        fork(first)
        out.record_stream(first)
        with torch.cuda.stream(first):
            a = sleep(out).sum(0)
        fork(second)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            scaled_into(out, out, 3.0)
        join(second)
        return out, a * 1


# ---- kinds of kernels


@program("a custom operator sees its block's stream as the current one")
def custom_operator(side, sleep, /, x):
    x = torch.ops.overlay_test.double(sleep(x))
    fork(side)
    with torch.cuda.stream(side):
        a = torch.ops.overlay_test.double(sleep(x))
    b = torch.ops.overlay_test.double(x) + 1
    join(side)
    return a + b


@program("a custom operator that mutates, on a side stream")
def mutating_custom_operator(side, sleep, /, x):
    total = x * 2
    fork(side)
    with torch.cuda.stream(side):
        torch.ops.overlay_test.add_to(total, sleep(x))
        torch.ops.overlay_test.add_to(total, total.clone())
    join(side)
    torch.ops.overlay_test.add_to(total, x)
    return total


@program("foreach operators with lists on two streams", matrices(4))
def foreach_on_two_streams(side, sleep, /, *xs):
    fork(side)
    with torch.cuda.stream(side):
        a = torch._foreach_mul([sleep(x) for x in xs], 3)
    b = torch._foreach_add(xs, 1)
    join(side)
    return torch._foreach_add(a, b)


@program(
    "combo kernels put independent kernels into one launch: only those of one stream",
    tensors(whole_numbers(64, 64), whole_numbers(32, 128), whole_numbers(128, 16), whole_numbers(16, 96)),
    options={"combo_kernels": True, "benchmark_combo_kernel": False},
)
def combo_kernels(side, sleep, /, a, b, c, d):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(a) * 2
        b = b.sum(-1) + 1
    c = c * 3
    d = d.sum(0) - 1
    join(side)
    return a, b, c, d


@program(
    "a matmul template with an epilogue on each of two streams",
    matrices(2, 128),
    options={"max_autotune": True, "max_autotune_gemm_backends": "TRITON"},
)
def matmul_templates(side, sleep, /, x, y):
    fork(side)
    with torch.cuda.stream(side):
        a = (sleep(x) @ y).relu() + 1
    b = (y @ x).relu() - 1
    join(side)
    return a + b


@program("a convolution and a pooling on a side stream", tensors(whole_numbers(2, 8, 16, 16)), tolerance=1e-3)
def convolution(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    first, second = k.parameter(8, 8, 3, 3), k.parameter(8, 8, 1, 1)

    def fn(x):
        fork(side)
        with torch.cuda.stream(side):
            a = torch.nn.functional.conv2d(sleep(x), first, padding=1).relu()
        b = torch.nn.functional.conv2d(x, second)
        join(side)
        return torch.nn.functional.max_pool2d(a + b, 2)

    return fn


@program(
    "kernels of the fallback kind, with several outputs: sort and topk",
    tensors(whole_numbers(64, 256, low=-50, high=50)),
)
def kernels_with_several_outputs(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        values, order = torch.sort(sleep(x), stable=True, dim=-1)
        top, _ = torch.topk(x, 4)
    join(side)
    again = torch.gather(x, -1, order)
    return again - values, top, order


@program(
    "scatter and index_put with accumulation on a side stream",
    tensors(
        whole_numbers(64, 16),
        lambda device, generator: torch.randint(0, 64, (128,), generator=generator).to(device),
        whole_numbers(128, 16),
    ),
)
def scatter_on_side_stream(side, sleep, /, x, index, values):
    total = x * 2
    fork(side)
    with torch.cuda.stream(side):
        a = total.index_add(0, index, sleep(values))
        b = total.index_put((index,), values, accumulate=True)
    join(side)
    return a + b + total


@program("reductions: several kernels on each stream, split in two steps", tensors(whole_numbers(8, 65536)))
def reductions(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x).sum()
        b = x.amax(-1)
    c = x.sum(0)
    join(side)
    return a + b, c + a


@program("slices of a concatenation are written by kernels of several streams", matrices(3))
def concatenation_of_branches(first, second, third, sleep, /, *xs):
    streams, parts = (first, second, third), []
    for i, (side, x) in enumerate(zip(streams, xs)):
        fork(side)
        with torch.cuda.stream(side):
            parts.append(sleep(x) * (i + 2))
    join(*streams)
    joined = torch.cat(parts, 1)
    return joined, joined.sum(1)


@program("a concatenation made on a side stream of parts from two others", matrices(2))
def concatenation_on_side_stream(first, second, sleep, /, x, y):
    fork(first)
    with torch.cuda.stream(first):
        a = sleep(x).relu()
    b = sleep(y) - 1
    fork(second)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        c = torch.cat([a, b, a + b])
    join(second)
    return c * 2


# ---- tensors


@program("views of one buffer read and written on several streams")
def views_across_streams(first, second, sleep, /, x):
    h = sleep(x) * 2
    top, bottom = h[:32], h[32:]
    fork(first, second)
    with torch.cuda.stream(first):
        top.add_(sleep(bottom.clone()))
    second.wait_stream(first)
    with torch.cuda.stream(second):
        bottom.mul_(3)
    turned = h.t()
    join(second)
    return turned @ h, top.reshape(-1)


@program("outputs that are views of an input, of each other, and the same tensor twice")
def aliased_outputs(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x) * 2
        view = a[1:]
    join(side)
    return a, view, a, x.t(), a.view(-1)


@program("outputs returned without a join: the caller joins", matrices(2), finish=joins_all)
def unjoined_outputs(first, second, sleep, /, x, y):
    fork(first, second)
    with torch.cuda.stream(first):
        a = sleep(x) @ y
    with torch.cuda.stream(second):
        b = sleep(y) + 1
    return a, b, x * y


@program(
    "empty tensors and tensors without dimensions",
    tensors(whole_numbers(64, 64), whole_numbers(0, 64), whole_numbers()),
)
def empty_and_scalar_tensors(side, sleep, /, x, empty, scalar):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(scalar) * 2
        b = torch.cat([empty * 2, x])
        c = (empty + 1).sum()
    join(side)
    return a + x, b, c + a, empty + a


@program(
    "tensors of several dtypes, and conversions between them on a side stream",
    tensors(
        whole_numbers(64, 64, dtype=torch.float16),
        whole_numbers(64, 64, dtype=torch.bfloat16),
        whole_numbers(64, 64, dtype=torch.int32),
        whole_numbers(64, 64, dtype=torch.float64),
        whole_numbers(64, 64, dtype=torch.bool, low=0, high=1),
    ),
)
def several_dtypes(side, sleep, /, half, brain, whole, double, truth):
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(half).float() + brain
        b = torch.where(truth, whole, -whole)
        c = sleep(double) * whole
    d = half @ half
    join(side)
    return a, b.to(torch.int64) + 1, c, d + a.half(), truth.logical_not()


# ---- modules and larger programs


class _RunningMean(torch.nn.Module):
    def __init__(self, k: Kit) -> None:
        super().__init__()
        self.side, self.sleep = k.stream(), k.sleep
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("mean", torch.zeros(64, device="cuda"))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device="cuda"))

    def forward(self, x):
        fork(self.side)
        with torch.cuda.stream(self.side):
            self.mean.mul_(0.5).add_(self.sleep(x).sum(0) * 2)
            self.count.add_(1)
        y = x * 3
        join(self.side)
        return y + self.mean, self.count + 0


@program("buffers of a module mutated on a side stream, as running statistics are", tolerance=1e-6)
def running_statistics(k: Kit) -> Any:
    return _RunningMean(k)


class _Normed(torch.nn.Module):
    def __init__(self, k: Kit) -> None:
        super().__init__()
        self.side, self.sleep = k.stream(), k.sleep
        self.norm = torch.nn.BatchNorm1d(64, device="cuda")
        self.norm.requires_grad_(False)

    def forward(self, x):
        fork(self.side)
        with torch.cuda.stream(self.side):
            a = self.norm(self.sleep(x))
        b = x + 1
        join(self.side)
        return a + b, self.norm.running_mean + 0


@program("batch norm in training mode on a side stream: its running statistics are mutated there", tolerance=1e-4)
def batch_norm_on_side_stream(k: Kit) -> Any:
    return _Normed(k)


@program("eight experts on eight streams", tensors(whole_numbers(64, 64, dtype=torch.bfloat16, low=-1, high=1)))
def eight_experts(k: Kit) -> Any:
    streams, sleep = [k.stream() for _ in range(8)], k.sleep
    up = [torch.sign(k.parameter(64, 64, dtype=torch.bfloat16)) for _ in streams]
    down = [torch.sign(k.parameter(64, 64, dtype=torch.bfloat16)) for _ in streams]

    def fn(x):
        outputs = []
        for i, side in enumerate(streams):
            fork(side)
            with torch.cuda.stream(side):
                hidden = (sleep(x) @ up[i]).relu().clamp(max=1)
                outputs.append(hidden @ down[i])
        join(*streams)
        total = outputs[0].float()
        for output in outputs[1:]:
            total = total + output
        return total

    return fn


@program("sixteen small blocks over four streams, four forks and four joins", tensors(*[whole_numbers(256)] * 4))
def sixteen_blocks(first, second, third, fourth, sleep, /, *xs):
    streams, xs = (first, second, third, fourth), list(xs)
    for _ in range(4):
        for i, side in enumerate(streams):
            fork(side)
            with torch.cuda.stream(side):
                xs[i] = (xs[i] * 2 + i).clamp(-99, 99)
        join(*streams)
        xs = [xs[i] + xs[i - 1] for i in range(4)]
    return sleep(xs[0]) + xs[1] + xs[2] + xs[3]


@program("two streams that hand a buffer to and fro with two events", matrices(1, low=-1, high=1))
def event_ping_pong(k: Kit) -> Any:
    ping, pong, sleep = k.stream(), k.stream(), k.sleep
    there, back = torch.cuda.Event(), torch.cuda.Event()
    weight = torch.sign(k.parameter(64, 64))

    def fn(x):
        fork(ping)
        for _ in range(3):
            with torch.cuda.stream(ping):
                x = (sleep(x) @ weight).clamp(-1, 1)
                there.record()
            with torch.cuda.stream(pong):
                there.wait()
                x = sleep(x) * 2 - 1
                back.record()
            ping.wait_event(back)
        back.wait()
        return x

    return fn


@program(
    "dynamic shapes: sizes are symbols in the plan's buffers",
    tensors(
        lambda device, generator: whole_numbers(3 + generator.initial_seed() % 90, 64)(device, generator),
        whole_numbers(64, 64),
    ),
    dynamic=True,
)
def dynamic_shapes(side, sleep, /, x, w):
    x = sleep(x + 1)
    fork(side)
    with torch.cuda.stream(side):
        a = (sleep(x) @ w).relu()
    b = x * x.shape[0]
    join(side)
    return a + b, x.shape[0]


@program("a region that is compiled once and called on two streams", matrices(1, low=-1, high=1))
def nested_region(k: Kit) -> Any:
    first, second, sleep, weight = k.stream(), k.stream(), k.sleep, torch.sign(k.parameter(64, 64))

    @torch.compiler.nested_compile_region
    def block(x):
        return (sleep(x) @ weight).clamp(-2, 2) + 1

    def fn(x):
        fork(first, second)
        with torch.cuda.stream(first):
            a = block(x)
        with torch.cuda.stream(second):
            b = block(x * 2)
        c = block(x * 3)
        join(first, second)
        return a + 2 * b + 3 * c

    return fn


def region_with_a_stream(k: Kit, side: torch.cuda.Stream) -> Any:
    sleep, weight = k.sleep, torch.sign(k.parameter(64, 64))

    @torch.compiler.nested_compile_region
    def block(x):
        fork(side)
        with torch.cuda.stream(side):
            a = (sleep(x) @ weight).clamp(-2, 2)
        b = x + 1
        join(side)
        return a + b

    return block


@program("a region that is compiled once and uses a stream inside", matrices(1, low=-1, high=1))
def stream_inside_nested_region(k: Kit) -> Any:
    block = region_with_a_stream(k, k.stream())
    return lambda x: block(block(x)) * 2


@program("a branch on a tensor, torch.cond, on a side stream")
def cond_on_side_stream(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        a = torch.cond(sleep(x).sum() > 0, lambda t: t * 2, lambda t: t - 1, (x,))
    b = x + 1
    join(side)
    return a + b


@program(
    "a transformer block whose MLP and attention run side by side", tensors(whole_numbers(2, 32, 64)), tolerance=1e-3
)
def parallel_transformer_block(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep
    qkv, out = k.parameter(64, 192), k.parameter(64, 64)
    up, down = k.parameter(64, 128), k.parameter(128, 64)

    def fn(x):
        h = torch.nn.functional.layer_norm(x, (64,))
        fork(side)
        with torch.cuda.stream(side):
            mlp = torch.nn.functional.gelu(sleep(h) @ up) @ down
        q, key, v = (h @ qkv).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, key, v)
        attended = attended.transpose(1, 2).reshape(2, 32, 64) @ out
        join(side)
        return x + mlp + attended

    return fn
