"""Marks the single values that checkpoint policies, or upstream's own marks, send to the host.

`torch.utils.checkpoint`'s `CheckpointPolicy.MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD` ask to save a value and to keep
it on the host. The partitioner doesn't know these policies, and would compute the value again. So before the
partitioner runs, the policy of a node becomes the one that saves, and the node is marked.

A user's pass may mark nodes with `meta["should_offload"]`, which upstream follows if `torch._functorch.config` has
`enable_activation_offloading`. With `activation_offload_separate_stream`, upstream's copies run on a stream of their
own, and the operation that waits for a copy to the host then frees the original's storage. Inductor doesn't know that:
it orders readers of the original after this operation, or reuses the memory for them (pytorch 2.15.0). So these marks
are replaced by ours, and the tensor is offloaded like any other: the original is freed when nothing refers to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.checkpoint import CheckpointPolicy

from torch_overlay._functorch.offload import ops


if TYPE_CHECKING:
    from torch.fx import Graph, Node

OFFLOAD = "offload_policy"  # in `meta`
MUST, PREFER = "must", "prefer"


def note_offload_policies(graph: Graph) -> None:
    """Have the partitioner save the nodes whose policy sends them to the host, and mark them."""
    for node in graph.nodes:
        policy = node.meta.get("recompute")
        if policy is CheckpointPolicy.MUST_CPU_OFFLOAD:
            node.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, OFFLOAD: MUST})
        elif policy is CheckpointPolicy.PREFER_CPU_OFFLOAD:
            node.meta.update({"recompute": CheckpointPolicy.PREFER_SAVE, OFFLOAD: PREFER})


def is_slab(placeholder: Node) -> bool:
    """True if the input of a backward is host memory with saved activations."""
    return any(user.target is ops.IN_USE for user in placeholder.users)


def note_upstream_marks(graph: Graph) -> None:
    """Mark the nodes that a pass of the user's has marked for upstream's rewrite."""
    for node in graph.nodes:
        if node.meta.get("should_offload"):
            node.meta[OFFLOAD] = MUST
