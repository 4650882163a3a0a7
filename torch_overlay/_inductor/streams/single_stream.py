"""Find work that is too short for a stream of its own: branches that run on the caller's stream (`fold_branches`), and
regions that keep to one stream while the device waits for its host (`follows_one_stream_when_idle`).

Note [Short branches]
A branch on a side stream can't be fused with what surrounds it: it costs a launch of its own, an allocation for each
value that leaves it, and a fork and a join. Sixteen pointwise blocks on four streams are five kernels and seventeen
allocations, where one kernel and one allocation suffice; on an H200 that is 87 us of host time against 24. What a
branch can gain is at most the device time of its own work. So a branch that consists of pointwise work and needs less
device time than a launch costs runs on the caller's stream, where it is fused. Since order in a graph is data
dependence (Note [Streams are placement, dependencies are order] in `streams.planner`), moving a node to another stream
is always legal. What the caller may rely on about the branch's stream stays true: the nodes come after what the stream
held before, and the stream is ordered after them at the exit. A branch whose result the caller gets stays where it is:
that result is memory of the branch's stream, which the caller may use there and drop while the stream still reads it.

Note [Streams can't pay on an idle device]
A kernel that needs less device time than the host needs to launch the next one has ended when the next one arrives: on
whatever streams they are, two such kernels never run side by side. Only the cost of the streams remains, some 35 us of
217 for eight experts of three kernels each (switches of the current stream, records and waits, kernels after a wait,
memory that no two streams share). While the device has a queue of launches, the same kernels do run side by side. Which
of the two is the case can be queried when the region is entered: if the caller's stream and the side streams hold
nothing, `enter` returns the caller's stream for each of them, and the region's records, waits and switches are left out
(`multi_stream` is False). The side streams are ordered before the region when it is entered, or hold nothing, and after
it when it is left. The launches, their order and the memory plan are the same in both cases.

That is right for any region whose side streams fork from the caller's stream and join it; it can't lose where each
kernel is short. A region with records or synchronisations of the user's, with events of the caller, with copies, or
with results in a side stream's memory always runs as planned, and so does a captured one.
"""

from __future__ import annotations

import logging
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils import _pytree as pytree

from torch_overlay._functorch.device_peaks import bytes_per_us
from torch_overlay._functorch.streams.facts import add_after, add_promised, fact_of
from torch_overlay._functorch.streams.fx import device_of, is_stream_op, is_view, node_stream, place_on, view_chain
from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM, is_copy_stream
from torch_overlay._functorch.streams.tokens import state
from torch_overlay._inductor.scheduler_nodes import device_us, fx_origins, owner_of, stream_operation
from torch_overlay._inductor.streams.plan import HOST


if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch.fx import Graph, Node

    from torch_overlay._inductor.streams.planned_region import PlannedRegion


def _is_forked_and_joined(node: BaseSchedulerNode) -> bool:
    """True if the user forked what this node computes from the caller's stream, and joined it again."""
    known = [fact for n in fx_origins(node) if node_stream(n) and (fact := fact_of(n)).is_placed]
    return bool(known) and all(fact.is_forked_and_joined for fact in known)


def _hands_out(region: PlannedRegion) -> bool:
    """True if the caller gets memory of a side stream, which it may use there and drop while that stream still reads
    it.
    """
    graph: Any = V.graph
    for position in handed_out(graph.module.graph, graph.is_backward):
        output = graph.graph_outputs[position]
        if not isinstance(output, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)):
            stream = region.plan.memory.get(owner_of(output.get_name()))
            if stream is not None and callers_device(stream) is None:
                return True
    return False


