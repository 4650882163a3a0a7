"""Read the boundary tokens of a region's nodes from the FX nodes that they compute: the order between the region and
its caller.

Inductor's origins also name the nodes that produced an operation's inputs, on whatever stream; the tokens of those
nodes belong to the operations that compute them. So the nodes of a region are read in their order, and each is noted
(`note_origins`) before the next is read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Literal, TYPE_CHECKING

from torch._inductor.virtualized import V

from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import is_view
from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM, callers_stream_index
from torch_overlay._functorch.streams.tokens import CALLER, state, streams_of
from torch_overlay._inductor.scheduler_nodes import fx_origins, user_stream
from torch_overlay._inductor.streams.graph_facts import leaving, private_streams


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._functorch.streams.facts import ForeignRead
    from torch_overlay._functorch.streams.tokens import Token

Kind = Literal["after", "before"]


class BoundaryTokens:
    """Reads the tokens of a region's nodes. A node whose FX origins lost theirs in some pass gets all tokens of its
    stream.

    `enclosed` regions order themselves against the caller's stream alone: each side stream forks from it at the entry
    and joins it at the exit. A region must be `enclosed` inside a captured graph, and where the rest of the user's
    program runs in other regions.
    """

    def __init__(self, scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode], enclosed: bool) -> None:
        self.scheduler, self.enclosed = scheduler, enclosed
        self.concerned: set[int] = set()  # user streams that an enclosed region runs on, or that come after it
        self.origins: dict[str, set[torch.fx.Node]] = {}  # buffer -> FX nodes that went into it
        # The current stream of another device is registered under a number of its own; here it has the number of that
        # device.
        self.numbers = {
            i.index: callers_stream_index(i.device.index or 0)
            for i in registry.describe()
            if i.origin == "current" and i.index != CALLERS_STREAM and i.device is not None
        }
        # Private streams are made by the frame, and nobody else sees them: at the entry of a forward they hold no work,
        # and nobody asks for their state at the exit. In a backward they hold the work that the forward launched there.
        self.private = set() if V.graph.is_backward else private_streams()
        self.of_stream: dict[Kind, dict[int, set[Token]]] = {"after": defaultdict(set), "before": defaultdict(set)}
        for node in nodes:
            for kind, known in self.of_stream.items():
                known[user_stream(scheduler, node)].update(self.of_node(node, kind) or ())

    def number(self, stream: int) -> int:
        return self.numbers.get(stream, stream)

    def renumbered(self, tokens: Iterable[Token]) -> set[Token]:
        return {t if t.stream is None else state(self.number(t.stream)) for t in tokens}

    def note_origins(self, node: BaseSchedulerNode) -> None:
        origins = set(fx_origins(node))
        self.origins.update((name, origins) for name in node.get_buffer_names())

    def own_origins(self, node: BaseSchedulerNode) -> list[torch.fx.Node]:
        """Return the FX nodes that this operation computes itself.

        A node that was inlined here and elsewhere counts for both operations, if it reads the caller's memory in both.
        A buffer that an operator realizes for itself, and the first half of a split reduction, name the operator as
        their origin, too: both operations have its tokens and reads, then.
        """
        reads = {d.name for d in node.read_writes.reads}
        inherited = set().union(*(self.origins.get(name, set()) for name in reads))
        every = list(fx_origins(node))
        own = [
            n
            for n in every
            if n not in inherited or any(a.op == "placeholder" and a.name in reads for a in n.all_input_nodes)
        ]
        return own or every

    def of_node(self, node: BaseSchedulerNode, kind: Kind) -> set[Token] | None:
        """Return the tokens of the operation; None if no pass has kept any for it."""
        found: set[Token] | None = None
        own = self.own_origins(node)
        # A view launches nothing: its tokens are not tokens of the kernel that reads through it.
        for origin in [n for n in own if not is_view(n) and n.target is not operator.getitem] or own:
            tokens = getattr(fact_of(origin), kind)
            if tokens is not None:
                found = (found or set()) | self.renumbered(tokens)
        if found is None and any(getattr(fact_of(origin), kind) is not None for origin in fx_origins(node)):
            return set()
        return found

    def of_launch(self, node: BaseSchedulerNode, stream: int) -> tuple[frozenset[Token], frozenset[Token]]:
        """Return what an operation on a stream of the device comes after, and what comes after it."""
        user = user_stream(self.scheduler, node)
        before = self.of_node(node, "before")
        before = self.of_stream["before"][user] if before is None else before
        if self.enclosed:
            token = frozenset(() if callers_device(stream) is not None else (CALLER,))
            self.concerned |= {user, *streams_of(before)}
            # A record, a synchronisation or a copy that blocks may stand in the same region.
            kept = frozenset(t for t in before if t.stream is None)
            return token, token | kept
        after = self.of_node(node, "after")
        after = self.of_stream["after"][user] if after is None else after
        own = {state(stream), *map(state, self.private)}
        return frozenset(after - own), frozenset(before - own)

    def foreign_reads(self, node: BaseSchedulerNode) -> set[ForeignRead] | None:
        """Return the operation's reads of other streams' memory in eager; None if no pass has kept them. A view that
        gets memory of its own is a read that eager doesn't have: there are none, then.
        """
        own = self.own_origins(node)
        known = [reads for n in own if (reads := fact_of(n).reads) is not None]
        if not known and not (own and all(map(is_view, own))):
            return None
        return {read for reads in known for read in reads}

    def at_exit(self, blocking: Collection[Token]) -> dict[int, frozenset[Token]]:
        """Return, per stream, the caller's states that it must be ordered after when the region is left. `blocking`:
        the tokens of the copies in it that block the host.
        """
        if self.enclosed:
            return {}
        promised: dict[int, frozenset[Token]] = {}
        for stream, tokens, unless in leaving():
            if unless not in blocking and stream not in self.private:
                number = self.number(stream)
                known = frozenset(self.renumbered(tokens)).difference(map(state, self.private))
                promised[number] = promised.get(number, frozenset()) | known
        return promised
