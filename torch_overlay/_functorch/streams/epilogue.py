"""Order the code of AOTAutograd that runs after a graph's code: the epilogue.

The graph returns the new value of an input that needs a gradient and is updated in place, and the epilogue copies it
into the input, on the caller's stream, when the graph's code has returned. The caller's stream has waited for the
update by then. What eager orders after the update itself must come after that copy: a stream that waited for the update
or made it, and the host, wait once more, and an event is recorded once more (`Promises`). The epilogue also makes
results anew that are views, on the streams of the program.

Its notes are `EpilogueNotes`, in the metadata of the forward.

The copies of updated inputs that AOTAutograd makes inside of the graph are placed here, too: one of an input that needs
a gradient, before all that the user wrote (`place_first_copies`), and one that writes the new value back, at the end of
the graph (`follow_mutations`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch.utils import _pytree as pytree

from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams import autograd_nodes
from torch_overlay._functorch.streams.facts import add_promised, fact_of, note_fact
from torch_overlay._functorch.streams.fx import (
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
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule, Node


_aten = torch.ops.aten


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
    view_streams: Sequence[tuple[int, ...]] = ()  # for each result, on which it is viewed: `autograd_nodes.made_on`


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
    views = autograd_nodes.view_streams(gm.graph)
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
