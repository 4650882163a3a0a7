"""Order the user's visible stream operations among the compute that Inductor schedules.

A record of an event that somebody else reads, a host synchronisation or a query has no tensor that would tie it to its
place. This module orders it after every node that carries its token, and after the visible operations before it: first
in the FX graph, whose passes move nodes towards their users (`order_graph`), so that values that are lowered before it
become buffers before it (`run_node`); then in the scheduler, as dependencies for its order only. The planner makes the
order true on the device.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import NodeUser
from torch._inductor.utils import gather_origins
from torch._inductor.virtualized import V

from torch_overlay import config
from torch_overlay._functorch.offload.ops import OPERATIONS
from torch_overlay._functorch.streams.facts import fact_of, is_placed_program
from torch_overlay._functorch.streams.fx import (
    blocks_host,
    is_device_synchronization,
    is_stream_op,
    is_synchronization,
    is_view,
    node_stream,
    updated_operands,
    viewed,
)
from torch_overlay._inductor.offload import codegen
from torch_overlay._inductor.scheduler_nodes import fx_origins, stream_operation
from torch_overlay._inductor.streams import copy_log, ranges as stream_ranges
from torch_overlay._inductor.streams.copies_in_place import IN_PLACE, make_copies_in_place
from torch_overlay._inductor.streams.folding import fold_branches
from torch_overlay._inductor.streams.graph_facts import required
from torch_overlay._inductor.streams.host_copies import fix_layout, upload_returned_memory_at_once
from torch_overlay._inductor.streams.partial_writes import assume_unaligned, computed_in_place, inputs_in_parts


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_overlay._functorch.streams.tokens import Token

_RECORD_STREAM = torch.ops.streams.record_stream.default


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
        for token in fact_of(node).before or ():
            carriers.setdefault(token, []).append(node)
    visible.sort(key=lambda n: fact_of(n).order or 0)
    for previous, node in itertools.pairwise(visible):
        after[node].add(previous)
    for node in visible:
        after[node].update(n for n in carriers.get(fact_of(node).requires, ()) if n is not node)
    after[nodes[-1]].update(nodes[:-1])  # the output
    wanted = {node: set(needed) for node, needed in after.items()}
    awaited = barrier = None
    for node in nodes:
        if is_synchronization(node):
            awaited, barrier = node, node if is_device_synchronization(node) else barrier
        elif awaited is not None and _touches_host_memory(node) and not _promises(node, awaited):
            wanted[node].add(awaited)
        if barrier is not None and _touches_callers_memory(node) and not _promises(node, barrier):
            wanted[node].add(barrier)
    in_ranges = {node: set(needed) for node, needed in wanted.items()}
    for first, second in stream_ranges.order(nodes):
        in_ranges[second].add(first)
    # A pass may have merged nodes before and after a synchronisation, or the end of a range, into one node.
    choices = (in_ranges, wanted, after)
    order = next((found for edges in choices if len(found := _sorted(nodes, edges)) == len(nodes)), None)
    if order is None:
        raise AssertionError("the stream program contradicts the order of the data that it synchronises")
    if order != nodes:
        for node in order[:-1]:
            order[-1].prepend(node)


def _keep_updates_in_order(nodes: list[torch.fx.Node], after: dict[torch.fx.Node, set[torch.fx.Node]]) -> None:
    """Order an update in place after the operations that read or write the memory before it, and before those that do
    so later.

    `record_stream` does neither: a `record_stream` that is written after an update may stand before the write-back at
    the graph's end.
    """
    last_write: dict[torch.fx.Node, torch.fx.Node] = {}
    reads: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in nodes:
        if node.op != "call_function" or is_view(node) or node.target is _RECORD_STREAM:
            continue
        written = {viewed(value) for value in updated_operands(node)}
        for memory in map(viewed, node.all_input_nodes):
            if memory in last_write:
                after[node].add(last_write[memory])
            if memory not in written:
                reads.setdefault(memory, set()).add(node)
        for memory in written:
            after[node].update(reads.pop(memory, ()))
            last_write[memory] = node


def _sorted(nodes: list[torch.fx.Node], after: dict[torch.fx.Node, set[torch.fx.Node]]) -> list[torch.fx.Node]:
    """Return the nodes, each after those that it must come after, else in the order that they have; fewer nodes if that
    can't be.
    """
    position = {node: i for i, node in enumerate(nodes)}
    users: dict[torch.fx.Node, list[torch.fx.Node]] = {node: [] for node in nodes}
    missing = {node: len(inputs) for node, inputs in after.items()}
    for node, inputs in after.items():
        for needed in inputs:
            users[needed].append(node)
    ready = [position[node] for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    return order


def _touches_host_memory(node: torch.fx.Node) -> bool:
    """True for an operation on host memory. What the user does with that memory after a synchronisation comes after it,
    since the device may have written the memory: no data dependence says so.
    """
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    on_host = (isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)
    return node.op == "call_function" and not is_stream_op(node) and any(on_host)


def _touches_callers_memory(node: torch.fx.Node) -> bool:
    """True for an operation on the caller's memory. What the user does with that memory after a synchronisation of the
    device comes after it, since any stream may have written the memory, also one that this graph doesn't know.
    """
    return (
        node.op == "call_function"
        and not is_stream_op(node)
        and not is_view(node)
        and any(viewed(value).op == "placeholder" for value in node.all_input_nodes)
    )


def _promises(node: torch.fx.Node, awaited: torch.fx.Node) -> bool:
    """True if the node belongs before that synchronisation though it stands after it, as the write-back to an input
    does.
    """
    return fact_of(awaited).requires in fact_of(node).promises


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
    for record in graph.find_nodes(op="call_function", target=_RECORD_STREAM):
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
    is_fixed = IN_PLACE in node.meta or any(user.target is _RECORD_STREAM for user in node.users)
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


def order_stream_operations(scheduler: Any) -> None:
    if all(stream_operation(node) is None for node in scheduler.nodes):
        return
    carriers: dict[Token, list[str]] = {}
    earlier: list[str] = []
    awaited: set[str] = set()
    barriers: set[str] = set()
    launched: dict[str, int] = {}  # buffer -> number of its kernel, as far as there are ranges
    ranges: dict[int, set[str]] = {}
    for node in scheduler.nodes:  # in the order of the graph: what a later one computes again was promised before
        own = set(node.get_buffer_names())
        dependencies = V.graph.additional_buffer_deps[node.get_name()]
        if stream_operation(node) is not None:
            needed = list(earlier)
            for token in required(node):
                needed += carriers.get(token, ())
            for place in (stream_ranges.number(n) for n in fx_origins(node) if stream_ranges.is_range(n)):
                needed += [name for name, known in launched.items() if place is not None and known <= place]
                ranges[place or 0] = own
            dependencies.update(n for n in needed if n not in own)
            earlier = [*earlier, *own]
            awaited |= own if any(map(is_synchronization, fx_origins(node))) else set()
            barriers |= own if any(map(is_device_synchronization, fx_origins(node))) else set()
        else:
            dependencies.update(awaited if any(map(_touches_host_memory, fx_origins(node))) else ())
            dependencies.update(barriers if any(map(_touches_callers_memory, fx_origins(node))) else ())
            if (place := stream_ranges.largest(fx_origins(node))) is not None:
                launched.update(dict.fromkeys(own, place))
                dependencies.update(ranges.get(place - 1, ()))
        for origin in fx_origins(node):
            for token in fact_of(origin).before or ():
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
    place = {node: i for i, node in enumerate(nodes)}
    launched: list[tuple[int, int, Any, frozenset[Token]]] = []  # place of its last operation, stream, node, promises
    on_host: list[tuple[int, Any, frozenset[Token]]] = []  # of those, what touches the host's memory
    blocking: list[tuple[int, int, Any, Token | None]] = []
    for node in scheduler.nodes:
        origins = sorted(fx_origins(node), key=place.__getitem__)
        if origins and stream_operation(node) is None:
            promises = frozenset(t for n in origins for t in fact_of(n).promises)
            last = place[origins[-1]]
            launched.append((last, node_stream(origins[-1]), node, promises))
            if any(map(_touches_host_memory, origins)):
                on_host.append((last, node, promises))
            for n in filter(blocks_host, origins):
                token = fact_of(n).requires
                blocking.append((place[n], node_stream(n), node, token))
    readers = _readers(scheduler)
    for at, stream, node, _ in blocking:
        _order_after(node, [n for other, s, n, _ in launched if other < at and s == stream], readers)
    for _, _, node, token in blocking:  # an input that was updated before is written back at the graph's end
        _order_after(node, [n for _, _, n, promises in launched if token in promises], readers)
    for last, node, promises in on_host:
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
    dependents, todo = {node}, [node]
    while todo:
        new = readers[todo.pop()] - dependents
        dependents |= new
        todo += new
    for other in earlier:
        if other not in dependents and node not in readers[other]:
            made = other.get_outputs()[0]
            node.add_fake_dep(WeakDep(made.get_name(), node.get_name(), is_fake=True))
            made.set_users([*made.users, NodeUser(node, is_weak=True)])
            readers[other].add(node)
