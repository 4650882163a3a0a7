"""Has AOTAutograd place streams (placement.py), and keep what was noted for the code around the graph."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch.utils import _pytree as pytree

from torch_overlay import config
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams import autograd_nodes
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.fx import is_view, node_stream
from torch_overlay._functorch.streams.input_mutations import Promises, promises_of
from torch_overlay._functorch.streams.placement import place_streams


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.fx import GraphModule, Node


def wrap_all_sync_nodes(original: Callable[..., Any], gm: GraphModule) -> None:
    """Run `place_streams` in place of threading values through control_deps."""
    if not config.streams:
        return original(gm)
    registry.remember()
    return place_streams(gm)


def skip_pass(original: Callable[..., Any], gm: GraphModule) -> None:
    """Skip the pass: it inserts synchronisation that the planner derives from data dependencies."""
    if not config.streams:
        original(gm)


def stream_or_callers(original: Callable[..., Any], node: Node) -> int:
    """Return the node's stream. A node without one runs on the caller's stream; upstream registers a fresh stream for
    it.
    """
    if not config.streams:
        return original(node)
    return node_stream(node)


def _note_dropped_outputs(gm: GraphModule, fw_metadata: Any) -> None:
    """Note the outputs that are an input, or a view of one: they are made anew from the caller's tensor. The value that
    the graph returns in their place, the last one that was written there, is dropped when the graph's code has
    returned.
    """
    first = fw_metadata.num_mutated_inp_runtime_indices
    nodes = pytree.tree_leaves(gm.graph.output_node().args[0])
    for node, info in zip(nodes[first:], fw_metadata.output_info):
        if info.output_type in (OutputType.alias_of_input, OutputType.is_input) and node.op == "call_function":
            note_fact(node, is_dropped=True)
            while is_view(node) and node.all_input_nodes and node.all_input_nodes[0] not in nodes:
                node = node.all_input_nodes[0]  # passes may remove the view
                note_fact(node, is_dropped=True)


def _keep_view_streams(gm: GraphModule, fw_metadata: Any) -> None:
    """Pass the streams of views that need a gradient to `make_output_handler`."""
    found = autograd_nodes.view_streams(gm.graph)[fw_metadata.num_mutated_inp_runtime_indices :]
    streams = [of if info.requires_grad else () for info, of in zip(fw_metadata.output_info, found)]
    if any(streams):
        fw_metadata.overlay_view_streams = streams


def populate_stream_indices(original: Callable[..., Any], gm: GraphModule, fw_metadata: Any) -> None:
    """Clear upstream's stream indices of inputs that the caller's epilogue mutates: those inputs are joined into the
    caller's stream, so they need no index.
    """
    original(gm, fw_metadata)
    has_streams = config.streams and any(node_stream(n) for n in gm.graph.nodes)
    # A result that is a subclass is several values of the graph.
    if has_streams and not any(isinstance(m, SubclassCreationMeta) for m in fw_metadata.subclass_fw_graph_out_meta):
        _note_dropped_outputs(gm, fw_metadata)
        _keep_view_streams(gm, fw_metadata)
    if config.streams and fw_metadata.mutated_inp_stream_indices:
        fw_metadata.overlay_promises = promises_of(gm, len(fw_metadata.mutated_inp_stream_indices))
        fw_metadata.mutated_inp_stream_indices = [None] * len(fw_metadata.mutated_inp_stream_indices)


def create_runtime_wrapper(
    original: Callable[..., Callable[..., Any]], compiled_fn: Any, *, runtime_metadata: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Keep the promises of updates that the epilogue writes back, after the epilogue."""
    wrapper = original(compiled_fn, runtime_metadata=runtime_metadata, **kwargs)
    promises: Promises | None = getattr(runtime_metadata, "overlay_promises", None)
    if promises is None:
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
    streams = getattr(runtime_metadata, "overlay_view_streams", ())
    of_this = next((of for other, of in zip(runtime_metadata.output_info, streams) if other is info), ())
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
