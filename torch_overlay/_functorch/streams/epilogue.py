"""Order the code of AOTAutograd that runs after a graph's code: the epilogue.

The graph returns the new value of an input that needs a gradient and is updated in place, and the epilogue copies it
into the input, on the caller's stream, when the graph's code has returned. The caller's stream has waited for the
update by then. What eager orders after the update itself must come after that copy: a stream that waited for the update
or made it, and the host, wait once more, and an event is recorded once more (`Promises`). The epilogue also makes
results anew that are views, on the streams of the program.

Its notes are `EpilogueNotes`, in the metadata of the forward.

Note [Autograd nodes outside of the graph]
Autograd's engine runs the backward of an operation on the stream that was current when the operation ran, and orders
that stream with the streams of its neighbours, whether or not the backward launches anything. A program may rely on
that order: it may free memory of a side stream because a gradient has passed through there. Two kinds of nodes are
outside of the graph that AOTAutograd partitions:

- For a result that is a view of an input, or of another result, the caller gets a view that AOTAutograd makes anew when
  the graph's code has returned. It is made on the streams on which the program made it.
- The node that accumulates a leaf's gradient is made for the first operation that reads the leaf, on the stream of that
  operation, even if nobody needs the operation's result. The backward leaves that stream ordered as the engine would.

The copies of updated inputs that AOTAutograd makes inside of the graph are placed here, too: one of an input that needs
a gradient, before all that the user wrote (`place_first_copies`), and one that writes the new value back, at the end of
the graph (`follow_mutations`).
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.facts import add_promised, fact_of, note_fact
from torch_overlay._functorch.streams.fx import (
    base_of,
    first_readers,
    has_streams,
    node_stream,
    place_on,
    readers_of,
    view_chain,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, written_index
from torch_overlay._functorch.streams.tokens import CALLER, state, streams_of
from torch_overlay.notes import Notes


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, GraphModule, Node


_aten = torch.ops.aten
_VIEWS = "stream_views"  # in `meta` of a graph's output: for each value
_MADE_ON = "stream_made_on"  # in `meta` of a view: the stream on which the program made it
_FIRST_READER = "stream_first_reader"  # in `meta` of an input: the stream of the first operation that reads it


def place_first_copies(graph: Graph) -> None:
    """Move each copy that AOTAutograd makes of an input that needs a gradient and is updated in place. AOTAutograd puts
    the copy before all that the user wrote; it moves to the first of the user's operations that reads it, on that
    operation's stream.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_aten.clone.default):
        is_users = not copy.meta.keys().isdisjoint(("from_node", "source_fn_stack"))
        if is_users or copy.args[0].op != "placeholder":  # type: ignore[union-attr]
            continue
        if readers := readers_of(copy):
            min(copy.users, key=position.__getitem__).prepend(copy)
            place_on(copy, node_stream(min(readers, key=position.__getitem__)))


def _producer(value: Any) -> Node | None:
    """Return the operation that computes a value, below aliases and selections of an output."""
    while isinstance(value, torch.fx.Node) and value.target in (operator.getitem, _aten.alias.default):
        value = value.args[0]
    return value if isinstance(value, torch.fx.Node) and value.op == "call_function" else None


def place_copies(graph: Graph) -> None:
    """Place each copy that writes an updated input back where the value that it writes is."""
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        place_on(copy, node_stream(copy.args[1]))  # type: ignore[arg-type]


def follow_mutations(graph: Graph) -> None:
    """Give each write-back copy the stream and the tokens of the value that it writes, not those of a later point."""
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        target: Any = copy.args[0]
        value = _producer(copy.args[1])
        if target.op != "placeholder" or value is None:
            continue
        place_on(copy, node_stream(value))
        note_fact(copy, after=fact_of(value).after, promised_to=fact_of(value).promised_to)


