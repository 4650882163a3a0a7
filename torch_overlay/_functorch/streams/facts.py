"""Keep what is known of an FX node of a program with streams, beside the stream that it is placed on, as a typed fact.

The stream is upstream's `node.meta["custom"]["stream"]`; all else is one frozen `Fact` in `custom["stream_fact"]`. The
fact is a value, not the number of a row in a table: nodes are copied from graph to graph (joint graph, forward,
backward, partitions, subgraphs, compile cache), and their facts go along without any code for it. Dynamo fills
`is_given` and `eager_storage`, AOTAutograd's passes (`placement`, `backward`) fill the rest; passes over FX graphs
only merge facts (`union_of_facts`), and Inductor reads them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

import torch

from torch_overlay._functorch.streams.fx import has_streams, node_stream, set_custom
from torch_overlay._functorch.streams.tokens import CALLER, state


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import Graph, GraphModule, Node

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay.frame_facts import FrameFacts

KEY = "stream_fact"  # in `custom`; as the stream, it belongs in the keys of compile caches

Storage = tuple[str, "int | None"]
"""Memory that is updated in place: a name, and the stream whose memory it is in eager; None for the caller's."""


class ForeignRead(NamedTuple):
    """A read of another stream's memory. `life` says what eager does with that memory: eager frees it whoever reads it
    ("freed"), keeps it as a result or for the backward, under the name `value` ("kept"), or has other memory there, or
    memory that lives on ("other").
    """

    stream: int
    life: Literal["freed", "kept", "other"]
    value: str = ""


class ExitWait(NamedTuple):
    """The states of the caller that a stream is ordered after at the graph's end: in any case, or with `unless` only if
    that copy, which blocks the host until then, is left out of the graph.
    """

    stream: int
    tokens: tuple[Token, ...]
    unless: Token | None = None


class ResultMemory(NamedTuple):
    """A result, by upstream's name for it, and the streams that its memory waits for in eager when it is freed."""

    result: str
    streams: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Fact:
    """All that is known of one node. None means that a pass lost it, or that nothing is known; an empty tuple says that
    there is nothing.

    - `after`, `promised_to`: tokens, sorted; see `streams.tokens`.
    - `requires`: the token that the node makes true, for records, synchronisations and copies that block the host. The
      node is ordered after the nodes that carry the token in `promised_to`.
    - `reads`: the streams whose memory the node reads in eager (`memory`).
    - `order`: place in the user's stream program, for an operation that stays in the graph.
    - `range`: number of operations of profiler ranges that come before the node: Note [Ranges], in `streams.lowering`.
    - `is_dropped`: the caller doesn't get this result, but its own tensor or a view of it.
    - `exit_waits`, `results`: facts of the graph; the same on every node of a forward, so that they survive if nodes
      are left out.
    - `eager_storage`: for a value in memory that is updated in place, its storage; one for each result of several.
      `is_given`: an operator was given that memory for its results, as by `out`.
    - `memory`: for a saved value, in the backward graph, the stream whose memory it may be. `is_owned`: it is that
      stream's for sure (`streams.graph_facts`). `is_computed`: the forward computed it, so its memory is freed.
      `in_input`: it may lie in memory of the forward's inputs, which nobody copies or writes over.
    """

    after: tuple[Token, ...] | None = None
    promised_to: tuple[Token, ...] | None = None
    requires: Token | None = None
    reads: tuple[ForeignRead, ...] | None = None
    order: int | None = None
    range: int | None = None
    is_dropped: bool = False
    exit_waits: tuple[ExitWait, ...] | None = None
    results: tuple[ResultMemory, ...] | None = None
    eager_storage: tuple[Storage | None, ...] = ()
    is_given: bool = False
    memory: int | None = None
    is_owned: bool = False
    is_computed: bool = False
    in_input: bool = False

    @property
    def is_placed(self) -> bool:
        """True if the node's tokens are known, even if there are none."""
        return self.after is not None and self.promised_to is not None

    @property
    def promises(self) -> frozenset[Token]:
        """The tokens in `promised_to`, as a set: they are ordered after the node by the end of the graph."""
        return frozenset(self.promised_to or ())

    @property
    def is_forked_and_joined(self) -> bool:
        """True if the user forked the node from the caller's stream, and joined it again."""
        return CALLER in (self.after or ()) and CALLER in self.promises

    @property
    def has_tokens(self) -> bool:
        return bool(self.after or self.promised_to or self.exit_waits)


