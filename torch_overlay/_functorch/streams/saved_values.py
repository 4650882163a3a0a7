"""Settles whose memory the values are that a forward saves, and what their readers in the backward wait for. Note [A
backward is a region of its own] says why. Merges duplicates, equal operations on two streams, in the graph that is
partitioned, and keeps them in the graph that runs.

Note [Duplicates]
Users let two branches begin with the same operation, or the compiler does it for them: under autocast each branch casts
the weight that both read. The branches stay independent, so duplicates are not merged in the code that runs. But the
partitioner decides on the joint graph what the backward saves and what it computes again, by the number of readers and
the distance to the backward of each value, and duplicates change both. In the joint graph they are merged, as they are
in the same program without streams: the partitioner's own elimination of common subexpressions is made to take no
notice of streams. A merged operation remembers the streams that its duplicates were on. When the graph has been
partitioned, the merged operation is divided again among its readers, in the half that it comes from. The other half
has one value, saved or computed again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import optimization_hint

from torch_overlay._functorch.streams.facts import (
    add_after,
    add_promised,
    fact_of,
    is_placed_program,
    note_fact,
    NOTHING,
    replace_fact,
)
from torch_overlay._functorch.streams.fx import (
    is_backward,
    is_view_by_call,
    node_stream,
    place_on,
    readers_of,
    RECORD_STREAM,
    storage_node,
    users_of_memory,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.memory import memory_writer, UPDATES
from torch_overlay._functorch.streams.tokens import CALLER, state, Token
from torch_overlay.notes import Notes


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, Node


@dataclass
class ContextNotes(Notes):
    """Notes on the compilation of a program with streams (`TracingContext`)."""

    results: Sequence[str]  # names of what the forward returns
    backward: Graph  # the graph of its backward

    @classmethod
    def current(cls) -> ContextNotes | None:
        return cls.find(torch._guards.TracingContext.try_get())


def _order_late_readers(value: Node, given: Node) -> None:
    """Order streams after the backward's reads of an input of which eager saves nothing; the backward reads it to
    compute something again. These are the streams that the user ordered after all operations that read the input, for
    example the one that loads the next batch.
    """
    promised = [{state(node_stream(reader)), *fact_of(reader).promises} for reader in readers_of(given)]
    states = {token for token in set.intersection(*promised) if token.stream is not None} if promised else set()
    for user in users_of_memory(value):
        add_promised(user, states)


def _in_inputs(forward: Graph) -> set[Node]:
    """Return the values of a program with streams that Inductor may make in an input's own memory: views by calls, and
    updates that are copied into an input, with the updates below them (`streams.copies_in_place`).
    """
    if not is_placed_program(forward):
        return set()
    found = {node for node in forward.nodes if is_view_by_call(node)}
    writes = forward.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    left: list[Any] = [write.args[1] for write in writes]
    while left:
        update = storage_node(left.pop())
        if update.target in UPDATES and update not in found:
            found.add(update)
            left += update.args[:2]
    return found


def place_saved(forward: Graph, backward: Graph, unread: Mapping[str, bool]) -> None:
    """Settle whose memory each saved value is, what its readers wait for, and what waits for them. `unread` maps each
    input of which eager saves nothing to whether it is a parameter, which lives on.
    """
    known = {n.name: n for n in forward.nodes if n.op in ("placeholder", "call_function")}
    in_inputs = _in_inputs(forward)
    for value in backward.find_nodes(op="placeholder"):
        place_on(value, CALLERS_STREAM)
        replace_fact(value, NOTHING)
        saved = known.get(value.name)
        writer = memory_writer(saved) if saved is not None else None
        if writer is not None and writer.op == "placeholder" and writer.name in unread:
            _order_late_readers(value, writer)
            # The caller may order the streams that reuse the input's memory after the forward alone.
            if not unread[writer.name]:
                for stream in sorted({node_stream(user) for user in users_of_memory(value)}):
                    end_backward_with(backward, RECORD_STREAM, value, stream)
        note_fact(value, in_input=saved is not None and not in_inputs.isdisjoint((saved, storage_node(saved))))
        if writer is None or writer.op != "call_function":
            continue
        stream = node_stream(writer)
        note_fact(value, is_computed=True, memory=stream or None)
        promised = fact_of(writer).promises
        for user in users_of_memory(value):
            if node_stream(user) != stream and state(node_stream(user)) not in promised:
                add_after(user, (state(stream),))


def end_backward_with(graph: Graph, operation: Any, *arguments: Any) -> None:
    """Add an operation of the stream program at the end of a backward, such as a `record_stream` of a saved value."""
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(operation, arguments)
    made.meta["partitioner_tag"] = "must_be_in_backward"


def record_saved_gradients(forward: Graph, backward: Graph) -> set[Token]:
    """Record the caller's stream for each gradient that is itself a saved value: it leaves with the memory that it came
    with, and the caller's stream reads it. (For gradients that the backward computes, generated code records the
    stream; a graph that computes nothing has no generated code.) Return the states of streams that the forward left
    without ordering the caller's stream after them.
    """
    computed = {n.name: n for n in forward.nodes if n.op == "call_function"}
    unordered = set()
    for value in dict.fromkeys(map(memory_writer, backward.output_node().all_input_nodes)):
        stream = fact_of(value).memory
        if value.op != "placeholder" or not stream:
            continue
        end_backward_with(backward, RECORD_STREAM, value, CALLERS_STREAM)
        if CALLER not in fact_of(memory_writer(computed[value.name])).promises:
            unordered.add(state(stream))
    return unordered


def read_unordered(forward: Graph) -> set[str]:
    """Return the names of forward outputs that a side stream reads without the user ordering the caller's stream after
    it.
    """
    readers = [n for n in forward.nodes if n.op == "call_function" and node_stream(n) != CALLERS_STREAM]
    late = [n for n in readers if CALLER not in fact_of(n).promises]
    read = {memory_writer(value) for node in late for value in node.all_input_nodes}
    return {value.name for value in forward.output_node().all_input_nodes if memory_writer(value) in read}


def may_be_donated(forward: Graph, backward: Graph, donated: list[int]) -> list[int]:
    """Return those of the backward's inputs that it may write over: of `donated`, saved values that nobody else has,
    none that shares its memory with another one, none whose memory may belong to a side stream or to the caller, and
    none that a side stream may still read.
    """
    inputs = backward.find_nodes(op="placeholder")
    unordered = read_unordered(forward)
    donated = [i for i in donated if inputs[i].name not in unordered and not fact_of(inputs[i]).in_input]
    memory = [fact_of(n).memory for n in inputs]
    if not any(memory):
        return donated
    values = [n.meta.get("val") for n in inputs]
    storages = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else None for v in values]
    count = Counter(storages)
    return [i for i in donated if not memory[i] and count[storages[i]] == 1]


def type_and_bytes(node: Node) -> tuple[torch.dtype, int] | None:
    """Return the type of a value on the device, and the size of its memory when it was traced; None for others."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return None
    return value.dtype, optimization_hint(value.untyped_storage().nbytes(), fallback=-1)


