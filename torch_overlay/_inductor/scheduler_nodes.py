"""Query Inductor's scheduler nodes: what a node computes, on which stream, in whose memory, and how long."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor import ir, scheduler as sched
from torch._inductor.virtualized import V
from torch._library.utils import mutates_and_returns_first_arg

from torch_overlay._functorch.device_peaks import bytes_per_us, flops_per_us
from torch_overlay._functorch.streams.fx import is_stream_operator, is_view_operator
from torch_overlay._functorch.streams.ids import CALLERS_STREAM


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler


def user_stream(scheduler: Scheduler, node: BaseSchedulerNode) -> int:
    """Return the registry index of the stream that a node was placed on; 0 without a placement."""
    return scheduler.stream_idx_to_user_obj_idx.get(scheduler.get_node_stream(node), CALLERS_STREAM)


def stream_operation(node: BaseSchedulerNode) -> torch._ops.OpOverload | None:
    """Return the operation of the user's stream program that a node carries out on the host, if it is one."""
    overload = getattr(node.node, "op_overload", None)
    if isinstance(overload, torch._ops.OpOverload) and is_stream_operator(overload):
        return overload
    return None


def makes_lazy_zeros(node: BaseSchedulerNode) -> bool:
    """True for a node whose result is a tensor of zeros that has no memory, as a gradient of `sgn` is."""
    return getattr(node.node, "op_overload", None) is torch.ops.aten._efficientzerotensor.default


def is_part(output: sched.SchedulerBuffer) -> bool:
    """True for a buffer that is one slice of a concatenation: the other slices are written beside it."""
    layout = getattr(output.node, "layout", None)
    if not isinstance(layout, ir.NonOwningLayout):
        return False
    return isinstance(V.graph.try_get_buffer(layout.view.get_name()), ir.ConcatKernel)


def fx_origins(node: BaseSchedulerNode) -> Iterable[torch.fx.Node]:
    """Yield the FX nodes of this graph that a scheduler node computes; in a subgraph, not the node that calls it."""
    graph = V.graph.module.graph  # type: ignore[union-attr]
    for part in node.get_nodes():
        if part.node is not None:
            yield from (n for n in part.node.get_origins() if n.op == "call_function" and n.graph is graph)


def kernel_of(output: Any) -> str | None:
    """Return the name of the kernel of which a buffer is one of several outputs."""
    if isinstance(output, ir.TensorBox | ir.StorageBox):
        output = output.data
    return output.inputs[0].get_name() if isinstance(output, ir.MultiOutput) else None  # type: ignore[union-attr]


def viewed_by_call(kernel: Any) -> set[str]:
    """Return the buffers that a kernel returns a view of, if it is a call that launches nothing (`view_as_real`)."""
    is_view_call = isinstance(kernel, ir.FallbackKernel) and is_view_operator(kernel.op_overload)
    return set(kernel.get_inputs_that_alias_output()) if is_view_call else set()


def updated_by_call(kernel: Any) -> set[str]:
    """Return the buffer that a kernel updates in place and returns under a name of its own, as `index_put_` does."""
    is_call = isinstance(kernel, ir.FallbackKernel) and isinstance(kernel.op_overload, torch._ops.OpOverload)
    updates = is_call and mutates_and_returns_first_arg(kernel.op_overload)
    return {kernel.inputs[0].get_name()} if updates else set()


def owner_of(name: str) -> str:
    """Return the buffer whose memory a buffer lies in: for an update what it updates, for a slice the concatenation,
    for a view that a call returns, alone or in a list, what it views.
    """
    while True:
        name = V.graph.scheduler.mutation_real_name.get(name, name)
        buffer = V.graph.try_get_buffer(name)
        call = V.graph.try_get_buffer(kernel_of(buffer) or name)
        if isinstance(layout := getattr(buffer, "layout", None), ir.NonOwningLayout):
            name = layout.view.get_name()
        elif len(same := viewed_by_call(call) or updated_by_call(call)) == 1:
            (name,) = same
        else:
            return name


def parts_of(buffer: Any) -> set[str]:
    """Return the other names under which operations write a buffer's memory: the kernel of which it is one of several
    outputs, and the slices of a concatenation.
    """
    kernel = kernel_of(buffer)
    found = {kernel} if kernel else set()
    if isinstance(buffer, ir.ConcatKernel):
        for part in buffer.inputs:
            found |= {part.get_name()} | parts_of(part)  # type: ignore[union-attr]
    return found


def is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type not in ("cpu", "meta")


def flops_of(node: BaseSchedulerNode) -> int | None:
    """Return the FLOPs of library kernels and matmul templates; upstream counts each call for its own statistics."""
    counted = counters["inductor"].get("flop_count")
    try:
        return node.estimate_flops()
    finally:
        if counted is None:
            counters["inductor"].pop("flop_count", None)
        else:
            counters["inductor"]["flop_count"] = counted


def device_us(node: BaseSchedulerNode) -> float | None:
    """Return the least device time of a node's kernel, by what it reads, writes and computes; None if not known."""
    device = node.get_device()
    if isinstance(node, sched.NopKernelSchedulerNode):
        return 0.0
    if device is None or device.type == "cpu":
        return None
    if any(s.free_symbols for s in _sizes(node)):
        return None
    time = node.get_read_write_buffers_sizes() / bytes_per_us(device.index or 0)
    if node.is_extern() or node.is_template():
        flops = flops_of(node)
        if flops is None:
            return None
        time = max(time, flops / flops_per_us(device.index or 0, element_size(node)))
    return time


def _sizes(node: BaseSchedulerNode) -> list[Any]:
    found: list[Any] = []
    for output in node.get_outputs():
        layout = getattr(output.node, "layout", None)
        found += getattr(layout, "size", ())
    return [s for s in found if hasattr(s, "free_symbols")]


def element_size(node: BaseSchedulerNode) -> int:
    sizes = [o.node.get_dtype().itemsize for o in node.get_outputs() if o.node is not None and o.node.get_size()]
    return max(sizes, default=4)
