"""Settles whose memory the values are that a forward saves, and what their readers in the backward wait for.

Note [A backward is a region of its own] says why.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.fx_passes.reinplace import _SCATTER_OP_TO_VIEW
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
    is_view_by_call,
    node_stream,
    place_on,
    readers_of,
    RECORD_STREAM,
    storage_node,
    users_of_memory,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.memory import memory_writer
from torch_overlay._functorch.streams.tokens import CALLER, state, Token
from torch_overlay.notes import Notes


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


_UPDATES = frozenset((torch.ops.aten.copy.default, *_SCATTER_OP_TO_VIEW))


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
        if update.target in _UPDATES and update not in found:
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
