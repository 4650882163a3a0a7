"""Keep updates of parts of one tensor from several streams in place.

`torch.mm(x, w, out=out[:n])` on one stream and `out[n:].copy_(y)` on another are, after functionalization, two
scatters: each makes a whole new tensor, and the second reads what the first made. Inductor turns scatters back into
updates in place where it expects to lose no fusion. Across streams there is no fusion to lose, but for each part a
whole tensor is copied, and another stream is waited for. So such parts are updated in place wherever that is safe. So
are parts of an input in a graph with streams: the code around the graph may be using other parts of the input.

Note [No aligned copies of an input in parts] Kernels are compiled for inputs that are aligned; a misaligned one is
copied at a call, as a whole, and back after it is written (Note [Aligned copies and the caller's memory]). Where a
program with streams writes a part of an input, the copy back would write the other parts, too, which other code may be
using by then. Kernels are compiled for such an input without any alignment, and it is never copied.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.fx_passes import reinplace
from torch.utils._ordered_set import OrderedSet

from torch_overlay import config
from torch_overlay._functorch.streams.fx import is_stream_op, is_view, node_stream, viewed
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC
from torch_overlay._inductor.streams.new_node_placement import NewNodes
from torch_overlay._inductor.streams.pass_log import PassLog


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.fx import Graph, Node

_COPY = torch.ops.aten.copy_.default
IN_PLACE = "stream_scatter_in_place"  # in `meta`, of a scatter, while upstream decides: make it an update in place


def reinplace_inplaceable_ops_core(original: Callable[[Graph], None], graph: Graph) -> None:
    marked: list[Node] = []
    if config.streams and (log := PassLog.of(graph)) is not None:
        _remove_writes_of_what_is_there(graph)
        NewNodes(log.replaced(graph), log.before).place()  # the scatters are new in this pass
        marked = list(_shared(graph))
    for node in marked:
        node.meta[IN_PLACE] = True
    original(graph)
    for node in marked:
        del node.meta[IN_PLACE]


def scatter_always_uses_mutation(original: Callable[[Node], bool], node: Node) -> bool:
    return IN_PLACE in node.meta or original(node)


def computed_in_place(graph: Any, node: Node) -> bool:
    """Make a library's kernel write its result into the part that `node` copies it to: `torch.mm(x, w, out=out[:n])`.

    False, with nothing changed, where something else reads the result, the kernel can't write there, or an operation
    that was lowered after the kernel uses the target's memory.
    """
    if node.target is not _COPY or not config.streams:
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
    kernel.layout, kernel.output_view = ir.MutationLayoutSHOULDREMOVE(view), view
    kernel.origins = OrderedSet([*kernel.origins, node])
    return True


def _has_streams(graph: Any) -> bool:
    return any(node_stream(n) for n in graph.module.graph.nodes)


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


def _remove_writes_of_what_is_there(graph: Graph) -> None:
    """Remove scatters that put a part into its own place, as `cache[i] += v` does after it has updated the part."""
    for node in graph.find_nodes(op="call_function", target=reinplace._generalized_scatter):
        base, part, views = node.args
        shown: list[tuple[Any, ...]] = []
        while part is not base and isinstance(part, torch.fx.Node) and is_view(part):
            shown.insert(0, (part.target, part.args[1:], part.kwargs))
            part = part.args[0]
        if part is base and shown == [(view.target, tuple(view.args), view.kwargs) for view in views]:
            node.replace_all_uses_with(base)
            graph.erase_node(node)


def _shared(graph: Graph) -> Iterable[Node]:
    """Yield the scatters of each chain (the base of one is the result of another) whose values several streams use, in
    this graph or, if the base is an input, in the code around the graph.
    """
    has_streams = any(map(node_stream, graph.nodes))
    chains: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=reinplace._generalized_scatter):
        if node.meta["val"].device.type == "cpu":
            continue
        base: Any = node.args[0]
        chains[node] = chains.get(base, [])
        chains[node].append(node)
    for chain in {id(chain): chain for chain in chains.values()}.values():
        is_input = chain[0].args[0].op == "placeholder"  # type: ignore[union-attr]
        if has_streams and is_input or len({*map(node_stream, chain)}.union(*map(_streams_of_readers, chain))) > 1:
            yield from chain


def _streams_of_readers(node: Node) -> set[int]:
    """Return the streams on which a value is read, also through views."""
    found: set[int] = set()
    for user in node.users:
        if is_view(user):
            found |= _streams_of_readers(user)
        elif user.op == "call_function" and not is_stream_op(user):
            found.add(node_stream(user))
    return found