# In `meta`: stream of a duplicate that was merged into this node -> the `custom` of that duplicate.
DUPLICATES = "stream_duplicates"
_CUSTOM = "stream_custom"  # in `meta`, while duplicates are merged: the node's `custom`


def _remember(before: Graph, after: Graph, key: Callable[[Node], Any]) -> None:
    """Note on each node of `after` the streams of the nodes of `before` that were merged into it."""
    kept = {node.name: node for node in after.nodes}
    known: dict[Any, Node] = {}
    names: dict[Node, str] = {}
    for node in before.nodes:
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"value {names[n]}")  # type: ignore[arg-type]
        value = (node.target, repr(operands), key(node))
        if node.name in kept:
            names[node] = node.name
            known.setdefault(value, kept[node.name])
            continue
        survivor = known.get(value)
        names[node] = node.name if survivor is None else survivor.name
        custom = node.meta.get("custom", {})
        stream = custom.get("stream") or 0
        if survivor is not None and stream != node_stream(survivor):
            survivor.meta[DUPLICATES] = {stream: custom, **survivor.meta.get(DUPLICATES, {})}


def split_duplicates(graph: Graph, of_backward: bool) -> None:
    """Divide merged operations among their readers: each reader reads the duplicate on its own stream."""
    made: dict[tuple[Node, int], Node] = {}

    def is_divided(node: Node) -> bool:
        return node.op == "call_function" and is_backward(node) == of_backward

    def on_stream(node: Node, stream: int) -> Node:
        duplicates = node.meta.get(DUPLICATES, {})
        if stream not in duplicates or stream == node_stream(node) or not is_divided(node):
            return node
        found = made.get((node, stream))
        if found is None:
            with graph.inserting_after(node):
                found = made[node, stream] = graph.node_copy(node, lambda n: on_stream(n, stream))
            del found.meta[DUPLICATES]
            found.meta["custom"] = duplicates[stream]
        return found

    for node in list(graph.nodes):
        if DUPLICATES not in node.meta or not is_divided(node):
            continue
        for reader in list(node.users):
            if reader.op == "call_function":
                reader.replace_input_with(node, on_stream(node, node_stream(reader)))
        if not node.users:
            graph.erase_node(node)


def merge_duplicates(graph: Graph, eliminate: Callable[[Graph], Graph], key: Callable[[Node], Any]) -> Graph:
    """Return what `eliminate`, a pass that merges equal operations, makes of the graph without its streams. Operations
    with another `key` are not equal to the pass. The result has the streams of the operations that are left.
    """
    if not any(map(node_stream, graph.nodes)):
        return eliminate(graph)
    for node in graph.nodes:
        node.meta[_CUSTOM] = node.meta.get("custom")
        place_on(node, CALLERS_STREAM)
    merged = eliminate(graph)
    for node in (*graph.nodes, *merged.nodes):
        custom = node.meta.pop(_CUSTOM, None)
        if custom is not None:
            node.meta["custom"] = custom
    _remember(graph, merged, key)
    return merged
