"""Compute into parts of tensors that the program names, and leave the other parts alone.

`torch.mm(x, w, out=out[:n])` is a kernel and a copy of its result after functionalization, and one kernel again here.

Note [No aligned copies of an input in parts] Kernels are compiled for inputs that are aligned; a misaligned one is
copied at a call, as a whole, and back after it is written (Note [Aligned copies and the caller's memory]). Where a
program with streams writes a part of an input, the copy back would write the other parts, too, which other code may be
using by then. Kernels are compiled for such an input without any alignment, and it is never copied.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.fx_passes.reinplace import _SCATTER_OP_TO_VIEW
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from torch_overlay._functorch.streams.fx import is_synchronization, is_view, node_stream, viewed
from torch_overlay._inductor.streams.copies_in_place import geometry
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, register


if TYPE_CHECKING:
    from torch.fx import Graph, Node

_COPY = torch.ops.aten.copy_.default


def computed_in_place(graph: Any, node: Node) -> bool:
    """Make a library's kernel write its result into the part that `node` copies it to: `torch.mm(x, w, out=out[:n])`.

    False, with nothing changed, where something else reads the result, the kernel can't write there, or, after the
    kernel, the host waits for others who may use the target's memory, or an operation does.
    """
    if node.target is not _COPY:
        return False
    args: Any = node.args
    part, result = args[:2]
    if not isinstance(result, torch.fx.Node) or len(result.users) > 1 or not _has_streams(graph):
        return False
    kernel, target = graph.env[result], graph.env[part]
    while isinstance(kernel, ir.MutableBox):
        kernel = kernel.data
    if type(kernel) is not ir.ExternKernelOut or not isinstance(target.data, ir.BaseView) or kernel.output_view:
        return False
    try:
        view = ir.ExternKernel.convert_to_reinterpret_view(target.data)
    except NotImplementedError:
        return False
    same = (view.get_dtype(), view.get_device()) == (kernel.get_dtype(), kernel.get_device())
    if not same or list(view.get_size()) != list(kernel.get_size()) or node_stream(result) != node_stream(node):
        return False
    name = view.get_name()
    graph.mark_buffer_mutated(name)  # what reads the old values becomes an operation
    since = graph.operations[graph.operations.index(kernel) :]
    if any(name in op.get_read_names() or name in op.get_mutation_names() for op in since):
        return False
    if any(is_synchronization(origin) for op in since for origin in op.get_origins()):
        return False
    kernel.layout, kernel.output_view = ir.MutationLayoutSHOULDREMOVE(view), view
    kernel.origins = OrderedSet([*kernel.origins, node])
    return True


def _has_streams(graph: Any) -> bool:
    return any(node_stream(n) for n in graph.module.graph.nodes)


def write_back_parts(graph: Graph) -> None:
    """Write back only the part of an input that the program updates, where upstream doesn't find it below other views
    than slices: `z.real.add_(x)`, `x.view(4, -1)[1].add_(y)`. All else that reads the new value has to be results.
    """
    for write in graph.find_nodes(op="call_function", target=_COPY):
        args: Any = write.args
        given, new = args[:2]
        if given.op != "placeholder" or not _is_returned_only(new, write):
            continue
        part, value, steps = _updated_part(given, new)
        if not steps or part.is_complex() or part.device.type == "cpu" or part.dtype != value.meta["val"].dtype:
            continue
        if viewed(value) is not given:
            register()
            with graph.inserting_before(write):
                made = graph.call_function(COPY_ASYNC, (given, value))
            made.meta = {**write.meta, "val": None, DESTINATION: part}
        elif geometry(value.meta["val"]) != geometry(part):  # else it is there, as after `add_(0)`
            continue
        graph.erase_node(write)
        new.replace_all_uses_with(given)
        for step in steps:
            if not step.users:
                graph.erase_node(step)


def _is_returned_only(value: Node, write: Node) -> bool:
    """True if apart from `write` only the caller gets the value, or views of it."""
    users = [user for user in value.users if user is not write]
    same = not users or geometry(value.meta["val"]) == geometry(write.args[0].meta["val"])  # type: ignore[union-attr]
    return same and all(_is_result(user) for user in users)


def _is_result(user: Node) -> bool:
    return user.op == "output" or (is_view(user) and all(map(_is_result, user.users)))


def _updated_part(given: Node, new: Node) -> tuple[torch.Tensor, Node, list[Node]]:
    """Return the least part of an input that differs in its new value, as far as scatters tell, that part's new value,
    and the nodes that make all of the new value of it.
    """
    part, value = given.meta["val"], new
    steps: list[Node] = []
    while True:
        views: list[Any] = []
        scatter: Any = value
        while scatter.op == "call_function" and is_view(scatter):
            views.append(scatter)
            scatter = scatter.args[0]
        if scatter.target not in _SCATTER_OP_TO_VIEW or viewed(base := scatter.args[0]) is not given:
            return part, value, steps
        with V.fake_mode:
            whole = base.meta["val"]
            for view in reversed(views):
                whole = _applied(view.target, whole, view, 1)
            is_read = any(len(node.users) > 1 for node in (*views, scatter) if node is not new)
            if is_read or geometry(whole) != geometry(part):
                return part, value, steps
            part = _applied(_SCATTER_OP_TO_VIEW[scatter.target], base.meta["val"], scatter, 2)
        steps += [*views, scatter, base]
        value = scatter.args[1]


def _applied(view: Any, base: torch.Tensor, node: Node, first: int) -> torch.Tensor:
    """Return a view of a fake tensor by a node's arguments from the index `first` on."""
    args, kwargs = torch.fx.map_arg((node.args[first:], node.kwargs), lambda n: n.meta["val"])  # type: ignore[misc]
    return view(base, *args, **kwargs)


def inputs_in_parts(graph: Graph) -> set[str]:
    """Return the names of inputs of which a part is written in place."""
    writes = graph.find_nodes(op="call_function", target=COPY_ASYNC)
    writes += [n for n in graph.find_nodes(op="call_function", target=_COPY) if is_view(n.args[0])]
    return {str(memory.target) for write in writes if (memory := viewed(write.args[0])).op == "placeholder"}


def assume_unaligned(graph: Any, names: set[str]) -> None:
    """Compile kernels for these inputs without any alignment: Note [No aligned copies of an input in parts]. `graph` is
    a GraphLowering before it lowers anything.
    """
    inputs = [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"]
    ours = frozenset(i for i in graph.inputs_to_check or () if inputs[i] in names)
    graph.unaligned_buffers.update(inputs[i] for i in ours)
    graph.inputs_to_check = [i for i in graph.inputs_to_check or () if i not in ours]
    graph._region_unaligned_inputs = ours
