"""Has Inductor lower and schedule graphs with streams as `lowering` and `schedule_order` say (seams)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay import config
from torch_overlay._functorch.offload.ops import OPERATIONS
from torch_overlay._functorch.streams.facts import is_placed_program
from torch_overlay._inductor.offload import codegen as offload_codegen
from torch_overlay._inductor.streams import copy_log, lowering as streams
from torch_overlay._inductor.streams.partial_writes import assume_unaligned, computed_in_place, inputs_in_parts
from torch_overlay._inductor.streams.schedule_order import order_blocking_operations, order_stream_operations
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def graph_lowering_init(original: Callable[..., None], lowering: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
    override(lowering, run_node=run_node)
    if any(n.target in OPERATIONS for n in gm.graph.nodes):
        offload_codegen.register()
    has_streams = handles_streams() and is_placed_program(gm.graph)
    if has_streams:
        streams.prepare(gm.graph, config.fold_branches_below_us, bool(kwargs.get("is_backward")))
    copy_log.publish(gm.graph)
    original(lowering, gm, *args, **kwargs)
    if has_streams:
        assume_unaligned(lowering, inputs_in_parts(gm.graph))


def run_node(original: Callable[..., object], graph: Any, node: torch.fx.Node) -> object:
    if not handles_streams():
        return original(graph, node)
    if computed_in_place(graph, node):
        return graph.env[node.args[0]]
    streams.realize_before(graph, node)
    with streams.copied_by_device(graph, node):
        result = original(graph, node)
    streams.realize_after(node, result)
    return result


def compute_dependencies(original: Callable[..., None], scheduler: Any) -> None:
    if handles_streams():
        order_stream_operations(scheduler)
    original(scheduler)
    if handles_streams():
        order_blocking_operations(scheduler)