def follows_one_stream_when_idle(region: PlannedRegion, limit_us: float) -> bool:
    """True for a region whose side streams can't pay on an idle device, as each of its kernels takes less than
    `limit_us`, what a launch costs. With 0 there is none.
    """
    plan = region.plan
    if not limit_us or region.enclosed or plan.boundary_waits:
        return False
    placed = {op.stream for op in plan.ops if op.stream is not None}
    if all(callers_device(stream) is not None for stream in placed) or _hands_out(region):
        return False
    if any(stream == HOST or is_copy_stream(stream) for stream in placed):
        return False
    if any(op.blocking or op.requires for op in plan.ops):
        return False
    if any(stream == HOST for event in plan.events for _, stream in event.waits):
        return False
    for node, here in region.index.items():
        stream = plan.ops[here].stream
        if stream_operation(node) is not None:
            return False
        time = device_us(node)
        if time is None or time >= limit_us:
            return False
        if stream is not None and callers_device(stream) is None and not _is_forked_and_joined(node):
            return False
    return True


log = logging.getLogger(__name__)

_UNKNOWN_SIZE = 1 << 40  # no branch that has one is folded

_ALSO_POINTWISE = frozenset(
    (
        torch.ops.aten.copy_.default,
        torch.ops.aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    )
)


def _is_pointwise(node: Node) -> bool:
    """True if Inductor fuses the node into a consumer or a neighbour, and the node stays on one device."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if not (torch.Tag.pointwise in target.tags or is_view(node) or target in _ALSO_POINTWISE):
        return False
    devices = {device_of(n) for n in (node, *node.all_input_nodes)}
    return len(devices) == 1 and None not in devices and torch.device("cpu") not in devices


def handed_out(graph: Graph, is_backward: bool) -> set[int]:
    """Return the positions of the outputs that the caller gets: all outputs of a backward; a forward's others are kept
    for the backward.
    """
    output = graph.output_node()
    positions = set(range(len(pytree.tree_leaves(output.args[0]))))
    visible = output.meta.get("user_visible_output_idxs")
    return positions if is_backward or visible is None else positions & set(visible)


def _results(graph: Graph, is_backward: bool) -> set[Node]:
    """Return the nodes whose memory the caller gets."""
    values = pytree.tree_leaves(graph.output_node().args[0])
    results = (values[position] for position in handed_out(graph, is_backward))
    return {node for value in results if isinstance(value, torch.fx.Node) for node in view_chain(value)}


def _device_us(branch: list[Node]) -> float:
    """Return the time that the branch needs on the device if it is one kernel: the time to read its inputs and to write
    its results.
    """
    inside = set(branch)
    moved = {n for node in branch for n in node.all_input_nodes if n not in inside}
    moved |= {n for n in branch if any(user not in inside for user in n.users)}
    values = [value for n in moved if isinstance(value := n.meta.get("val"), torch.Tensor)]
    total = sum(optimization_hint(v.numel() * v.element_size(), fallback=_UNKNOWN_SIZE) for v in values)
    return total / bytes_per_us(branch[0].meta["val"].device.index or 0)


def fold_branches(graph: Graph, limit_us: float, is_backward: bool = False) -> list[int]:
    """Move branches that can't pay to the caller's stream, and return the streams that were folded."""
    branches: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (stream := node_stream(node)) and not is_stream_op(node):
            branches.setdefault(stream, []).append(node)
    visible = {arg for n in graph.nodes if is_stream_op(n) for arg in n.args if isinstance(arg, int)}
    results = _results(graph, is_backward)
    folded = []
    for stream, branch in branches.items():
        if is_copy_stream(stream) or stream in visible or not results.isdisjoint(branch):
            continue
        # Without the user's fork and join, folding would make one stream wait for the other.
        if not all(_is_pointwise(n) and fact_of(n).is_forked_and_joined for n in branch):
            continue
        if (time := _device_us(branch)) >= limit_us:
            continue
        for node in branch:
            place_on(node, CALLERS_STREAM)
            add_after(node, (state(stream),))
            add_promised(node, (state(stream),))
        folded.append(stream)
        log.debug(
            "stream %d: %d pointwise nodes, %.2f us on the device, run on the caller's stream",
            stream,
            len(branch),
            time,
        )
    return folded
