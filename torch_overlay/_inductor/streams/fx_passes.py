"""Keep the placement of nodes through the passes that rewrite FX graphs.

A pass may replace a node by another and overwrite the survivor's metadata with that of the node it removed (`x + 0`
becomes `x`, and `x` takes the addition's place and stream), or create nodes that have no placement. Around each pass, a
node that was there before keeps its stream and tokens, and a new node takes those of the nodes that it replaces: a log
of the pass knows these nodes (Note [Which nodes a new node replaces]), and rules place the new ones (Note [Rules of
placement]). Where a node was removed because it did nothing, its readers take over the tokens that the caller relies
on. One pass is made to keep updates in place that several streams share (Note [Parts of one tensor]).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.fx_passes import reinplace

from torch_overlay._functorch.streams.facts import (
    add_after,
    add_promised,
    Fact,
    fact_in,
    fact_of,
    KEY,
    note_fact,
    union_of_facts,
)
from torch_overlay._functorch.streams.fx import (
    base_of,
    blocks_host,
    has_streams,
    is_stream_op,
    node_stream,
    place_on,
    readers_of,
    storage_node,
    users_of_memory,
    view_chain,
)
from torch_overlay._functorch.streams.ids import is_copy_stream
from torch_overlay._functorch.streams.memory import results_made
from torch_overlay._functorch.streams.tokens import state
from torch_overlay._stream_handling import handles_streams
from torch_overlay.hooks import override
from torch_overlay.notes import Notes
from torch_overlay.upstream_fixes.aliases import Aliases, COPY_OF, reinplace_inplaceable_ops


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from torch.fx import Graph, GraphModule, Node
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    from torch_overlay._functorch.streams.tokens import Token


_open: dict[GraphModule, PassLog] = {}


@dataclasses.dataclass(frozen=True)
class Placed:
    """A node's `custom` before a pass, the nodes that it read, its readers, and whether it was a view, which its
    operands tell: a pass may have taken them away.
    """

    custom: dict[str, Any] | None
    inputs: frozenset[Node]
    users: frozenset[Node]
    is_view: bool

    @classmethod
    def of(cls, node: Node) -> Placed:
        inputs, users = frozenset(node.all_input_nodes), frozenset(node.users)
        return cls(node.meta.get("custom"), inputs, users, base_of(node) is not None)


@dataclasses.dataclass
class _PassStep:
    made: list[Node] = dataclasses.field(default_factory=list)
    replaced: dict[Node, None] = dataclasses.field(default_factory=dict)
    erased: dict[Node, None] = dataclasses.field(default_factory=dict)


# Note [Which nodes a new node replaces]
# A pass works in steps: it creates nodes, then replaces or erases the old ones. FX reports each change to hooks of the
# graph's module, so the log knows of each new node which nodes it replaces:
#
# - the nodes whose readers it was given to, and what the same step erases of the same operands;
# - for a write in place, which nobody reads: the nodes that go in the same step and read the same values.
#
# Where a node is made and replaced within the pass, its replacement also replaces what that node had replaced.


class PassLog:
    """The log of one pass over a graph. Its hooks are registered on the graph's module until `close`."""

    def __init__(self, gm: GraphModule, before: dict[Node, Placed]) -> None:
        self.before = before
        self._gm = gm
        self._steps = [_PassStep()]
        self._step_of: dict[Node, _PassStep] = {}  # of a node that the pass made
        self._inputs: dict[Node, frozenset[Node]] = {}  # of a node that the pass made and erased
        self._heirs: dict[Node, dict[Node, None]] = {}  # replaced node -> what its readers were given
        self._given: dict[Node, dict[Node, None]] = {}  # what readers were given -> replaced nodes
        self._names = {node.name: node for node in before}
        self._hooks = self._register()

    @staticmethod
    def of(graph: Graph) -> PassLog | None:
        """Return the open log of a graph's module."""
        return None if graph.owning_module is None else _open.get(graph.owning_module)

    def _register(self) -> tuple[Callable[..., None], ...]:
        # Functions, not bound methods: a pass may copy the module deeply, and its hooks with it.
        def on_create(node: Node) -> None:
            if self._steps[-1].replaced or self._steps[-1].erased:
                self._steps.append(_PassStep())
            self._steps[-1].made.append(node)
            self._step_of[node] = self._steps[-1]
            self._names[node.name] = node

        def on_replace(old: Node, new: str, user: Node) -> None:
            heir = self._names.get(new)
            if heir is not None and heir is not old:
                self._heirs.setdefault(old, {})[heir] = None
                self._given.setdefault(heir, {})[old] = None
                self._steps[-1].replaced[old] = None

        def on_erase(node: Node) -> None:
            if node in self._step_of:
                self._inputs[node] = frozenset(node.all_input_nodes)
            self._steps[-1].erased[node] = None

        def on_deepcopy(copy: GraphModule) -> None:
            self._unregister(copy)

        _open[self._gm] = self
        hooks = (on_create, on_replace, on_erase, on_deepcopy)
        for hooked, hook in zip(_hook_lists(self._gm), hooks):
            hooked.append(hook)
        return hooks

    def _unregister(self, gm: GraphModule) -> None:
        for hooked, hook in zip(_hook_lists(gm), self._hooks):
            if hook in hooked:
                hooked.remove(hook)

    def close(self) -> None:
        _open.pop(self._gm, None)
        self._unregister(self._gm)

    def replaced(self, graph: Graph) -> dict[Node, list[Node]]:
        """Return the new operations, each with the nodes from before the pass that it replaces."""
        left = set(graph.nodes)
        new = [node for node in graph.nodes if node not in self.before and node.op == "call_function"]
        return {node: list(self._origins(node, left, {node})) for node in new}

    def _origins(self, node: Node, left: set[Node], seen: set[Node]) -> Iterator[Node]:
        gone = [old for old in self._given.get(node, ()) if old not in left]
        if gone and node in self._step_of:
            gone += self._erased_with(node, left)
        elif not gone and (node not in left or is_write(node)):
            gone = self._gone_with(node, left)
        for old in gone:
            if old not in seen:
                seen.add(old)
                if old in self.before:
                    yield old
                else:
                    yield from self._origins(old, left, seen)

    def _erased_with(self, node: Node, left: set[Node]) -> list[Node]:
        """Return the operations that the step erases without giving their readers anything else: the new node does
        their work.
        """
        erased = [old for old in self._step_of[node].erased if old not in left and old not in self._heirs]
        return self._that_read(erased, self._read(node))

    def _gone_with(self, node: Node, left: set[Node]) -> list[Node]:
        step = self._step_of.get(node)
        if step is None:
            return []
        operands = frozenset().union(*map(self._read, step.made))
        for nodes in (step.replaced, step.erased):
            if gone := self._that_read([n for n in nodes if n not in left and n not in step.made], operands):
                return gone
        return []

    def _that_read(self, nodes: Iterable[Node], operands: frozenset[Node]) -> list[Node]:
        return [n for n in nodes if not operands.isdisjoint({*self._read(n), *self._heirs.get(n, ())})]

    def _read(self, node: Node) -> frozenset[Node]:
        if node in self.before:
            return self.before[node].inputs
        return self._inputs.get(node) or frozenset(node.all_input_nodes)


