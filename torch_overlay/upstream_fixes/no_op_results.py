"""Allocate memory of its own for a result that needs no computation.

Upstream removes operations that do nothing (additions of zero, products with one, and copies) and uses their operand
instead. Where the operand is an input, another result, or the new value of an input that is updated in place, the
caller gets the same memory twice, and whoever writes to one of them changes the other:

    return torch.zeros_like(x) + x  # is x

    x[1:3].mul_(2)
    y = x.clone()  # is x, so the next line changes y
    x[0:1].add_(1)
    return y

The same goes for a result that the program itself puts into an input (`x.copy_(z); return z`), and for what is saved
for a backward, which takes it for memory that it may write to. And if another stream reads the value that the result
was made from, the caller may overwrite the result during that read.

The same goes for a copy that is no result, but is read on another stream than it was made on, or after an operation
that blocks the host. Without the copy the caller's memory, or a value that becomes it, would be read later than the
caller knows.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, SavedForBackwardsAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._inductor.fx_passes import reinplace
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams.eager_memory import results_made
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import is_stream_op, is_view, node_stream, viewed, written_arguments
from torch_overlay._inductor.streams.pass_log import COPY_OF


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet

    from torch.fx import Graph, GraphModule, Node

_aten = torch.ops.aten
_SCATTERS = (
    _aten.slice_scatter.default,
    _aten.select_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default,
)


def remove_no_ops(
    original: Callable[..., None], gm: GraphModule, zeros: AbstractSet[Node], ones: AbstractSet[Node]
) -> None:
    """Run the pass, and copy results that then share memory with an input, its new value or another result, and didn't
    before.
    """
    _keep_apart(gm.graph, lambda: original(gm, zeros, ones))


def remove_noop_ops(original: Callable[..., None], graph: Graph) -> None:
    _keep_apart(graph, lambda: original(graph))


def _keep_apart(graph: Graph, remove: Callable[[], None]) -> None:
    """Run `remove`, then copy results that it made share memory. Results that were views of one memory before remain
    so.
    """
    nodes, output = list(graph.nodes), graph.output_node()
    together: dict[Node, list[tuple[int, list[Node]]]] = {}  # maker of the memory -> its results, and their views
    for i, value in enumerate(pytree.tree_leaves(output.args[0])):
        if isinstance(value, torch.fx.Node):
            views, maker = _views(value)
            together.setdefault(maker, []).append((i, views))
    users = {node: tuple(node.users) for node in nodes}
    inputs = {node: tuple(node.all_input_nodes) for node in nodes}
    views = {node for node in nodes if is_view(node)}
    remove()
    left = set(graph.nodes)
    copies: dict[Node, Node] = {}  # by the first removed operation
    if any(node_stream(node) or fact_of(node).before for node in nodes):
        _keep_for_other_streams(nodes, inputs, views, left, output, copies)
    if left.issuperset(together):
        return
    after, structure = pytree.tree_flatten(output.args[0])
    taken = left.intersection(together)
    written = _written_inputs(graph)
    gone: dict[Node, tuple[Any, list[Node | None]]] = {}  # what replaces a maker of results, and views of it
    for maker, results in together.items():
        if maker not in left:
            bases = [next((view for view in reversed(views) if view in left), None) for _, views in results]
            gone[maker] = (after[results[0][0]] if bases[0] is None else bases[0].args[0]), bases
    for maker, (value, bases) in gone.items():
        results, owner = together[maker], viewed(value)
        shared = owner.op == "placeholder" or owner in taken or _may_lie_in(owner, written)
        # A stream that is ordered after the result may overwrite it, while the value it was made from is still read.
        others = _readers(owner, lambda n: n.users, left) - _readers(maker, users.__getitem__, left)
        others |= {other for other, (given, _) in gone.items() if other is not maker and viewed(given) is owner}
        # The first removed operation read the value, on its own stream; whoever waits for the last one waited for it.
        _, between = _behind(maker, inputs, left, (value,))
        first = next((c for c in reversed(between) if c not in views), maker)
        if shared or first in copies or any(_is_read_later(maker, n) for n in others):
            if first not in copies:
                copies[first] = _copy(value, _place_of(first, nodes, left), {**first.meta, COPY_OF: first.name})
            copy = copies[first]
            for user in left.intersection(users[maker]):
                if is_stream_op(user):  # `record_stream` must name the block that the caller gets
                    user.replace_input_with(value, copy)
            for (i, _), base in zip(results, bases):
                if base is None:
                    after[i] = copy
                else:
                    base.replace_input_with(value, copy)
        taken.add(owner)
    output.args = (pytree.tree_unflatten(after, structure),)


def _keep_for_other_streams(
    nodes: Sequence[Node],
    inputs: Mapping[Node, Sequence[Node]],
    views: AbstractSet[Node],
    left: AbstractSet[Node],
    output: Node,
    copies: dict[Node, Node],
) -> None:
    """Keep copies of memory that the caller may write to, so that only the streams of eager read that memory."""
    returned = results_made(output)
    written = _written_inputs(output.graph)
    for node in sorted(nodes, key=is_stream_op):  # `record_stream` comes last: it names copies kept for others
        if node not in left or node.op != "call_function":
            continue
        removed = [n for n in inputs[node] if n not in left]
        readers = _readers(node, lambda n: n.users, left) if removed and is_view(node) else {node}
        for gone in removed:
            value, between = _behind(gone, inputs, left, node.all_input_nodes)
            copied = [c for c in between if c not in views]
            if value is None or not copied:
                continue
            first, owner = copied[-1], viewed(value)
            is_elsewhere = any(_is_read_elsewhere(c, reader) for c in copied for reader in readers)
            may_change = owner.op == "placeholder" or owner in returned or _may_lie_in(owner, written)
            if is_elsewhere and may_change and first not in copies:
                copies[first] = _copy(value, _place_of(first, nodes, left), {**first.meta, COPY_OF: first.name})
            if first in copies and (is_elsewhere or is_stream_op(node)):
                node.replace_input_with(value, copies[first])


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


def _behind(
    value: Node, inputs: Mapping[Node, Sequence[Node]], left: AbstractSet[Node], now: Sequence[Node]
) -> tuple[Node | None, list[Node]]:
    """Return which of the nodes in `now` replaces a removed value, and the removed nodes between the two."""
    between: dict[Node, list[Node]] = {value: []}
    todo = [value]
    while todo:
        value = todo.pop()
        if value not in left:
            path = [*between[value], value]
            new = [given for given in inputs[value] if given not in between]
            between |= dict.fromkeys(new, path)
            todo += new
        elif value in now:
            return value, between[value]
    return None, []


def _views(result: Node) -> tuple[list[Node], Node]:
    """Return the views that lead to a result, the last one first, and the node that made the memory."""
    views = []
    while is_view(result) and isinstance(base := next(iter(result.args), None), torch.fx.Node):
        views.append(result)
        result = base
    return views, result


def _readers(owner: Node, users: Callable[[Node], Iterable[Node]], left: AbstractSet[Node]) -> set[Node]:
    """Return the remaining operations that read a value, or a view or a removed copy of it."""
    found: set[Node] = set()
    todo = [owner]
    while todo:
        new = set(users(todo.pop())) - found
        todo += [n for n in new if n not in left or is_view(n)]
        found |= new
    return {n for n in found if n in left and n.op == "call_function" and not is_view(n)}


def _place_of(gone: Node, nodes: Sequence[Node], left: AbstractSet[Node]) -> Node:
    """Return the first remaining node after a removed one: updates in place may follow."""
    return next(n for n in nodes[nodes.index(gone) + 1 :] if n in left)


def _copy(value: Node, place: Node, meta: dict[str, Any]) -> Node:
    with value.graph.inserting_before(place):
        copy = value.graph.call_function(_aten.clone.default, (value,))
    copy.meta = meta
    return copy


# ---- what is computed in an input's memory


def _written_inputs(graph: Graph) -> set[Node]:
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return {given for copy in copies if (given := viewed(copy.args[0])).op in ("placeholder", "get_attr")}


def _may_lie_in(value: Node, written: AbstractSet[Node]) -> bool:
    """True if the value updates an input that is written at the end: it may be computed in the input's memory."""
    given = value
    while (base := _updated(given)) is not None:
        given = base
    return given is not value and given in written


