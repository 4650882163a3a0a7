"""Every operation that a pass makes is placed: it has a stream, and tokens for what the outside relies on.

In this order, for nodes that come without a placement of their own:

1. A node takes the placement of those that it replaces (`pass_log`).
2. A node that replaces none is computed for its readers, and runs where they do.
3. A node that nobody reads but the caller runs where its operands were computed.

Where these are on several streams, the one that its operands come from is taken, or the first: any is right, for the
planner orders what crosses streams. Tokens of another stream's node say what they said: that this stream waits for
that one's state, too.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.streams.fx import (
    AFTER,
    BEFORE,
    blocks_host,
    DROPPED,
    is_stream_op,
    is_view,
    LEAVE,
    node_stream,
    READS,
    REQUIRES,
    RESULTS,
    viewed,
)


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import Node

    from torch_overlay._inductor.streams.pass_log import Placed

Custom = dict[str, Any]


def is_placed(custom: Custom | None) -> bool:
    """Its tokens are known, even if there are none."""
    return custom is not None and AFTER in custom and BEFORE in custom


def needs_streams(custom: Custom | None) -> bool:
    """A graph with such a node is to be placed."""
    return custom is not None and any(custom.get(key) for key in ("stream", LEAVE, AFTER, BEFORE))


def union_of_tokens(customs: Sequence[Custom]) -> Custom:
    """Of one node that does what several did."""
    made: Custom = {}
    for key in (AFTER, BEFORE, READS):
        known = [tokens for custom in customs if (tokens := custom.get(key)) is not None]
        if known:
            made[key] = tuple(sorted({token for tokens in known for token in tokens}))
    for custom in customs:
        made |= {key: custom[key] for key in (LEAVE, RESULTS) if key in custom}
    return made


class NewNodes:
    """`replaced`: the new nodes in the order of the graph, each with those that it replaces. Nodes of a region's body
    have streams and no tokens (`has_tokens`).
    """

    def __init__(self, replaced: Mapping[Node, Sequence[Node]], before: Mapping[Node, Placed]) -> None:
        self.replaced, self.before = replaced, before
        self.has_tokens = any(is_placed(placed.custom) for placed in before.values())

    def place(self) -> None:
        todo = [node for node in self.replaced if not is_stream_op(node) and not self._is_placed(node)]
        left = []
        for node in reversed(todo):
            if gone := [c for old in self.replaced[node] if (c := self._known(self.before[old].custom)) is not None]:
                _place(node, gone)
                _keep_marks(node, gone)
            elif readers := self._readers(node):
                same_work = all(reader in self.replaced for reader in readers)
                _place(node, [reader.meta.get("custom", {}) for reader in readers], reads=same_work)
            else:
                left.append(node)
        for node in reversed(left):
            makers = [viewed(value) for value in node.all_input_nodes]
            made = [self._known(maker.meta.get("custom")) for maker in makers if maker.op == "call_function"]
            if known := [custom for custom in made if custom is not None]:
                _place(node, known, reads=False)

    def _known(self, custom: Custom | None) -> Custom | None:
        """None if a node isn't placed."""
        if not self.has_tokens:
            return custom or {}
        return custom if is_placed(custom) else None

    def _is_placed(self, node: Node) -> bool:
        custom = node.meta.get("custom")
        return is_placed(custom) if self.has_tokens else bool(custom)

    def _readers(self, node: Node) -> list[Node]:
        """The placed operations that read a value, after views of it; the views, if there are no others."""
        views: list[Node] = []
        found: list[Node] = []
        todo = list(node.users)
        while todo:
            user = todo.pop(0)
            is_operation = user.op == "call_function" and not is_stream_op(user)
            if is_operation and self._known(user.meta.get("custom")) is not None:
                (views if is_view(user) else found).append(user)
                todo += user.users if is_view(user) else ()
        return found or views


def _place(node: Node, customs: Sequence[Custom], reads: bool = True) -> None:
    own = node.meta.get("custom", {})
    streams = [custom.get("stream") or 0 for custom in customs]
    operands = {node_stream(viewed(value)) for value in node.all_input_nodes if value.op == "call_function"}
    stream = own.get("stream") or next((s for s in streams if s in operands), streams[0])
    made = own | union_of_tokens(customs)
    made |= {"stream": stream} if stream else {}
    for key in (AFTER, BEFORE):
        if key in made:
            made[key] = tuple(sorted({*made[key], *(f"s{s}" for s in streams)} - {f"s{stream}"}))
    if not reads or {*streams} != {stream}:
        made.pop(READS, None)
    if made:
        node.meta["custom"] = made


def _keep_marks(node: Node, gone: Sequence[Custom]) -> None:
    """The promise of a copy that blocks the host, and that a result isn't handed on."""
    tokens = {custom[REQUIRES] for custom in gone if REQUIRES in custom}
    if len(tokens) == 1 and blocks_host(node):
        node.meta["custom"][REQUIRES] = tokens.pop()
    if all(custom.get(DROPPED) for custom in gone):
        node.meta["custom"][DROPPED] = True


__all__ = ["is_placed", "needs_streams", "NewNodes", "union_of_tokens"]
