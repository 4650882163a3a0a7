"""Order the user's visible stream operations, and what blocks the host, among the nodes of a schedule.

The dependencies are for the order only, as `graph_order` has it: nothing is read, and nothing on the device waits.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import NodeUser
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.facts import fact_of, is_placed_program
from torch_overlay._functorch.streams.fx import blocks_host, is_device_synchronization, is_synchronization, node_stream
from torch_overlay._inductor.scheduler_nodes import fx_origins, stream_operation
from torch_overlay._inductor.streams import ranges as stream_ranges
from torch_overlay._inductor.streams.graph_facts import required
from torch_overlay._inductor.streams.graph_order import touches_callers_memory, touches_host_memory


if TYPE_CHECKING:
    from torch_overlay._functorch.streams.tokens import Token


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
            dependencies.update(awaited if any(map(touches_host_memory, fx_origins(node))) else ())
            dependencies.update(barriers if any(map(touches_callers_memory, fx_origins(node))) else ())
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
            if any(map(touches_host_memory, origins)):
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
