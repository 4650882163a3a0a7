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
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.fx import has_streams
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def _is_on_host(node: Node) -> bool | None:
    value = node.meta.get("example_value")
    return value.device.type == "cpu" if isinstance(value, torch.Tensor) else None


def _blocks_host(node: Node) -> bool:
    """True if the node copies between host and device and waits for the copy, or reads a number from the device."""
    if node.kwargs.get("non_blocking"):
        return False
    made = _is_on_host(node)
    given = {_is_on_host(n) for n in node.all_input_nodes} - {None}
    if node.target == "item":
        return given == {False}
    return made is not None and (not made) in given


# Functions of torch.nn.functional that call a random operator of another name.
_CALLERS = ("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward")


@functools.cache
def _is_random(name: str) -> bool:
    """True if an operator of ATen of this name draws random numbers, or a function that calls one."""
    packet = getattr(torch.ops.aten, name, None)
    is_operator = isinstance(packet, torch._ops.OpOverloadPacket)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if is_operator else []
    return name.startswith(_CALLERS) or any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)


def _draws_random_numbers(node: Node) -> bool:
    """True if the node's function may draw random numbers; dropout draws none outside of training, and neither does
    attention without dropout."""

    def argument(index: int, name: str, default: Any) -> Any:
        return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)

    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "scaled_dot_product_attention":
        return argument(4, "dropout_p", 0.0) != 0.0
    if "dropout" in name:
        return argument(2, "training", True) is not False
    return _is_random(name)


def is_safe_to_reorder(original: Callable[[Node], bool], node: Node) -> bool:
    if not original(node):
        return False
    if not handles_streams() or node.op not in ("call_function", "call_method"):
        return True
    if _draws_random_numbers(node):
        return False
    return not _blocks_host(node) or not has_streams(node.graph.nodes)
