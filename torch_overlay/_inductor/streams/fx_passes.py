"""Keep the placement of nodes through the passes that rewrite FX graphs.

A pass may replace a node by another and overwrite the survivor's metadata with that of the node it removed (`x + 0`
becomes `x`, and `x` takes the addition's place and stream), or create nodes that have no placement. Around each pass, a
node that was there before keeps its stream and tokens, and a new node takes those of the nodes that it replaces
(`pass_log`, `new_node_placement`). Where a node was removed because it did nothing, its readers take over the tokens
that the caller relies on.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.eager_memory import results_made
from torch_overlay._functorch.streams.facts import (
    add_after,
    add_before,
    Fact,
    fact_in,
    fact_of,
    KEY,
    note_fact,
    union_of_facts,
)
from torch_overlay._functorch.streams.fx import is_stream_op, is_view, node_stream, viewed
from torch_overlay._functorch.streams.tokens import state
from torch_overlay._inductor.streams.new_node_placement import needs_streams, NewNodes
from torch_overlay._inductor.streams.pass_log import COPY_OF, PassLog, Placed


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Graph, GraphModule, Node

    from torch_overlay._functorch.streams.tokens import Token


def has_streams(graph: Graph) -> bool:
    return any(needs_streams(node.meta.get("custom")) for node in graph.nodes)


def begin_pass(gm: GraphModule) -> PassLog | None:
    """Begin to log a pass over a graph with streams; None for another graph, and within a pass that is logged."""
    if PassLog.of(gm.graph) is not None or not has_streams(gm.graph):
        return None
    return PassLog(
        gm,
        {
            n: Placed(n.meta.get("custom"), frozenset(n.all_input_nodes), frozenset(n.users), is_view(n))
            for n in gm.graph.nodes
        },
    )


def end_pass(gm: GraphModule, log: PassLog, failed: bool) -> None:
    """End the log of a pass, and place the nodes that the pass left and made."""
    log.close()
    if not failed:
        _restore(gm.graph, log)


def merge_facts(nodes: Sequence[Node]) -> dict[str, Any]:
    """Return what a pattern's replacement has in `custom` beside its stream: the tokens of all nodes that it replaces.
    It takes over the metadata of the last of them, so they all get the tokens; `end_pass` takes these back from nodes
    that remain.
    """
    union = union_of_facts([fact_of(node) for node in nodes])
    if not union:
        return {}
    for node in nodes:
        if node.op == "call_function" and "custom" in node.meta:
            note_fact(node, **union)
    return {KEY: Fact(**union)}


def _restore(graph: Graph, log: PassLog) -> None:
    before = log.before
    for node in graph.nodes:
        if node in before:
            custom = before[node].custom
            if node.meta.get("custom") is not custom:
                if custom is None:
                    node.meta.pop("custom", None)
                else:
                    node.meta["custom"] = custom
    left = set(graph.nodes)
    replaced = log.replaced(graph)
    done_anew = {old for gone in replaced.values() for old in gone}
    # A view reads nothing itself, and has no tokens to transfer.
    readers = [
        n
        for n, p in before.items()
        if n not in left and n not in done_anew and p.custom and n.op == "call_function" and not p.is_view
    ]
    results = _given_to_caller(graph) if readers else set()
    for node in readers:
        _transfer_to_users(node, before, left, results)
    for node in graph.nodes:
        node.meta.pop(COPY_OF, None)
    NewNodes(replaced, before).place()


def _given_to_caller(graph: Graph) -> set[Node]:
    """Return the values that are in the caller's memory in the end: results, and what is written back to inputs."""
    written = (copy.args for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    inputs = {viewed(value) for given, value, *_ in written if given.op == "placeholder"}
    return results_made(graph.output_node()) | inputs


def _transfer_to_users(gone: Node, before: dict[Node, Placed], left: set[Node], results: set[Node]) -> None:
    """Transfer the tokens of a removed node that did nothing (`x * 1`) to its readers, which now read what it read.

    The caller's memory is still read when that node would have read it: after what the node's stream had waited for,
    and before what the user ordered after the node, or does on its stream later. A copy that blocks the host may have
    come between, and then the reader comes after the copy. The caller gets a result's memory at the end, and an input's
    memory has its new value then: for those, only the tokens in `before` are transferred. Whose memory is read in eager
    (`reads`) is transferred to readers on the same stream only; where the user orders that memory's stream after the
    node, eager may free the memory then, so that token is transferred, too.
    """
    custom: Any = before[gone].custom
    fact, stream = fact_in(custom), custom.get("stream") or 0
    for user, taken in _heirs(gone, before, left):
        own = fact_of(user)
        if is_stream_op(user) or not own.is_placed or fact.after is None:
            continue
        roots = set(map(viewed, taken))
        callers = any(root.op == "placeholder" for root in roots)
        if callers:
            add_after(user, [state(stream), *_ordering(fact.after)])
        if callers or not roots.isdisjoint(results):
            add_before(user, [state(stream), *_ordering(fact.before)])
        if node_stream(user) == stream and fact.reads:
            note_fact(user, reads=tuple(sorted({*(own.reads or ()), *fact.reads})))
            add_before(user, {state(read.stream) for read in fact.reads}.intersection(fact.before or ()))


def _ordering(tokens: tuple[Token, ...] | None) -> Iterator[Token]:
    return (t for t in tokens or () if not t.is_blocking_copy)


def _heirs(gone: Node, before: dict[Node, Placed], left: set[Node]) -> Iterator[tuple[Node, set[Node]]]:
    """Yield the remaining operations that read a removed node, or a node in its place, each with the values that it
    reads instead, some of them through views: what the removed node read, or a copy that was kept of that.
    """
    given = set(before[gone].inputs)
    while not given <= left:  # the nodes that it read may be removed, too
        given = {value for node in given for value in ([node] if node in left else before[node].inputs)}
    seen: set[Node] = set()
    todo: list[tuple[Node, set[Node]]] = [(user, set()) for user in before[gone].users]
    while todo:
        user, viewed_ones = todo.pop()
        if user not in before:
            continue
        if user not in left:
            todo += [(reader, viewed_ones) for reader in before[user].users if user not in seen]
        elif user.op == "call_function":
            new = {*user.all_input_nodes} - before[user].inputs
            taken = viewed_ones or {v for v in new if v in given or v.meta.get(COPY_OF, gone.name) != gone.name}
            if taken and user not in seen:
                yield user, taken
                todo += [(reader, taken) for reader in user.users if is_view(user)]
            elif not taken:
                continue
        seen.add(user)
