"""Keeps what a program was promised of results that an update of other elements made anew."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams.blocking_copies import KEPT_WITH_WAITS
from torch_overlay._functorch.streams.facts import add_before, fact_of, note_fact
from torch_overlay._functorch.streams.fx import (
    blocks_host,
    DEALLOC,
    is_backward,
    is_stream_op,
    node_stream,
    RECORD,
    viewed,
    WAITS,
)
from torch_overlay._functorch.streams.tokens import state, synchronization
from torch_overlay._functorch.streams.view_sources import sources


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from torch_overlay._functorch.streams.program import Program
    from torch_overlay._functorch.streams.tokens import Token

_streams = torch.ops.streams


def _named(value: Node) -> Iterator[Node]:
    """Yield a value and the views below it, down to the node whose memory the value names."""
    root = viewed(value)
    yield value
    while value is not root:
        value = value.args[0]  # type: ignore[assignment]
        yield value


def promise_parts(output: Node) -> list[tuple[Node, Node]]:
    """Add the promises of the original operations to each result that holds only elements which an update in place left
    alone. Return the results that the host must wait for instead, and their updates.

    The update makes new memory, and the update's stream fills all of it. Whoever had waited for the operations that
    computed the other elements may read the result. So a record that comes before the update is ordered after it, if no
    operation that the host waits for or asks stands between them. Otherwise, and where the host had waited, it waits
    for the update.
    """
    place = {node: i for i, node in enumerate(output.graph.nodes)}
    records = {fact_of(n).requires: i for n, i in place.items() if n.target is RECORD}
    moves = (RECORD, *WAITS, DEALLOC)
    fixed = [i for n, i in place.items() if blocks_host(n) or (is_stream_op(n) and n.target not in moves)]
    awaited = []
    for value in pytree.tree_leaves(output.args):
        if not isinstance(value, torch.fx.Node) or value.op != "call_function" or is_backward(value):
            continue
        made, root = sources(value), viewed(value)
        if root in made or any(node.op != "call_function" or is_backward(node) for node in made):
            continue
        tokens = [{state(node_stream(n)), *fact_of(n).promises} for n in made]
        known = {
            t for t in set.intersection(*tokens) if not t.is_blocking_copy
        }  # the compiler decides where a blocking copy stands
        late = {
            t
            for t in known
            if t.stream is None and (t not in records or any(records[t] < i < place[root] for i in fixed))
        }
        if not late <= fact_of(root).promises:
            awaited.append((value, root))
        for node in _named(value):
            add_before(node, known - late)
    return awaited


def wait_for_parts(program: Program, awaited: list[tuple[Node, Node]]) -> None:
    """Make the host wait, after all else, for the streams of the updates that `promise_parts` returned."""
    # The partitioner leaves what has no operands out of a backward if it stands before it.
    computed = [node for node in program.nodes[0].graph.nodes if node.op == "call_function"]
    last = list(itertools.takewhile(lambda node: not is_backward(node), computed))[-1]
    tokens: dict[int, Token] = {}
    for value, root in awaited:
        stream = node_stream(root)
        if stream not in tokens:
            tokens[stream] = synchronization(len(program.tokens) + len(tokens))
            with last.graph.inserting_after(last):
                wait = last.graph.call_function(_streams.synchronize_stream.default, (stream,))
            wait.meta = {key: root.meta[key] for key in KEPT_WITH_WAITS if key in root.meta}
            order = len(program.ops) + len(tokens) - 1
            note_fact(
                wait,
                after=(),
                before=(),
                requires=tokens[stream],
                order=order,
                reads=None,
                eager_targets=(),
                eager_storage=(),
            )
        for node in _named(value):
            add_before(node, (tokens[stream],))
