"""Plan and generate the regions of a compiled graph, and the code around them that orders the caller's streams.

Without CUDA graphs a compiled graph is one region: its boundary is the caller's. With CUDA graphs each partition is
captured by itself, so it forks its side streams from the caller's stream and joins them again, and so do the nodes
between partitions; the waits that order the caller's streams before and after the call are generated once around all
regions, outside every captured graph.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay import config
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import node_stream
from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM, is_copy_stream, written_index
from torch_overlay._functorch.streams.tokens import CALLER, events_of, state, streams_of
from torch_overlay._inductor.offload.codegen import is_copy
from torch_overlay._inductor.schedule_notes import notes_of
from torch_overlay._inductor.scheduler_nodes import fx_origins, stream_operation, user_stream
from torch_overlay._inductor.streams.emitter import RegionEmitter
from torch_overlay._inductor.streams.graph_facts import (
    eager_memory_of_results,
    leaving,
    private_streams,
    saved_on_streams,
    stream_devices,
)
from torch_overlay._inductor.streams.planned_region import needs_plan, plan_region, Region
from torch_overlay._inductor.streams.region_definition import (
    declare_runtime,
    define_region,
    Operation,
    record_stream_text,
    root_of,
)
from torch_overlay._inductor.streams.wrapper_lines import StreamLine


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode

    from torch_overlay._functorch.streams.tokens import Token


_OTHER_WRAPPER = (
    "torch_overlay: this graph uses CUDA streams or events, and the {} can't generate them yet. Compile it with the "
    "Python wrapper (torch._inductor.config.{} = False), take the streams out of the {} function, or give upstream's "
    "handling back with torch_overlay.config.streams = False."
)
CPP_WRAPPER = _OTHER_WRAPPER.format("C++ wrapper (cpp_wrapper, AOTInductor)", "cpp_wrapper", "exported")
FX_WRAPPER = _OTHER_WRAPPER.format("FX wrapper (fx_wrapper)", "fx_wrapper", "compiled")

CROSS_DEVICE = "cross-device ops"  # upstream's reason

HANDLE_IS_READ = (
    "the raw handle of a stream is read (Stream.cuda_stream), and a capture runs on another stream than that handle's"
)


class UnsupportedStreams(RuntimeError):
    """A graph with streams that no wrapper can be generated for."""


def _is_enclosed() -> bool:
    """True if the region isn't all of the code that the caller calls."""
    return inductor_config.triton.cudagraphs or _is_partition() or V.graph.name is not None


def codegen(original: Callable[..., None], scheduler: Any, nodes: Sequence[BaseSchedulerNode]) -> None:
    if not config.streams or not needs_plan(scheduler):
        return original(scheduler, nodes)
    if V.graph.cpp_wrapper:
        raise UnsupportedStreams(CPP_WRAPPER)
    if V.graph.fx_wrapper:
        raise UnsupportedStreams(FX_WRAPPER)
    known = _known_at_entry(scheduler)
    region = plan_region(scheduler, nodes, _is_enclosed(), known)
    _note_known(scheduler, known, region)
    emitter = RegionEmitter(scheduler, region)
    # A buffer that an earlier region allocated remains its stream's memory.
    notes = notes_of(scheduler)
    notes.memory = {**region.plan.memory, **(notes.memory or {})}
    outer, notes.region = notes.region, emitter
    try:
        emitter.begin()
        original(scheduler, nodes)
        emitter.end()
    finally:
        notes.region = outer


def _is_partition() -> bool:
    return hasattr(V.graph.wrapper_code, "parent_wrapper")


def _known_at_entry(scheduler: Any) -> Mapping[int, frozenset[Token]]:
    """Return the states of other streams that each stream has waited for when a region between or inside of partitions
    begins. A captured graph forks its side streams itself.
    """
    known = notes_of(scheduler).known if V.graph.name is None else {}
    return {CALLERS_STREAM: known[CALLERS_STREAM]} if known and _is_partition() else known