def _hook_lists(gm: GraphModule) -> tuple[list[Callable[..., Any]], ...]:
    return gm._create_node_hooks, gm._replace_hooks, gm._erase_node_hooks, gm._deepcopy_hooks


def is_write(node: Node) -> bool:
    """True if the node writes in place, or nobody reads it: then it is there for what it writes."""
    schema = getattr(node.target, "_schema", None)
    return not node.users or (isinstance(schema, torch._C.FunctionSchema) and schema.is_mutable)


Custom = dict[str, Any]


def is_placed(custom: Custom | None) -> bool:
    """True if the tokens are known, even if there are none."""
    return fact_in(custom).is_placed


# Note [Rules of placement]
# A new node without a placement of its own is placed by the first of these rules that applies:
#
# 1. A node takes the placement of those that it replaces (`PassLog`).
# 2. A node that replaces none is computed for its readers, and runs where they do.
# 3. A node that nobody reads but the caller runs where its operands were computed.
#
# Where those nodes are on several streams, the node takes the stream that its operands come from, or the first: any is
# right, for the planner orders what crosses streams. Tokens taken from another stream's node keep their meaning, so the
# node also gets the token of that stream's state.


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
            if gone := self._known(self.before[old].custom for old in self.replaced[node]):
                _place(node, gone)
                _keep_marks(node, gone)
            elif readers := self._readers(node):
                same_work = all(reader in self.replaced for reader in readers)
                _place(node, [reader.meta.get("custom", {}) for reader in readers], reads=same_work)
            else:
                left.append(node)
        for node in reversed(left):
            makers = map(storage_node, node.all_input_nodes)
            if known := self._known(maker.meta.get("custom") for maker in makers if _computes(maker)):
                _place(node, known, reads=False)

    def _known(self, customs: Iterable[Custom | None]) -> list[Custom]:
        """Return the metadata of the nodes that are placed."""
        return [custom or {} for custom in customs if is_placed(custom) or not self.has_tokens]

    def _is_placed(self, node: Node) -> bool:
        custom = node.meta.get("custom")
        return is_placed(custom) if self.has_tokens else bool(custom)

    def _readers(self, node: Node) -> list[Node]:
        """Return the placed operations that read a value, also through its views; only the views if there are no
        others.
        """
        users = [user for user in users_of_memory(node) if _computes(user) and not is_stream_op(user)]
        users = [user for user in users if self._known([user.meta.get("custom")])]
        return [user for user in users if base_of(user) is None] or users


