"""Kernels of the user's own, and others that are given more than pointers and numbers."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from relaunch_programs._program import Kit, program
from relaunch_programs.training import gradients


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from user_kernels import scale_kernel, scaled
except ImportError:
    triton = None


if triton is not None:

    @triton.autotune(
        configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["count"], restore_value=["target"]
    )
    @triton.jit
    def _add_kernel(target, source, count, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        total = tl.load(target + offsets, mask=inside) + tl.load(source + offsets, mask=inside)
        tl.store(target + offsets, total, mask=inside)

    @triton.jit
    def _double_tiles_kernel(source, target, ROWS: tl.constexpr):
        first = tl.program_id(0) * ROWS
        target.store([first, 0], source.load([first, 0]) * 2)

    @triton.jit
    def _double_rows_kernel(source, target, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        first = tl.program_id(0) * ROWS
        tiles = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [ROWS, COLUMNS])
        made = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [ROWS, COLUMNS])
        made.store([first, 0], tiles.load([first, 0]) * 2)

    def add_to(target: torch.Tensor, source: torch.Tensor) -> None:
        _add_kernel[lambda meta: (triton.cdiv(target.numel(), meta["BLOCK"]),)](target, source, target.numel())

    @torch.library.triton_op("relaunch_programs::scaled", mutates_args={})
    def scaled_op(x: torch.Tensor, factor: float) -> torch.Tensor:
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 1024),)
        torch.library.wrap_triton(scale_kernel)[grid](x, out, factor, x.numel(), BLOCK=1024)
        return out

    scaled_op.register_autograd(
        lambda ctx, grad: (scaled_op(grad, ctx.factor), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    )


@program("a kernel of the user between those of the compiler", launches=6, gpu_only=True)
def user_kernel(k: Kit) -> None:
    f = k.compile(lambda x: scaled(x.sin(), 3.0).cos() + scaled(x[1:], 0.5).sum())
    for _ in k.steps():
        k.see("output", f(k.randn(70, 33)))


@program("a kernel that is tuned at the first call adds to its input", launches=6, gpu_only=True)
def user_kernel_in_place(k: Kit) -> None:
    def fn(total, x):
        add_to(total, x.relu())
        return total * 2

    f = k.compile(fn)
    total = k.randn(5000)
    for _ in k.steps():
        k.see("output", f(total, k.randn(5000)))
        k.see("total", total)


@program("an address that is packed into a descriptor by the host", launches=0, refusals=True, gpu_only=True)
def descriptors_of_the_host(k: Kit) -> None:
    def fn(x):
        y = x + 1
        out = torch.empty_like(y)
        tiles = (TensorDescriptor.from_tensor(v, [32, 64]) for v in (y, out))
        _double_tiles_kernel[(y.shape[0] // 32,)](*tiles, ROWS=32)
        return out.sin()

    f = k.compile(fn)
    for _ in k.steps():
        k.see("output", f(k.randn(128, 64)))


@program("descriptors that a kernel writes to memory of its launcher's", launches=0, refusals=True, gpu_only=True)
def descriptors_of_the_device(k: Kit) -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))

    def fn(x):
        y = x + 1
        out = torch.empty_like(y)
        _double_rows_kernel[(y.shape[0] // 32,)](y, out, y.shape[0], y.shape[1], ROWS=32, COLUMNS=64)
        return out.sin()

    f = k.compile(fn)
    for _ in k.steps():
        k.see("output", f(k.randn(128, 64)))


@program("an operator of a kernel of the user, with its backward", launches=12, gpu_only=True)
def operator_of_a_kernel(k: Kit) -> None:
    layer = k.module(nn.Linear(64, 64))
    f = k.compile(lambda x: scaled_op(layer(x).sin(), 0.25).square().mean())
    for _ in k.steps():
        loss = f(k.randn(32, 64))
        loss.backward()
        k.see("loss", loss)
        k.see("gradients", gradients(layer))


@program("attention from a template, with a mask of blocks", launches=6, loose=4, gpu_only=True)
def flexible_attention(k: Kit) -> None:
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 100), None, None, 256, 256, device=k.device)
    bias = k.randn(4)

    def fn(q, kv):
        def score(s, b, h, i, j):
            return s + bias[h] * (i - j)

        return flex_attention(q, kv, kv, score_mod=score, block_mask=mask).sin()

    f = k.compile(fn)
    with torch.no_grad():
        for _ in k.steps():
            shape = 2, 4, 256, 64
            k.see("output", f(k.randn(*shape, dtype=torch.bfloat16), k.randn(*shape, dtype=torch.bfloat16)))


@program("attention from a template is trained", launches=12, loose=8, gpu_only=True)
def flexible_attention_in_training(k: Kit) -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device=k.device)
    layer = k.module(nn.Linear(64, 192), torch.bfloat16)

    def fn(x):
        q, key, v = layer(x).chunk(3, -1)
        return flex_attention(q, key, v, block_mask=mask).float().square().mean()

    f = k.compile(fn)
    for _ in k.steps():
        x = k.randn(2, 4, 256, 64, dtype=torch.bfloat16, grad=True)
        loss = f(x)
        loss.backward()
        k.see("loss", loss)
        k.see("gradients", [x.grad, *gradients(layer).values()])


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + x).relu()


@program("convolutions allocate what is saved and what is a gradient, beside workspaces", launches=12, loose=40)
def convolutions_in_training(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(16), Block(16)))
    model = model.to(memory_format=torch.channels_last)
    f = k.compile(lambda x: model(x).mean((2, 3)).square().sum())
    for _ in k.steps():
        loss = f(k.randn(8, 3, 64, 64).contiguous(memory_format=torch.channels_last))
        loss.backward()
        k.see("loss", loss)
        k.see("gradients", gradients(model))
        k.see("statistics", [m.running_mean for m in model.modules() if isinstance(m, nn.BatchNorm2d)])


@program("a function that is mapped and differentiated before it is compiled", launches=6, loose=4)
def transforms(k: Kit) -> None:
    def energy(w, x):
        return (x @ w).sin().square().sum()

    f = k.compile(lambda w, x: torch.func.vmap(torch.func.grad(energy), (None, 0))(w, x))
    for _ in k.steps():
        k.see("output", f(k.randn(16, 8), k.randn(5, 4, 16)))


@program("sequences of several lengths in one tensor", launches=0, refusals=True)
def jagged(k: Kit) -> None:
    def fn(values, offsets):
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return (x.sin() * 2 + 1).values()

    f = k.compile(fn)
    for i in k.steps():
        offsets = k.place(torch.tensor([0, 3 + i, 10, 24]))
        k.see("values", f(k.randn(24, 16), offsets))


@program("products of small integers", launches=6)
def products_of_integers(k: Kit) -> None:
    def fn(a, b, scale):
        return torch._int_mm(a, b).float() * scale

    f = k.compile(fn)
    for _ in k.steps():
        a, b = (k.randint(100, *shape, low=-100, dtype=torch.int8) for shape in ((64, 128), (128, 32)))
        k.see("output", f(a, b, k.randn(32)))
