"""Place every operation that a pass makes: give it a stream, and tokens for what the caller relies on.

A new node without a placement of its own is placed by the first of these rules that applies:

1. A node takes the placement of those that it replaces (`pass_log`).
2. A node that replaces none is computed for its readers, and runs where they do.
3. A node that nobody reads but the caller runs where its operands were computed.

Where those nodes are on several streams, the node takes the stream that its operands come from, or the first: any is
right, for the planner orders what crosses streams. Tokens taken from another stream's node keep their meaning, so the
node also gets the token of that stream's state.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.streams.facts import fact_in, note_fact, union_of_facts
from torch_overlay._functorch.streams.fx import blocks_host, is_stream_op, is_view, node_stream, place_on, viewed
from torch_overlay._functorch.streams.ids import is_copy_stream
from torch_overlay._functorch.streams.tokens import state


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import Node

    from torch_overlay._inductor.streams.pass_log import Placed

Custom = dict[str, Any]


def is_placed(custom: Custom | None) -> bool:
    """True if the tokens are known, even if there are none."""
    return fact_in(custom).is_placed


def needs_streams(custom: Custom | None) -> bool:
    """True if a graph with a node of this metadata has to be placed."""
    return custom is not None and bool(custom.get("stream") or fact_in(custom).has_tokens)


class NewNodes:
    """Places the new nodes of a pass. `replaced`: the new nodes in the order of the graph, each with those that it
    replaces. Nodes of a region's body have streams and no tokens (`has_tokens`).
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
            made = [self._known(maker.meta.get("custom")) for maker in makers if _computes(maker)]
            if known := [custom for custom in made if custom is not None]:
                _place(node, known, reads=False)

    def _known(self, custom: Custom | None) -> Custom | None:
        """Return the metadata of a node; None if the node isn't placed."""
        if not self.has_tokens:
            return custom or {}
        return custom if is_placed(custom) else None

    def _is_placed(self, node: Node) -> bool:
        custom = node.meta.get("custom")
        return is_placed(custom) if self.has_tokens else bool(custom)

    def _readers(self, node: Node) -> list[Node]:
        """Return the placed operations that read a value, also through its views; only the views if there are no
        others.
        """
        views: list[Node] = []
        found: list[Node] = []
        todo = list(node.users)
        while todo:
            user = todo.pop(0)
            if _computes(user) and not is_stream_op(user) and self._known(user.meta.get("custom")) is not None:
                (views if is_view(user) else found).append(user)
                todo += user.users if is_view(user) else ()
        return found or views


def _computes(node: Node) -> bool:
    """True for an operation that isn't a copy of a saved value to the host or back: those have streams of their own."""
    return node.op == "call_function" and not is_copy_stream(node_stream(node))


def _place(node: Node, customs: Sequence[Custom], reads: bool = True) -> None:
    streams = [custom.get("stream") or 0 for custom in customs]
    operands = {node_stream(viewed(value)) for value in node.all_input_nodes if value.op == "call_function"}
    stream = node_stream(node) or next((s for s in streams if s in operands), streams[0])
    place_on(node, stream)
    made = union_of_facts(list(map(fact_in, customs)))
    for name in made.keys() & {"after", "before"}:
        made[name] = tuple(sorted({*made[name], *map(state, streams)} - {state(stream)}))
    if not reads or {*streams} != {stream}:
        made["reads"] = None
    note_fact(node, **made)


def _keep_marks(node: Node, gone: Sequence[Custom]) -> None:
    """Keep the token of a copy that blocks the host (`requires`), and the mark that a result isn't returned
    (`is_dropped`).
    """
    facts = list(map(fact_in, gone))
    required = {fact.requires for fact in facts} - {None}
    if len(required) == 1 and blocks_host(node):
        note_fact(node, requires=required.pop())
    if all(fact.is_dropped for fact in facts):
        note_fact(node, is_dropped=True)


__all__ = ["is_placed", "needs_streams", "NewNodes"]
