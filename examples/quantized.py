"""Weights quantised by torchao, in a model whose calls are relaunched.

`quantize_` replaces each weight by a tensor subclass that holds integers and scales. Dynamo sees through it: the
compiled region reads the plain tensors inside, and its graph is one like any other. A weight that is exchanged later,
by an adapter say, only moves pointers.

    python examples/quantized.py

It needs torchao (`pip install torchao`).
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext

import torch
from torch import nn

import torch_overlay
from torch_overlay.testing import simulated_gpu


WIDTH, LAYERS, CALLS = 1024, 4, 6


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@torch.no_grad()
def serve() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyrefly: ignore[missing-import]

    model = nn.Sequential(*(MLP() for _ in range(LAYERS))).to("cuda", torch.bfloat16).requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    compiled = torch.compile(lambda x: model(x), mode="reduce-overhead", fullgraph=True)
    for _ in range(CALLS):
        compiled(torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16))


def main() -> None:
    if importlib.util.find_spec("torchao") is None:
        print("This example needs torchao, which isn't installed: pip install torchao")
        return
    with nullcontext() if torch.cuda.is_available() else simulated_gpu():
        serve()
        print(torch_overlay.coverage())


if __name__ == "__main__":
    main()
