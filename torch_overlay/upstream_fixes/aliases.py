"""Keep the results of a graph apart, and apart from the caller's memory.

The rule: results share memory after a pass only if they shared it before, and none lies in the memory of an input that
it is no view of. Whoever writes to one result, or to an input, would change the other. Upstream breaks the rule in
three ways, and here the value is copied once for each memory of results:

    return torch.zeros_like(x) + x  # does nothing, and is removed: the result is x

    z = torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
    x.copy_(z)
    return z  # is computed in x, as nothing in the graph reads the old x

    y = x * 2
    return torch.cat([y, b]), y.view(64, 16)  # the second is a part of the first

The caller's memory is also not read on a different stream, or later, than in eager. So a removed copy that is no result
stays, too, if it is read on a different stream than it was made on, or after an operation that blocks the host.
"""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._inductor.fx_passes import reinplace
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.lowering import clone
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import (
    is_asynchronous_copy,
    is_stream_op,
    is_view,
    node_stream,
    output_descriptions,
    storage_node,
    updated_operands,
    view_chain,
    written_arguments,
)
from torch_overlay._functorch.streams.memory import results_made
from torch_overlay.orders import reached


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set as AbstractSet

    from torch.fx import Graph, Node

COPY_OF = "stream_copy_of"  # in `meta`, of a copy that a pass keeps: the name of the node that it stands for

_aten = torch.ops.aten


class Aliases:
    """A graph before a pass, with its results by the memory that they show, and the copies that the pass calls for."""

    def __init__(self, graph: Graph) -> None:
        self._output = graph.output_node()
        self._nodes = list(graph.nodes)
        self._users = {node: tuple(node.users) for node in self._nodes}
        self._inputs = {node: tuple(node.all_input_nodes) for node in self._nodes}
        self._views = {node for node in self._nodes if is_view(node)}
        known = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
        self._descriptions = output_descriptions(self._output) if known is not None else []
        # Maker of memory -> its results, and their views. Those that are inputs, or views of inputs, are left out.
        self._results: dict[Node, list[tuple[int, list[Node]]]] = {}
        for i, value in enumerate(pytree.tree_leaves(self._output.args[0])):
            if isinstance(value, torch.fx.Node) and not any(
                _is_input(what, known) for what in self._descriptions[i:][:1]
            ):
                *views, maker = view_chain(value)
                self._results.setdefault(maker, []).append((i, views))
        self._left = set(self._nodes)  # after the pass
        self._copies: dict[Node, Node] = {}  # by the first removed operation

    def keep_out_of_inputs(self) -> None:
        """Copy, before the pass, results that it may compute in inputs."""
        values, structure = pytree.tree_flatten(self._output.args[0])
        count = len(self._descriptions)
        for maker, results in self._results.items():
            kept = [(i, views) for i, views in results if i < count and _may_lie_in_written_input(values[i])]
            is_whole = maker.op == "call_function" and len({values[i] for i, _ in kept}) > 1
            for i, views in kept:
                value = maker if is_whole else values[i]
                copy = self._copy(value, value)
                with V.fake_mode:
                    copy.meta["val"] = _aten.clone.default(value.meta["val"])
                self._show(values, i, views if is_whole else [], value, copy)
        self._output.args = (pytree.tree_unflatten(values, structure),)

    def drop_needless(self) -> None:
        """Remove, after the pass, copies of what an operation computed in new memory, if nothing is written there after
        the copy. New values that are selected from an operation's results may still become its operands.
        """
        copies, written = {*self._copies.values()}, set()
        for node in reversed(self._output.graph.nodes):
            if node in copies and {*node.users} == {self._output}:
                owner = storage_node(node.all_input_nodes[0])
                is_new = owner.op == "call_function" and owner.target is not operator.getitem
                if is_new and not updated_operands(owner) and owner not in written:
                    node.replace_all_uses_with(node.all_input_nodes[0])
                    self._output.graph.erase_node(node)
            written.update(map(storage_node, updated_operands(node)))

    def keep_apart(self, with_streams: bool = True) -> None:
        """Copy, after the pass, what other streams read in eager, and results that the pass made share memory with an
        input, its new value or another result. Without `with_streams`, all is on one stream.
        """
        self._left = set(self._output.graph.nodes)
        if with_streams:
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
                blocking = {c: {token for token in fact_of(c).promises if token.is_blocking_copy} for c in copied}
                is_elsewhere = any(_is_read_elsewhere(c, r, blocking[c]) for c in copied for r in readers)
                if is_elsewhere and (owner in returned or _may_be_callers(owner)):
                    self._copy(first, value)
                if first in self._copies and (is_elsewhere or is_stream_op(node)):
                    node.replace_input_with(value, self._copies[first])

    def _keep_results(self, with_streams: bool) -> None:
        left, users = self._left, self._users
        values, structure = pytree.tree_flatten(self._output.args[0])
        taken = left.intersection(self._results)
        given: dict[Node, Any] = {}  # removed maker of results -> what replaces it
        for maker, ((i, views), *_) in self._results.items():
            if maker not in left:
                given[maker] = next((view.args[0] for view in reversed(views) if view in left), values[i])
        removed = {maker: self._behind(maker, (value,))[1] or [maker] for maker, value in given.items()}
        for maker in sorted(given, key=lambda maker: len(removed[maker])):
            value = given[maker]
            owner = storage_node(value)
            # A stream that is ordered after the result may overwrite it while the value behind it is still read.
            others = self._readers(owner, lambda n: n.users) - self._readers(maker, users.__getitem__)
            others |= {other for other in given if other is not maker and storage_node(given[other]) is owner}
            # The first removed operation read the value, on its stream; who waits for the last one waited for it.
            *later, first = removed[maker]
            is_read_later = any(_is_read_elsewhere(maker, n, fact_of(maker).promises) for n in others)
            if owner in taken or _may_be_callers(owner) or first in self._copies or with_streams and is_read_later:
                copy = self._copy(first, value)
                while copy in taken and later:  # by the result that this one is made from
                    copy = self._copy(later.pop(), copy)
                taken.add(copy)
                for user in left.intersection(users[maker]):
                    if is_stream_op(user):  # `record_stream` must name the block that the caller gets
                        user.replace_input_with(value, copy)
                for i, views in self._results[maker]:
                    self._show(values, i, views, value, copy)
            taken.add(owner)
        self._output.args = (pytree.tree_unflatten(values, structure),)

    def _show(self, values: list[Any], i: int, views: list[Node], value: Node, copy: Node) -> None:
        """Make a result show a copy of a value, through those of its views that remain."""
        base = next((view for view in reversed(views) if view in self._left), None)
        if base is None:
            values[i] = copy
        else:
            base.replace_input_with(value, copy)

    def _copy(self, first: Node, value: Node) -> Node:
        """Return the copy of a value that stands for an operation: before the first node after it that remains, as
        updates in place may follow.
        """
        if first not in self._copies:
            place = next(n for n in self._nodes[self._nodes.index(first) + 1 :] if n in self._left)
            with value.graph.inserting_before(place):
                copy = value.graph.call_function(_aten.clone.default, (value,))
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
    return owner.op == "placeholder" or _may_lie_in_written_input(owner) or is_asynchronous_copy(owner)


