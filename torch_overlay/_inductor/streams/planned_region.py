"""Plan the regions of a schedule, and decide which graphs need a plan.

Build the planner's buffers: the memory that a region touches, its stream, and whether the exit orders it
(`settles`).

Publish each stream plan, as it is made, to observers: tools and tests.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.ids import callers_device, callers_stream_index
from torch_overlay._functorch.streams.tokens import state
from torch_overlay._inductor.notes import ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins, is_gpu, owner_of, stream_operation, user_stream
from torch_overlay._inductor.streams.graph_facts import eager_memory_of_results, exit_waits, saved_on_streams
from torch_overlay._inductor.streams.host_copies import AsyncCopy
from torch_overlay._inductor.streams.plan import Buffer, HOST
from torch_overlay._inductor.streams.planner import plan_streams
from torch_overlay._inductor.streams.reader import RegionReader


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
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
        for name in {owner_of(reader.owners.get(n, n)) for n in reader.ops[i].reads | reader.ops[i].writes}:
            users[name].append(i)

    def add(name: str, stream: int, settles: bool, **fields: Any) -> None:
        settles, leaves = settles and not reader.enclosed, name in reader.output_memory
        found.append(Buffer(name, stream, views=frozenset(views[name]), settles=settles, leaves=leaves, **fields))

    results = eager_memory_of_results()
    for name in reader.fresh:
        streams = [s for s in reader.writer_streams.get(name, ()) if s != HOST]
        if streams:
            shared = _callers_stream(reader.device_of(name))
            is_of_one = len(set(streams)) == 1 and name not in reader.loaded
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
    touched = {reader.owners.get(n, n) for op in reader.ops for n in op.reads | op.writes}
    for name in sorted(touched - local):
        device = reader.device_of(name)
        if is_gpu(device):
            saved_on = reader.saved_on.get(name, elsewhere.get(name))
            is_owned = saved_on is not None and name in reader.owned
            stream = saved_on if is_owned else _callers_stream(device)
            size = _size_of(name) if name in reader.kept else 0
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
    reads = {owner_of(reader.owners.get(n, n)) for n in reader.ops[i].reads}
    kept = sum(n in reader.output_memory and stream in reader.writer_streams.get(n, ()) for n in reads)
    return "other" not in lives and lives.count("kept") <= kept


def drop_inner_promises(reader: RegionReader, buffers: list[Buffer]) -> None:
    """Drop the tokens in `promised_to` that nobody needs: a stream, or the host after a copy, need not be ordered after
    an operation that touched neither the caller's memory nor a block of that stream. If the stream of one of the
    operation's blocks has no such token, only what the caller does next can order it after the operation: all tokens
    are kept.
    """
    blocks = {view: b for b in buffers for view in (b.name, *b.views)}
    for i in reader.inner:
        op = reader.ops[i]
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
    private: frozenset[int]  # streams that only this call sees
    enclosed: bool
    concerned: frozenset[int]  # user streams whose order or memory the region affects


def needs_plan(scheduler: Scheduler) -> bool:
    """True if a node of the graph runs on a side stream, carries a boundary token, or belongs to the user's stream
    program; if an input that the graph frees may be a side stream's memory; or if the host computes beside copies for
    which it doesn't wait.
    """
    notes = ScheduleNotes.of(scheduler)
    known = notes.needs_plan
    if known is None:
        known = bool(exit_waits() or saved_on_streams())
        known = known or any(_concerns_streams(scheduler, n) for n in scheduler.nodes)
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
) -> PlannedRegion:
    """Plan the given nodes, in their order. `known`: see `plan_streams`."""
    reader = RegionReader(scheduler, nodes, enclosed)
    reader.read()
    buffers = read_buffers(reader)
    drop_inner_promises(reader, buffers)
    plan = plan_streams(reader.ops, buffers, reader.promised(), known)
    private = frozenset(reader.tokens.private)
    concerned = reader.tokens.concerned.union(*({b.stream, b.saved_on or b.stream} for b in buffers))
    return PlannedRegion(
        plan, reader.index, reader.devices, reader.tokens.numbers, private, enclosed, frozenset(concerned)
    )


_plan_observers: list[Callable[[Plan], None]] = []


def subscribe_to_plans(observer: Callable[[Plan], None]) -> Callable[[], None]:
    """Call `observer` with every plan from now on; the function returned ends that."""
    _plan_observers.append(observer)
    return lambda: _plan_observers.remove(observer)


def publish_plan(plan: Plan) -> None:
    for observer in tuple(_plan_observers):
        observer(plan)
