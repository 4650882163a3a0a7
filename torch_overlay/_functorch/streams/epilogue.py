"""Notes what the epilogue has to know of a graph's streams: the code of AOTAutograd that runs after the graph's.

The epilogue copies the new values of inputs into them where autograd has to see the updates, and makes results anew
that are views. The notes are in the metadata of the forward (`ViewAndMutationMeta`), which caches keep:

- `stream_promises`: what must come after these copies (`input_mutations`);
- `output_view_streams`: for each result, the streams on which it is viewed (`autograd_nodes.made_on`).
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams import autograd_nodes
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.fx import is_view, node_stream
from torch_overlay._functorch.streams.input_mutations import promises_of


if TYPE_CHECKING:
    from torch.fx import GraphModule


def note_epilogue(gm: GraphModule, fw_metadata: Any) -> None:
    """Note in the metadata of a forward, or of a joint graph, what its epilogue has to know, and in the facts of the
    graph which outputs the epilogue drops. The graph was placed before (`placement`).
    """
    copied = fw_metadata.num_mutated_inp_runtime_indices
    views = autograd_nodes.view_streams(gm.graph)
    has_streams = any(views) or any(node_stream(n) for n in gm.graph.nodes)
    # A result that is a subclass is several values of the graph.
    if has_streams and not any(isinstance(m, SubclassCreationMeta) for m in fw_metadata.subclass_fw_graph_out_meta):
        _note_dropped_outputs(gm, fw_metadata)
        streams = [of if info.requires_grad else () for info, of in zip(fw_metadata.output_info, views[copied:])]
        if any(streams):
            fw_metadata.output_view_streams = streams
    if copied:
        fw_metadata.stream_promises = promises_of(gm, copied)


def _note_dropped_outputs(gm: GraphModule, fw_metadata: Any) -> None:
    """Note the outputs that are an input, or a view of one: they are made anew from the caller's tensor. The value that
    the graph returns in their place, the last one that was written there, is dropped when the graph's code has
    returned.
    """
    nodes = pytree.tree_leaves(gm.graph.output_node().args[0])
    for node, info in zip(nodes[fw_metadata.num_mutated_inp_runtime_indices :], fw_metadata.output_info):
        if info.output_type in (OutputType.alias_of_input, OutputType.is_input) and node.op == "call_function":
            note_fact(node, is_dropped=True)
            while is_view(node) and node.all_input_nodes and node.all_input_nodes[0] not in nodes:
                node = node.all_input_nodes[0]  # passes may remove the view
                note_fact(node, is_dropped=True)
