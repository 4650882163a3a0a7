"""Order the caller's streams around a graph's partitions, and say where streams cut it.

The regions of a partition, and those between partitions, fork from the caller's stream and join it (`streams.regions`).
The waits that order the caller's streams before and after the call are generated once around all of them, outside every
captured graph: at the entry the caller's stream waits for the user's streams and events, and at the exit the user's
streams wait for the caller's stream. Records that the caller can see, host synchronisations and queries happen at each
call: never inside a captured graph.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM, is_copy_stream
from torch_overlay._functorch.streams.tokens import events_of, state, streams_of
from torch_overlay._inductor.graph_results import results_are_callers
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins, owner_of, stream_operation, user_stream
from torch_overlay._inductor.streams.graph_facts import (
    eager_memory_of_results,
    exit_waits,
    private_streams,
    saved_on_streams,
    stream_devices,
)
from torch_overlay._inductor.streams.planned_region import needs_plan
from torch_overlay._inductor.streams.region_names import Definition, record_stream_text, root_of
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.regions import nested_streams
from torch_overlay._inductor.streams.wrapper_lines import StreamLine


if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler


HANDLE_IS_READ = (
    "the raw handle of a stream is read (Stream.cuda_stream), and a capture runs on another stream than that handle's"
)


def _outside(scheduler: Scheduler) -> tuple[list[int], list[int]]:
    """Return the user's streams in the graph, and the caller's events that some node waits for."""
    streams: set[int] = set()
    events: set[int] = set()
    for node in scheduler.nodes:
        streams.add(user_stream(scheduler, node))
        overload = stream_operation(node)
        if overload is not None and overload._schema.name.endswith(("record_event", "synchronize_stream")):
            streams.add(node.node.constant_args[-1])  # type: ignore[union-attr]
        for origin in fx_origins(node):
            tokens = {*(fact_of(origin).after or ()), *fact_of(origin).promises}
            streams |= streams_of(tokens)
            events |= events_of(tokens)
    for end in exit_waits():
        streams |= streams_of(end.tokens) | ({end.stream} if not V.graph.is_backward else set())
        events |= events_of(end.tokens)
    streams |= {*nested_streams()}
    theirs = {s for s in streams - private_streams() - {CALLERS_STREAM} if not is_copy_stream(s)}
    return sorted(theirs), sorted(events)


def _left_behind(streams: Collection[int]) -> list[int]:
    """Return the other streams of the user that a backward orders at its exit, because it frees memory that the forward
    saved on them, or because gradients passed through them.
    """
    engine = {end.stream for end in exit_waits()} - {CALLERS_STREAM} if V.graph.is_backward else set()
    return sorted({*saved_on_streams().values(), *engine}.difference(streams))


def _recorded_results(scheduler: Scheduler) -> dict[str, list[int]]:
    """Return, for the results of a captured graph, the streams that their memory waits for in eager, apart from the one
    that it is allocated on.
    """
    if not results_are_callers() or V.graph.name is not None:
        return {}
    results, private = eager_memory_of_results(), private_streams()
    found = {name: known - private - {_allocated_on(scheduler, name)} for name, known in results.items()}
    return {name: sorted(known) for name, known in found.items() if known}


def _allocated_on(scheduler: Scheduler, name: str) -> int:
    """Return the stream on which a result is allocated: the caller's, unless the result is an update, under another
    name, of memory that an operation between captured graphs allocates.
    """
    owner = owner_of(name)
    if owner == name or owner not in scheduler.name_to_buf:
        return CALLERS_STREAM
    maker: Any = scheduler.name_to_buf[owner].defining_op
    return user_stream(scheduler, maker) if scheduler.should_partition(maker) else CALLERS_STREAM


@contextlib.contextmanager
def ordered_around(scheduler: Scheduler) -> Iterator[None]:
    """Write the order around the partitions of a graph, whose lines are generated inside, if streams need any."""
    if inductor_config.triton.cudagraphs and frame_facts.current().handle_is_read:
        V.graph.disable_cudagraphs_reason = HANDLE_IS_READ
    if not inductor_config.triton.cudagraphs or not (needs_plan(scheduler) or nested_streams()):
        yield
        return
    streams, events = _outside(scheduler)
    left = _left_behind(streams)
    if not (streams or events or left):
        yield
        return
    wrapper: Any = V.graph.wrapper_code
    # Copies between devices are ordered by the devices' current streams, which the program need not have named.
    recorded = _recorded_results(scheduler)
    others = {s for owners in recorded.values() for s in owners}.difference(streams, left)
    used = (*streams, *left, *sorted(others))
    device: int = torch.accelerator.current_device_index()
    on_device = stream_devices() | {s: there for s in used if (there := callers_device(s)) is not None}
    is_one_device = all(on_device.get(s, device) == device for s in (*streams, *left))
    # Across devices there are plain records and waits only: Note [Boundary events under the caller's capture].
    record, wait, leave = OperationKind.RECORD, OperationKind.WAIT, OperationKind.WAIT
    if is_one_device:
        record, wait, leave = OperationKind.RECORD_ENTRY, OperationKind.WAIT_ENTRY, OperationKind.WAIT_EXIT
    outer = Definition(root_of(wrapper), "_outer", "frame_outer", "_outer", device if is_one_device else None)
    for stream in (CALLERS_STREAM, *used):
        outer.position(stream)
    for event, stream in enumerate(streams, start=1):
        outer.entry += outer.at_boundary((record, event, stream), (wait, event, CALLERS_STREAM))
    notes = ScheduleNotes.of(scheduler)
    notes.settled = frozenset()
    here = [s for s in streams if callers_device(s) is None]
    notes.known = {CALLERS_STREAM: frozenset(map(state, here)), **dict.fromkeys(here, frozenset())}
    waiting_stream = outer.stream(CALLERS_STREAM) if events else ""
    records = [(name, outer.stream(s)) for name, owners in recorded.items() for s in owners]
    waits = [f"{outer.object(event)}.wait({waiting_stream})" for event in events]
    for text in (outer.enter(), *waits):
        wrapper.writeline(StreamLine(text))
    yield
    if waiting := [(leave, 0, s) for s in (*streams, *left) if s not in notes.settled]:
        outer.exit = outer.at_boundary((OperationKind.RECORD, 0, CALLERS_STREAM), *waiting)
    outer.define(events=len(streams) + 1 if waiting or streams else 0)
    for text in (outer.leave(), *(record_stream_text(*each) for each in records)):
        wrapper.writeline(StreamLine(text))


def reason_to_cut(scheduler: Scheduler, node: BaseSchedulerNode) -> str | None:
    """Return why the graph is partitioned at a node, if streams are the reason, or None."""
    if (overload := stream_operation(node)) is not None:
        return f"stream operation {overload}"
    if needs_plan(scheduler) and _has_several_devices(scheduler):
        return "streams on several devices"
    return None


def _has_several_devices(scheduler: Scheduler) -> bool:
    """True if the nodes and the caller's current device make several devices. CUDA graphs are refused then, and a
    partition that changes the device would be generated wrong: upstream exits the guard of the partition's device,
    which stands around the call of the partition, inside of the partition. The caller's device counts, too: its stream
    would be forked from and joined inside of a capture on the other device.
    """
    notes = ScheduleNotes.of(scheduler)
    if notes.has_several_devices is None:
        devices = {d.index for n in scheduler.nodes if (d := n.get_device()) is not None and d.type != "cpu"}
        notes.has_several_devices = len(devices | {torch.accelerator.current_device_index()}) > 1
    return notes.has_several_devices
