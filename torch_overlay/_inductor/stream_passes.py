"""Placement survives the passes that rewrite FX graphs.

A pass may replace a node by another and overwrite the survivor's metadata with that of the node it removed (`x + 0`
becomes `x`, and `x` takes the addition's place and stream), or create nodes that have no placement. Around each pass:
a node that was there before keeps its stream and tokens. A new write in place takes those of the nodes that it was put
in the place of, as far as their inputs tell; any other new node between nodes of one stream joins that stream. What
remains without a placement runs on the ambient stream: correct in any case, for the planner orders it. Where a node
is gone because it did nothing, its readers take over what the caller relies on.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay import config
from torch_overlay._functorch.eager_memory import results_made
from torch_overlay._functorch.stream_placement import (
    AFTER,
    BEFORE,
    is_stream_op,
    is_view,
    LEAVE,
    node_stream,
    READS,
    RESULTS,
    viewed,
)
from torch_overlay._inductor.no_op_results import COPY_OF


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.fx import Graph, Node


@dataclasses.dataclass(frozen=True)
class _Placed:
    """What a node's `custom` held before a pass, what the node read, and who read the node."""

    custom: dict[str, Any] | None
    inputs: frozenset[Node]
    users: frozenset[Node]


def _placements(graph: Graph) -> dict[Node, _Placed] | None:
    """None for a graph in which nothing has a stream."""
    found = {}
    streams = False
    for node in graph.nodes:
        custom = node.meta.get("custom")
        found[node] = _Placed(custom, frozenset(node.all_input_nodes), frozenset(node.users))
        streams = streams or bool(custom and (custom.get("stream") or LEAVE in custom))
    return found if streams else None


def _restore(graph: Graph, before: dict[Node, _Placed]) -> None:
    new = []
    for node in graph.nodes:
        if node in before:
            custom = before[node].custom
            if node.meta.get("custom") is not custom:
                if custom is None:
                    node.meta.pop("custom", None)
                else:
                    node.meta["custom"] = custom
        elif node.op == "call_function" and not node.meta.get("custom"):
            new.append(node)
    left = set(graph.nodes)
    if not any(_is_write(node) for node in new):  # a pass that makes writes in place drops what the writes replace
        # A view reads nothing itself, and has nothing to hand on.
        readers = [
            n for n, p in before.items() if n not in left and p.custom and n.op == "call_function" and not is_view(n)
        ]
        results = _given_to_caller(graph) if readers else set()
        for node in readers:
            _hand_down(node, before, left, results)
    for node in graph.nodes:
        node.meta.pop(COPY_OF, None)
    if not new:
        return
    gone = {node: placed for node, placed in before.items() if node not in left and placed.custom}
    for node in new:
        _inherit(node, gone)
    for node in new:
        if not node.meta.get("custom"):
            neighbours = [n for n in (*node.all_input_nodes, *node.users) if n.op == "call_function"]
            streams = {node_stream(n) for n in neighbours}
            if len(streams) == 1 and (stream := streams.pop()):
                node.meta["custom"] = {"stream": stream}


