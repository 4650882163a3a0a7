"""Who asks for the host value by value: checkpoint policies, and upstream's own marks.

`torch.utils.checkpoint`'s `CheckpointPolicy.MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD` mean to save a value and to keep
it on the host. The partitioner knows no such policy, and would compute the value again. So before it runs, the policy
becomes the one that saves, and the node is marked.

A pass of the user's may mark nodes with `meta["should_offload"]`, which `torch._functorch.config` follows under
`enable_activation_offloading`. With `activation_offload_separate_stream`, upstream's copies have a stream of their own,
and the operation that waits for a copy to the host then frees the original by taking its storage away. Inductor knows
nothing of that, and orders readers of the original after it, or gives them the memory (pytorch 2.15.0). So these marks
become ours, and such a tensor waits on the host as any other does: the original goes when nothing refers to it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch.utils.checkpoint import CheckpointPolicy

from torch_overlay import config
from torch_overlay._functorch.offload import ops


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node

OFFLOAD = "overlay_offload"  # in `meta`
MUST, PREFER = "must", "prefer"


def note_offload_policies(graph: Graph) -> None:
    for node in graph.nodes:
        policy = node.meta.get("recompute")
        if policy is CheckpointPolicy.MUST_CPU_OFFLOAD:
            node.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, OFFLOAD: MUST})
        elif policy is CheckpointPolicy.PREFER_CPU_OFFLOAD:
            node.meta.update({"recompute": CheckpointPolicy.PREFER_SAVE, OFFLOAD: PREFER})


def is_slab(placeholder: Node) -> bool:
    """An input of a backward that is host memory with saved activations."""
    return any(user.target is ops.IN_USE for user in placeholder.users)


def enable_activation_offloading(
    original: Callable[..., None], forward: GraphModule, *args: Any, **kwargs: Any
) -> None:
    """Seam: upstream rewrites the graphs here; ours are rewritten when they are placed on streams."""
    if not (config.streams and torch._functorch.config.activation_offload_separate_stream):
        return original(forward, *args, **kwargs)
    for node in forward.graph.nodes:
        if node.meta.get("should_offload"):
            node.meta[OFFLOAD] = MUST
