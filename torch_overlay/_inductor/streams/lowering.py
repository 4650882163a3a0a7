"""Lower graphs with streams: the last changes of the FX graph, and what has to be a buffer by itself.

Values that a visible stream operation has to find finished become buffers before it (`graph_order`), values for another
stream where they stand.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import config as inductor_config, ir
from torch._inductor.utils import gather_origins

from torch_overlay import config
from torch_overlay._dynamo.ops import RANGES
from torch_overlay._functorch.offload.ops import OPERATIONS
from torch_overlay._functorch.streams.facts import fact_of, is_placed_program
from torch_overlay._functorch.streams.fx import (
    blocks_host,
    device_type,
    is_stream_op,
    node_stream,
    RECORD_STREAM,
    storage_node,
)
from torch_overlay._inductor.offload import codegen as offload_codegen
from torch_overlay._inductor.streams.copies_in_place import (
    assume_unaligned,
    computed_in_place,
    IN_PLACE,
    inputs_in_parts,
    make_copies_in_place,
    write_back_parts,
)
from torch_overlay._inductor.streams.graph_order import (
    order_blocking_operations,
    order_graph,
    order_stream_operations,
)
from torch_overlay._inductor.streams.host_copies import fix_layout, upload_returned_memory_at_once
from torch_overlay._inductor.streams.single_stream import fold_branches
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable


def prepare(graph: torch.fx.Graph, fold_below_us: float, is_backward: bool) -> None:
    """Make the last changes to the FX graph: the passes are done, and nothing is lowered yet. Branches below
    `fold_below_us` microseconds run on the caller's stream.
    """
    order_graph(graph)
    make_copies_in_place(graph)
    write_back_parts(graph)
    upload_returned_memory_at_once(graph)
    _name_memory(graph)
    if fold_below_us > 0:
        fold_branches(graph, fold_below_us, is_backward)


def _name_memory(graph: torch.fx.Graph) -> None:
    """Give each `record_stream` the value whose memory its argument is a view of: the layout doesn't matter to it.
    Inductor would copy the argument of an operator to lay it out as in eager.
    """
    for record in graph.find_nodes(op="call_function", target=RECORD_STREAM):
        record.replace_input_with(record.args[0], storage_node(record.args[0]))  # type: ignore[arg-type]
        record.meta.pop("eager_input_vals", None)


def realize_before(graph: Any, node: torch.fx.Node) -> None:
    """Make buffers of the values that a stream operation has to find finished, before it is lowered: alone, or as part
    of the expression that has absorbed them. A later consumer must not absorb them.
    """
    token = fact_of(node).requires
    if token is not None:
        for earlier, value in graph.env.items():
            # A copy that blocks the host need not realize a value that nobody reads later.
            if not is_stream_op(node) and all(user in graph.env for user in earlier.users):
                continue
            if isinstance(value, ir.TensorBox) and any(
                token in fact_of(origin).promises for origin in (earlier, *gather_origins([value], {}))
            ):
                value.realize()
    if node.target in RANGES:
        for earlier, value in graph.env.items():
            is_computed = earlier.op == "call_function" and earlier.all_input_nodes  # constants are not
            if isinstance(value, ir.TensorBox) and is_computed:
                value.realize()


def realize_after(node: torch.fx.Node, result: object) -> None:
    """Make a buffer of a value for another stream where it stands, not where that stream's consumer does: launched
    there, it would come after all that its own stream does in between, and the consumer was to run beside that work.
    Memory that the program names has the layout of eager.
    """
    if not isinstance(result, ir.TensorBox) or node.op != "call_function":
        return
    if _is_for_another_stream(node):
        result.realize()
    if IN_PLACE in node.meta or any(user.target is RECORD_STREAM for user in node.users):
        fix_layout(node, result)


def copied_by_device(graph: Any, node: torch.fx.Node) -> bool:
    """True for a copy to the host that the device has to make. Instead of copying a constant, Inductor makes another
    one on the host, if it can: if nobody counts on the host waiting for the copy, and the constant isn't scanned or
    sorted, which upstream fails to make there.
    """
    if device_type(node) != "cpu":
        return False
    is_counted_on = fact_of(node).requires is not None and blocks_host(node)
    if is_counted_on or node.target not in (torch.ops.prims.device_put.default, torch.ops.aten._to_copy.default):
        return is_counted_on
    source = graph.env.get(node.args[0])
    while isinstance(source, (ir.TensorBox, ir.StorageBox, ir.BaseView, ir.ComputedBuffer)):
        source = source.data
    return isinstance(source, (ir.Scan, ir.Sort))


def _is_for_another_stream(node: torch.fx.Node) -> bool:
    if is_stream_op(node):
        return False
    stream = node_stream(node)
    return any(user.op == "call_function" and node_stream(user) != stream for user in node.users)


def graph_lowering_init(original: Callable[..., None], lowering: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
    override(lowering, run_node=run_node)
    if any(n.target in OPERATIONS for n in gm.graph.nodes):
        offload_codegen.register()
    has_streams = handles_streams() and is_placed_program(gm.graph)
    is_backward = bool(kwargs.get("is_backward"))
    if has_streams:
        prepare(gm.graph, config.fold_branches_below_us, is_backward)
    original(lowering, gm, *args, **kwargs)
    if has_streams:
        if lowering.cpp_wrapper:  # of which code for the CPU alone couldn't name a stream
            lowering.device_types.add("cuda")
        assume_unaligned(lowering, inputs_in_parts(gm.graph))
    if is_backward:
        # They may lie in memory of the forward's inputs, and not in an aligned copy.
        inputs = gm.graph.find_nodes(op="placeholder")
        assume_unaligned(lowering, {str(n.target) for n in inputs if fact_of(n).in_input})


def run_node(original: Callable[..., object], graph: Any, node: torch.fx.Node) -> object:
    if not handles_streams():
        return original(graph, node)
    if computed_in_place(graph, node):
        return graph.env[node.args[0]]
    realize_before(graph, node)
    # Inductor has an option that says of all constants that the device copies them.
    option = {"aot_inductor.use_runtime_constant_folding": True}
    with inductor_config.patch(option) if copied_by_device(graph, node) else contextlib.nullcontext():
        result = original(graph, node)
    realize_after(node, result)
    return result


def compute_dependencies(original: Callable[..., None], scheduler: Any) -> None:
    if handles_streams():
        order_stream_operations(scheduler)
    original(scheduler)
    if handles_streams():
        order_blocking_operations(scheduler)


def populate_stream_assignments(original: Callable[..., None], scheduler: Any) -> None:
    """Assign streams to kernels that the scheduler has grouped before it asks which stream they belong to: those of a
    `torch._foreach` operator, and the copies of inputs into a concatenation. Such a node of the scheduler has no IR
    node of its own, by which upstream looks up a stream. It gets the stream of its parts, which come from one
    operation.
    """
    original(scheduler)
    if not handles_streams():
        return
    for node in scheduler.nodes:
        if node.node is not None:
            continue
        streams = {part.node.get_stream_idx() for part in node.get_nodes() if part.node is not None}
        if len(streams) != 1 or (user := streams.pop()) is None:
            continue
        stream = scheduler.node_to_stream[node] = scheduler._get_or_create_stream_idx_for_user_obj(user)
        scheduler.buff_to_stream.update(dict.fromkeys(node.get_buffer_names(), stream))
        scheduler._multi_stream_nodes = True