def _given_to_caller(graph: Graph) -> set[Node]:
    """What is in the caller's memory in the end: results, and what is written back to inputs."""
    written = (copy.args for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    inputs = {viewed(value) for given, value, *_ in written if given.op == "placeholder"}
    return results_made(graph.output_node()) | inputs


def _hand_down(gone: Node, before: dict[Node, _Placed], left: set[Node], results: set[Node]) -> None:
    """What a node read that did nothing (`x * 1`) is read by its readers now.

    The caller's memory is still read when that node would have done so: behind what its stream had waited for, and
    ahead of what the user ordered behind that node, or does on its stream later. A copy that blocks the host may have
    come between, and then the reader comes behind it. The caller gets a result's memory at the end, and that of an
    input has its new value then: of those, the second half holds. Whose memory is read in eager is known of the same
    stream only.
    """
    custom: Any = before[gone].custom
    stream = custom.get("stream") or 0
    for user, taken in _heirs(gone, before, left):
        own = user.meta.get("custom", {})
        if is_stream_op(user) or own.get(AFTER) is None or custom.get(AFTER) is None:
            continue
        also = {}
        if node_stream(user) == stream:
            also[READS] = tuple(sorted({*own.get(READS, ()), *custom.get(READS, ())}))
        roots = set(map(viewed, taken))
        callers = any(root.op == "placeholder" for root in roots)
        for key in (AFTER, BEFORE):
            if key in own and (callers or (key == BEFORE and not roots.isdisjoint(results))):
                told = {token for token in custom[key] if not token.startswith("c")}
                also[key] = tuple(sorted({*own[key], *told, f"s{stream}"} - {f"s{node_stream(user)}"}))
        user.meta["custom"] = {**own, **also}


def _heirs(gone: Node, before: dict[Node, _Placed], left: set[Node]) -> Iterator[tuple[Node, set[Node]]]:
    """The operations that are left of those that read a node, or one in its place, with what they read instead, some of
    them through views: what the node read, or a copy that was kept of that.
    """
    given = set(before[gone].inputs)
    while not given <= left:  # what it read may have done nothing, too
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


def _is_write(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _inherit(node: Node, gone: Mapping[Node, _Placed]) -> None:
    """A write in place was a copy, and perhaps a scatter before it: their stream is the new node's, if they have one,
    and so is what the caller relies on. Any other new node is one of those that are gone, with other operands, if it
    does the same for the same readers.
    """
    inputs, users = set(node.all_input_nodes), set(node.users)
    if _is_write(node):
        replaced = [p for p in gone.values() if not inputs.isdisjoint(p.inputs)]
    else:
        replaced = [
            p
            for other, p in gone.items()
            if other.target is node.target and not users.isdisjoint(p.users) and not inputs.isdisjoint(p.inputs)
        ]
    customs = [placed.custom for placed in replaced if placed.custom]
    if not customs or len({custom.get("stream", 0) for custom in customs}) > 1:
        return
    made: dict[str, Any] = {"stream": stream} if (stream := customs[0].get("stream")) else {}
    made |= union_of_tokens(customs)
    if made:
        node.meta["custom"] = made


def union_of_tokens(customs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one node that does what several did."""
    made: dict[str, Any] = {}
    for key in (AFTER, BEFORE, READS):
        known = [tokens for custom in customs if (tokens := custom.get(key)) is not None]
        if known:
            made[key] = tuple(sorted({token for tokens in known for token in tokens}))
    for custom in customs:
        made |= {key: custom[key] for key in (LEAVE, RESULTS) if key in custom}
    return made


def apply_gm_pass(original: Callable[..., Any], observer: Any, pass_fn: Callable[[Any], Any]) -> Any:
    before = _placements(observer.gm.graph) if config.streams else None
    result = original(observer, pass_fn)
    if before is not None:
        _restore(observer.gm.graph, before)
    return result


def reorder_for_locality(original: Callable[[Graph], None], graph: Graph) -> None:
    """Upstream moves producers to just before their consumer. For a side stream's branch that is the latest moment at
    which it can be launched, after all the work that it was to run beside.
    """
    if not (config.streams and _placements(graph)):
        original(graph)


def common_custom_context(original: Callable[..., dict[str, Any]], nodes: Sequence[Node]) -> dict[str, Any]:
    """A pattern's replacement carries the tokens of all that it replaces. It takes over the metadata of the last of
    them, so they all get them; `_restore` takes them back from what stays.
    """
    tokens = union_of_tokens([node.meta.get("custom", {}) for node in nodes])
    found = original(nodes) | tokens
    for node in nodes if tokens else ():
        if node.op == "call_function" and "custom" in node.meta:
            node.meta["custom"] = node.meta["custom"] | tokens
    return found
