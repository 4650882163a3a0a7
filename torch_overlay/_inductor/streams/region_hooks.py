"""Replace functions of Inductor's scheduler that generate the regions of a graph, and part it (seams)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.virtualized import V

from torch_overlay import config
from torch_overlay._inductor.offload.codegen import is_copy
from torch_overlay._inductor.streams.around_partitions import ordered_around, reason_to_cut
from torch_overlay._inductor.streams.planned_region import needs_plan
from torch_overlay._inductor.streams.regions import planned


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode


_OTHER_WRAPPER = (
    "torch_overlay: this graph uses CUDA streams or events, and the {} can't generate them yet. Compile it with the "
    "Python wrapper (torch._inductor.config.{} = False), take the streams out of the {} function, or give upstream's "
    "handling back with torch_overlay.config.streams = False."
)
CPP_WRAPPER = _OTHER_WRAPPER.format("C++ wrapper (cpp_wrapper, AOTInductor)", "cpp_wrapper", "exported")
FX_WRAPPER = _OTHER_WRAPPER.format("FX wrapper (fx_wrapper)", "fx_wrapper", "compiled")

CROSS_DEVICE = "cross-device ops"  # upstream's reason


class UnsupportedStreams(RuntimeError):
    """A graph with streams that no wrapper can be generated for."""


def codegen(original: Callable[..., None], scheduler: Any, nodes: Sequence[BaseSchedulerNode]) -> None:
    if not config.streams or not needs_plan(scheduler):
        return original(scheduler, nodes)
    if V.graph.cpp_wrapper:
        raise UnsupportedStreams(CPP_WRAPPER)
    if V.graph.fx_wrapper:
        raise UnsupportedStreams(FX_WRAPPER)
    with planned(scheduler, nodes):
        return original(scheduler, nodes)


def codegen_partitions(original: Callable[..., None], scheduler: Any) -> None:
    if not config.streams:
        return original(scheduler)
    with ordered_around(scheduler):
        return original(scheduler)


def should_partition(original: Callable[..., str | None], scheduler: Any, node: BaseSchedulerNode) -> str | None:
    """Return why the graph is partitioned at a node, or None."""
    reason = original(scheduler, node)
    if reason == CROSS_DEVICE and is_copy(node) and config.cudagraphs == "relaunch":
        return None  # the host's side is a slab, whose address doesn't change
    if reason is None and config.streams:
        return reason_to_cut(scheduler, node)
    return reason


__all__ = ["UnsupportedStreams", "codegen", "codegen_partitions", "should_partition"]