def _note_known(scheduler: Any, known: Mapping[int, frozenset[Token]], region: Region) -> None:
    """Note which states the streams have waited for after the region. A graph's work is the caller's stream's work once
    the graph has been launched.
    """
    if known:
        ordered = frozenset() if _is_partition() else region.plan.after_caller
        joined = known[CALLERS_STREAM]
        notes = notes_of(scheduler)
        notes.known = {
            s: joined if s == CALLERS_STREAM else joined | {CALLER} if s in ordered else frozenset()
            for s in notes.known
        }
        settled = frozenset() if _nested_streams() else notes.settled - region.concerned
        notes.settled = settled | ordered


def _outside(scheduler: Any) -> tuple[list[int], list[int]]:
    """Return the user's streams in the graph, and the caller's events that some node waits for."""
    streams: set[int] = set()
    events: set[int] = set()
    for node in scheduler.nodes:
        streams.add(user_stream(scheduler, node))
        overload = stream_operation(node)
        named = overload is not None and overload._schema.name.endswith(("record_event", "synchronize_stream"))
        if named:
            streams.add(node.node.constant_args[-1])
        for origin in fx_origins(node):
            tokens = {*(fact_of(origin).after or ()), *fact_of(origin).promises}
            streams |= streams_of(tokens)
            events |= events_of(tokens)
    for end in leaving():
        streams |= streams_of(end.tokens) | ({end.stream} if not V.graph.is_backward else set())
        events |= events_of(end.tokens)
    streams |= {*_nested_streams()}
    theirs = {s for s in streams - private_streams() - {CALLERS_STREAM} if not is_copy_stream(s)}
    return sorted(theirs), sorted(events)


def _left_behind(streams: Collection[int]) -> list[int]:
    """Return the other streams of the user that a backward orders at its exit, because it frees memory that the forward
    saved on them, or because gradients passed through them.
    """
    engine = {end.stream for end in leaving()} - {CALLERS_STREAM} if V.graph.is_backward else set()
    return sorted({*saved_on_streams().values(), *engine}.difference(streams))


def _nested_streams() -> list[int]:
    """Return the user's streams inside of nested regions, which fork from the stream of the node that calls them."""
    bodies = [m for m in V.graph.module.modules() if isinstance(m, torch.fx.GraphModule) and m is not V.graph.module]
    return sorted({stream for body in bodies for node in body.graph.nodes if (stream := node_stream(node))})


def _lent_results() -> dict[str, list[int]]:
    """Return, for the results of a captured graph, the streams that their memory waits for in eager. A relaunch
    allocates the results on the current stream.
    """
    if config.cudagraphs != "relaunch" or V.graph.name is not None:
        return {}
    ours = private_streams() | {CALLERS_STREAM}
    found = {name: known - ours for name, known in eager_memory_of_results().items()}
    return {name: sorted(known) for name, known in found.items() if known}


