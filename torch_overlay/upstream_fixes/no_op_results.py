"""Allocate memory of its own for a result that needs no computation.

Upstream removes operations that do nothing (additions of zero, products with one, and copies) and uses their operand
instead. Where the operand is an input, another result, or the new value of an input that is updated in place, the
caller gets the same memory twice, and whoever writes to one of them changes the other:

    return torch.zeros_like(x) + x  # is x

    x[1:3].mul_(2)
    y = x.clone()  # is x, so the next line changes y
    x[0:1].add_(1)
    return y

If another stream reads the value that the result was made from, the caller may also overwrite the result during that
read.

The same goes for a copy that is no result, but is read on another stream than it was made on, or after an operation
that blocks the host. Without the copy the caller's memory, or a value that becomes it, would be read later than the
caller knows.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import (
    has_streams,
    is_asynchronous_copy,
    is_stream_op,
    is_view,
    node_stream,
    storage_node,
)
from torch_overlay._functorch.streams.memory import results_made
from torch_overlay._stream_handling import handles_streams
from torch_overlay.orders import reached
from torch_overlay.upstream_fixes.results_in_inputs import may_lie_in_written_input


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set as AbstractSet

    from torch.fx import Graph, GraphModule, Node

COPY_OF = "stream_copy_of"  # in `meta`, of a copy that a pass keeps: the name of the node that it stands for


class NoOpPass:
    """A pass that removes operations that do nothing: the graph as it was before, and the copies that it needs now."""

    def __init__(self, graph: Graph) -> None:
        self._output = graph.output_node()
        self._nodes = list(graph.nodes)
        self._users = {node: tuple(node.users) for node in self._nodes}
        self._inputs = {node: tuple(node.all_input_nodes) for node in self._nodes}
        self._views = {node for node in self._nodes if is_view(node)}
        self._results: dict[Node, list[tuple[int, list[Node]]]] = {}  # maker of memory -> its results, and their views
        for i, value in enumerate(pytree.tree_leaves(self._output.args[0])):
            if isinstance(value, torch.fx.Node):
                views, maker = _views(value)
                self._results.setdefault(maker, []).append((i, views))
        self._left: set[Node] = set()  # after the pass
        self._copies: dict[Node, Node] = {}  # by the first removed operation

    def keep_apart(self, with_streams: bool = True) -> None:
        """Copy, after the pass, what other streams read in eager, and results that the pass made share memory with an
        input, its new value or another result. Results that were views of one memory before remain so. Without
        `with_streams`, all is on one stream.
        """
        self._left = set(self._output.graph.nodes)
        if with_streams and has_streams(self._nodes, lambda node: bool(fact_of(node).promised_to)):
            self._keep_for_other_streams()
        if not self._left.issuperset(self._results):
            self._keep_results(with_streams)

    def _keep_for_other_streams(self) -> None:
        """Keep copies of memory that the caller may write to, so that only the streams of eager read that memory."""
        returned = results_made(self._output)
        # `record_stream` comes last: it names copies that are kept for others.
        for node in sorted(self._nodes, key=is_stream_op):
            if node not in self._left or node.op != "call_function":
                continue
            removed = [n for n in self._inputs[node] if n not in self._left]
            readers = self._readers(node, lambda n: n.users) if removed and is_view(node) else {node}
            for gone in removed:
                value, copied = self._behind(gone, node.all_input_nodes)
                if value is None or not copied:
                    continue
                first, owner = copied[-1], storage_node(value)
                is_elsewhere = any(_is_read_elsewhere(c, reader) for c in copied for reader in readers)
                if is_elsewhere and (owner in returned or _may_be_callers(owner)):
                    self._copy(first, value)
                if first in self._copies and (is_elsewhere or is_stream_op(node)):
                    node.replace_input_with(value, self._copies[first])

    def _keep_results(self, with_streams: bool) -> None:
        left, users = self._left, self._users
        after, structure = pytree.tree_flatten(self._output.args[0])
        taken = left.intersection(self._results)
        gone: dict[Node, tuple[Any, list[Node | None]]] = {}  # what replaces a maker of results, and views of it
        for maker, results in self._results.items():
            if maker not in left:
                bases = [next((view for view in reversed(views) if view in left), None) for _, views in results]
                gone[maker] = (after[results[0][0]] if bases[0] is None else bases[0].args[0]), bases
        for maker, (value, bases) in gone.items():
            owner = storage_node(value)
            shared = owner in taken or _may_be_callers(owner)
            # A stream that is ordered after the result may overwrite it while the value behind it is still read.
            others = self._readers(owner, lambda n: n.users) - self._readers(maker, users.__getitem__)
            others |= {
                other for other, (given, _) in gone.items() if other is not maker and storage_node(given) is owner
            }
            # The first removed operation read the value, on its stream; who waits for the last one waited for it.
            _, removed = self._behind(maker, (value,))
            first = removed[-1] if removed else maker
            is_read_later = with_streams and any(_is_read_later(maker, n) for n in others)
            if shared or first in self._copies or is_read_later:
                copy = self._copy(first, value)
                for user in left.intersection(users[maker]):
                    if is_stream_op(user):  # `record_stream` must name the block that the caller gets
                        user.replace_input_with(value, copy)
                for (i, _), base in zip(self._results[maker], bases):
                    if base is None:
                        after[i] = copy
                    else:
                        base.replace_input_with(value, copy)
            taken.add(owner)
        self._output.args = (pytree.tree_unflatten(after, structure),)

    def _copy(self, first: Node, value: Node) -> Node:
        """Return the copy of a value that stands for a removed operation: before the first node after it that remains,
        as updates in place may follow.
        """
        if first not in self._copies:
            place = next(n for n in self._nodes[self._nodes.index(first) + 1 :] if n in self._left)
            with value.graph.inserting_before(place):
                copy = value.graph.call_function(torch.ops.aten.clone.default, (value,))
            copy.meta = {**first.meta, COPY_OF: first.name}
            self._copies[first] = copy
        return self._copies[first]

    def _behind(self, value: Node, now: Sequence[Node]) -> tuple[Node | None, list[Node]]:
        """Return which of the nodes in `now` replaces a removed value, and the removed operations between the two that
        are no views, the last one first.
        """
        between: dict[Node, list[Node]] = {value: []}
        todo = [value]
        while todo:
            value = todo.pop()
            if value not in self._left:
                path = between[value] if value in self._views else [*between[value], value]
                new = [given for given in self._inputs[value] if given not in between]
                between |= dict.fromkeys(new, path)
                todo += new
            elif value in now:
                return value, between[value]
        return None, []

    def _readers(self, owner: Node, users: Callable[[Node], Iterable[Node]]) -> set[Node]:
        """Return the remaining operations that read a value, or a view or a removed copy of it."""
        found = reached(users(owner), lambda n: users(n) if n not in self._left or is_view(n) else ())
        return {n for n in found if n in self._left and n.op == "call_function" and not is_view(n)}


def _may_be_callers(owner: Node) -> bool:
    """True if the value is an input, or may be computed in an input's memory: by upstream, or by `copies_in_place`."""
    return owner.op == "placeholder" or may_lie_in_written_input(owner) or is_asynchronous_copy(owner)


