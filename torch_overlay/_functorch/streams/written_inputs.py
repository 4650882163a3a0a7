"""Keeps the partitioner from saving inputs that the forward writes to.

Note [Inputs that the forward writes to]
An input that is written to when the forward has computed must not be saved: the backward would compute again from the
new value. Upstream tells the partitioner so only for inputs that need gradients. A checkpoint policy may ask to compute
again what is computed from such an input, like a new count of a router's tokens: the partitioner has no way to do that.
The value is saved, if the backward needs it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy

from torch_overlay._functorch.streams.fx import is_view


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import Node


def keep_unsaved(inputs: Mapping[Node, Any]) -> None:
    """Mark inputs, and their views, as not to be saved: Note [Inputs that the forward writes to]."""
    unsaved = [node for node, info in inputs.items() if info.mutates_data]
    while unsaved:
        node = unsaved.pop()
        node.meta["aot_runtime_epilogue_input_mutation"] = True
        unsaved += [user for user in node.users if is_view(user) and user.args[0] is node]
        for user in filter(partitioners.must_recompute, node.users):
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE
