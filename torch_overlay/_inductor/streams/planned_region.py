"""Plan and generate the regions of a compiled graph, and decide which graphs need a plan.

Without CUDA graphs a compiled graph is one region: its boundary is the caller's. With CUDA graphs each partition is
captured by itself, so it forks its side streams from the caller's stream and joins them again, and so do the nodes
between partitions.

The waits that order the caller's streams before and after the call are generated once around all of them, outside every
captured graph (`ordered_around`): at the entry the caller's stream waits for the user's streams and events, and at the
exit the user's streams wait for the caller's stream. Records that the caller can see, host synchronisations and queries
happen at each call, never inside a captured graph: they cut it (`reason_to_cut`).

`read_buffers` builds the planner's buffers: the memory that a region touches, its stream, and whether the exit orders
it (`settles`). Each plan is published, as it is made, to observers: tools and tests.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.codegen.wrapper import AllocateLine, KernelCallLine
from torch._inductor.virtualized import V

from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import fact_of, NOTHING
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM, callers_stream_index, is_copy_stream
from torch_overlay._functorch.streams.tokens import CALLER, events_of, state, streams_of
from torch_overlay._inductor.graph_results import results_are_callers
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins, is_gpu, owner_of, stream_operation, user_stream
from torch_overlay._inductor.streams.cpp_emitter import CppRegionEmitter
from torch_overlay._inductor.streams.emitter import RegionEmitter
from torch_overlay._inductor.streams.graph_facts import (
    eager_memory_of_results,
    exit_waits,
    facts_of_inputs,
    private_streams,
    stream_devices,
    streams_of_saved,
)
from torch_overlay._inductor.streams.host_copies import AsyncCopy
from torch_overlay._inductor.streams.plan import Buffer, HOST
from torch_overlay._inductor.streams.planner import plan_streams
from torch_overlay._inductor.streams.reader import RegionReader
from torch_overlay._inductor.streams.region_names import Definition, record_stream_text, root_of
from torch_overlay._inductor.streams.region_spec import OperationKind
from torch_overlay._inductor.streams.switching import BeginRegion, EndRegion, OnStream, StreamLine


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay._inductor.streams.plan import Plan


def _size_of(name: str) -> int:
    """Return the bytes of the memory that a buffer is allocated with."""
    buffer: Any = V.graph.try_get_buffer(name)
    layout = getattr(buffer, "layout", None)
    if not isinstance(layout, ir.Layout):
        return 0
    count = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(buffer), fallback=0)
    return int(count) * layout.dtype.itemsize


def read_buffers(reader: RegionReader) -> list[Buffer]:
    found: list[Buffer] = []
    views: dict[str, set[str]] = defaultdict(set)
    for view, owner in reader.owners.items():
        views[owner].add(view)
    users: dict[str, list[int]] = defaultdict(list)  # those of which it is known what they read in eager
    for i in reader.foreign_reads:
        for name in reader.memory_of(reader.ops[i].reads | reader.ops[i].writes):
            users[name].append(i)

    def add(name: str, stream: int, settles: bool, **fields: Any) -> None:
        settles, leaves = settles and not reader.enclosed, name in reader.output_memory
        found.append(Buffer(name, stream, views=frozenset(views[name]), settles=settles, leaves=leaves, **fields))

    results = eager_memory_of_results()
    for name in reader.fresh:
        streams = [s for s in reader.writer_streams.get(name, ()) if s != HOST]
        if streams:
            shared = _callers_stream(reader.device_of(name))
            is_of_one = len(set(streams)) == 1 and not is_copy_stream(streams[0])
            stream = streams[0] if is_of_one else reader.allocated_on.get(name, shared)
            known = results.get(name, set())
            if len(known) == 1 and isinstance(V.graph.try_get_buffer(name), ir.ConcatKernel):
                # Whichever streams wrote its inputs, the caller gets memory of the stream that concatenates in eager.
                (stream,) = (reader.tokens.numbers.get(s, s) or shared for s in known)
            add(name, stream, _settles(reader, name, stream, users[name], name in results), size=_size_of(name))
    local = {b.name for b in found}
    # Buffers that another region allocated on a side stream, unless a graph was launched for that region.
    memory = ScheduleNotes.of(reader.scheduler).memory or {}
    elsewhere = {name: stream for name, stream in memory.items() if callers_device(stream) is None}
    touched, inputs = {reader.owners.get(n, n) for op in reader.ops for n in op.reads | op.writes}, facts_of_inputs()
    for name in sorted(touched - local):
        device = reader.device_of(name)
        if is_gpu(device):
            fact = inputs.get(name, NOTHING)
            saved_on = elsewhere.get(name) if fact.memory is None else fact.memory
            stream = saved_on if saved_on is not None and fact.is_owned else _callers_stream(device)
            size = _size_of(name) if fact.is_computed else 0
            add(name, stream, saved_on is not None, fresh=False, saved_on=saved_on, size=size)
    return found


def _callers_stream(device: torch.device | None) -> int:
    return callers_stream_index((device.index if device is not None else None) or 0)


def _settles(reader: RegionReader, name: str, stream: int, users: Iterable[int], is_result: bool) -> bool:
    """True if `stream` has to be ordered after the other streams that use its memory before the memory is freed.

    In a backward this holds for a side stream's memory that does not leave: the autograd engine records the streams
    that read another stream's gradient, whichever stream computed it. In a forward it holds for reads that eager does
    not have (`memory`); also of the caller's results that are in its own stream's memory, since it may overwrite
    them on that stream; and of saved values, which are dropped with the results if there is no backward. A read of
    memory that eager returns to the caller, or saves, is excepted if this graph returns that memory, too.
    """
    leaves, is_shared = name in reader.output_memory, stream == _callers_stream(reader.device_of(name))
    if V.graph.is_backward:
        return not (is_shared or leaves)
    if is_result and leaves and not is_shared:
        return False
    return any(reader.ops[i].stream != stream and not _reads_as_eager(reader, i, stream, leaves) for i in users)


def _reads_as_eager(reader: RegionReader, i: int, stream: int, leaves: bool) -> bool:
    """True if all memory of a stream that an operation reads in eager is freed there whoever reads it, or is returned
    or saved there, and here, too.
    """
    lives = [read.life for read in reader.foreign_reads[i] if read.stream == stream]
    if leaves or "kept" not in lives:
        return bool(lives) and "other" not in lives
    reads = reader.memory_of(reader.ops[i].reads)
    kept = sum(n in reader.output_memory and stream in reader.writer_streams.get(n, ()) for n in reads)
    return "other" not in lives and lives.count("kept") <= kept


def drop_inner_promises(reader: RegionReader, buffers: list[Buffer]) -> None:
    """Drop the tokens in `promised_to` that nobody needs: a stream, or the host after a copy, need not be ordered after
    an operation that touched neither the caller's memory nor a block of that stream. The caller holds memory during the
    call, or gets it, maybe by a view that a call returns of it. If the stream of one of the operation's blocks has no
    such token, only what the caller does next can order it after the operation: all tokens are kept.
    """
    blocks = {view: b for b in buffers for view in (b.name, *b.views)}
    callers = {*V.graph.graph_inputs, *V.graph.constants, *reader.output_memory}
    for i, op in enumerate(reader.ops):
        if not (op.promised_to and callers.isdisjoint(reader.memory_of(op.reads | op.writes))):
            continue
        touched = [blocks[n] for n in op.reads | op.writes if n in blocks]
        if any(b.stream != op.stream and not b.settles and state(b.stream) not in op.promised_to for b in touched):
            continue
        streams = {state(b.stream) for b in touched}
        kept = frozenset(t for t in op.promised_to if not (t.stream is not None or t.is_blocking_copy) or t in streams)
        if kept != op.promised_to:
            reader.ops[i] = replace(op, promised_to=kept)


@dataclass(frozen=True)
class PlannedRegion:
    """A planned list of scheduler nodes: its plan, and for each node the index of its operation in the plan."""

    plan: Plan
    index: dict[BaseSchedulerNode, int]
    devices: dict[int, int]
    numbers: dict[int, int]
    private: set[int]  # streams that only this call sees
    enclosed: bool
    concerned: set[int]  # user streams whose order or memory the region affects


def needs_plan(scheduler: Scheduler) -> bool:
    """True if a node of the graph runs on a side stream, carries a boundary token, or belongs to the user's stream
    program; if an input that the graph frees may be a side stream's memory; or if the host computes beside copies for
    which it doesn't wait.
    """
    notes = ScheduleNotes.of(scheduler)
    known = notes.needs_plan
    if known is None:
        known = bool(exit_waits() or streams_of_saved())
        known = known or any(user_stream(scheduler, n) or stream_operation(n) is not None for n in scheduler.nodes)
        known = known or any(fact_of(origin).has_tokens for n in scheduler.nodes for origin in fx_origins(n))
        if not known and any(isinstance(n.node, AsyncCopy) for n in scheduler.nodes):
            known = any((device := n.get_device()) is not None and device.type == "cpu" for n in scheduler.nodes)
        notes.needs_plan = known
    return known


def plan_region(
    scheduler: Scheduler,
    nodes: Sequence[BaseSchedulerNode],
    enclosed: bool,
    known: Mapping[int, frozenset[Token]] | None = None,
) -> PlannedRegion:
    """Plan the given nodes, in their order. `known`: see `plan_streams`."""
    reader = RegionReader(scheduler, nodes, enclosed)
    reader.read()
    buffers = read_buffers(reader)
    if not enclosed:
        drop_inner_promises(reader, buffers)
    plan = plan_streams(reader.ops, buffers, reader.promised(), known)
    tokens = reader.tokens
    concerned = tokens.concerned.union(*({b.stream, b.saved_on or b.stream} for b in buffers))
    return PlannedRegion(plan, reader.index, reader.devices, tokens.numbers, tokens.private, enclosed, concerned)


_plan_observers: list[Callable[[Plan], None]] = []


def subscribe_to_plans(observer: Callable[[Plan], None]) -> Callable[[], None]:
    """Call `observer` with every plan from now on; the function returned ends that."""
    _plan_observers.append(observer)
    return lambda: _plan_observers.remove(observer)


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
        for observer in tuple(_plan_observers):
            observer(region.plan)
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
                    allocation.node = replace(allocation.node, outer_name=made)  # type: ignore[type-var]
                    found += [allocation, line.wrapper.make_zero_buffer(made)]
            line = replace(line, call_args=tuple(own.get((str(a), place), a) for a in line.call_args))
        found.append(line)
    return found


def stream_of_memory(scheduler: Scheduler, name: str) -> int | None:
    """Return the stream whose memory a buffer lives in; None before a region is planned."""
    memory = ScheduleNotes.of(scheduler).memory
    return None if memory is None else memory.get(owner_of(name), CALLERS_STREAM)


HANDLE_IS_READ = (
    "the raw handle of a stream is read (Stream.cuda_stream), and a capture runs on another stream than that handle's"
)


def _outside(scheduler: Scheduler) -> tuple[list[int], list[int], list[int]]:
    """Return the user's streams in the graph, the caller's events that some node waits for, and the other streams of
    the user that a backward orders at its exit, because it frees memory that the forward saved on them, or because
    gradients passed through them.
    """
    streams: set[int] = set()
    left = streams_of_saved()
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
        streams |= streams_of(end.tokens)
        events |= events_of(end.tokens)
        (left if V.graph.is_backward else streams).add(end.stream)
    streams |= {*nested_streams()}
    theirs = {s for s in streams - private_streams() - {CALLERS_STREAM} if not is_copy_stream(s)}
    return sorted(theirs), sorted(events), sorted(left - theirs - {CALLERS_STREAM})


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
    streams, events, left = _outside(scheduler)
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
