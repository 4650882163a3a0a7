"""Keep notes on one schedule while Inductor generates its code: the only attribute that they add to a scheduler.

It is an attribute and no entry of a weak dictionary, because the notes name the scheduler's nodes, which name the
scheduler: only the garbage collector can free them together.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch._inductor.scheduler import BaseSchedulerNode

    from torch_overlay._functorch.streams.tokens import Token


@dataclasses.dataclass
class ScheduleNotes:
    """Notes on one schedule. Streams are registry indices.

    - `memory`: buffer -> the stream whose memory it is; None before a region is planned.
    - `region`: what writes the plan of the region whose lines are generated now (a `RegionEmitter`).
    - `known`: between partitions, stream -> the states of other streams that it has waited for; empty if the graph is
      one region. `settled`: the streams that need not wait for more before the caller goes on.
    - `needs_plan`, `has_several_devices`: answers of the functions of these names, once asked.
    - `awaited_stores`: node -> the stores of saved tensors after which it has to come, by name. `slabs`: the buffers on
      the host that they are in.
    """

    memory: dict[str, int] | None = None
    region: Any = None
    known: Mapping[int, frozenset[Token]] = dataclasses.field(default_factory=dict)
    settled: frozenset[int] = frozenset()
    needs_plan: bool | None = None
    has_several_devices: bool | None = None
    awaited_stores: Mapping[BaseSchedulerNode, Collection[str]] = dataclasses.field(default_factory=dict)
    slabs: Collection[str] = ()


def notes_of(scheduler: Any) -> ScheduleNotes:
    found = getattr(scheduler, "_stream_notes", None)
    if found is None:
        found = scheduler._stream_notes = ScheduleNotes()
    return found


def active_region(scheduler: Any) -> Any:
    """Return what writes the plan of the region whose lines are generated now; None outside of planned regions."""
    return notes_of(scheduler).region if scheduler is not None else None