def _computes(node: Node) -> bool:
    """True for an operation that isn't a copy of a saved value to the host or back: those have streams of their own."""
    return node.op == "call_function" and not is_copy_stream(node_stream(node))


def _place(node: Node, customs: Sequence[Custom], reads: bool = True) -> None:
    streams = [custom.get("stream") or 0 for custom in customs]
    operands = {node_stream(storage_node(value)) for value in node.all_input_nodes if value.op == "call_function"}
    stream = node_stream(node) or next((s for s in streams if s in operands), streams[0])
    place_on(node, stream)
    made = union_of_facts(list(map(fact_in, customs)))
    for name in made.keys() & {"after", "promised_to"}:
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


def needs_placement(nodes: Iterable[Node]) -> bool:
    """True if a graph with these nodes has to be placed: all that passes make in it, too."""
    return has_streams(nodes, lambda node: fact_of(node).has_tokens)


def _restore(graph: Graph, log: PassLog) -> None:
    """Place the nodes that a pass left and made."""
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
    gone = [(n, p) for n, p in before.items() if n.op == "call_function" and n not in left and n not in done_anew]
    readers = [n for n, p in gone if p.custom and not p.is_view]
    results = _given_to_caller(graph) if readers else set()
    for node in readers:
        _transfer_to_users(node, before, left, results)
    for node in graph.nodes:
        node.meta.pop(COPY_OF, None)
    NewNodes(replaced, before).place()


