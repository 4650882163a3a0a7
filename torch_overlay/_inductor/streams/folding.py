"""Move branches that are too small for a stream of their own to the caller's stream.

A branch on a side stream can't be fused with what surrounds it: it costs a launch of its own, an allocation for each
value that leaves it, and a fork and a join. Sixteen pointwise blocks on four streams are five kernels and seventeen
allocations, where one kernel and one allocation suffice; on an H200 that is 87 us of host time against 24. What a
branch can gain is at most the device time of its own work. So a branch that consists of pointwise work and needs less
device time than a launch costs runs on the caller's stream, where it is fused. Since order in a graph is data
dependence (Note [Streams are placement, dependencies are order] in `streams.planner`), moving a node to another stream
is always legal. What the caller may rely on about the branch's stream stays true: the nodes come after what the stream
held before, and the stream is ordered after them at the exit. A branch whose result the caller gets stays where it is:
that result is memory of the branch's stream, which the caller may use there and drop while the stream still reads it.
"""

from __future__ import annotations

import logging
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.device_peaks import bytes_per_us
from torch_overlay._functorch.streams.facts import add_after, add_promised, fact_of
from torch_overlay._functorch.streams.fx import is_stream_op, is_view, node_stream, place_on, view_chain
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, is_copy_stream
from torch_overlay._functorch.streams.tokens import CALLER, state


if TYPE_CHECKING:
    from torch.fx import Graph, Node

log = logging.getLogger(__name__)

_ALSO_POINTWISE = frozenset(
    (
        torch.ops.aten.copy_.default,
        torch.ops.aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    )
)


def _device(node: Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _is_pointwise(node: Node) -> bool:
    """True if Inductor fuses the node into a consumer or a neighbour, and the node stays on one device."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if not (torch.Tag.pointwise in target.tags or is_view(node) or target in _ALSO_POINTWISE):
        return False
    devices = {_device(n) for n in (node, *node.all_input_nodes)}
    return len(devices) == 1 and None not in devices and torch.device("cpu") not in devices


def _is_private_branch(node: Node) -> bool:
    """True if the user forked the node from the caller's stream and joined it again. Otherwise folding would make one
    stream wait for the other.
    """
    fact = fact_of(node)
    return CALLER in (fact.after or ()) and CALLER in fact.promises


def _bytes(node: Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        hint = size if isinstance(size, int) else size.node.hint
        if hint is None:
            return None
        count *= hint
    return count


def handed_out(graph: Graph, is_backward: bool) -> set[int]:
    """Return the positions of the outputs that the caller gets: all outputs of a backward; a forward's others are kept
    for the backward.
    """
    (output,) = graph.find_nodes(op="output")
    values: Any = output.args[0]
    positions = range(len(values)) if isinstance(values, (list, tuple)) else range(1)
    visible = output.meta.get("user_visible_output_idxs")
    return set(positions) if is_backward or visible is None else set(positions) & set(visible)


def _results(graph: Graph, is_backward: bool) -> set[Node]:
    """Return the nodes whose memory the caller gets."""
    (output,) = graph.find_nodes(op="output")
    values: Any = output.args[0]
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    found: set[Node] = set()
    for position in handed_out(graph, is_backward):
        if isinstance(value := values[position], torch.fx.Node):
            found.update(view_chain(value))
    return found


def _device_us(branch: list[Node]) -> float | None:
    """Return the time that the branch needs on the device if it is one kernel: the time to read its inputs and to write
    its results.
    """
    inside = set(branch)
    moved = {n for node in branch for n in node.all_input_nodes if n not in inside}
    moved |= {n for n in branch if any(user not in inside for user in n.users)}
    total = 0
    for node in moved:
        size = _bytes(node)
        if size is None:
            return None
        total += size
    device = next((d for n in branch if (d := _device(n)) is not None), None)
    return total / bytes_per_us(device.index or 0) if device is not None else None


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
        if (
            is_copy_stream(stream)
            or stream in visible
            or not all(_is_pointwise(n) and _is_private_branch(n) for n in branch)
        ):
            continue
        if not results.isdisjoint(branch):
            continue
        time = _device_us(branch)
        if time is None or time >= limit_us:
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
