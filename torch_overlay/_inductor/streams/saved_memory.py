"""Note on which stream a saved value was allocated, once the forward's code is generated.

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

Find the streams that may still use what a region returns when its holder frees it.

A gradient in a side stream's memory is read by the caller's stream and freed by whoever holds it last, maybe when the
side stream has run far ahead. Autograd's engine records the reading stream where it moves a gradient from stream to
stream; here it does not see that the gradient moves. Whoever calls a nested region takes its results for memory of the
stream of the call. A result of a forward may be memory of another stream than in
eager, as that of an update in place is: whoever drops it counts on the stream that it has in eager. Code that is to be
captured also runs uncaptured: the first time, and whenever no graph can be had.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch._inductor.config as inductor_config
from torch._dynamo import compiled_autograd
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.ids import CALLERS_STREAM, callers_stream_index
from torch_overlay._functorch.streams.saved_values import ContextNotes
from torch_overlay._inductor.notes import GraphNotes, ScheduleNotes
from torch_overlay._inductor.scheduler_nodes import owner_of
from torch_overlay._inductor.streams.graph_facts import eager_memory_of_results


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._inductor.scheduler import Scheduler

    from torch_overlay._inductor.streams.plan import Plan
    from torch_overlay._inductor.streams.planned_region import PlannedRegion


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
    that it was allocated on. The region that makes a value does so: in another one, such as that which allocates the
    memory that it is a view of, it may have no name. A region may return, under a new name, what an earlier one
    allocated.
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
