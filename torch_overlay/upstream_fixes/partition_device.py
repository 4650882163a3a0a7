"""Look the current device up in each graph partition of code that is compiled on one rank for all.

With `torch.compiler.config.compile_on_one_rank`, code takes the index of the current device into a variable where it
enters the device, and stream look-ups use the variable. A partition for CUDA graphs is a function of its own. Where its
caller has entered the device, the variable is the caller's, and the partition failed with a NameError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable


def device_index(original: Callable[[int], int | str], device_idx: int) -> int | str:
    """Seam of `_coor_device_idx_ref`, which returns what code calls a device."""
    found = original(device_idx)
    if isinstance(found, str) and hasattr(V.graph.wrapper_code, "parent_wrapper"):
        return V.graph.device_ops.current_device_idx_expr()
    return found
