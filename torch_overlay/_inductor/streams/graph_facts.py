"""Look up and note the facts of the whole graph that Inductor compiles: its streams, its order at the exit, whose
memory its results are, and the streams that use them.

Note [Memory of saved values]
The backward frees saved values, and must know on which stream they were allocated. When the joint graph is partitioned,
that is a guess: an operation on a side stream may be folded into the caller's stream later, a region may run on the
caller's stream alone when the device is idle, and all memory of a captured region is the caller's stream's. A block
that may belong to either of two streams is freed only when both are ordered after its last use; for the caller's stream
that is often the exit of the backward, so that a branch's activations would all stay allocated to the end. The forward
is generated before the backward is compiled. The streams that its plan gives for the memory of its results are kept
with the forward's code, also in compile caches. When the code is ready, generated or from a cache, they are noted on
the backward's inputs, in the graph, where they are part of the compile cache's key, too: a forward from a cache leads
to the backward that was compiled for it.

Note [Users of results]
A gradient in a side stream's memory is read by the caller's stream and freed by whoever holds it last, maybe when the
side stream has run far ahead. Autograd's engine records the reading stream where it moves a gradient from stream to
stream; here it does not see that the gradient moves. Whoever calls a nested region takes its results for memory of the
stream of the call. A result of a forward may be memory of a different stream than in eager, as that of an update in
place is: whoever drops it counts on the stream that it has in eager. Code that is to be captured also runs uncaptured:
the first time, and whenever no graph can be had.
"""

from __future__ import annotations

from typing import Any, Literal, TYPE_CHECKING

import torch._inductor.config as inductor_config
from torch._dynamo import compiled_autograd
from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import ExitWait, Fact, fact_of, note_fact
from torch_overlay._functorch.streams.fx import output_descriptions
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, callers_stream_index
from torch_overlay._functorch.streams.saved_values import ContextNotes
from torch_overlay._inductor.notes import GraphNotes, ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import fx_origins, is_gpu, owner_of


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay._inductor.streams.plan import Plan
    from torch_overlay._inductor.streams.planned_region import PlannedRegion


def stream_devices() -> dict[int, int]:
    """Return the device index of each stream that the frame uses, as far as it is known, by registry index."""
    return {
        i.index: i.device.index for i in frame_facts.current().objects if i.kind == "stream" and i.device is not None
    }


def private_streams() -> set[int]:
    """Return the registry indices of the streams that the frame makes and nobody else sees."""
    return {i.index for i in frame_facts.current().objects if i.origin == "frame" and not i.escapes}


def _noted(name: Literal["exit_waits", "results"]) -> Any:
    """Return a fact of the whole graph. Operations carry it, and inputs, of which some remain when every computed value
    is dropped or is a view; the nodes of a backward carry the backward's.
    """
    nodes = V.graph.module.graph.nodes  # type: ignore[union-attr]
    return next((found for node in nodes if (found := getattr(fact_of(node), name))), ())


def exit_waits() -> tuple[ExitWait, ...]:
    """Return what each stream is ordered after when the graph is left, for the caller to rely on."""
    return _noted("exit_waits")


def facts_of_inputs() -> dict[str, Fact]:
    graph: Any = V.graph.module.graph  # type: ignore[union-attr]
    return {str(node.target): fact_of(node) for node in graph.find_nodes(op="placeholder")}


def streams_of_saved() -> set[int]:
    """Return the side streams whose memory saved values of a backward may be."""
    return {fact.memory for fact in facts_of_inputs().values() if fact.memory is not None}


def eager_memory_of_results() -> dict[str, set[int]]:
    """Return, for the buffers that a forward returns to its caller, the registry indices of the streams that their
    memory waits for in eager, as far as that is known.
    """
    streams: dict[str, tuple[int, ...]] = dict(_noted("results"))
    if V.graph.is_backward or not streams:
        return {}
    found: dict[str, set[int]] = {}
    real = V.graph.scheduler.mutation_real_name
    output = V.graph.module.graph.output_node()  # type: ignore[union-attr]
    for what, value in zip(output_descriptions(output), V.graph.graph_outputs):
        known = streams.get(what.expr())
        if known is None or not isinstance(value, ir.TensorBox | ir.StorageBox | ir.BaseView):
            continue
        name = value.get_name()
        if not is_gpu(value.get_device()):
            continue
        if (name := real.get(name, name)) in V.graph.name_to_buffer and name not in V.graph.graph_inputs:
            found.setdefault(name, set()).update(known)
    return found


def required(node: BaseSchedulerNode) -> set[Token]:
    """Return the tokens of the boundary effects that a node makes happen: of a record, of a synchronisation, of a copy
    that blocks the host.
    """
    return {token for origin in fx_origins(node) if (token := fact_of(origin).requires) is not None}


def note_owners(plan: Plan) -> None:
    """Note the stream whose memory each result of the forward that is being generated is, where it is the same at every
    call: that which the result was placed on, or the caller's stream, into which its branch was folded.
    """
    if (
        ContextNotes.current() is None
        or V.graph.is_backward
        or V.graph.name is not None
        or inductor_config.triton.cudagraphs
    ):
        return
    graph: Any = V.graph
    names = [output.maybe_get_name() for output in graph.graph_outputs]
    owners = [None if name is None else plan.memory.get(owner_of(name)) for name in names]
    GraphNotes.of(graph).owners = tuple(owners)


def settle_owners(owners: Sequence[int | None]) -> None:
    """Note on the inputs of the backward that is to be compiled whose memory they are, as its forward returns them."""
    known = ContextNotes.current()
    if known is None or len(known.results) != len(owners):
        return  # hooks on saved tensors changed what the forward returns
    made = dict(zip(known.results, owners))  # passes rename what a graph returns, but keep its position
    for value in known.backward.find_nodes(op="placeholder"):
        stream, owner = fact_of(value).memory, made.get(value.name)
        if stream is None:
            continue
        if owner == stream:
            note_fact(value, is_owned=True)
        elif owner == CALLERS_STREAM:
            note_fact(value, memory=None)


def users_of_results(scheduler: Scheduler, region: PlannedRegion) -> Iterator[tuple[str, int]]:
    """Yield buffers that the graph returns, each with a stream to be recorded on it (`record_stream`), beside the one
    that it was allocated on: Note [Users of results]. The region that makes a value does so: in a different one, such
    as that which allocates the memory that it is a view of, it may have no name. A region may return, under a new name,
    what an earlier one allocated.
    """
    made = {name for node in region.index for name in node.get_buffer_names()}
    memory, real = ScheduleNotes.of(scheduler).memory or {}, scheduler.mutation_real_name
    if V.graph.name is not None or V.graph.is_backward or compiled_autograd.in_compiled_autograd_region:
        users = {real.get(name, name): {CALLERS_STREAM} for name in V.graph.get_output_names()}
    else:
        users = eager_memory_of_results()
    for name, known in users.items():
        if name not in made or (stream := memory.get(owner_of(name))) is None:
            continue
        device: Any = V.graph.get_buffer(name).get_device()
        callers_stream = callers_stream_index(device.index or 0)
        for other in sorted(known):
            other = region.numbers.get(other, other) or callers_stream
            if other != stream and other not in region.private:
                yield name, other
