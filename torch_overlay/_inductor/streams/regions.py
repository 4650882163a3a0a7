"""Plan and generate the regions of a compiled graph.

Without CUDA graphs a compiled graph is one region: its boundary is the caller's. With CUDA graphs each partition is
captured by itself, so it forks its side streams from the caller's stream and joins them again, and so do the nodes
between partitions; `around_partitions` has the order around all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.codegen.wrapper import AllocateLine, KernelCallLine
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.tokens import CALLER
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import owner_of
from torch_overlay._inductor.streams.cpp_emitter import CppRegionEmitter
from torch_overlay._inductor.streams.emitter import RegionEmitter
from torch_overlay._inductor.streams.planned_region import plan_region, PlannedRegion
from torch_overlay._inductor.streams.wrapper_lines import BeginRegion, EndRegion, OnStream


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.streams.tokens import Token


@contextlib.contextmanager
def planned(scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode]) -> Iterator[None]:
    """Plan a region of these nodes, whose lines are generated inside, and write the plan into them."""
    known = _known_at_entry(scheduler)
    region = plan_region(scheduler, nodes, _is_enclosed(), known)
    _note_known(scheduler, known, region)
    emitter = (CppRegionEmitter if V.graph.cpp_wrapper else RegionEmitter)(scheduler, region)
    # A buffer that an earlier region allocated remains its stream's memory.
    notes = ScheduleNotes.of(scheduler)
    notes.memory = {**region.plan.memory, **(notes.memory or {})}
    outer, notes.region = notes.region, emitter
    try:
        emitter.begin()
        yield
        emitter.end()
    finally:
        notes.region = outer


def _is_enclosed() -> bool:
    """True if the region isn't all of the code that the caller calls, or if the caller can't know its side streams: a
    package of AOTInductor makes them itself.
    """
    return inductor_config.triton.cudagraphs or _is_partition() or V.graph.name is not None or V.graph.aot_mode


def _is_partition() -> bool:
    return hasattr(V.graph.wrapper_code, "parent_wrapper")


def _known_at_entry(scheduler: Scheduler) -> Mapping[int, frozenset[Token]]:
    """Return the states of other streams that each stream has waited for when a region between or inside of partitions
    begins. A captured graph forks its side streams itself.
    """
    known = ScheduleNotes.of(scheduler).known if V.graph.name is None else {}
    return {CALLERS_STREAM: known[CALLERS_STREAM]} if known and _is_partition() else known


def _note_known(scheduler: Scheduler, known: Mapping[int, frozenset[Token]], region: PlannedRegion) -> None:
    """Note which states the streams have waited for after the region. A graph's work is the caller's stream's work once
    the graph has been launched.
    """
    if known:
        ordered = frozenset() if _is_partition() else region.plan.after_caller
        joined = known[CALLERS_STREAM]
        notes = ScheduleNotes.of(scheduler)
        notes.known = {
            s: joined if s == CALLERS_STREAM else joined | {CALLER} if s in ordered else frozenset()
            for s in notes.known
        }
        settled = frozenset() if nested_streams() else notes.settled - region.concerned
        notes.settled = settled | ordered


def nested_streams() -> list[int]:
    """Return the user's streams inside of nested regions, which fork from the stream of the node that calls them."""
    bodies = [m for m in V.graph.module.modules() if isinstance(m, torch.fx.GraphModule) and m is not V.graph.module]
    return sorted({stream for body in bodies for node in body.graph.nodes if (stream := node_stream(node))})


def place_workspaces(scheduler: Scheduler, lines: Sequence[Any]) -> list[Any]:
    """Note whose memory the workspaces of kernels are: their kernel's stream's. The plan doesn't know them, but memory
    planning reuses them like buffers. The semaphores that all kernels of a graph share are made once for each stream.
    """
    notes = ScheduleNotes.of(scheduler)
    places: list[int | None] = [None]  # the innermost region last
    shared: dict[str, AllocateLine] = {}
    own: dict[tuple[str, int | None], str] = {}
    found: list[Any] = []
    for line in lines:
        place = places[-1]
        if isinstance(line, BeginRegion):
            places.append(None)
        elif isinstance(line, EndRegion):
            places.pop()
        elif isinstance(line, OnStream):
            places[-1] = line.stream
        elif isinstance(line, AllocateLine) and isinstance(line.node, WorkspaceArg):
            name = line.node.get_name()
            if place is not None:
                notes.memory = {**(notes.memory or {}), name: place}
            if line.node.zero_mode == WorkspaceZeroMode.ZERO_PER_GRAPH:
                shared[name], own[name, place] = line, name
        elif isinstance(line, KernelCallLine) and (names := shared.keys() & set(map(str, line.call_args))):
            for name in sorted(names):
                if (name, place) not in own:
                    made = own[name, place] = f"{name}_stream{place}"
                    allocation = copy.copy(shared[name])
                    allocation.node = dataclasses.replace(allocation.node, outer_name=made)  # type: ignore[type-var]
                    found += [allocation, line.wrapper.make_zero_buffer(made)]
            line = dataclasses.replace(line, call_args=tuple(own.get((str(a), place), a) for a in line.call_args))
        found.append(line)
    return found


def stream_of_memory(scheduler: Scheduler, name: str) -> int | None:
    """Return the stream whose memory a buffer lives in; None before a region is planned."""
    memory = ScheduleNotes.of(scheduler).memory
    return None if memory is None else memory.get(owner_of(name), CALLERS_STREAM)
