"""Keep results out of the memory of inputs that the graph writes to.

Upstream's reinplacing pass computes the new value of an input in the input's memory, if nothing reads the old value up
to the copy into the input. The caller reads the graph's results after that copy, and a backward takes what is saved for
memory that it may write to:

    z = torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
    x.copy_(z)
    return z  # is x
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

from torch_overlay._functorch.streams.fx import is_view, output_descriptions, storage_node, written_arguments


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

_aten = torch.ops.aten
_SCATTERS = (
    _aten.slice_scatter.default,
    _aten.select_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default,
)


def may_lie_in_written_input(value: Node) -> bool:
    """True if the value updates an input that is written at the end: it may be computed in the input's memory."""
    given = value
    while (base := _updated(given)) is not None:
        given = base
    if given is value or given.op not in ("placeholder", "get_attr"):
        return False
    copies: Any = value.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return any(storage_node(copy.args[0]) is given for copy in copies)


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
    kept = {
        i: value
        for i, (value, what) in enumerate(zip(values, output_descriptions(output)))
        if isinstance(value, torch.fx.Node) and _is_memory_of_its_own(what) and may_lie_in_written_input(value)
    }
    shown = Counter(storage_node(value) for value in set(kept.values()))  # memory -> number of results that show it
    copies: dict[Node, Node] = {}

    def copied(value: Node) -> Node:
        """Return a copy of a value; of one of several views of what the graph computes, the view of one copy."""
        base = storage_node(value)
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


__all__ = ["may_lie_in_written_input", "reinplace_inplaceable_ops"]