def _is_read_elsewhere(copy: Node, reader: Node) -> bool:
    """True if the copy's reader runs on another stream, or after an operation that blocks the host until the copy is
    done.
    """
    blocking = {token for token in fact_of(copy).promises if token.is_blocking_copy}
    promised = fact_of(reader).promises
    return not is_stream_op(reader) and (node_stream(copy) != node_stream(reader) or not blocking.issubset(promised))


def _is_read_later(result: Node, reader: Node) -> bool:
    """True if the reader runs on another stream than the result, or if a stream, event or host wait comes after the
    result but not after the reader.
    """
    promised = [fact_of(node).promises for node in (result, reader)]
    return not is_stream_op(reader) and (node_stream(result) != node_stream(reader) or not promised[0] <= promised[1])


def _views(result: Node) -> tuple[list[Node], Node]:
    """Return the views that lead to a result, the last one first, and the node that made the memory."""
    views = []
    while is_view(result) and isinstance(base := next(iter(result.args), None), torch.fx.Node):
        views.append(result)
        result = base
    return views, result


def remove_no_ops(
    original: Callable[..., None], gm: GraphModule, zeros: AbstractSet[Node], ones: AbstractSet[Node]
) -> None:
    begun = NoOpPass(gm.graph)
    original(gm, zeros, ones)
    begun.keep_apart(handles_streams())


def remove_noop_ops(original: Callable[..., None], graph: Graph) -> None:
    begun = NoOpPass(graph)
    original(graph)
    begun.keep_apart(handles_streams())


__all__ = ["NoOpPass", "remove_no_ops", "remove_noop_ops"]
