"""Two batches at once, each on a stream of its own, forward and backward.

Small batches leave most of a large GPU idle: a training step is a chain of short kernels, and nothing runs beside it.
Two halves of a batch are independent until their gradients meet in the parameters. Here each half runs on its own
stream inside one compiled function; the backward runs each half's operations where its forward ran them, and sums the
gradients. What to see: the same loss and the same gradients, in less time.

    python examples/train_two_batches.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import torch_overlay  # noqa: F401


if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH, TOKENS, HEADS = 4, 512, 128, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.inner_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def one(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()

    def in_turn(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return self.one(first) + self.one(second)

    def at_once(self, x: torch.Tensor) -> torch.Tensor:
        current, losses = torch.cuda.current_stream(), []
        for stream, half in zip(self.streams, x.chunk(2)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                losses.append(self.one(half))
        for stream in self.streams:
            current.wait_stream(stream)
        return losses[0] + losses[1]


def make() -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
    """The two halves at once, and a batch."""
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16)
    return model.at_once, (torch.randn(2, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16),)


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            function, args = make()
            compiled = compile_only(function, *args, backward=True)
        for kind, plan in zip(("forward", "backward"), compiled.plans):
            counts = [sum(op.stream == stream for op in plan.ops) for stream in (1, 2, 0)]
            print(f"No GPU: compiled only. The {kind} launches {counts[0]} operations on the first stream, {counts[1]}")
            print(f"on the second and {counts[2]} on the current one, with {len(plan.events)} events:\n")
            print(plan.table(), end="\n\n")
        return
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16)
    x = torch.randn(2, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, forward in (("in turn", model.in_turn), ("at once", model.at_once)):
        step = torch.compile(forward, fullgraph=True, mode="reduce-overhead")
        times = []
        for _ in range(60):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = step(x)
            loss.backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        found[name] = loss.item(), gradients
        print(f"{name}: {sorted(times)[len(times) // 2] * 1e6:7.0f} µs a step, loss {loss.item():.6f}")
    pairs = zip(found["in turn"][1], found["at once"][1])
    difference = max(((a - b).float().norm() / a.float().norm()).item() for a, b in pairs)
    print(f"largest relative difference of a gradient: {difference:.2g}")


if __name__ == "__main__":
    main()
