"""Places the copies that AOTAutograd makes of inputs which the program updates in place.

There are two: one of an input that needs a gradient, before all that the user wrote, and one that writes the new value
back, at the end of the graph.
"""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.fx import is_stream_op, is_view, node_stream, place_on


if TYPE_CHECKING:
    from torch.fx import Graph, Node

_aten = torch.ops.aten


def place_first_copies(graph: Graph) -> None:
    """Move each copy that AOTAutograd makes of an input that needs a gradient and is updated in place. AOTAutograd puts
    the copy before all that the user wrote; it moves to the first of the user's operations that reads it, on that
    operation's stream.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_aten.clone.default):
        is_users = not copy.meta.keys().isdisjoint(("from_node", "source_fn_stack"))
        if is_users or copy.args[0].op != "placeholder":  # type: ignore[union-attr]
            continue
        readers, todo = [], [copy]
        while todo:
            users = [user for user in todo.pop().users if user.op == "call_function" and not is_stream_op(user)]
            todo += filter(is_view, users)
            readers += [user for user in users if not is_view(user)]
        if readers:
            min(copy.users, key=place.__getitem__).prepend(copy)
            place_on(copy, node_stream(min(readers, key=place.__getitem__)))


def _producer(value: Any) -> Node | None:
    """Return the operation that computes a value, below aliases and selections of an output."""
    while isinstance(value, torch.fx.Node) and value.target in (operator.getitem, _aten.alias.default):
        value = value.args[0]
    return value if isinstance(value, torch.fx.Node) and value.op == "call_function" else None


def follow_mutations(graph: Graph) -> None:
    """Give each write-back copy the stream and the tokens of the value that it writes, not those of a later point."""
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        target: Any = copy.args[0]
        value = _producer(copy.args[1])
        if target.op != "placeholder" or value is None:
            continue
        place_on(copy, node_stream(value))
        note_fact(copy, after=fact_of(value).after, before=fact_of(value).before)
