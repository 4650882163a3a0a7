"""Track the streams of the autograd nodes that eager makes and a compiled forward doesn't.

Autograd's engine runs the backward of an operation on the stream that was current when the operation ran, and orders
that stream with the streams of its neighbours, whether or not the backward launches anything. A program may rely on
that order: it may free memory of a side stream because a gradient has passed through there. Two kinds of nodes are
outside of the graph that AOTAutograd partitions:

- For a result that is a view of an input, or of another result, the caller gets a view that AOTAutograd makes anew when
  the graph's code has returned. It is made on the streams on which the program made it.
- The node that accumulates a leaf's gradient is made for the first operation that reads the leaf, on the stream of that
  operation, even if nobody needs the operation's result. The backward leaves that stream ordered as the engine would
  (`streams.backward.order_after_gradients`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from torch_overlay._dynamo import objects, registry
from torch_overlay._functorch.streams.fx import first_readers, is_view, node_stream
from torch_overlay._functorch.streams.ids import CALLERS_STREAM


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node


_VIEWS = "overlay_view_streams"  # in `meta` of a graph's output: for each value
_FIRST_READER = "overlay_first_reader"  # in `meta` of an input: the stream of the first operation that reads it


def note(graph: Graph) -> None:
    """Note the streams of views and first readers. This runs before placement, which replaces the stream on which the
    program made a view by the one on which the view's memory is filled.
    """
    known = first_readers_in_dynamo()
    for value in graph.find_nodes(op="placeholder"):
        what = value.meta.get("desc")
        if isinstance(what, PlainAOTInput) and what.idx in known:
            value.meta[_FIRST_READER] = known[what.idx]
    for value, stream in first_readers(graph.nodes).items():
        value.meta.setdefault(_FIRST_READER, stream)
    output = graph.output_node()
    output.meta[_VIEWS] = list(map(_view_streams, pytree.tree_leaves(output.args[0])))


def first_readers_in_dynamo() -> dict[int, int]:
    """Map the position of an input to the stream of its first reader. Dynamo's graph maps it by node, because its
    inputs may be sorted after the graph was read (`canonicalize_output_graph_node_order`).
    """
    known = registry.current().first_readers
    graph = next((node.graph for node in known), None)
    inputs = graph.find_nodes(op="placeholder") if graph else ()
    return {position: known[node] for position, node in enumerate(inputs) if node in known}


def first_reader(value: Node) -> int:
    """Return the stream of the first operation that reads an input, the caller's if none does."""
    return value.meta.get(_FIRST_READER, CALLERS_STREAM)


def _view_streams(value: Any) -> tuple[int, ...]:
    """Return the stream of the first reader of a value's memory, and the streams of the views that lead from there to
    the value; none if all views are made on the caller's stream.
    """
    streams = []
    while isinstance(value, torch.fx.Node) and value.op == "call_function" and is_view(value):
        streams.append(node_stream(value))
        value = value.args[0]
    made = [stream for stream, _ in itertools.groupby(reversed(streams))]
    reader = first_reader(value) if isinstance(value, torch.fx.Node) else CALLERS_STREAM
    return (reader, *made) if any(made) else ()


def keep_view_streams(gm: GraphModule, fw_metadata: Any) -> None:
    """Pass the streams of views that need a gradient to `make_output_handler`."""
    first = fw_metadata.num_mutated_inp_runtime_indices
    found = gm.graph.output_node().meta.get(_VIEWS, ())[first:]
    streams = [of if info.requires_grad else () for info, of in zip(fw_metadata.output_info, found)]
    if any(streams):
        fw_metadata.overlay_view_streams = streams


@dataclasses.dataclass(frozen=True)
class _PlacedViews:
    """A result's recorded views, with `streams` (see `_view_streams`): a stand-in for the views that AOTAutograd passes
    from the result's handler to `gen_alias_from_base`.
    """

    streams: tuple[int, ...]
    views: Any


# ---- seams


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
    reader, *passed, last = (None if stream == CALLERS_STREAM else objects.get(stream) for stream in views.streams)
    with torch.cuda.stream(reader):
        accumulates = get_gradient_edge(base) if base.requires_grad and base.is_leaf else None
    for stream in passed:
        with torch.cuda.stream(stream):
            base = base.view_as(base)
    with torch.cuda.stream(last):
        made = original(base, target, requires_grad, views.views, **kwargs)
    del accumulates  # the view's node holds it now
    return made


__all__ = [
    "first_reader",
    "first_readers_in_dynamo",
    "gen_alias_from_base",
    "keep_view_streams",
    "make_output_handler",
    "note",
]
