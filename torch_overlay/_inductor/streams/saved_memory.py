"""Note on which stream a saved value was allocated, once the forward's code is generated.

Note [Memory of saved values]
The backward frees saved values, and must know on which stream they were allocated. When the joint graph is partitioned,
that is a guess: an operation on a side stream may be folded into the caller's stream later (`streams.folding`), a
region may run on the caller's stream alone when the device is idle (`streams.single_stream`), and all memory of a
captured region is the caller's stream's. A block that may belong to either of two streams is freed only when both are
ordered after its last use; for the caller's stream that is often the exit of the backward, so that a branch's
activations would all stay allocated to the end. The forward is generated before the backward is compiled. The stream
that its plan gives for a value's memory is then noted on the backward's input, in the graph, where it is also part of
the compile cache's key.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.facts import fact_of, note_fact
from torch_overlay._functorch.streams.ids import CALLERS_STREAM


if TYPE_CHECKING:
    from torch_overlay._inductor.streams.planner import Plan


def settle_owners(plan: Plan, real_names: dict[str, str]) -> None:
    """Note on the backward's inputs whose memory the saved values are, where it is the same at every call of this
    forward: that of the stream which they were placed on, or the caller's stream's, into which their branch was folded.
    """
    known: Any = getattr(torch._guards.TracingContext.try_get(), "overlay_saved", None)
    if known is None or V.graph.is_backward or V.graph.name is not None or inductor_config.triton.cudagraphs:
        return
    names, backward = known
    if len(names) != len(V.graph.graph_outputs):
        return  # hooks on saved tensors changed what the forward returns
    # Passes rename what a graph returns, but keep its position.
    made = {name: output.maybe_get_name() for name, output in zip(names, V.graph.graph_outputs)}
    for value in backward.find_nodes(op="placeholder"):
        stream, name = fact_of(value).memory, made.get(value.name)
        owner = plan.memory.get(real_names.get(name, name)) if stream is not None and name is not None else None
        if owner == stream and owner is not None:
            note_fact(value, is_owned=True)
        elif owner == CALLERS_STREAM:
            note_fact(value, memory=None)
