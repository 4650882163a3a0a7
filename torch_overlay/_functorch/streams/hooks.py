"""The package's stream policy (placement.py, epilogue.py), and hooks on the partitioning of a joint graph."""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config, frame_facts
from torch_overlay._functorch.offload.checkpoint_policies import is_slab, note_offload_policies
from torch_overlay._functorch.offload.hooks import offload_saved
from torch_overlay._functorch.streams.backward import assign_second_nodes, assign_sums, keep_unsaved, prepare_parts
from torch_overlay._functorch.streams.epilogue import EpilogueNotes, made_on, note_epilogue, place_copies
from torch_overlay._functorch.streams.placement import place_streams
from torch_overlay._functorch.streams.saved_values import may_be_donated, merge_duplicates, type_and_bytes
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch.fx import Graph, GraphModule, Node

    from torch_overlay.doors.stream_policy import ViewMaker


class _Placement:
    """The stream policy (`doors.stream_policy`): streams are placed, and the planner derives all synchronisation from
    the dependencies of the placed nodes.
    """

    def handles_streams(self) -> bool:
        return handles_streams()

    def place(self, gm: GraphModule, metadata: ViewAndMutationMeta, is_joint: bool) -> None:
        if is_joint:
            assign_second_nodes(gm.graph)
            assign_sums(gm.graph)
        frame_facts.remember()
        place_copies(gm.graph)
        place_streams(gm, frame_facts.current())
        note_epilogue(gm, metadata)

    def after_epilogue(self, metadata: ViewAndMutationMeta) -> Callable[[], None] | None:
        notes = EpilogueNotes.find(metadata)
        return notes.promises.keep if notes is not None and notes.promises is not None else None

    def view_makers(self, metadata: ViewAndMutationMeta) -> Sequence[ViewMaker | None]:
        notes = EpilogueNotes.find(metadata)
        streams_of_each = notes.view_streams if notes is not None else ()
        return [functools.partial(made_on, streams) if streams else None for streams in streams_of_each]


POLICY = _Placement()


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


def _partition_joint_graph_into_fw_bw(
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


def collect_bw_donated_buffer_idxs(
    original: Callable[..., list[int]], forward: GraphModule, backward: GraphModule, metadata: Any
) -> list[int]:
    """Return the saved tensors that the backward may write over (`saved_values.may_be_donated`). A relaunched forward
    puts what it saves into few allocations, and a gradient in one of them would keep the whole allocation alive. So
    none is donated there that a gradient could take the memory of: Inductor reuses memory for the same type and size.
    """
    donated, inputs = original(forward, backward, metadata), backward.graph.find_nodes(op="placeholder")
    if config.cudagraphs == "relaunch" and torch._inductor.config.triton.cudagraphs:
        returned = {None, *map(type_and_bytes, backward.graph.output_node().all_input_nodes)}
        donated = [i for i in donated if type_and_bytes(inputs[i]) not in returned]
    if not handles_streams():
        return donated
    return [i for i in may_be_donated(forward.graph, backward.graph, donated) if not is_slab(inputs[i])]
