"""Plan the regions of a schedule, and decide which graphs need a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._inductor.schedule_notes import notes_of
from torch_overlay._inductor.scheduler_nodes import (
    fx_origins,
    stream_operation,
    user_stream,
)
from torch_overlay._inductor.streams.buffers import drop_inner_promises, read_buffers
from torch_overlay._inductor.streams.graph_facts import (
    leaving,
    saved_on_streams,
)
from torch_overlay._inductor.streams.host_copies import AsyncCopy
from torch_overlay._inductor.streams.planner import plan_streams
from torch_overlay._inductor.streams.reader import RegionReader


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay._inductor.streams.plan import Plan


@dataclass(frozen=True)
class Region:
    """A planned list of scheduler nodes: its plan, and for each node the index of its operation in the plan."""

    plan: Plan
    index: dict[BaseSchedulerNode, int]
    devices: dict[int, int]
    numbers: dict[int, int]
    private: frozenset[int]  # streams that only this call sees
    enclosed: bool
    concerned: frozenset[int]  # user streams whose order or memory the region affects


def needs_plan(scheduler: Scheduler) -> bool:
    """True if a node of the graph runs on a side stream, carries a boundary token, or belongs to the user's stream
    program; if an input that the graph frees may be a side stream's memory; or if the host computes beside copies for
    which it doesn't wait.
    """
    notes = notes_of(scheduler)
    known = notes.needs_plan
    if known is None:
        known = bool(leaving() or saved_on_streams()) or any(_concerns_streams(scheduler, n) for n in scheduler.nodes)
        if not known and any(isinstance(n.node, AsyncCopy) for n in scheduler.nodes):
            known = any((device := n.get_device()) is not None and device.type == "cpu" for n in scheduler.nodes)
        notes.needs_plan = known
    return known


def _concerns_streams(scheduler: Scheduler, node: BaseSchedulerNode) -> bool:
    if user_stream(scheduler, node) or stream_operation(node) is not None:
        return True
    return any(fact_of(origin).has_tokens for origin in fx_origins(node))


def plan_region(
    scheduler: Scheduler,
    nodes: Sequence[BaseSchedulerNode],
    enclosed: bool,
    known: Mapping[int, frozenset[Token]] | None = None,
) -> Region:
    """Plan the given nodes, in their order. `known`: see `plan_streams`."""
    reader = RegionReader(scheduler, nodes, enclosed)
    reader.read()
    buffers = read_buffers(reader)
    drop_inner_promises(reader, buffers)
    plan = plan_streams(reader.ops, buffers, reader.promised(), known)
    private = frozenset(reader.tokens.private)
    concerned = reader.tokens.concerned.union(*({b.stream, b.saved_on or b.stream} for b in buffers))
    return Region(plan, reader.index, reader.devices, reader.tokens.numbers, private, enclosed, frozenset(concerned))
