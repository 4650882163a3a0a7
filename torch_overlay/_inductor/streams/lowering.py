"""Lower graphs with streams: the last changes of the FX graph, and what has to be a buffer by itself.

Values that a visible stream operation has to find finished become buffers before it (`graph_order`), values for another
stream where they stand.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.utils import gather_origins

from torch_overlay import config
from torch_overlay._functorch.offload.ops import OPERATIONS
from torch_overlay._functorch.streams.facts import fact_of, is_placed_program
from torch_overlay._functorch.streams.fx import (
    blocks_host,
    is_stream_op,
    node_stream,
    viewed,
)
from torch_overlay._inductor.offload import codegen
from torch_overlay._inductor.streams import copy_log, ranges as stream_ranges
from torch_overlay._inductor.streams.copies_in_place import IN_PLACE, make_copies_in_place
from torch_overlay._inductor.streams.folding import fold_branches
from torch_overlay._inductor.streams.graph_order import order_graph, RECORD_STREAM
from torch_overlay._inductor.streams.host_copies import fix_layout, upload_returned_memory_at_once
from torch_overlay._inductor.streams.partial_writes import assume_unaligned, computed_in_place, inputs_in_parts
from torch_overlay._inductor.streams.schedule_order import order_blocking_operations, order_stream_operations


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def graph_lowering_init(original: Callable[..., None], lowering: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
    """Make the last changes to the FX graph: the passes are done, and nothing is lowered yet."""
    if any(n.target in OPERATIONS for n in gm.graph.nodes):
        codegen.register()
    has_streams = config.streams and is_placed_program(gm.graph)
    if has_streams:
        order_graph(gm.graph)
        make_copies_in_place(gm.graph)
        upload_returned_memory_at_once(gm.graph)
        _name_memory(gm.graph)
        if config.fold_branches_below_us > 0:
            fold_branches(gm.graph, config.fold_branches_below_us, bool(kwargs.get("is_backward")))
    copy_log.publish(gm.graph)
    original(lowering, gm, *args, **kwargs)
    if has_streams:
        assume_unaligned(lowering, inputs_in_parts(gm.graph))


def _name_memory(graph: torch.fx.Graph) -> None:
    """Give each `record_stream` the value whose memory its argument is a view of: the layout doesn't matter to it.
    Inductor would copy the argument of an operator to lay it out as in eager.
    """
    for record in graph.find_nodes(op="call_function", target=RECORD_STREAM):
        record.replace_input_with(record.args[0], viewed(record.args[0]))  # type: ignore[arg-type]
        record.meta.pop("eager_input_vals", None)


def run_node(original: Callable[..., object], graph: Any, node: torch.fx.Node) -> object:
    """Lower a node, and realize values where the order of streams needs it.

    Values that a stream operation has to find finished become buffers before it, alone or as part of the expression
    that has absorbed them; a later consumer must not absorb them. A value for another stream becomes a buffer where it
    stands, not where that stream's consumer does: launched there, it would come after all that its own stream does in
    between, and the consumer was to run beside that work.
    """
    if computed_in_place(graph, node):
        return graph.env[node.args[0]]
    token = fact_of(node).requires if config.streams else None
    if token is not None:
        for earlier, value in graph.env.items():
            # A copy that blocks the host need not realize a value that nobody reads later.
            if not is_stream_op(node) and all(user in graph.env for user in earlier.users):
                continue
            if isinstance(value, ir.TensorBox) and any(
                token in fact_of(origin).promises for origin in (earlier, *gather_origins([value], {}))
            ):
                value.realize()
    if config.streams and stream_ranges.is_range(node):
        stream_ranges.realize_before(graph, node)
    is_counted_on = token is not None and blocks_host(node)
    with _by_the_device(graph, node) if _downloads(graph, node, is_counted_on) else contextlib.nullcontext():
        result = original(graph, node)
    if config.streams and isinstance(result, ir.TensorBox) and _is_for_another_stream(node):
        result.realize()
    is_fixed = IN_PLACE in node.meta or any(user.target is RECORD_STREAM for user in node.users)
    if config.streams and isinstance(result, ir.TensorBox) and node.op == "call_function" and is_fixed:
        fix_layout(node, result)
    return result


def _downloads(graph: Any, node: torch.fx.Node, is_counted_on: bool) -> bool:
    """True for a copy to the host that the device has to make. Instead of copying a constant, Inductor makes another
    one on the host, if it can: if nobody counts on the host waiting for the copy, and the constant isn't scanned or
    sorted, which upstream fails to make there.
    """
    value = node.meta.get("val")
    if not config.streams or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    if is_counted_on or node.target not in (torch.ops.prims.device_put.default, torch.ops.aten._to_copy.default):
        return is_counted_on
    source = graph.env.get(node.args[0])
    while isinstance(source, (ir.TensorBox, ir.StorageBox, ir.BaseView, ir.ComputedBuffer)):
        source = source.data
    return isinstance(source, (ir.Scan, ir.Sort))


@contextlib.contextmanager
def _by_the_device(graph: Any, copy: torch.fx.Node) -> Iterator[None]:
    """Copy a constant, too, where Inductor would make another one on the host: others count on the host waiting for the
    copy. Inductor does not do that to a buffer that was mutated, so the buffer counts as mutated meanwhile.
    """
    source = graph.env.get(copy.all_input_nodes[0])
    name = source.realize() if isinstance(source, ir.TensorBox) else None
    is_new = name is not None and name not in graph.mutated_buffers
    if is_new:
        graph.mutated_buffers.add(name)
    try:
        yield
    finally:
        if is_new:
            graph.mutated_buffers.remove(name)


def _is_for_another_stream(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or is_stream_op(node):
        return False
    stream = node_stream(node)
    return any(user.op == "call_function" and node_stream(user) != stream for user in node.users)


def compute_dependencies(original: Callable[..., None], scheduler: Any) -> None:
    if config.streams:
        order_stream_operations(scheduler)
    original(scheduler)
    if config.streams:
        order_blocking_operations(scheduler)
