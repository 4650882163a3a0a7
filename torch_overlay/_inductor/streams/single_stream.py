"""Find the regions that keep to one stream while the device waits for its host.

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

from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import callers_device, is_copy_stream
from torch_overlay._inductor.scheduler_nodes import device_us, fx_origins, owner_of, stream_operation
from torch_overlay._inductor.streams.folding import handed_out
from torch_overlay._inductor.streams.plan import HOST


if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

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


__all__ = ["follows_one_stream_when_idle"]
