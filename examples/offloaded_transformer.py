"""A transformer on a sequence so long that its activations don't fit, trained with them in host memory.

What a forward saves for its backward grows with the length of the sequence. `torch_overlay.config.activation_offload`
gives it a budget: what goes beyond waits in pinned host memory. Copies run on streams of their own, beside the kernels,
and no line of the model changes. Here the budget takes off some 40 % of what the step would hold.

    python examples/offloaded_transformer.py
"""

from __future__ import annotations

import time
from typing import Any, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

import torch_overlay


if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH, HEADS = 8, 1024, 16
LENGTH = 32768


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model, and arguments for one step of it."""
    torch.manual_seed(0)
    model = Transformer().to("cuda", torch.bfloat16)
    return model, (torch.randn(1, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16),)


def budget_gb(model: nn.Module, args: tuple[torch.Tensor, ...], cut: float = 0.4) -> float:
    """60 % of what a step holds: for each token some 16 tensors a block, each of the model's width, 2 bytes a value."""
    return (1 - cut) * LAYERS * args[0].numel() * 16 * 2 / 1e9


def losses(step: Callable[..., Any], args: tuple[torch.Tensor, ...], steps: int) -> tuple[list[float], float, float]:
    """Losses, ms a step, GB at the peak."""
    found = [step(*args) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found += [step(*args) for _ in range(steps)]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return [loss.item() for loss in found], 1e3 * seconds / steps, torch.cuda.max_memory_allocated() / 1e9


def trained(budget: float | None) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A training step under a budget; None for no offload."""
    model, args = make()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        option = None if budget is None else {"budget_gb": budget}
        with torch_overlay.config.patch(activation_offload=option):
            loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, args


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            model, args = make()
            with torch_overlay.config.patch(activation_offload={"budget_gb": budget_gb(model, args)}):
                compiled = compile_only(model, *args, backward=True)
        print("No GPU: compiled only. What waits on the host, and when it is copied (step of the schedule):\n")
        (report,) = compiled.offloads
        forward, backward = (r.copies for r in compiled.regions)
        print(report.summary() + ".\n")
        for row in report.rows:
            out, back = forward.text(row.name), backward.text(row.name)
            print(f"{row.name:12}{row.nbytes / 1e6:8.1f} MB   out {out:18} back {back}")
        return
    budget = budget_gb(*make())
    results = {}
    for name, limit in (("on the device", None), ("offloaded", budget)):
        torch._dynamo.reset()
        step, args = trained(limit)
        results[name], ms, peak = losses(step, args, 5)
        print(f"{name:16}{ms:8.1f} ms a step{peak:8.2f} GB at the peak")
        del step, args
        torch.cuda.empty_cache()
    a, b = results.values()
    print(f"largest difference between the losses: {max(abs(x - y) for x, y in zip(a, b)):.2g}")


if __name__ == "__main__":
    main()
