"""Checkpoint policies that ask for the host, and the marks that they leave on the graph.

`torch.utils.checkpoint`'s `CheckpointPolicy.MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD` mean to save a value and to keep
it on the host. The partitioner knows no such policy, and would compute the value again. So before it runs, the policy
becomes the one that saves, and the node is marked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.checkpoint import CheckpointPolicy

from torch_overlay._functorch import offload_ops


if TYPE_CHECKING:
    from torch.fx import Graph, Node

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
    return any(user.target is offload_ops.IN_USE for user in placeholder.users)
