"""A loss whose scale is chosen on the host: the doctor finds `.item()`, and compares the change that removes it.

`with_item` reads a number of the device to decide. The host waits for all that the device has queued, Dynamo breaks the
graph there, and two CUDA graphs run with a gap between them. `without_item` says the same with `torch.where`: the
decision stays on the device, and the function is one graph.

    python examples/remove_item.py

The first lines of the report name the line of `.item()`; the last ones say what the change brought.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

import torch_overlay
from torch_overlay.testing import simulated_gpu


def with_item(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    if y.abs().max().item() > 0.5:
        y = y * 0.5
    return (y @ w).square().mean()


def without_item(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    y = torch.where(y.abs().max() > 0.5, y * 0.5, y)
    return (y @ w).square().mean()


def main() -> None:
    with nullcontext() if torch.cuda.is_available() else simulated_gpu():
        x, w = (torch.randn(512, 512, device="cuda") for _ in range(2))
        print(torch_overlay.doctor(with_item, x, w, remedy=without_item))


if __name__ == "__main__":
    main()