def _updated(value: Any) -> Node | None:
    """Return the value that a node's result may be written over, or is a view of."""
    if not isinstance(value, torch.fx.Node) or value.op != "call_function":
        return None
    base: Any = None
    target: Any = value.target
    if is_view(value) or target in _SCATTERS:
        base = value.args[0]
    elif (op := reinplace.inplaceable_ops.get(target)) is not None and isinstance(op.mutated_arg, int):
        base = value.args[op.mutated_arg]
    elif value.target is operator.getitem:
        call: Any = value.args[0]
        index: Any = value.args[1]
        if is_view(call):
            base = call
        elif (op := reinplace.inplaceable_foreach_ops.get(call.target)) is not None:
            # An update of a list, if the result goes into the tensor that stands at its place.
            given = call.args[op.mutated_arg][index]
            base = given if any(n.target is _aten.copy_.default and n.args[0] is given for n in value.users) else None
        else:
            written = written_arguments(call)
            base = written.get(index) if written else None  # an index of another call may be a slice
    return base if isinstance(base, torch.fx.Node) else None


def reinplace_inplaceable_ops(original: Callable[..., None], updater: Any, graph: Graph) -> None:
    """Copy results that upstream's pass may compute in an input's memory. The pass looks for readers only up to the
    copy into the input; the caller reads the graph's results after it.
    """
    output = graph.output_node()
    values, structure = pytree.tree_flatten(output.args[0])
    written = _written_inputs(graph)
    kept = {
        i: value
        for i, (value, what) in enumerate(zip(values, output.meta.get("desc") or ()))
        if isinstance(value, torch.fx.Node) and _is_memory_of_its_own(what) and _may_lie_in(value, written)
    }
    shown = Counter(viewed(value) for value in set(kept.values()))  # memory -> number of results that show it
    copies: dict[Node, Node] = {}

    def copied(value: Node) -> Node:
        """Return a copy of a value; of one of several views of what the graph computes, the view of one copy."""
        base = viewed(value)
        if value not in copies:
            if value is not base and base.op == "call_function" and shown[base] > 1:
                given: Any = value.args[0]
                copies[value] = _call(value, value.target, copied(given), *value.args[1:], **value.kwargs)
            else:
                copies[value] = _call(value, _aten.clone.default, value)
        return copies[value]

    for i, value in kept.items():
        values[i] = copied(value)
    if copies:
        output.args = (pytree.tree_unflatten(values, structure),)
    original(updater, graph)


def _call(value: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call after a value that makes the same value again."""
    with value.graph.inserting_before(value.next):
        made = value.graph.call_function(target, args, kwargs)
    given, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])  # type: ignore[arg-type]
    with V.fake_mode:
        made.meta = {**value.meta, "val": target(*given, **named)}
    return made


def _is_memory_of_its_own(what: Any) -> bool:
    """True if the result is neither an input nor a view of one."""
    if isinstance(what, SavedForBackwardsAOTOutput):
        return True
    context = torch._guards.TracingContext.try_get()
    known = getattr(context, "fw_metadata", None)
    if not isinstance(what, PlainAOTOutput) or known is None or what.idx >= len(known.output_info):
        return False
    return known.output_info[what.idx].output_type not in (OutputType.alias_of_input, OutputType.is_input)


__all__ = ["reinplace_inplaceable_ops", "remove_no_ops", "remove_noop_ops"]
