"""Whose memory does an operation read in eager, when it reads another stream's?

Eager frees a tensor when its last reference goes, and its block may be handed on at once: to work of the stream that
allocated it, whatever other streams still read of it. A program that lets a side stream's tensor die like that lives
with it, and compiled code may do as eager does. But functional graphs have values that eager never allocates. The
result of an update in place is new memory of the stream that updates, where in eager it is the input's, or that of
the stream which made the tensor; so is the result of an operator that was given `out`. Of two equal operations on two
streams one remains, and the other's readers read memory of a stream that they never knew. Such memory must not be given
back while somebody reads it.

So each node of a traced graph keeps, in `custom["stream_reads"]`, the streams whose memory it reads in eager, apart
from its own stream's. The planner's reader (`stream_schedule`) settles at the exit whatever is read beyond that.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from torch_overlay._functorch.stream_placement import is_view, node_stream, TARGET


if TYPE_CHECKING:
    from torch.fx import Node

_IN_PLACE = frozenset(
    (
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.setitem),
    )
)

_PUTS_BACK = (
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
)


def _updates(node: Node) -> bool:
    """The user wrote it as an update in place of its first argument, or it puts such an update back into its base."""
    if node.target in _PUTS_BACK:
        return True
    stack = node.meta.get("source_fn_stack")
    if not stack:
        return False
    written = stack[-1][1]
    if isinstance(written, str):
        return written.endswith("_") and not written.endswith("__")
    name = getattr(written, "__name__", "")
    return written in _IN_PLACE or name.endswith("_") and not name.endswith("__")


def memory_stream(node: Node) -> int | None:
    """Registry index of the stream whose memory the node's value is in eager; None for memory of the caller."""
    while node.op == "call_function":
        if (target := node.meta.get("custom", {}).get(TARGET)) is not None:
            return target if target >= 0 else None
        selects = node.target is operator.getitem or is_view(node)
        if not (selects or _updates(node)):
            return node_stream(node)
        base = _base(node)
        if base is None:  # `zero_` reads nothing of what it overwrites
            return None if _updates(node) else node_stream(node)
        node = base
    return None


def _base(node: Node) -> Node | None:
    return next((a for a in node.args if isinstance(a, torch.fx.Node)), None)


def _root(node: Node) -> Node:
    """The node whose memory a value is, behind views and updates of it."""
    while node.op == "call_function" and (is_view(node) or node.target is operator.getitem or _updates(node)):
        base = _base(node)
        if base is None:
            break
        node = base
    return node


def foreign_reads(node: Node) -> tuple[str, ...]:
    """The streams, as tokens, whose memory the node reads in eager, without its own stream. What it updates in place
    lives on in eager as its result, and so does what it was given as `out`.
    """
    if is_view(node):  # it launches nothing
        return ()
    updated = _root(node) if _updates(node) else None
    target = node.meta.get("custom", {}).get(TARGET)
    read = [v for v in node.all_input_nodes if updated is None or _root(v) is not updated]
    found = {memory_stream(v) for v in read} - {None, node_stream(node), target}
    return tuple(sorted(f"s{stream}" for stream in found))


__all__ = ["foreign_reads", "memory_stream"]
