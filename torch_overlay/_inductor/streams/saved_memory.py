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
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._inductor.scheduler_nodes import owner_of


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.streams.plan import Plan


def _saved() -> Any:
    """Return the names of what the forward returns, and the graph of its backward, while they are compiled."""
    return getattr(torch._guards.TracingContext.try_get(), "stream_saved", None)


def note_owners(plan: Plan) -> None:
    """Note the stream whose memory each result of the forward that is being generated is, where it is the same at every
    call: that which the result was placed on, or the caller's stream, into which its branch was folded.
    """
    if _saved() is None or V.graph.is_backward or V.graph.name is not None or inductor_config.triton.cudagraphs:
        return
    graph: Any = V.graph
    names = [output.maybe_get_name() for output in graph.graph_outputs]
    graph.stream_owners = tuple([None if name is None else plan.memory.get(owner_of(name)) for name in names])


def owners_of(graph: Any) -> tuple[int | None, ...]:
    """Return what was noted for a graph that code was generated for, for the cache; empty if nothing was."""
    return getattr(graph, "stream_owners", ())


def settle_owners(owners: Sequence[int | None]) -> None:
    """Note on the inputs of the backward that is to be compiled whose memory they are, as its forward returns them."""
    known = _saved()
    if known is None or len(known[0]) != len(owners):
        return  # hooks on saved tensors changed what the forward returns
    names, backward = known
    made = dict(zip(names, owners))  # passes rename what a graph returns, but keep its position
    for value in backward.find_nodes(op="placeholder"):
        stream, owner = fact_of(value).memory, made.get(value.name)
        if stream is None:
            continue
        if owner == stream:
            note_fact(value, is_owned=True)
        elif owner == CALLERS_STREAM:
            note_fact(value, memory=None)
