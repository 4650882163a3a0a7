"""A training step of a mixture of experts: eight experts on eight streams, forward and backward.

The layer is the one of `moe_experts.py`. Nothing is said of the backward: each expert's gradients are computed on the
stream that its forward ran on, all of them beside each other; gradients of the tokens, which all experts read, are
summed on the current stream; and all gradients can be read there as soon as `backward` returns. What to see: gradients
equal those of eager code, and the step takes little more memory than on one stream.

    python examples/train_moe_experts.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

import torch_overlay  # noqa: F401
from moe_experts import CAPACITY, EXPERTS, MixtureOfExperts, TOKENS, WIDTH  # pyrefly: ignore[missing-import]


if TYPE_CHECKING:
    from collections.abc import Callable


class Step:
    """A forward with a loss; `streams=False` puts all experts on the current stream."""

    def __init__(self, streams: bool = True) -> None:
        torch.manual_seed(0)
        self.layer = MixtureOfExperts().to("cuda", torch.bfloat16)
        if not streams:
            self.layer.streams = [torch.cuda.current_stream()] * EXPERTS
        self.tokens = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.target = torch.randn(TOKENS, WIDTH, device="cuda")

    def loss(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.layer(tokens) - target).square().mean()


def make() -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
    """The loss, and arguments for one call of it."""
    step = Step()
    return step.loss, (step.tokens, step.target)


def measure(step: Step, loss: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], float, int]:
    """Gradients of a step, its time in µs, and the bytes that it allocates at most."""
    gradients: list[torch.Tensor] = []
    times, peak = [], 0
    for _ in range(40):
        gradients.clear()
        step.layer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss(step.tokens, step.target).backward()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        peak = torch.cuda.max_memory_allocated() - before
        gradients += [p.grad for p in step.layer.parameters() if p.grad is not None]
    return gradients, sorted(times)[len(times) // 2], peak


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.analysis.memory_report import describe
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            function, args = make()
            compiled = compile_only(function, *args, backward=True)
        forward, backward = compiled.plans
        print(f"No GPU: compiled only. {EXPERTS} experts of {CAPACITY} tokens each, on {EXPERTS} streams.")
        print(f"The forward has {len(forward.events)} events, the backward {len(backward.events)}:\n")
        print(backward.table(), "", *describe(backward), sep="\n")
        return
    found = {}
    for name, streams, is_compiled in (
        ("eager, eight streams", True, False),
        ("compiled, one stream", False, True),
        ("compiled, eight streams", True, True),
    ):
        step = Step(streams)
        loss = torch.compile(step.loss, fullgraph=True) if is_compiled else step.loss
        found[name], us, peak = measure(step, loss)
        print(f"{name:24}{us:8.0f} µs a step, {peak / 2**20:7.1f} MiB")
    pairs = zip(found["eager, eight streams"], found["compiled, eight streams"])
    difference = max(((a - b).float().norm() / a.float().norm()).item() for a, b in pairs)
    print(f"largest relative difference of a gradient: {difference:.2g}")


if __name__ == "__main__":
    main()
