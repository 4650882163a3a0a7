"""Tests programs with streams without a GPU: `simulated_gpu()` and `compile_only()`.

from torch_overlay.testing import compile_only, simulated_gpu

with simulated_gpu():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    result = compile_only(fn, x, backward=True)
print(result.graphs[0], result.wrappers[0])
"""

from torch_overlay.testing._observe import compile_only, Compiled, Frame, GraphBreak, observe, Region
from torch_overlay.testing._placement import placement_checked, Unplaced
from torch_overlay.testing._simulate import active, simulated_gpu, Simulation


__all__ = [
    "Compiled",
    "Frame",
    "GraphBreak",
    "Region",
    "Simulation",
    "Unplaced",
    "active",
    "compile_only",
    "observe",
    "placement_checked",
    "simulated_gpu",
]
