"""Marks the nodes of a joint graph that belong to the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams.fx import BACKWARD, is_view


if TYPE_CHECKING:
    from torch.fx import Graph, Node


def mark_backward(graph: Graph) -> None:
    """Mark the backward's nodes. Upstream's tag is missing on the body of a user's `autograd.Function.backward`; those
    nodes come after the first gradient. The tag of a write-back doesn't count: upstream puts write-backs into the
    backward also in graphs that have none. The nodes after a write-back may be views for the forward's caller, of what
    was updated in place after they were made.
    """
    begun = False
    results = _viewed_results(graph.output_node())
    for node in graph.nodes:
        tag = node.meta.get("partitioner_tag")
        if node.op != "call_function" or node in results or tag in ("is_forward", "must_be_in_forward"):
            continue
        if (
            begun
            or node.meta.get(BACKWARD)
            or tag == "is_backward"
            or any(n.op == "placeholder" and "tangents" in n.name for n in node.all_input_nodes)
        ):
            node.meta[BACKWARD] = begun = True


def _viewed_results(output: Node) -> set[Node]:
    """Return the views that the forward returns, and the views that those are views of."""
    found: set[Node] = set()
    for value, what in zip(pytree.tree_leaves(output.args[0]), output.meta.get("desc") or ()):
        while isinstance(what, PlainAOTOutput) and isinstance(value, torch.fx.Node) and is_view(value):
            found.add(value)
            value = value.args[0]
    return found
