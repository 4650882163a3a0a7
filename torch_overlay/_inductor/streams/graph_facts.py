"""Look up the facts of the whole graph that Inductor compiles: its streams, its order at the exit, the memory of its
results.
"""

from __future__ import annotations

from typing import Any, Literal, TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.virtualized import V

from torch_overlay import frame_facts
from torch_overlay._functorch.streams.facts import ExitWait, Fact, fact_of
from torch_overlay._functorch.streams.fx import output_descriptions
from torch_overlay._inductor.scheduler_nodes import fx_origins, is_gpu


if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

    from torch_overlay._functorch.streams.tokens import Token


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
