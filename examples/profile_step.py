"""A profile of a relaunched training step, read back: which launch is which graph.

In a profile a CUDA graph is one launch that names nothing. With `torch_overlay.config.nvtx = True` each call of
compiled code, and each launch of a graph, has a range that names the function and the region. `torch.profiler` shows
it, and Nsight Systems does: nsys profile -t cuda,nvtx --cuda-graph-trace=node python examples/profile_step.py.

    python examples/profile_step.py

With a GPU it also writes step.json for https://ui.perfetto.dev, with a line at each kernel.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
from torch import nn
from torch.profiler import profile, ProfilerActivity, record_function

import torch_overlay
from torch_overlay.testing import simulated_gpu


def profiled(activities: list[ProfilerActivity]) -> profile:
    """Three steps of training, after three that compile, capture and launch."""
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4)).to("cuda")
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-2)

    @torch.compile(mode="reduce-overhead")
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def step() -> None:
        with record_function("step"):
            loss_of(torch.randn(64, 256, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch_overlay.config.patch(nvtx=True):
        for _ in range(3):
            step()
        with profile(activities=activities) as seen:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
    return seen


def main() -> None:
    simulated = not torch.cuda.is_available()
    with simulated_gpu() if simulated else nullcontext():
        seen = profiled([ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not simulated)])
        names = Counter(event.name for event in seen.events() or ())
        for name, count in names.items():
            if name == "step" or "compiled frame" in name:
                print(f"{count:4} x {name}")
        print(torch_overlay.coverage())
    if not simulated:
        annotations = torch.cuda.graph_annotations.get_kernel_annotations()
        seen.export_chrome_trace("step.json", cuda_graph_annotations=annotations)


if __name__ == "__main__":
    main()
