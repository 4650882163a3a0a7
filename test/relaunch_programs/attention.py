"""Attention with dropout in training: where a forward leaves its seeds depends on how it ran.

Memory-efficient attention keeps a seed in host memory outside of a capture and on the device inside. A backward that
runs another way than its forward did reads an address of the wrong memory.
"""

from collections.abc import Callable

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.nn.attention import sdpa_kernel, SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from relaunch_programs._program import Kit, program


Attention = Callable[[torch.Tensor], torch.Tensor]


def attention(k: Kit, backend: SDPBackend, dropout: float = 0.3) -> Attention:
    def f(q: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            y = scaled_dot_product_attention(q, q * 0.5, q + 1, dropout_p=dropout, is_causal=True)
        return y.relu()

    return k.compile(f)


def leaf(k: Kit, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return k.randn(2, 4, 64, 32, dtype=dtype).requires_grad_()


def train(k: Kit, f: Attention, dtype: torch.dtype = torch.float32) -> None:
    for _ in k.steps():
        q = leaf(k, dtype)
        y = f(q)
        y.sum().backward()
        k.see("output and gradient", (y, q.grad))


@program(
    "memory-efficient attention: the seed is on the host in the first step", random=True, launches=9, gpu_only=True
)
def attention_efficient(k: Kit) -> None:
    f = attention(k, SDPBackend.EFFICIENT_ATTENTION)
    k.seed(1)
    train(k, f)


@program("flash attention keeps its state on the device", random=True, launches=9, gpu_only=True)
def attention_flash(k: Kit) -> None:
    f = attention(k, SDPBackend.FLASH_ATTENTION)
    k.seed(2)
    train(k, f, torch.bfloat16)


@program("attention in plain operators draws its mask by itself", random=True, launches=9)
def attention_math(k: Kit) -> None:
    f = attention(k, SDPBackend.MATH)
    k.seed(4)
    train(k, f)


@program("without dropout the seed is memory that nobody writes", launches=9, gpu_only=True)
def attention_without_dropout(k: Kit) -> None:
    train(k, attention(k, SDPBackend.EFFICIENT_ATTENTION, dropout=0.0))


@program("the first backward comes when the forward is a graph already", random=True, launches=12, gpu_only=True)
def attention_late_backward(k: Kit) -> None:
    f = attention(k, SDPBackend.EFFICIENT_ATTENTION)
    k.seed(5)
    for _ in k.steps():
        leaves = [leaf(k) for _ in range(3)]
        outputs = [f(q) for q in leaves]
        for y in reversed(outputs):
            y.sum().backward()
        k.see("outputs and gradients", (outputs, [q.grad for q in leaves]))


@program("a backward that is run twice reads its seeds twice", random=True, launches=12, gpu_only=True)
@functorch_config.patch(donated_buffer=False)  # what upstream asks of whoever retains a graph
def attention_retained(k: Kit) -> None:
    f = attention(k, SDPBackend.EFFICIENT_ATTENTION)
    k.seed(6)
    for _ in k.steps():
        q = leaf(k)
        loss = f(q).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        k.see("gradient", q.grad)


@program("evaluation between the steps is other code, which draws nothing", random=True, launches=12, gpu_only=True)
def attention_evaluated(k: Kit) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True, norm_first=True)
    model = k.module(layer)

    def f(x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return model(x)

    compiled = k.compile(f)
    k.seed(7)
    for _ in k.steps():
        x = k.randn(2, 16, 32).requires_grad_()
        model.train()
        compiled(x).sum().backward()
        k.see("gradients", (x.grad, [p.grad for p in model.parameters()]))
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            k.see("evaluation", compiled(x))


@program("the backward of an attention of many sizes", random=True, launches=9, gpu_only=True)
def attention_of_sizes(k: Kit) -> None:
    f = attention(k, SDPBackend.EFFICIENT_ATTENTION)
    k.seed(9)
    for n in (32, 32, 64, 64, 32, 64, 32, 64):
        k.churn()
        q = k.randn(2, 4, n, 32).requires_grad_()
        y = f(q)
        y.sum().backward()
        k.see("output and gradient", (y, q.grad))
