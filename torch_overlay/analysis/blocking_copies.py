"""Find the copies between device and host for which the host waits, each with the reason: for `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from torch_overlay._functorch.streams.fx import blocks_host, is_asynchronous_copy, storage_node
from torch_overlay._inductor.streams.copies_in_place import READ_LATER
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, is_pinned, RETURNED


if TYPE_CHECKING:
    from torch.fx import Node


@dataclass(frozen=True)
class BlockingCopy:
    stack_trace: str
    reason: str


def blocking_copies(module: torch.nn.Module) -> list[BlockingCopy]:
    """Return those in the graph that Inductor has lowered, and in the graphs that it calls."""
    graphs = [m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
    found = [(node, why) for graph in graphs for node in graph.nodes if (why := reason(node))]
    return [BlockingCopy(node.meta.get("stack_trace") or "", why) for node, why in found]


def reason(node: Node) -> str:
    """Return why the host waits for a copy; empty if it doesn't, as far as that is known before the code runs: a copy
    also blocks where memory of the caller isn't pinned.
    """
    if node.target is torch.ops.aten._local_scalar_dense.default:
        return "the host reads the number"
    if RETURNED in node.meta:
        return "the caller gets the host memory that is copied, and may write there; it isn't pinned"
    if is_asynchronous_copy(node):
        return "the function uses no stream: it is compiled as by stock PyTorch, where such a copy blocks"
    if blocks_host(node):
        return "it is made without non_blocking=True"
    if node.target is not COPY_ASYNC:
        return ""
    if READ_LATER in node.meta:
        return "what was in the host memory before is read later, so that the host copies it: the copy into it waits"
    memory, source = node.args[:2]
    part, given = node.meta[DESTINATION], source.meta["val"]  # type: ignore[union-attr]
    if part.device == given.device:  # what a program updates of an input
        return ""
    host, root = (part, memory) if part.device.type == "cpu" else (given, storage_node(source))  # type: ignore[arg-type]
    if root.op != "placeholder" and not is_pinned(root):  # type: ignore[union-attr]
        return "the host memory isn't pinned"
    if _is_gathered(part, given, host):
        return "the host copies elements that don't lie next to each other one by one, in eager, too"
    return ""


def _is_gathered(part: torch.Tensor, given: torch.Tensor, host: torch.Tensor) -> bool:
    """True if the copy needs temporaries: PyTorch copies memory directly only if it is contiguous, or laid out alike on
    both sides.
    """
    expanded = given.expand_as(part)
    alike = part.dtype == given.dtype and (
        (part.is_contiguous() and expanded.is_contiguous())
        or (part.stride() == expanded.stride() and all(map(is_non_overlapping_and_dense_or_false, (part, expanded))))
    )
    side: Any = part if host is part else expanded
    return not alike and not side.is_contiguous()
