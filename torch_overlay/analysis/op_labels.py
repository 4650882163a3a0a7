"""Readable names for the operations of a stream plan: `gelu` in place of `op7_op8`.

Plan and operations are plain data that name scheduler nodes. What a node computes is known only while its region is
generated, which is when observers of `plan_log` are called: `op_labels(plan)` is for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

    from torch_overlay._inductor.stream_planner import Plan

# Changes of layout and type, named only where an operation does nothing else.
_SILENT = {
    *("_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "detach", "expand", "full", "permute", "reshape"),
    *("scalar_tensor", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view", "zeros", "zeros_like"),
}


def _origin_name(origin: torch.fx.Node) -> str:
    target = origin.meta.get("original_aten") or origin.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", str(target))


def _label(node: BaseSchedulerNode) -> str:
    if isinstance(node.node, ir.DeviceCopy):
        device = node.get_device()
        return f"copy to {device.type}" if device is not None else "copy"
    names: dict[str, None] = {}
    for part in node.get_nodes():
        if part.node is None:
            continue
        # The origins of an extern kernel are also those of the inputs that it made Inductor compute first.
        own = part.node.get_origin_node() if part.is_extern() else None
        origins = [n for n in ([own] if own else part.node.get_origins()) if n.op == "call_function"]
        names.update(dict.fromkeys(_origin_name(n) for n in sorted(origins)))
    spoken = [name for name in names if name not in _SILENT]
    return "+".join(spoken or names) or node.get_name()


def op_labels(plan: Plan) -> dict[str, str]:
    """What each operation of the plan computes, by the operation's name. Empty where no region is being generated."""
    scheduler = getattr(V.graph, "scheduler", None)
    if scheduler is None:
        return {}
    nodes = {node.get_name(): node for node in scheduler.nodes}
    return {op.name: _label(nodes[op.name]) for op in plan.ops if op.name in nodes}
