"""A result that takes no computing is still memory of its own.

Upstream removes additions of zero and products with one from the graph that is differentiated, and hands on what they
were given. Where that is an input, or another result, the caller gets one memory twice, and whoever writes to one of
them in place changes the other:

    return torch.zeros_like(x) + x  # is x
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay._functorch.stream_placement import viewed


if TYPE_CHECKING:
    from collections.abc import Callable, Set as AbstractSet

    from torch.fx import GraphModule, Node


def remove_no_ops(
    original: Callable[..., None], gm: GraphModule, zeros: AbstractSet[Node], ones: AbstractSet[Node]
) -> None:
    """Results that share memory with an input or another result, and didn't before, become copies."""
    output = gm.graph.output_node()
    before = pytree.tree_leaves(output.args[0])
    memory = [viewed(v) if isinstance(v, torch.fx.Node) else None for v in before]
    original(gm, zeros, ones)
    after, structure = pytree.tree_flatten(output.args[0])
    if after == before:
        return
    taken = {viewed(v) for v, old in zip(after, before) if v is old and isinstance(v, torch.fx.Node)}
    made: dict[Node, Node] = {}  # from what was returned before: twice the same stays twice the same
    for i, (value, old) in enumerate(zip(after, before)):
        if value is old:
            continue
        if old not in made:
            owner = viewed(value)
            shared = owner is not memory[i] and (owner.op == "placeholder" or owner in taken)
            made[old] = _copy(gm, value, old) if shared else value
            taken.add(owner)
        after[i] = made[old]
    output.args = (pytree.tree_unflatten(after, structure),)


def _copy(gm: GraphModule, value: Node, old: Node) -> Node:
    with gm.graph.inserting_before(gm.graph.output_node()):
        copy = gm.graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta = dict(old.meta)
    return copy
