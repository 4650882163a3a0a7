"""Texts of varying lengths through one compiled model: one CUDA graph for all of them where it can be one.

A batch as long as its longest text has another size each time. `mark_dynamic` says so, and Dynamo compiles once. The
pointwise part needs one graph for any length: the launch computes what depends on it. The model calls libraries, which
choose kernels by size, so a length needs a capture: the first four at their second calls, further ones as far as the
time pays that graphs have saved. Padding to a few lengths has fewer captures; here nothing is padded.

    python examples/varying_lengths.py

The report has one row for each compiled function: how many calls of it were launched as graphs, and how many graphs
there are.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

import torch_overlay
from torch_overlay.testing import simulated_gpu


WIDTH, LENGTHS = 256, (48, 96, 64, 112, 80, 48, 64, 112, 96, 80)


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Pointwise: Triton kernels alone."""
    one, two = x.chunk(2, -1)
    return torch.cat((one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()), -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@torch.no_grad()
def serve() -> None:
    rotate = torch.compile(rotated, mode="reduce-overhead")
    model = torch.compile(Model().to("cuda"), mode="reduce-overhead")
    for length in LENGTHS:
        x, angle = torch.randn(8, length, WIDTH, device="cuda"), torch.rand(length, 1, device="cuda")
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(angle, 0)
        model(rotate(x, angle))


def main() -> None:
    with nullcontext() if torch.cuda.is_available() else simulated_gpu():
        serve()
        print(torch_overlay.coverage())


if __name__ == "__main__":
    main()
