"""Keep a constant on the host if the caller gets it there.

With CUDA graphs upstream moves constants that a program makes on the host to the GPU, so that operations on them can be
captured. It did so, too, where the caller or a backward gets them: they arrived on the wrong device.

    @torch.compile(mode="reduce-overhead")
    def step(x):
        return x + 1, torch.zeros(4)  # both on the GPU

Pinned memory that is made on the GPU is an error: what is moved there isn't pinned.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node


def mover_init(original: Callable[..., None], mover: Any, *args: Any, **kwargs: Any) -> None:
    override(mover, cannot_be_moved=cannot_be_moved, __call__=move)
    original(mover, *args, **kwargs)


def cannot_be_moved(original: Callable[..., bool], mover: Any, node: Node) -> bool:
    """True for an output that returns a constant made on the host: neither the constant nor its operands are moved."""
    if node.op == "output" and any(map(_is_made_on_host, node.all_input_nodes)):
        return True
    return original(mover, node)


def move(original: Callable[..., None], mover: Any, graph: Graph) -> None:
    original(mover, graph)
    for node in graph.nodes:
        if node.kwargs.get("pin_memory") and torch.device(node.kwargs.get("device") or "cpu").type != "cpu":
            node.kwargs = {**node.kwargs, "pin_memory": False}


def _is_made_on_host(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and value.device.type == "cpu"
