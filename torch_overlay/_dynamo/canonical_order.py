"""Keeps more operations in place under Dynamo's option `canonicalize_output_graph_node_order`.

The option sorts the operations of Dynamo's graph between those that have effects, and takes these for operations
without one:

- functions that draw random numbers: their order is the order of the generator's numbers, so `fallback_random` would
  not give those of eager;
- in a program with streams, a copy to the host: a kernel launched after the copy may rely on all that was launched
  before the copy on its stream.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.fx import device_type, has_streams
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def _blocks_host(node: Node) -> bool:
    """True if the node copies between host and device and waits for the copy, or reads a number from the device."""
    if node.kwargs.get("non_blocking"):
        return False
    made, given = device_type(node), {*map(device_type, node.all_input_nodes)} - {""}
    if node.target == "item":
        return bool(given) and "cpu" not in given
    return bool(made) and any((made == "cpu") != (device == "cpu") for device in given)


# Functions of torch.nn.functional that call a random operator of another name, some only in training.
_CALLERS = (
    *("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"),
    *("multi_head_attention_forward", "scaled_dot_product_attention"),
)


@functools.cache
def _is_random(name: str) -> bool:
    """True if an operator of ATen of this name draws random numbers, or a function that calls one."""
    packet = getattr(torch.ops.aten, name, None)
    is_operator = isinstance(packet, torch._ops.OpOverloadPacket)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if is_operator else []
    is_caller = name.startswith(_CALLERS) or "dropout" in name
    return is_caller or any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)


def is_safe_to_reorder(original: Callable[[Node], bool], node: Node) -> bool:
    if not original(node):
        return False
    if not handles_streams() or node.op not in ("call_function", "call_method"):
        return True
    if _is_random(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")):
        return False
    return not _blocks_host(node) or not has_streams(node.graph.nodes)