def codegen_partitions(original: Callable[..., None], scheduler: Any) -> None:
    """Generate the order around captured partitions: at the entry the caller's stream waits for the user's streams and
    events, and at the exit the user's streams wait for the caller's stream.
    """
    if not (config.streams and inductor_config.triton.cudagraphs):
        return original(scheduler)
    if not needs_plan(scheduler) and not _nested_streams():
        return original(scheduler)
    if registry.current().handle_is_read:
        V.graph.disable_cudagraphs_reason = HANDLE_IS_READ
    streams, events = _outside(scheduler)
    left = _left_behind(streams)
    if not (streams or events or left):
        return original(scheduler)
    wrapper: Any = V.graph.wrapper_code
    root: Any = root_of(wrapper)
    declare_runtime(root)
    # Copies between devices are ordered by the devices' current streams, which the program need not have named.
    lent = _lent_results()
    told = {s for owners in lent.values() for s in owners}.difference(streams, left)
    used = (*streams, *left, *sorted(told))
    current = {s: there for s in used if (there := callers_device(s)) is not None}
    handles = {f"stream{s}_outer": f"cuda:{written_index(current[s])}" if s in current else s for s in used}
    names = list(handles)[: len(streams)]
    objects = {f"event{e}_outer": e for e in events}
    caller = "stream0_outer"
    returns = dict.fromkeys(f"stream{s}_outer" for owners in lent.values() for s in owners)
    if objects:
        returns = {caller: None, **returns, **dict.fromkeys(objects)}
    device: int = torch.accelerator.current_device_index()
    on_device = stream_devices() | current
    is_one_device = all(on_device.get(s, device) == device for s in (*streams, *left))
    # Across devices there are plain records and waits only: Note [Boundary events under the caller's capture].
    record, wait, leave = ("record_entry", "wait_entry", "wait_exit") if is_one_device else ("record", "wait", "wait")
    entry: list[Operation] = []
    for event, stream in enumerate(names, start=1):
        entry.append((record, f"ev{event}_outer", stream))
        entry.append((wait, f"ev{event}_outer", caller))
    notes = notes_of(scheduler)
    notes.settled = frozenset()
    here = [s for s in streams if callers_device(s) is None]
    notes.known = {CALLERS_STREAM: frozenset(map(state, here)), **dict.fromkeys(here, frozenset())}
    found = ", ".join(["frame_outer", *returns])
    wrapper.writeline(StreamLine(f"{found}, = _outer.enter()"))
    for event in objects:
        wrapper.writeline(StreamLine(f"{event}.wait({caller})"))
    original(scheduler)
    waiting = [f"stream{s}_outer" for s in (*streams, *left) if s not in notes.settled]
    define_region(
        root,
        "_outer",
        device=written_index(device) if is_one_device else None,
        streams={caller: f"cuda:{written_index(device)}", **handles},
        events=len(names) + 1 if waiting or names else 0,
        entry=tuple(entry),
        exit=(("record", "ev0_outer", caller), *((leave, "ev0_outer", s) for s in waiting)) if waiting else (),
        returns=tuple(returns),
        objects=objects,
    )
    wrapper.writeline(StreamLine("frame_outer.leave()"))
    for name, owners in lent.items():
        for stream in owners:
            wrapper.writeline(StreamLine(record_stream_text(name, f"stream{stream}_outer")))
    return None


def should_partition(original: Callable[..., str | None], scheduler: Any, node: BaseSchedulerNode) -> str | None:
    """Return why the graph is partitioned at a node, or None. Records that the caller can see, host synchronisations
    and queries happen at each call: never inside a captured graph.
    """
    reason = original(scheduler, node)
    if reason == CROSS_DEVICE and is_copy(node) and config.cudagraphs == "relaunch":
        return None  # the host's side is a slab, whose address doesn't change
    if reason is None and config.streams:
        if (overload := stream_operation(node)) is not None:
            return f"stream operation {overload}"
        if needs_plan(scheduler) and _has_several_devices(scheduler):
            return "streams on several devices"
    return reason


def _has_several_devices(scheduler: Any) -> bool:
    """True if the nodes and the caller's current device make several devices. CUDA graphs are refused then, and a
    partition that changes the device would be generated wrong: upstream exits the guard of the partition's device,
    which stands around the call of the partition, inside of the partition. The caller's device counts, too: its stream
    would be forked from and joined inside of a capture on the other device.
    """
    notes = notes_of(scheduler)
    if notes.has_several_devices is None:
        devices = {d.index for n in scheduler.nodes if (d := n.get_device()) is not None and d.type != "cpu"}
        notes.has_several_devices = len(devices | {torch.accelerator.current_device_index()}) > 1
    return notes.has_several_devices


__all__ = ["UnsupportedStreams", "codegen", "codegen_partitions", "should_partition"]