NOTHING = Fact()


def fact_in(custom: Any) -> Fact:
    """Return the fact in a node's `custom`, which may be None."""
    return custom.get(KEY, NOTHING) if custom else NOTHING


def fact_of(node: Node) -> Fact:
    return fact_in(node.meta.get("custom"))


def replace_fact(node: Node, fact: Fact) -> None:
    set_custom(node, KEY, fact if fact != NOTHING else None)


def note_fact(node: Node, **changes: Any) -> None:
    """Replace fields of a node's fact."""
    replace_fact(node, dataclasses.replace(fact_of(node), **changes))


def add_after(node: Node, tokens: Iterable[Token]) -> None:
    note_fact(node, after=_joined(node, fact_of(node).after, tokens))


def add_promised(node: Node, tokens: Iterable[Token]) -> None:
    note_fact(node, promised_to=_joined(node, fact_of(node).promised_to, tokens))


def _joined(node: Node, known: tuple[Token, ...] | None, tokens: Iterable[Token]) -> tuple[Token, ...]:
    """Return the tokens of both arguments, without the state of the node's own stream, which is implied."""
    return tuple(sorted({*(known or ()), *tokens} - {state(node_stream(node))}))


def union_of_facts(facts: Sequence[Fact]) -> dict[str, Any]:
    """Return the fields of one node that does what several did: all that any of them reads, waits for and promises."""
    made: dict[str, Any] = {}
    for name in ("after", "promised_to", "reads"):
        known = [values for fact in facts if (values := getattr(fact, name)) is not None]
        if known:
            made[name] = tuple(sorted({value for values in known for value in values}))
    for fact in facts:
        made |= {name: value for name in ("exit_waits", "results") if (value := getattr(fact, name)) is not None}
    return made


def merged(first: Fact, second: Fact) -> Fact:
    """Return the fact of a node that does what two did: the fields that aren't united come from `second` where it has
    them, else from `first`.
    """
    said = {f.name: getattr(second, f.name) for f in dataclasses.fields(Fact)}
    said = {name: value for name, value in said.items() if value != getattr(NOTHING, name)}
    return dataclasses.replace(first, **said | union_of_facts([first, second]))


def is_placed_program(graph: Graph) -> bool:
    """True if `placement` has seen the graph, or if an operation in it runs on a stream of its own."""
    return has_streams(graph.nodes, lambda node: fact_of(node).exit_waits is not None)


# For keys of caches: where the nodes of graphs are placed, and what numbers of streams stand for

# (name of the graph module, position of the node, what its metadata says of streams), for each node with such metadata
Placement = tuple[tuple[str, int, str], ...]


def stream_notes(node: Node) -> str:
    """Return the node's stream and the tokens of its boundary effects; empty if the program has no streams."""
    custom = node.meta.get("custom") or {}
    notes = {key: value for key, value in custom.items() if key.startswith("stream_")}
    if custom.get("stream"):  # index 0 is the caller's stream, as is no index
        notes["stream"] = custom["stream"]
    return repr(sorted(notes.items())) if notes else ""


def placement(gm: GraphModule) -> Placement:
    """Return where the nodes of a graph, and of the graphs nested in it, are placed."""
    found = []
    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            for position, node in enumerate(module.graph.nodes):
                if notes := stream_notes(node):
                    found.append((name, position, notes))
    return tuple(found)


def stream_objects(frame: FrameFacts) -> tuple[object, ...]:
    """Return what Dynamo knows of the streams and events of the frame, and of the streams that first read its inputs.
    If the frame uses the caller's stream alone, return whether the program has other streams: that matters to a copy
    that blocks the host.
    """
    objects = tuple(map(repr, frame.objects))
    if len(objects) <= 1:
        objects = ("streams",) * frame.program_has_streams
    if not objects:
        return ()
    readers = sorted(frame.first_readers.items())
    return (*objects, *readers, *("goes on",) * frame.goes_on, *("resumed",) * frame.is_resumed)
