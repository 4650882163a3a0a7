"""Report the copies between device and host for which the host waits, each with the reason: for `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.fx import blocks_host, is_asynchronous_copy, viewed
from torch_overlay._inductor.streams.copies_in_place import READ_LATER
from torch_overlay._inductor.streams.host_copies import COPY_ASYNC, DESTINATION, is_pinned, RETURNED


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node


@dataclass(frozen=True)
class BlockingCopy:
    stack_trace: str
    reason: str


_observers: list[Callable[[list[BlockingCopy]], None]] = []


def subscribe(observer: Callable[[list[BlockingCopy]], None]) -> Callable[[], None]:
    """Call `observer` with the blocking copies of every graph from now on; the function returned ends that."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def publish(graph: Graph) -> None:
    """Report a graph's blocking copies to the observers, when no pass changes the graph any more."""
    if _observers:
        found = [BlockingCopy(node.meta.get("stack_trace") or "", why) for node in graph.nodes if (why := reason(node))]
        for observer in tuple(_observers):
            observer(found)


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
    host, root = (part, memory) if part.device.type == "cpu" else (given, viewed(source))  # type: ignore[arg-type]
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
        or (part.stride() == expanded.stride() and _is_dense(part) and _is_dense(expanded))
    )
    side: Any = part if host is part else expanded
    return not alike and not side.is_contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    from torch._prims_common import is_non_overlapping_and_dense_or_false

    return is_non_overlapping_and_dense_or_false(tensor)


__all__ = ["BlockingCopy", "publish", "reason", "subscribe"]