@dataclass(frozen=True)
class Promises:
    """The work that must come after the epilogue's copies, by registry index: streams, and events with the streams that
    record them.
    """

    devices: tuple[int, ...]  # on whose current streams the copies run, as `ids.written_index` has them
    streams: tuple[int, ...]
    events: tuple[tuple[int, int], ...]
    host: bool

    def keep(self) -> None:
        """Make streams and the host wait for the copies, and record the events again. This runs after the copies, with
        the objects of the graph's call.
        """
        copied = [objects.callers_stream(device) for device in self.devices]
        for index in self.streams:
            for stream in copied:
                objects.get(index).wait_stream(stream)
        for event, index in self.events:
            objects.get(event).record(objects.get(index))
        if self.host:
            for stream in copied:
                stream.synchronize()


@dataclass
class EpilogueNotes(Notes):
    """Notes on the metadata of a forward (`ViewAndMutationMeta`), which caches keep."""

    promises: Promises | None = None  # what must come after the epilogue's copies
    view_streams: Sequence[tuple[int, ...]] = ()  # for each result, on which it is viewed: `made_on`


def promises_of(gm: GraphModule, count: int) -> Promises | None:
    """Order the caller's stream after the first `count` outputs, which the epilogue writes back. Return their promises;
    None if there are none.
    """
    outputs: Any = gm.graph.output_node().args[0]
    values = [value for value in outputs[:count] if isinstance(value, torch.fx.Node)]
    for value in values:  # the caller writes them back on its own stream
        if node_stream(value) != CALLERS_STREAM:
            add_promised(value, (CALLER,))
    last = {
        n.args[0]: n for n in gm.graph.find_nodes(op="call_function", target=torch.ops.streams.record_event.default)
    }
    records = {fact_of(n).requires: (event, n.args[1]) for event, n in last.items()}
    tokens = {t for v in values for t in (state(node_stream(v)), *fact_of(v).promises)}
    streams = streams_of(tokens) - {CALLERS_STREAM}
    events = {records[t] for t in tokens if t in records}
    host = any(t.is_blocking_copy or t.is_synchronization for t in tokens)
    if not (streams or events or host):
        return None
    devices = {written_index(v.meta["val"].device.index or 0) for v in values if v.meta["val"].device.type == "cuda"}
    return Promises(tuple(sorted(devices)), tuple(sorted(streams)), tuple(sorted(events)), host)


def note_epilogue(gm: GraphModule, fw_metadata: Any) -> None:
    """Note in the metadata of a forward, or of a joint graph, what its epilogue has to know, and in the facts of the
    graph which outputs the epilogue drops. The graph was placed before (`placement`).
    """
    copied = fw_metadata.num_mutated_inp_runtime_indices
    views = view_streams(gm.graph)
    # A result that is a subclass is several values of the graph.
    on_streams = any(views) or has_streams(gm.graph.nodes, None)
    if on_streams and not any(isinstance(m, SubclassCreationMeta) for m in fw_metadata.subclass_fw_graph_out_meta):
        _note_dropped_outputs(gm, fw_metadata)
        streams = [of if info.requires_grad else () for info, of in zip(fw_metadata.output_info, views[copied:])]
        if any(streams):
            EpilogueNotes.of(fw_metadata).view_streams = streams
    if copied and (promises := promises_of(gm, copied)) is not None:
        EpilogueNotes.of(fw_metadata).promises = promises


def _note_dropped_outputs(gm: GraphModule, fw_metadata: Any) -> None:
    """Note the outputs that are an input, or a view of one: they are made anew from the caller's tensor. The value that
    the graph returns in their place, the last one that was written there, is dropped when the graph's code has
    returned.
    """
    nodes = pytree.tree_leaves(gm.graph.output_node().args[0])
    for node, info in zip(nodes[fw_metadata.num_mutated_inp_runtime_indices :], fw_metadata.output_info):
        if info.output_type in (OutputType.alias_of_input, OutputType.is_input) and node.op == "call_function":
            for shown in view_chain(node):  # passes may remove the view
                if shown is not node and shown in nodes:
                    break
                note_fact(shown, is_dropped=True)


def note_autograd_nodes(graph: Graph, known: Mapping[int, int]) -> None:
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


def autograd_stream(node: Node) -> int:
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
