"""A CUDA graph that a program captures by hand, and the same function under relaunch.

`Captured` is the usual pattern: warm up on a side stream, capture once, copy each input into the graph's own tensor,
replay, and clone the output before the next replay overwrites it. The graph keeps its memory for itself, and serves one
shape. Under relaunch the function is called as it is: inputs are read where they lie, each call returns a new tensor,
and a further shape needs no code.

    python examples/graph_by_hand.py

With a GPU it prints the time of a call and the memory that stays reserved; without one, where nothing can be captured,
how the calls of the second form are launched.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import torch_overlay
from torch_overlay.testing import simulated_gpu


WIDTH, CALLS = 512, 100


class Captured:
    """By hand: `function` for inputs like `example`."""

    def __init__(self, function: Any, example: torch.Tensor) -> None:
        self.input = example.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function(self.input)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function(self.input)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.input.copy_(x)
        self.graph.replay()
        return self.output.clone()


def measure(name: str, function: Any, batches: list[torch.Tensor]) -> torch.Tensor:
    for x in batches:
        function(x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = [function(batches[i % len(batches)]) for i in range(CALLS)]
    torch.cuda.synchronize()
    print(f"{name:12}{(time.perf_counter() - start) * 1e6 / CALLS:8.0f} µs a call")
    return torch.stack(outputs)


def main() -> None:
    simulated = not torch.cuda.is_available()
    with simulated_gpu() if simulated else nullcontext():
        layers = (layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)))
        model = nn.Sequential(*layers).to("cuda").requires_grad_(False)
        batches = [torch.randn(32, WIDTH, device="cuda") for _ in range(4)]
        relaunched = torch.compile(lambda x: model(x), mode="reduce-overhead", fullgraph=True)
        mine = measure("relaunched", relaunched, batches)
        if not simulated:
            theirs = measure("by hand", Captured(torch.compile(model), batches[0]), batches)
            print(f"largest difference: {(mine - theirs).abs().max().item():.2g}")
        print(torch_overlay.coverage())


if __name__ == "__main__":
    main()