def _given_to_caller(graph: Graph) -> set[Node]:
    """Return the values that are in the caller's memory in the end: results, and what is written back to inputs."""
    written = (copy.args for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    inputs = {storage_node(value) for given, value, *_ in written if given.op == "placeholder"}
    return results_made(graph.output_node()) | inputs


def _transfer_to_users(gone: Node, before: dict[Node, Placed], left: set[Node], results: set[Node]) -> None:
    """Transfer the tokens of a removed node that did nothing (`x * 1`) to its readers, which now read what it read.

    The caller's memory is still read when that node would have read it: after what the node's stream had waited for,
    and before what the user ordered after the node, or does on its stream later. A copy that blocks the host may have
    come between, and then the reader comes after the copy. The caller gets a result's memory at the end, and an input's
    memory has its new value then: for those, only the tokens in `promised_to` are transferred. Whose memory is read in
    eager (`reads`) is transferred to readers on the same stream only; where the user orders that memory's stream after
    the node, eager may free the memory then, so that token is transferred, too.
    """
    custom: Any = before[gone].custom
    fact, stream = fact_in(custom), custom.get("stream") or 0
    for user, taken in _heirs(gone, before, left):
        own = fact_of(user)
        if is_stream_op(user) or not own.is_placed or fact.after is None:
            continue
        roots = set(map(storage_node, taken))
        callers = any(root.op == "placeholder" for root in roots)
        if callers:
            add_after(user, [state(stream), *_ordering(fact.after)])
        if callers or not roots.isdisjoint(results):
            add_promised(user, [state(stream), *_ordering(fact.promised_to)])
        if node_stream(user) == stream and fact.reads:
            note_fact(user, reads=tuple(sorted({*(own.reads or ()), *fact.reads})))
            add_promised(user, {state(read.stream) for read in fact.reads}.intersection(fact.promised_to or ()))


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
            if not taken:
                continue
            if user not in seen:
                yield user, taken
                todo += [(reader, taken) for reader in user.users if base_of(user) is not None]
        seen.add(user)


IN_PLACE = "stream_scatter_in_place"  # in `meta`, of a scatter, while upstream decides: make it an update in place


def _remove_writes_of_what_is_there(graph: Graph) -> None:
    """Remove scatters that put a part into its own place, as `cache[i] += v` does after it has updated the part."""
    for node in graph.find_nodes(op="call_function", target=reinplace._generalized_scatter):
        base, part, views = node.args
        chain = list(view_chain(part)) if isinstance(part, torch.fx.Node) else []
        shown = [(n.target, n.args[1:], n.kwargs) for n in chain[: chain.index(base)]] if base in chain else None
        if shown == [(view.target, tuple(view.args), view.kwargs) for view in reversed(views)]:
            node.replace_all_uses_with(base)
            graph.erase_node(node)


# Note [Parts of one tensor]
# `torch.mm(x, w, out=out[:n])` on one stream and `out[n:].copy_(y)` on another are, after functionalization, two
# scatters: each makes a whole new tensor, and the second reads what the first made. Inductor turns scatters back into
# updates in place where it expects to lose no fusion. Across streams there is no fusion to lose, but for each part a
# whole tensor is copied, and another stream is waited for. So such parts are updated in place wherever that is safe. So
# are parts of an input in a graph with streams: the code around the graph may be using other parts of the input.


def _shared(graph: Graph) -> Iterable[Node]:
    """Yield the scatters of each chain (the base of one is the result of another) whose values several streams use, in
    this graph or, if the base is an input, in the code around the graph.
    """
    on_streams = has_streams(graph.nodes, None)
    chains: dict[Node, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=reinplace._generalized_scatter):
        if node.meta["val"].device.type == "cpu":
            continue
        base: Any = node.args[0]
        chains[node] = chains.get(base, [])
        chains[node].append(node)
    for chain in {id(chain): chain for chain in chains.values()}.values():
        is_input = chain[0].args[0].op == "placeholder"  # type: ignore[union-attr]
        if on_streams and is_input or len({*map(node_stream, set(chain).union(*map(readers_of, chain)))}) > 1:
            yield from chain


_REMOVES = ("remove_noop_ops", "constant_fold_uniform_value")  # passes that remove what takes no computing


@dataclasses.dataclass
class PassNotes(Notes):
    """Notes on a pass (`GraphTransformObserver`)."""

    log: PassLog | None
    aliases: Aliases | None


def observer_init(original: Callable[..., None], observer: GraphTransformObserver, *args: Any, **kwargs: Any) -> None:
    override(observer, __enter__=enter_observer, __exit__=exit_observer, apply_graph_pass=apply_graph_pass)
    original(observer, *args, **kwargs)


def enter_observer(original: Callable[..., Any], observer: GraphTransformObserver) -> Any:
    """Begin to log a pass over a graph with streams, unless it is within a pass that is logged."""
    gm = observer.gm
    aliases = Aliases(gm.graph) if observer.passname in _REMOVES else None
    is_logged = handles_streams() and PassLog.of(gm.graph) is None and needs_placement(gm.graph.nodes)
    log = PassLog(gm, {node: Placed.of(node) for node in gm.graph.nodes}) if is_logged else None
    PassNotes(log, aliases).put(observer)
    return original(observer)


def exit_observer(
    original: Callable[..., None],
    observer: GraphTransformObserver,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    notes: Any = PassNotes.find(observer)
    if notes.aliases is not None and kind is None:
        notes.aliases.keep_apart(handles_streams())
    original(observer, kind, error, traceback)
    if notes.log is not None:
        notes.log.close()
        if kind is None:
            _restore(observer.gm.graph, notes.log)


def apply_graph_pass(
    original: Callable[..., Any], observer: GraphTransformObserver, run: Callable[[Graph], Any]
) -> Any:
    """Skip `reorder_for_locality` in a graph with streams. Upstream moves producers to just before their consumer: for
    a side stream's branch that is the latest moment at which it can be launched, after all the work that it was to run
    beside.
    """
    if observer.passname == "reorder_for_locality" and handles_streams() and needs_placement(observer.gm.graph.nodes):
        return None
    return original(observer, run)


def common_custom_context(original: Callable[..., dict[str, Any]], nodes: Sequence[Node]) -> dict[str, Any]:
    """Return what a pattern's replacement has in `custom`: beside its stream, the tokens of all nodes that it replaces.
    It takes over the metadata of the last of them, so they all get the tokens; `_restore` takes these back from nodes
    that remain.
    """
    custom, union = original(nodes), union_of_facts([fact_of(node) for node in nodes])
    for node in nodes if union else ():
        if node.op == "call_function" and "custom" in node.meta:
            note_fact(node, **union)
    return {**custom, KEY: Fact(**union)} if union else custom


def reinplace_inplaceable_ops_core(original: Callable[[Graph], None], graph: Graph) -> None:
    """Mark scatters whose values several streams use, in a graph whose pass is logged, until upstream has decided."""
    marked: list[Node] = []
    if (log := PassLog.of(graph)) is not None:
        _remove_writes_of_what_is_there(graph)
        NewNodes(log.replaced(graph), log.before).place()  # the scatters are new in this pass
        marked = list(_shared(graph))
    for node in marked:
        node.meta[IN_PLACE] = True
    try:
        original(graph)
    finally:
        for node in marked:
            del node.meta[IN_PLACE]


def scatter_always_uses_mutation(original: Callable[[Node], bool], node: Node) -> bool:
    return IN_PLACE in node.meta or original(node)


__all__ = ["is_placed", "is_write", "needs_placement", "NewNodes", "PassLog", "Placed", "reinplace_inplaceable_ops"]
