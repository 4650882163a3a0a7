"""Track the streams of the autograd nodes that eager makes and a compiled forward doesn't.

Autograd's engine runs the backward of an operation on the stream that was current when the operation ran, and orders
that stream with the streams of its neighbours, whether or not the backward launches anything. A program may rely on
that order: it may free memory of a side stream because a gradient has passed through there. Two kinds of nodes are
outside of the graph that AOTAutograd partitions:

- For a result that is a view of an input, or of another result, the caller gets a view that AOTAutograd makes anew when
  the graph's code has returned. It is made on the streams on which the program made it.
- The node that accumulates a leaf's gradient is made for the first operation that reads the leaf, on the stream of that
  operation, even if nobody needs the operation's result. The backward leaves that stream ordered as the engine would.
"""

from __future__ import annotations

import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.fx import base_of, first_readers, node_stream, view_chain
from torch_overlay._functorch.streams.ids import CALLERS_STREAM


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, Node

_VIEWS = "stream_views"  # in `meta` of a graph's output: for each value
_MADE_ON = "stream_made_on"  # in `meta` of a view: the stream on which the program made it
_FIRST_READER = "stream_first_reader"  # in `meta` of an input: the stream of the first operation that reads it


def note(graph: Graph, known: Mapping[int, int]) -> None:
    """Note the streams of views and of first readers. Dynamo's graph shows readers that this one lacks (`known`, by the
    input's position). This runs before placement, which replaces the stream on which the program made a view by the one
    on which the view's memory is filled.
    """
    for node in graph.nodes:
        if base_of(node) is not None:
            node.meta[_MADE_ON] = node_stream(node)
    for value in graph.find_nodes(op="placeholder"):
        what = value.meta.get("desc")
        if isinstance(what, PlainAOTInput) and what.idx in known:
            value.meta[_FIRST_READER] = known[what.idx]
    for value, stream in first_readers(graph.nodes).items():
        value.meta.setdefault(_FIRST_READER, stream)
    output = graph.output_node()
    output.meta[_VIEWS] = list(map(_view_streams, pytree.tree_leaves(output.args[0])))


def first_reader(value: Node) -> int:
    """Return the stream of the first operation that reads an input, the caller's if none does."""
    return value.meta.get(_FIRST_READER, CALLERS_STREAM)


def stream_of(node: Node) -> int:
    """Return the stream on which autograd has the node of an operation of the program."""
    return node.meta.get(_MADE_ON, node_stream(node))


def _view_streams(value: Any) -> tuple[int, ...]:
    """Return the stream of the first reader of a value's memory, and the streams of the views that lead from there to
    the value; none if all views are made on the caller's stream.
    """
    if not isinstance(value, torch.fx.Node):
        return ()
    *views, base = view_chain(value)
    made = [stream for stream, _ in itertools.groupby(map(node_stream, reversed(views)))]
    return (first_reader(base), *made) if any(made) else ()


def view_streams(graph: Graph) -> Sequence[tuple[int, ...]]:
    """Return the streams on which each value that a graph returns was viewed, as noted; see `_view_streams`."""
    return graph.output_node().meta.get(_VIEWS, ())


def made_on(streams: Sequence[int], base: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `make(base)`, a view of the base, with the autograd nodes that lead to it made on the streams."""
    reader, *passed, last = (None if stream == CALLERS_STREAM else objects.get(stream) for stream in streams)
    with torch.cuda.stream(reader):
        accumulates = get_gradient_edge(base) if base.requires_grad and base.is_leaf else None
    for stream in passed:
        with torch.cuda.stream(stream):
            base = base.view_as(base)
    with torch.cuda.stream(last):
        made = make(base)
    del accumulates  # the view's node holds it now
    return made
