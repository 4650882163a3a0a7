"""Mixture of experts: eight small experts, each on a stream of its own.

The router is "expert choice": every expert picks the tokens it scores highest, as many as its capacity, so all shapes
are static and the layer compiles as one region. One expert alone leaves most of a large GPU idle; on eight streams they
run side by side. The code forks and joins in the usual way, with `wait_stream` in two loops: 16 events a call. The
compiler needs fewer.

    python examples/moe_experts.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import torch_overlay  # noqa: F401


if TYPE_CHECKING:
    from collections.abc import Callable

EXPERTS, TOKENS, CAPACITY, WIDTH, INNER = 8, 1024, 128, 1024, 2048


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(tokens)))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.streams = [torch.cuda.Stream() for _ in range(EXPERTS)]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gates, chosen = self.router(tokens).softmax(-1).topk(CAPACITY, dim=0)
        current = torch.cuda.current_stream()
        outputs = []
        for i, (expert, stream) in enumerate(zip(self.experts, self.streams)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append(expert(tokens[chosen[:, i]]) * gates[:, i : i + 1])
        for stream in self.streams:
            current.wait_stream(stream)
        mixed = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        return mixed.index_add(0, chosen.t().reshape(-1), torch.cat(outputs).float())


def make() -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
    """The layer, and arguments for one call of it."""
    torch.manual_seed(0)
    layer = MixtureOfExperts().to("cuda", torch.bfloat16).requires_grad_(False)
    return layer, (torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16),)


def main() -> None:
    if not torch.cuda.is_available():
        from torch_overlay.testing import compile_only, simulated_gpu

        with simulated_gpu():
            layer, args = make()
            compiled = compile_only(layer, *args)
        print("No GPU: compiled only. Which operation runs on which stream, and what waits for what:\n")
        print(compiled.plans[0].table())
        return
    layer, args = make()
    results = {}
    for name, function in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))):
        for _ in range(10):
            results[name] = function(*args)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            function(*args)
        torch.cuda.synchronize()
        print(f"{name:10}{(time.perf_counter() - start) * 1e4:8.0f} µs a call")
    difference = (results["eager"] - results["compiled"]).abs().max().item()
    print(f"largest difference between the two: {difference:.2g}")


if __name__ == "__main__":
    main()