def _may_lie_in_written_input(value: Node) -> bool:
    """True if the value is a view or a new value of an input that is written at the end: upstream's pass computes new
    values in the input's memory if nothing reads the old one up to the copy into the input, but the caller reads the
    graph's results after that copy, and a backward takes what is saved for memory that it may write to.
    """
    given = storage_node(value)
    while (base := _updated(given)) is not None:
        given = storage_node(base)
    if given is value or given.op not in ("placeholder", "get_attr"):
        return False
    copies: Any = value.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return any(storage_node(copy.args[0]) is given for copy in copies)


def _updated(value: Node) -> Node | None:
    """Return the value that an operation's result may be written over."""
    target: Any = value.target
    args: Any = value.args
    base = None
    if target in reinplace._SCATTER_OP_TO_VIEW:
        base = args[0]
    elif (op := reinplace.inplaceable_ops.get(target)) is not None and isinstance(op.mutated_arg, int):
        base = args[op.mutated_arg]
    elif target is operator.getitem:
        call, index = args
        if (op := reinplace.inplaceable_foreach_ops.get(call.target)) is not None:
            # An update of a list, if the result goes into the tensor that stands at its place.
            given = call.args[op.mutated_arg][index]
            base = given if any(n.target is _aten.copy_.default and n.args[0] is given for n in value.users) else None
        elif written := written_arguments(call):  # an index of another call may be a slice
            base = written.get(index)
    return base if isinstance(base, torch.fx.Node) else None


def _is_input(what: Any, known: Any) -> bool:
    """True if the result is an input or a view of one, which the caller makes from the input itself."""
    kinds = [info.output_type for info in known.output_info[what.idx :][:1]] if isinstance(what, PlainAOTOutput) else []
    return kinds in ([OutputType.alias_of_input], [OutputType.is_input])


def _is_read_elsewhere(value: Node, reader: Node, tokens: AbstractSet[Any]) -> bool:
    """True if the reader runs on another stream than the value, or if one of the value's tokens, of a stream, an event
    or a host wait after it, is not after the reader.
    """
    is_ordered = node_stream(value) == node_stream(reader) and tokens <= fact_of(reader).promises
    return not is_stream_op(reader) and not is_ordered


def reinplace_inplaceable_ops(original: Callable[..., None], updater: Any, graph: Graph) -> None:
    before = Aliases(graph)
    before.keep_out_of_inputs()
    original(updater, graph)
    before.drop_needless()


def concatenate(original: Callable[..., Any], cls: Any, inputs: Sequence[Any], dim: int) -> Any:
    """Seam of ConcatKernel.create, which computes inputs in place as parts of its result, unless they are results of
    the graph themselves: inputs of which a result is a view are copied, too.
    """
    graph: Any = V.graph
    results = {get_node_storage(result) for result in graph.graph.output_node().all_input_nodes} - {None}
    nodes = [n for n in graph.current_node.all_input_nodes if n.op != "placeholder" and get_node_storage(n) in results]
    shown = {id(graph.env[node].data) for node in nodes}
    return original(cls, [clone(x) if id(x.data) in shown else x for x in inputs], dim)
