"""A constant that the caller gets on the host stays there.

With CUDA graphs upstream makes constants on the GPU that a program makes on the host, so that what computes with them
can be captured. It did so, too, where the caller gets them, or a backward: they came on the wrong device.

    @torch.compile(mode="reduce-overhead")
    def step(x):
        return x + 1, torch.zeros(4)  # both on the GPU
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def cannot_be_moved(original: Callable[..., bool], mover: Any, node: Node) -> bool:
    """Of the output: what the graph makes on the host for it is not to be moved, nor what takes part in it."""
    if node.op == "output" and any(map(_is_made_on_host, node.all_input_nodes)):
        return True
    return original(mover, node)


def _is_made_on_host(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.device.type == "cpu"


__all__ = ["cannot_be_moved"]
