"""Order the user's visible stream operations, and what blocks the host.

A record of an event that somebody else reads, a host synchronisation or a query has no tensor that would tie it to its
place. It is ordered after every node that carries its token, and after the visible operations before it: first in the
FX graph, whose passes move nodes towards their users (`order_graph`), so that values that are lowered before it become
buffers before it; then in the scheduler. Dependencies there are for the order only: nothing is read, and nothing on the
device waits. The planner makes the order true on the device.

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

import itertools
from typing import Any, TYPE_CHECKING

from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import NodeUser
from torch._inductor.virtualized import V

from torch_overlay import orders
from torch_overlay._dynamo.ops import RANGES
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
from torch_overlay._inductor.scheduler_nodes import fx_origins, stream_operation
from torch_overlay._inductor.streams.graph_facts import required


if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from torch_overlay._functorch.streams.tokens import Token


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
    order = next((found for edges in (in_ranges, wanted) if len(found := _sorted(nodes, edges)) == len(nodes)), None)
    if order is None:
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


def _sorted(nodes: list[torch.fx.Node], after: dict[torch.fx.Node, set[torch.fx.Node]]) -> list[torch.fx.Node]:
    """Return the nodes, each after those that it must come after, else in the order that they have; fewer nodes if that
    can't be.
    """
    return orders.sort(orders.directly_after(nodes, ((needed, n) for n, inputs in after.items() for needed in inputs)))


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
