"""Notes on what Inductor makes of one graph, while it generates code."""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch_overlay.notes import Notes


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch._inductor.scheduler import BaseSchedulerNode

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay._inductor.relaunch.notes import Partitions


@dataclasses.dataclass
class GraphNotes(Notes):
    """Notes on a graph that is lowered (`GraphLowering`)."""

    # Partitions that get CUDA graphs, and operations that are split off; None if the graph isn't partitioned.
    partitions: Partitions | None = None
    # For each result of a forward, the stream whose memory it is: `streams.graph_facts`.
    owners: tuple[int | None, ...] = ()
    # Positions of inputs whose alignment the code of planned regions sees to, or doesn't need: `streams.alignment`.
    unchecked: frozenset[int] = frozenset()


@dataclasses.dataclass
class ScheduleNotes(Notes):
    """Notes on a schedule (`Scheduler`). Streams are registry indices."""

    # Buffer -> the stream whose memory it is; None before a region is planned.
    memory: dict[str, int] | None = None
    # The `RegionEmitter` that writes the plan of the region whose lines are generated now.
    region: Any = None
    # Between partitions, stream -> the states of other streams that it has waited for; empty if all is one region.
    known: Mapping[int, frozenset[Token]] = dataclasses.field(default_factory=dict)
    # The streams that need not wait for more before the caller goes on.
    settled: frozenset[int] = frozenset()
    # Answers of the functions of these names, once asked.
    needs_plan: bool | None = None
    has_several_devices: bool | None = None
    # Node -> the names of the stores of saved tensors after which it has to come, and the buffers on the host for them.
    awaited_stores: Mapping[BaseSchedulerNode, Collection[str]] = dataclasses.field(default_factory=dict)
    slabs: Collection[str] = ()


@dataclasses.dataclass
class WrapperNotes(Notes):
    """Notes on what writes a generated module (`PythonWrapperCodegen`)."""

    regions: int = 0  # that are written already
    included: set[str] = dataclasses.field(default_factory=set)  # headers in a C++ module
    raw_stream: str | None = None  # that the kernel call which is being written is launched on


def active_region(scheduler: Any) -> Any:
    """Return the emitter of the region whose lines are generated now; None outside of planned regions."""
    return ScheduleNotes.of(scheduler).region if scheduler is not None else None
