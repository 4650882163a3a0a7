"""Has AOTAutograd place streams (placement.py), and its epilogue keep what was noted for it (epilogue.py)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config, frame_facts
from torch_overlay._functorch.offload.checkpoint_policies import is_slab, note_offload_policies
from torch_overlay._functorch.offload.hooks import offload_saved
from torch_overlay._functorch.streams import autograd_nodes
from torch_overlay._functorch.streams.backward import assign_second_nodes, assign_sums, keep_unsaved, prepare_parts
from torch_overlay._functorch.streams.duplicates import merge_duplicates
from torch_overlay._functorch.streams.epilogue import EpilogueNotes, note_epilogue
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.placement import place_streams
from torch_overlay._functorch.streams.saved_values import may_be_donated, type_and_bytes
from torch_overlay._stream_handling import handles_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node


def wrap_all_sync_nodes(original: Callable[..., Any], gm: GraphModule) -> None:
    """Run `place_streams` in place of threading values through control_deps."""
    if not handles_streams():
        return original(gm)
    frame_facts.remember()
    return place_streams(gm, frame_facts.current())


def skip_pass(original: Callable[..., Any], gm: GraphModule) -> None:
    """Skip the pass: it inserts synchronisation that the planner derives from data dependencies."""
    if not handles_streams():
        original(gm)


def stream_or_callers(original: Callable[..., Any], node: Node) -> int:
    """Return the node's stream. A node without one runs on the caller's stream; upstream registers a fresh stream for
    it.
    """
    if not handles_streams():
        return original(node)
    return node_stream(node)


def populate_stream_indices(original: Callable[..., Any], gm: GraphModule, fw_metadata: Any) -> None:
    """Note what the epilogue has to know, in place of the streams of inputs that it updates: the graph joins those into
    the caller's stream.
    """
    if not handles_streams():
        return original(gm, fw_metadata)
    return note_epilogue(gm, fw_metadata)


def create_runtime_wrapper(
    original: Callable[..., Callable[..., Any]], compiled_fn: Any, *, runtime_metadata: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Keep the promises of updates that the epilogue writes back, after the epilogue."""
    wrapper = original(compiled_fn, runtime_metadata=runtime_metadata, **kwargs)
    notes = EpilogueNotes.find(runtime_metadata)
    if notes is None or (promises := notes.promises) is None:
        return wrapper

    @functools.wraps(wrapper)
    def keep_promises(*args: Any, **kwargs: Any) -> Any:
        result = wrapper(*args, **kwargs)
        promises.keep()
        return result

    return keep_promises


@dataclasses.dataclass(frozen=True)
class _PlacedViews:
    """A result's recorded views, with their streams: a stand-in for the views that AOTAutograd passes from the result's
    handler to `gen_alias_from_base`.
    """

    streams: tuple[int, ...]
    views: Any


def make_output_handler(original: Callable[..., Any], info: Any, runtime_metadata: Any, *args: Any) -> Any:
    handler = original(info, runtime_metadata, *args)
    notes = EpilogueNotes.find(runtime_metadata)
    of_all = zip(runtime_metadata.output_info, notes.view_streams if notes is not None else ())
    of_this = next((of for other, of in of_all if other is info), ())
    if of_this and hasattr(handler, "view_meta_sequence"):
        handler.view_meta_sequence = _PlacedViews(of_this, handler.view_meta_sequence)
    return handler


def gen_alias_from_base(
    original: Callable[..., torch.Tensor],
    base: torch.Tensor,
    target: torch.Tensor,
    requires_grad: bool,
    views: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    if type(views) is not _PlacedViews:
        return original(base, target, requires_grad, views, **kwargs)
    return autograd_nodes.made_on(
        views.streams, base, lambda of: original(of, target, requires_grad, views.views, **kwargs)
    )


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
    puts what it saves into few allocations, and a gradient in one of them would keep the whole allocation alive. So
    none is donated there that a gradient could take the memory of: Inductor reuses memory for the same type and size.
    """
    donated = original(forward, backward, metadata)
    if config.cudagraphs == "relaunch" and torch._inductor.config.triton.cudagraphs:
        saved = backward.graph.find_nodes(op="placeholder")
        returned = {None, *map(type_and_bytes, backward.graph.output_node().all_input_nodes)}
        donated = [i for i in donated if type_and_bytes(saved[i]) not in returned]
    if not handles_streams():
        return donated
    inputs = backward.graph.find_nodes(op="placeholder")
    return [i for i in may_be_donated(forward.graph, backward.graph, donated) if not is_slab(inputs[i])]
