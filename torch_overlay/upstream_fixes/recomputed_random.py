"""Never compute random numbers again under a budget of memory: a backward would draw other ones than its forward.

The partitioner saves the state of the generator for random operators that a checkpoint computes again. It doesn't for
those that `activation_memory_budget`, or `aggressive_recomputation`, has it choose, so that the loss is right, and the
gradients are those of other masks:

    with torch._functorch.config.patch(activation_memory_budget=0.5):
        loss = torch.compile(lambda x: F.dropout(x @ w1) @ w2)(x).sum()
    loss.backward()  # draws another mask

Such operators are marked as to be saved while the values to save are chosen. Under Inductor, most programs draw seeds,
of which only some bytes are saved, and compute numbers from a seed, which may be done again.
"""

from __future__ import annotations

import sys
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch.partitioners import is_rng_op, must_recompute
from torch.utils.checkpoint import CheckpointPolicy


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node


def choose_saved_values_set(
    original: Callable[..., list[Node]], joint: Graph, node_info: Any, memory_budget: float = 1
) -> list[Node]:
    """Seam. A budget of 0 is one of next to nothing: for 0 upstream saves the inputs, and computes all else again."""
    random = [node for node in node_info.required_fw_nodes if _draws(node) and not must_recompute(node)]
    metas = [(node, node.meta) for node in random]
    for node, meta in metas:
        node.meta = {**meta, "recompute": CheckpointPolicy.MUST_SAVE}
    try:
        return original(joint, node_info, memory_budget or (sys.float_info.min if random else 0))
    finally:
        for node, meta in metas:
            node.meta = meta


def _draws(node: Node) -> bool:
    """True if the node draws random numbers, itself or in a graph that it calls."""
    module = node.graph.owning_module
    graphs = (getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr")
    return is_rng_op(node) or any(
        isinstance(g, torch.fx.GraphModule) and any(map(_draws, g.graph.nodes)) for g in graphs
    )
