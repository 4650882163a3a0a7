"""Has AOTAutograd place backwards (backward.py) where it partitions a joint graph, and offload what is saved."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config
from torch_overlay._functorch.offload.checkpoint_policies import is_slab, note_offload_policies
from torch_overlay._functorch.offload.hooks import offload_saved
from torch_overlay._functorch.streams.backward import assign_second_nodes, assign_sums
from torch_overlay._functorch.streams.duplicates import merge_duplicates
from torch_overlay._functorch.streams.partition import prepare_parts
from torch_overlay._functorch.streams.saved_values import may_be_donated
from torch_overlay._functorch.streams.written_inputs import keep_unsaved
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node


def assign_backward_streams(original: Callable[..., None], gm: GraphModule) -> None:
    if not handles_streams():
        return original(gm)
    assign_second_nodes(gm.graph)
    return assign_sums(gm.graph)


def common_subexpressions(original: Callable[..., Graph], graph: Graph, *args: Any, **kwargs: Any) -> Graph:
    """Eliminate common subexpressions for the partitioner, which is the only caller that passes a key of its own."""
    key = kwargs.get("extra_node_key")
    if not handles_streams() or key is None:
        return original(graph, *args, **kwargs)
    return merge_duplicates(graph, lambda of: original(of, *args, **kwargs), key)


def _inputs(graph: Graph, inner_meta: Any, fw_metadata: Any) -> dict[Node, Any]:
    """Map the forward's inputs in a joint graph to what AOTAutograd knows of them (`InputAliasInfo`)."""
    from torch._functorch._aot_autograd import graph_compile

    inputs = [
        node
        for node in graph.find_nodes(op="placeholder")
        if graph_compile._is_primal(node) and not isinstance(node.meta.get("desc"), graph_compile.ForwardTokenAOTInput)
    ]
    return dict(zip(inputs, graph_compile.compute_inner_input_info_from_subclass_meta(fw_metadata, inner_meta)))


def partition(
    original: Callable[..., Any], joint: GraphModule, inputs: Any, inner_meta: Any, fw_metadata: Any, *args: Any
) -> Any:
    note_offload_policies(joint.graph)
    inputs_of_forward = _inputs(joint.graph, inner_meta, fw_metadata)
    keep_unsaved(inputs_of_forward)
    place = prepare_parts(joint.graph, inputs_of_forward) if handles_streams() else None
    forward, backward, count = original(joint, inputs, inner_meta, fw_metadata, *args)
    if place is not None:
        place(forward, backward)
    offload_saved(forward, backward, count)
    return forward, backward, count


def donated_buffers(
    original: Callable[..., list[int]], forward: GraphModule, backward: GraphModule, metadata: Any
) -> list[int]:
    """Return the saved tensors that the backward may write over (`saved_values.may_be_donated`). A relaunched forward
    puts what it saves into few allocations, and a gradient in one of them would keep the whole allocation alive. So a
    relaunched forward donates nothing, and its stages free the memory instead (`relaunch.memory.arrange`).
    """
    if config.cudagraphs == "relaunch" and torch._inductor.config.triton.cudagraphs:
        return []
    donated = original(forward, backward, metadata)
    if not handles_streams():
        return donated
    inputs = backward.graph.find_nodes(op="placeholder")
    return [i for i in may_be_donated(forward.graph, backward.graph, donated) if not is_slab(inputs[i])]
