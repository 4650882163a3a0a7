"""Lower graphs with streams: the last changes of the FX graph, what has to be a buffer by itself, and the order of what
the user or the host can see.

A record of an event that somebody else reads, a host synchronisation or a query has no tensor that would tie it to its
place. It is ordered after every node that carries its token, and after the visible operations before it: first in the
FX graph, whose passes move nodes towards their users (`order_graph`), so that values that are lowered before it become
buffers before it; then in the scheduler. Dependencies there are for the order only: nothing is read, and nothing on the
device waits. The planner makes the order true on the device. Values for another stream become buffers where they stand.

Note [Ranges]
A range shows the launches that the host makes while it is open, so `range_push`, `range_pop` and `range_mark` (see
`_dynamo.ops`) are ordered on the host, and nothing on the device waits for them. When streams are placed, each node
notes how many of these operations the program has before it (`Fact.range`). From then on an operation of a range comes
after the nodes with its number or a smaller one, and before those with a larger one: in the FX graph, in what is
realized into buffers, in the scheduler. So kernels are not fused across the end of a range. A kernel that computes
nodes of several numbers belongs to the largest. Where a pass has made an order that contradicts this, data dependence
decides.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import config as inductor_config, ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import NodeUser
from torch._inductor.utils import gather_origins
from torch._inductor.virtualized import V

from torch_overlay import config, orders
from torch_overlay._dynamo.ops import RANGES
from torch_overlay._functorch.offload.ops import OPERATIONS
from torch_overlay._functorch.streams.facts import fact_of, is_placed_program
from torch_overlay._functorch.streams.fx import (
    base_of,
    blocks_host,
    device_type,
    is_device_synchronization,
    is_stream_op,
    is_synchronization,
    node_stream,
    RECORD_STREAM,
    storage_node,
    updated_operands,
)
from torch_overlay._inductor.offload import codegen as offload_codegen
from torch_overlay._inductor.scheduler_nodes import fx_origins, stream_operation
from torch_overlay._inductor.streams.copies_in_place import (
    assume_unaligned,
    computed_in_place,
    IN_PLACE,
    inputs_in_parts,
    make_copies_in_place,
    write_back_parts,
)
from torch_overlay._inductor.streams.graph_facts import required
from torch_overlay._inductor.streams.host_copies import fix_layout, upload_returned_memory_at_once
from torch_overlay._inductor.streams.single_stream import fold_branches
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_overlay._functorch.streams.tokens import Token


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
    users = (user for user in node.users if user.op == "call_function")
    if not is_stream_op(node) and any(node_stream(user) != node_stream(node) for user in users):
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


def graph_lowering_init(original: Callable[..., None], lowering: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
    override(lowering, run_node=run_node)
    if any(n.target in OPERATIONS for n in gm.graph.nodes):
        offload_codegen.register()
    has_streams = handles_streams() and is_placed_program(gm.graph)
    is_backward = bool(kwargs.get("is_backward"))
    if has_streams:
        # The last changes to the FX graph: the passes are done, and nothing is lowered yet.
        order_graph(gm.graph)
        make_copies_in_place(gm.graph)
        write_back_parts(gm.graph)
        upload_returned_memory_at_once(gm.graph)
        _name_memory(gm.graph)
        if config.fold_branches_below_us > 0:
            fold_branches(gm.graph, config.fold_branches_below_us, is_backward)
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


def order_graph(graph: torch.fx.Graph) -> None:
    """Sort the graph, changing as little as possible, so that visible stream operations stand where the user put
    them.
    """
    visible = [n for n in graph.nodes if n.op == "call_function" and is_stream_op(n)]
    if not visible:
        return
    nodes = list(graph.nodes)
    after: dict[torch.fx.Node, set[torch.fx.Node]] = {node: set(node.all_input_nodes) for node in nodes}
    _keep_updates_in_order(nodes, after)
    carriers: dict[Token | None, list[torch.fx.Node]] = {}
    for node in nodes:
        for token in fact_of(node).promised_to or ():
            carriers.setdefault(token, []).append(node)
    visible.sort(key=lambda n: fact_of(n).order or 0)
    for previous, node in itertools.pairwise(visible):
        after[node].add(previous)
    for node in visible:
        after[node].update(n for n in carriers.get(fact_of(node).requires, ()) if n is not node)
    after[nodes[-1]].update(nodes[:-1])  # the output
    wanted = {node: set(needed) for node, needed in after.items()}
    awaited = barrier = None
    earlier: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # a pass may have merged nodes before and after it into one

    def is_earlier(node: torch.fx.Node, synchronization: torch.fx.Node) -> bool:
        # Some stand after it and belong before it, as the write-back to an input does.
        return node in earlier[synchronization] or fact_of(synchronization).requires in fact_of(node).promises

    for node in nodes:
        if is_synchronization(node):
            awaited, barrier = node, node if is_device_synchronization(node) else barrier
            earlier[node] = orders.reached(after[node], after.__getitem__)
        elif awaited is not None and touches_host_memory(node) and not is_earlier(node, awaited):
            wanted[node].add(awaited)
        if barrier is not None and touches_callers_memory(node) and not is_earlier(node, barrier):
            wanted[node].add(barrier)
    in_ranges = {node: set(needed) for node, needed in wanted.items()}
    for first, second in _order_of_ranges(nodes):
        in_ranges[second].add(first)
    # A pass may have merged nodes before and after the end of a range, too.
    for edges in (in_ranges, wanted):
        pairs = ((needed, node) for node, inputs in edges.items() for needed in inputs)
        if len(order := orders.sort(orders.directly_after(nodes, pairs))) == len(nodes):
            break
    else:
        raise AssertionError("the stream program contradicts the order of the data that it synchronises")
    if order != nodes:
        for node in order[:-1]:
            order[-1].prepend(node)


def _order_of_ranges(nodes: list[torch.fx.Node]) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """Yield pairs of nodes: the first must come before the second. Operations of ranges are already in order."""
    places = {fact_of(n).range: n for n in nodes if n.target in RANGES}
    for node in nodes:
        known = fact_of(node).range
        if known is None or node.target in RANGES or node.op != "call_function":
            continue
        if (following := places.get(known)) is not None:
            yield node, following
        if (previous := places.get(known - 1)) is not None:
            yield previous, node


def _keep_updates_in_order(nodes: list[torch.fx.Node], after: dict[torch.fx.Node, set[torch.fx.Node]]) -> None:
    """Order an update in place after the operations that read or write the memory before it, and before those that do
    so later.

    `record_stream` does neither: a `record_stream` that is written after an update may stand before the write-back at
    the graph's end.
    """
    last_write: dict[torch.fx.Node, torch.fx.Node] = {}
    reads: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in nodes:
        if node.op != "call_function" or base_of(node) is not None or node.target is RECORD_STREAM:
            continue
        written = {storage_node(value) for value in updated_operands(node)}
        for memory in map(storage_node, node.all_input_nodes):
            if memory in last_write:
                after[node].add(last_write[memory])
            if memory not in written:
                reads.setdefault(memory, set()).add(node)
        for memory in written:
            after[node].update(reads.pop(memory, ()))
            last_write[memory] = node


def touches_host_memory(node: torch.fx.Node) -> bool:
    """True for an operation on host memory. What the user does with that memory after a synchronisation comes after it,
    since the device may have written the memory: no data dependence says so.
    """
    is_operation = node.op == "call_function" and not is_stream_op(node)
    return is_operation and "cpu" in map(device_type, (node, *node.all_input_nodes))


def touches_callers_memory(node: torch.fx.Node) -> bool:
    """True for an operation on the caller's memory. What the user does with that memory after a synchronisation of the
    device comes after it, since any stream may have written the memory, also one that this graph doesn't know.
    """
    return (
        node.op == "call_function"
        and not is_stream_op(node)
        and base_of(node) is None
        and any(storage_node(value).op == "placeholder" for value in node.all_input_nodes)
    )


def order_stream_operations(scheduler: Any) -> None:
    if all(stream_operation(node) is None for node in scheduler.nodes):
        return
    carriers: dict[Token, list[str]] = {}
    earlier: list[str] = []
    awaited: set[str] = set()
    barriers: set[str] = set()
    launched: dict[str, int] = {}  # buffer -> number of its kernel, as far as there are ranges
    of_ranges: dict[int, set[str]] = {}
    for node in scheduler.nodes:  # in the order of the graph: what a later one computes again was promised before
        own = set(node.get_buffer_names())
        dependencies = V.graph.additional_buffer_deps[node.get_name()]
        if stream_operation(node) is not None:
            needed = list(earlier)
            for token in required(node):
                needed += carriers.get(token, ())
            for number in (fact_of(n).range for n in fx_origins(node) if n.target in RANGES):
                needed += [name for name, known in launched.items() if number is not None and known <= number]
                of_ranges[number or 0] = own
            dependencies.update(n for n in needed if n not in own)
            earlier = [*earlier, *own]
            awaited |= own if any(map(is_synchronization, fx_origins(node))) else set()
            barriers |= own if any(map(is_device_synchronization, fx_origins(node))) else set()
        else:
            dependencies.update(awaited if any(map(touches_host_memory, fx_origins(node))) else ())
            dependencies.update(barriers if any(map(touches_callers_memory, fx_origins(node))) else ())
            numbers = {fact_of(n).range for n in fx_origins(node) if n.target not in RANGES} - {None}
            if (number := max(numbers, default=None)) is not None:  # type: ignore[type-var]
                launched.update(dict.fromkeys(own, number))
                dependencies.update(of_ranges.get(number - 1, ()))
        for origin in fx_origins(node):
            for token in fact_of(origin).promised_to or ():
                carriers.setdefault(token, []).extend(own)


def order_blocking_operations(scheduler: Any) -> None:
    """Order an operation that blocks the host until its stream is done after what the user launched on that stream
    before, and after what the stream had waited for: all that the caller launches afterwards, on whatever stream,
    counts on it. Later operations on host memory come after it, since the device may have written that memory in an
    earlier frame.

    The dependencies are no reads, so they are added after those that upstream finds: a read would have to come before
    whatever writes there later. What can't be computed before the copy stays after it.
    """
    graph: Any = V.graph.module.graph  # type: ignore[union-attr]
    nodes = list(graph.nodes)
    if not any(map(blocks_host, nodes)) or not is_placed_program(graph):
        return
    position = {node: i for i, node in enumerate(nodes)}
    launched: list[tuple[int, int, Any, frozenset[Token]]] = []  # last position, stream, node, promises
    blocking: list[tuple[int, int, Any, Token | None]] = []
    for node in scheduler.nodes:
        origins = sorted(fx_origins(node), key=position.__getitem__)
        if origins and stream_operation(node) is None:
            promises = frozenset(t for n in origins for t in fact_of(n).promises)
            last = position[origins[-1]]
            launched.append((last, node_stream(origins[-1]), node, promises))
            for n in filter(blocks_host, origins):
                token = fact_of(n).requires
                blocking.append((position[n], node_stream(n), node, token))
    readers = _readers(scheduler)
    for at, stream, node, _ in blocking:
        _order_after(node, [n for other, s, n, _ in launched if other < at and s == stream], readers)
    for _, _, node, token in blocking:  # an input that was updated before is written back at the graph's end
        _order_after(node, [n for _, _, n, promises in launched if token in promises], readers)
    for last, _, node, promises in launched:
        if any(map(touches_host_memory, fx_origins(node))):
            _order_after(node, [n for at, _, n, token in blocking if at < last and token not in promises], readers)


def _readers(scheduler: Any) -> dict[Any, set[Any]]:
    """Return, for each node, the nodes that read its results."""
    maker = {name: node for node in scheduler.nodes for name in node.get_buffer_names()}
    readers: dict[Any, set[Any]] = {node: set() for node in scheduler.nodes}
    for node in scheduler.nodes:
        for dependency in node.read_writes.reads:
            if (made_by := maker.get(dependency.name)) not in (None, node):
                readers[made_by].add(node)
    return readers


def _order_after(node: Any, earlier: list[Any], readers: dict[Any, set[Any]]) -> None:
    """Order `node` after each of `earlier`, except those that depend on `node`."""
    dependents = orders.reached([node], readers.__getitem__)
    for other in earlier:
        if other not in dependents and node not in readers[other]:
            made = other.get_outputs()[0]
            node.add_fake_dep(WeakDep(made.get_name(), node.get_name(), is_fake=True))
            made.set_users([*made.users, NodeUser(node, is_weak=True)])
            readers[other].add(node)
