"""From the user's stream program to placement and boundary effects on FX nodes.

Dynamo leaves the user's synchronisation in the graph as side-effect operations on stream and event indices. This pass
reads them once, in program order, writes on every node what the outside can tell (see Note [Streams are placement,
dependencies are order] in `streams.planner`), and erases them. Two vector-clock walks do it:

- forward: which states of the caller had each stream waited for when this node was issued? ->
  `custom["stream_after"]`
- backward: which streams, events and host synchronisations had the user ordered behind this node by the end? ->
  `custom["stream_before"]`

- the forward walk's last state: which of the caller's states is each stream ordered after at the end? ->
  `custom["stream_leave"]`, the same on every node, because it belongs to the graph; with what the host learns from a
  copy that blocks it, which holds if the copy is left out as well

Tokens: "s1" is the state of stream 1 at the region's entry (after) or exit (before); "e5" the caller's event 5;
"e5.0" the first record of event 5 in this graph; "h2" the third host synchronisation. Order between nodes is data
dependence and needs no token.

Operations that the outside can see stay in the graph: records of events that somebody else can read, host
synchronisation, queries. Each carries the token that it makes true in `custom["stream_requires"]`; the scheduler
orders it behind the nodes that carry the token.

An input that the user mutates becomes, after functionalization, a copy at the graph's end. The copy takes over stream
and tokens of the value that it writes: it is ordered by the joins that the user wrote after the mutation, not by
where the copy stands.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch.utils import _pytree as pytree

from torch_overlay import config


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Graph, GraphModule, Node


AFTER, BEFORE, REQUIRES, LEAVE = "stream_after", "stream_before", "stream_requires", "stream_leave"
READS = "stream_reads"  # the streams whose memory a node reads in eager (`eager_memory`)
RESULTS = "stream_results"  # of each result that is no gradient, what its memory waits for in eager (`eager_memory`)
DROPPED = "stream_dropped"  # of a result that is not handed on: the caller gets its own tensor, or a view of it
TARGET = "stream_target"  # the stream whose memory an operator was given as `out`, -1: the caller's; from Dynamo
STORAGE = "stream_storage"  # of all values in a storage that is updated in place: its name and stream; from Dynamo
RANGE = "stream_range"  # how many operations of profiler ranges come before it: Note [Ranges], in `streams.ranges`
ORDER = "stream_order"  # of an operation that stays: its place in the user's stream program
MEMORY = "stream_memory"  # of a saved value, in the backward graph: the stream whose memory it may be
OWNED = "stream_owned"  # of a saved value, in the backward graph: it is that stream's for sure (`streams.saved_memory`)
KEPT = "stream_kept"  # of a saved value, in the backward graph: the forward computed it, so its memory is given back
_KEPT_WITH_WAITS = ("custom", "stack_trace", "partitioner_tag", "seq_nr")  # in `meta`, of what the host waits for
BACKWARD = "overlay_backward"  # in `meta`, not in `custom`: the node belongs to the backward
AMBIENT = 0

_aten = torch.ops.aten
_streams = torch.ops.streams
_WAITS = (_streams.wait_event.default, _streams.wait_stream.default)
_SYNCHRONIZE = (
    _streams.synchronize_event.default,
    _streams.synchronize_stream.default,
    _streams.synchronize_device.default,
)
_DEALLOC = _streams.sync_dealloc.default
_RECORD = _streams.record_event.default
_DEVICE_PUT = torch.ops.prims.device_put.default


def is_stream_op(node: Node) -> bool:
    """True for an operation of the user's stream program, as opposed to one that computes."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):  # in Dynamo's graphs
        namespace = target._qualified_op_name.partition("::")[0]
    else:
        namespace = getattr(target, "namespace", "")
    return node.op == "call_function" and namespace in ("streams", "streams_overlay")


def is_synchronization(node: Node) -> bool:
    """The host waits for an event, a stream or a device."""
    return node.target in _SYNCHRONIZE


def is_device_synchronization(node: Node) -> bool:
    return node.target is _streams.synchronize_device.default


def is_view(node: Node) -> bool:
    """It names memory of its first argument. So does a conversion to the type that there is, with which a copy from
    the host ends, or one to the host begins; any other is a copy: `x.to(torch.float32, copy=True)`.
    """
    target = node.target
    if target is torch.ops.prims.convert_element_type.default:
        source: Any = node.args[0]
        made, given = node.meta.get("val"), source.meta.get("val") if isinstance(source, torch.fx.Node) else None
        if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor) or made.dtype != given.dtype:
            return False
        return source.target is _DEVICE_PUT or bool(node.users) and all(n.target is _DEVICE_PUT for n in node.users)
    return isinstance(target, torch._ops.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )


def viewed(node: Node) -> Node:
    """The node whose memory a value names, behind views of it."""
    while isinstance(base := next(iter(node.args), None), torch.fx.Node) and (
        is_view(node) or (node.target is operator.getitem and is_view(base))
    ):
        node = base
    return node


def written_arguments(call: Any) -> dict[Any, Node]:
    """The values that an operator or a user's kernel updates in a functional graph, by the index of the new value among
    its results.
    """
    higher = torch.ops.higher_order
    if not isinstance(call, torch.fx.Node):
        return {}
    arguments: Any = call.kwargs
    found: dict[Any, Any] = {}
    if call.target is higher.triton_kernel_wrapper_functional:
        found = {name: arguments["kwargs"].get(name) for name in arguments["tensors_to_clone"]}
    elif call.target in (higher.auto_functionalized_v2, higher.auto_functionalized):
        (called,) = call.args[:1]
        schema = called._schema if isinstance(called, torch._ops.OpOverload) else None
        written = arguments.get("_all_bases", ())
        if call.target is higher.auto_functionalized:
            names = schema.arguments if schema is not None else ()
            written = [arguments.get(a.name) for a in names if a.alias_info is not None and a.alias_info.is_write]
        found = dict(enumerate(written, max(1, len(schema.returns) if schema is not None else 1)))
    return {index: value for index, value in found.items() if isinstance(value, torch.fx.Node)}


def constants(graph: Graph) -> set[Node]:
    """What is computed from nothing, as zeros, ones and what is made of them, and not at random."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "call_function" and not is_random and found.issuperset(node.all_input_nodes):
            found.add(node)
        elif getattr(getattr(node.target, "_schema", None), "is_mutable", False):  # fills what was made from nothing
            found.difference_update(map(viewed, node.all_input_nodes))
    return found


def blocks_host(node: Node) -> bool:
    """The host returns from the launch when the work is done: `.item()`, and copies between host and device that don't
    say otherwise.
    """
    target, args = node.target, node.args
    if target is _aten._local_scalar_dense.default:
        return True
    if target is _aten._to_copy.default:
        source, waits = args[0], not node.kwargs.get("non_blocking")
    elif target is _DEVICE_PUT:
        source, waits = args[0], not (args[2] if len(args) > 2 else node.kwargs.get("non_blocking"))
    elif target in (_aten.copy.default, _aten.copy_.default):
        source, waits = args[1], not (args[2] if len(args) > 2 else node.kwargs.get("non_blocking"))
    else:
        return False
    made, given = node.meta.get("val"), source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if not (waits and isinstance(made, torch.Tensor) and isinstance(given, torch.Tensor)):
        return False
    return (made.device.type == "cpu") != (given.device.type == "cpu")


def is_asynchronous_copy(node: Node) -> bool:
    """A copy between host and device into memory that the user names, for which the host doesn't wait."""
    if node.target is not _aten.copy.default or len(node.args) < 3 or node.args[2] is not True:
        return False
    sides = [n.meta.get("val") for n in node.args[:2] if isinstance(n, torch.fx.Node)]
    return {v.device.type for v in sides if isinstance(v, torch.Tensor)} == {"cpu", "cuda"}


def node_stream(node: Node) -> int:
    """Registry index of the stream that a node is placed on; 0 is the ambient stream."""
    return node.meta.get("custom", {}).get("stream") or AMBIENT


def annotate(node: Node, **values: Any) -> None:
    """Set keys of the node's own copy of `custom`; None removes one. An empty tuple of tokens stays: it says that
    they are known.
    """
    custom = dict(node.meta.get("custom", {}))
    for key, value in values.items():
        if value is None:
            custom.pop(key, None)
        else:
            custom[key] = value
    if custom:
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)


def is_backward(node: Node) -> bool:
    """True for a node of a joint graph, once marked, or of a backward graph that autograd traced as backward."""
    return node.meta.get(BACKWARD) or node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _mark_backward(gm: GraphModule) -> None:
    """Upstream's tag is missing on the body of a user's `autograd.Function.backward`. Such nodes stand behind the first
    gradient. A write-back says nothing: it is told to be in the backward in graphs that have none, too. What follows
    may be views for the forward's caller, of what was updated in place after they were made.
    """
    begun = False
    results = _viewed_results(gm.graph.output_node())
    for node in gm.graph.nodes:
        tag = node.meta.get("partitioner_tag")
        if node.op != "call_function" or node in results or tag in ("is_forward", "must_be_in_forward"):
            continue
        if (
            begun
            or node.meta.get(BACKWARD)
            or tag == "is_backward"
            or any(n.op == "placeholder" and "tangents" in n.name for n in node.all_input_nodes)
        ):
            node.meta[BACKWARD] = begun = True


def _viewed_results(output: Node) -> set[Node]:
    """The views that the forward returns, and those that they are views of."""
    found: set[Node] = set()
    for value, what in zip(pytree.tree_leaves(output.args[0]), output.meta.get("desc") or ()):
        while isinstance(what, PlainAOTOutput) and isinstance(value, torch.fx.Node) and is_view(value):
            found.add(value)
            value = value.args[0]
    return found


def _observed_events(ops: Sequence[Node]) -> set[int]:
    """Events whose record somebody can see: held by the caller, or read by an operation of this graph on the host."""
    from torch_overlay._dynamo import registry

    observed = {info.index for info in registry.describe() if info.escapes}
    for node in ops:
        reads_events = node.target is _streams.synchronize_event.default or "event" in str(node.target)
        if (reads_events or "elapsed_time" in str(node.target)) and node.target not in (_RECORD, *_WAITS, _DEALLOC):
            observed.update(arg for arg in node.args if isinstance(arg, int))
    return observed


class _Program:
    """The stream operations of one graph in program order, and what they promise to each node."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        from torch_overlay._functorch.streams.peer_copies import PeerCopies

        self.nodes = nodes
        self.ops = [n for n in self.nodes if is_stream_op(n)]
        self.observed = _observed_events(self.ops)
        copies = PeerCopies()
        self.peers = {n: ends for n in nodes if (ends := copies.ends(n)) is not None}  # (source's stream, result's)
        self.tokens: dict[Node, str] = {}
        self.streams = {node_stream(n) for n in self.nodes} | {AMBIENT}
        for node in self.ops:  # a stream that is only named counts: a copy that blocks the host orders it, too
            named: Any = node.args
            if node.target in (_RECORD, _streams.wait_event.default, _streams.record_stream.default):
                self.streams.add(named[1])
            elif node.target is _streams.synchronize_stream.default:
                self.streams.add(named[0])
            elif node.target is _streams.wait_stream.default:
                self.streams.update(named)
        records: dict[int, int] = defaultdict(int)
        synchronizations, blocking = itertools.count(), itertools.count()
        for node in self.nodes:
            if node.target is _RECORD:
                event: Any = node.args[0]
                self.tokens[node] = f"e{event}.{records[event]}"
                records[event] += 1
            elif node.target in _SYNCHRONIZE:
                self.tokens[node] = f"h{next(synchronizations)}"
            elif blocks_host(node):
                self.tokens[node] = f"c{next(blocking)}"

    def keeps(self, node: Node) -> bool:
        if node.target is _RECORD:
            return node.args[0] in self.observed
        return node.target not in (*_WAITS, _DEALLOC)

    def after(self) -> tuple[dict[Node, frozenset[str]], tuple[tuple[int, tuple[str, ...], str], ...]]:
        """What each node's stream has waited for of the caller's states, when the node is issued; and (stream, states,
        token) for what each has in the end, where a token names the copy that blocks the host until then, so that this
        is to be said only if the copy is left out.
        """
        clock: dict[int, frozenset[str]] = defaultdict(frozenset)
        events: dict[int, frozenset[str]] = {}
        found: dict[Node, frozenset[str]] = {}
        host: frozenset[str] = frozenset()  # what the host has waited for: whatever is launched later comes after it
        learnt: dict[str, frozenset[str]] = {}

        def state(stream: int) -> frozenset[str]:
            return clock[stream] | host | {f"s{stream}"}

        def known(stream: int) -> frozenset[str]:
            return (clock[stream] | host) - {f"s{stream}"}

        for node in self.nodes:
            args: Any = node.args
            if node.target is _RECORD:
                found[node] = known(args[1])
                events[args[0]] = state(args[1])
            elif node.target is _streams.synchronize_event.default:
                outside = frozenset() if args[0] in events else frozenset((f"e{args[0]}",))
                found[node] = outside
                host |= events.get(args[0], outside)
            elif node.target is _streams.synchronize_stream.default:
                found[node] = known(args[0])
                host |= state(args[0])
            elif node.target is _streams.synchronize_device.default:
                found[node] = frozenset(f"s{stream}" for stream in self.streams)
                host = host.union(*map(state, self.streams))
            elif node.target is _streams.wait_event.default:
                event, stream = args
                clock[stream] = (clock[stream] | events.get(event, frozenset((f"e{event}",)))) - {f"s{stream}"}
            elif node.target is _streams.wait_stream.default:
                waiting, waited = args
                clock[waiting] = (clock[waiting] | state(waited)) - {f"s{waiting}"}
            elif node in self.peers:
                source, target = self.peers[node]
                both = state(source) | state(target)
                found[node] = both - {f"s{node_stream(node)}"}
                clock[source], clock[target] = both - {f"s{source}"}, both - {f"s{target}"}
            elif node.op == "call_function":
                found[node] = known(node_stream(node))
                if blocks_host(node):
                    learnt[self.tokens[node]] = state(node_stream(node)) - host
                    host |= state(node_stream(node))
        leave = [(stream, tokens, "") for stream, tokens in clock.items()]
        for token, states in learnt.items():
            leave += [(stream, states - {f"s{stream}"} - clock[stream], token) for stream in self.streams]
        return found, tuple(sorted((stream, tuple(sorted(tokens)), token) for stream, tokens, token in leave if tokens))

    def before(self) -> dict[Node, frozenset[str]]:
        """What the user has ordered behind each node by the end of the graph."""
        promised: dict[int, frozenset[str]] = defaultdict(frozenset)
        by_event: dict[int, frozenset[str]] = defaultdict(frozenset)
        found: dict[Node, frozenset[str]] = {}
        for node in reversed(self.nodes):
            args: Any = node.args
            if node.target is _RECORD:
                event, stream = args
                found[node] = (promised[stream] | by_event[event]) - {f"s{stream}"}
                promised[stream] = promised[stream] | by_event[event]
                if self.keeps(node):
                    promised[stream] = promised[stream] | {self.tokens[node]}
                by_event[event] = frozenset()
            elif node.target is _streams.wait_event.default:
                event, stream = args
                by_event[event] = by_event[event] | promised[stream] | {f"s{stream}"}
            elif node.target is _streams.wait_stream.default:
                waiting, waited = args
                promised[waited] = promised[waited] | promised[waiting] | {f"s{waiting}"}
            elif node.target is _streams.synchronize_event.default:
                by_event[args[0]] = by_event[args[0]] | {self.tokens[node]}
            elif node.target is _streams.synchronize_stream.default:
                promised[args[0]] = promised[args[0]] | {self.tokens[node]}
            elif node.target is _streams.synchronize_device.default:
                for stream in self.streams:
                    promised[stream] = promised[stream] | {self.tokens[node]}
            elif node in self.peers:
                source, target = self.peers[node]
                both = promised[source] | promised[target] | {f"s{source}", f"s{target}"}
                found[node] = both - {f"s{node_stream(node)}"}
                promised[source], promised[target] = both, both
            elif node.op == "call_function":
                stream = node_stream(node)
                blocks = blocks_host(node)
                if blocks:  # and with it all that is launched later; if it is left out, then on the streams known here
                    promised[stream] = promised[stream].union(*({f"s{s}", *promised[s]} for s in self.streams))
                found[node] = promised[stream] - {f"s{stream}"}
                if blocks:
                    promised[stream] = promised[stream] | {self.tokens[node]}
        return found


def _place_subgraphs(gm: GraphModule) -> None:
    """Region bodies (invoke_subgraph, cond, ...) run on the stream of the node that calls them: that is their ambient
    stream.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for argument in node.all_input_nodes:
            body = getattr(gm, str(argument.target), None) if argument.op == "get_attr" else None
            if not isinstance(body, torch.fx.GraphModule):
                continue
            outer = node_stream(node)
            for inner in list(body.graph.nodes):
                if is_stream_op(inner) and inner.target in (*_WAITS, _DEALLOC):
                    body.graph.erase_node(inner)
                elif node_stream(inner) in (outer, AMBIENT):
                    annotate(inner, stream=None)
            body.recompile()
            _place_subgraphs(body)


def _producer(value: Any) -> Node | None:
    """The operation that computes a value, behind aliases and selections of an output."""
    while isinstance(value, torch.fx.Node) and value.target in (operator.getitem, torch.ops.aten.alias.default):
        value = value.args[0]
    return value if isinstance(value, torch.fx.Node) and value.op == "call_function" else None


def _follow_mutations(gm: GraphModule) -> None:
    """A write-back copy takes stream and promises of the value that it writes, and of no later point."""
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target: Any = copy.args[0]
        value = _producer(copy.args[1])
        if target.op != "placeholder" or value is None:
            continue
        custom = value.meta.get("custom", {})
        annotate(copy, stream=node_stream(value) or None, **{key: custom.get(key) for key in (AFTER, BEFORE)})


def _named(value: Node) -> Iterator[Node]:
    """A value, and what it is a view of, up to the node whose memory it names."""
    root = viewed(value)
    yield value
    while value is not root:
        value = value.args[0]  # type: ignore[assignment]
        yield value


def _promise_parts(output: Node) -> list[tuple[Node, Node]]:
    """A result that an update in place left alone in part is new memory, and the update's stream fills all of it. Who
    had waited for what computed that part may read the result, if there is nothing else in it. So a record that comes
    ahead of the update comes behind it, where nothing that the host waits for or asks stands between them. Otherwise,
    and where the host had waited, it waits for the update: such results, and the updates, are returned.
    """
    from torch_overlay._functorch.streams.view_sources import sources

    place = {node: i for i, node in enumerate(output.graph.nodes)}
    records = {n.meta.get("custom", {}).get(REQUIRES): i for n, i in place.items() if n.target is _RECORD}
    moves = (_RECORD, *_WAITS, _DEALLOC)
    fixed = [i for n, i in place.items() if blocks_host(n) or (is_stream_op(n) and n.target not in moves)]
    awaited = []
    for value in pytree.tree_leaves(output.args):
        if not isinstance(value, torch.fx.Node) or value.op != "call_function" or is_backward(value):
            continue
        made, root = sources(value), viewed(value)
        if root in made or any(node.op != "call_function" or is_backward(node) for node in made):
            continue
        tokens = [{f"s{node_stream(n)}", *n.meta.get("custom", {}).get(BEFORE, ())} for n in made]
        known = {t for t in set.intersection(*tokens) if t[0] != "c"}  # where a copy blocks is the compiler's affair
        late = {
            t for t in known if t[0] != "s" and (t not in records or any(records[t] < i < place[root] for i in fixed))
        }
        if not late <= set(root.meta.get("custom", {}).get(BEFORE, ())):
            awaited.append((value, root))
        for node in _named(value):
            before = (known - late).union(node.meta.get("custom", {}).get(BEFORE, ())) - {f"s{node_stream(node)}"}
            annotate(node, **{BEFORE: tuple(sorted(before))})
    return awaited


def _wait_for_parts(program: _Program, awaited: list[tuple[Node, Node]]) -> None:
    """The host waits, behind all else, for the streams of updates (`_promise_parts`)."""
    # The partitioner leaves what has no operands out of a backward if it stands ahead of it.
    computed = [node for node in program.nodes[0].graph.nodes if node.op == "call_function"]
    last = list(itertools.takewhile(lambda node: not is_backward(node), computed))[-1]
    tokens: dict[int, str] = {}
    for value, root in awaited:
        stream = node_stream(root)
        if stream not in tokens:
            tokens[stream] = f"h{len(program.tokens) + len(tokens)}"
            with last.graph.inserting_after(last):
                wait = last.graph.call_function(_streams.synchronize_stream.default, (stream,))
            wait.meta = {key: root.meta[key] for key in _KEPT_WITH_WAITS if key in root.meta}
            order = len(program.ops) + len(tokens) - 1
            told = {AFTER: (), BEFORE: (), REQUIRES: tokens[stream], ORDER: order}
            annotate(wait, **told, **dict.fromkeys((READS, TARGET, STORAGE)))
        for node in _named(value):
            before = {*node.meta["custom"].get(BEFORE, ()), tokens[stream]}
            annotate(node, **{BEFORE: tuple(sorted(before))})


def _computes(gm: GraphModule) -> bool:
    """Whether kernels are left of the graph when what nobody reads is dropped: no views, no stream program."""
    todo = [n for n in gm.graph.nodes if n.op == "output" or (n.op == "call_function" and n.is_impure())]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or is_stream_op(node):
            continue
        seen.add(node)
        if node.op == "call_function" and not is_view(node) and node.target is not operator.getitem:
            return True
        todo += node.all_input_nodes
    return False


def _place_program(gm: GraphModule, nodes: Sequence[Node]) -> None:
    """Write the tokens of the forward's nodes, or of the backward's, and erase the user's waits among them."""
    from torch_overlay._functorch.streams import eager_memory

    program = _Program(nodes)
    output = gm.graph.output_node()
    returned, results = eager_memory.returned_storages(output), eager_memory.result_memory(output, program.streams)
    kept = eager_memory.results_made(output) | eager_memory.saved_in_eager(gm.graph)
    known, values = constants(gm.graph), set(output.all_input_nodes)
    (after, leave), before = program.after(), program.before()
    # A graph that only synchronises, as a frame before its first graph break may, has no node to carry its promises,
    # nor has one that launches nothing of which somebody reads the result. The user's operations stay as they are.
    computes = _computes(gm)
    if not computes:
        leave = ()
    for node in nodes:
        if node.op == "placeholder" and leave and not is_backward(node):
            annotate(node, **{LEAVE: leave, RESULTS: results})
        if node.op != "call_function":
            continue
        # A view does nothing on a stream. Inductor may make one that is returned memory of its own, which is filled
        # where its base is, and a view of a constant a constant of its own.
        made = viewed(node)
        maker = made if made in known or (node in values and made.op == "call_function") else node
        stream = node_stream(maker) or None
        # Note [A backward is a region of its own], in `streams.backward`
        engine = {"s0"} if stream and is_backward(node) else set()
        tokens: dict[str, Any] = {
            # Where the user's waits stay as they are, the operations behind them need none of ours.
            AFTER: tuple(sorted(after.get(maker, frozenset()) | engine)) if computes or not is_stream_op(node) else (),
            BEFORE: tuple(sorted(before.get(maker, frozenset()) | engine)),
            LEAVE: None if is_backward(node) else leave,
            READS: None
            if is_backward(node) or is_stream_op(node)
            else eager_memory.foreign_reads(node, returned, kept),
            RESULTS: None if is_backward(node) else results,
            REQUIRES: program.tokens.get(node),
            ORDER: program.ops.index(node) if is_stream_op(node) else None,
        }
        annotate(node, stream=stream, **tokens)
    is_forward = not all(map(is_backward, nodes))
    if computes and is_forward and (awaited := _promise_parts(output)):
        _wait_for_parts(program, awaited)
    for node in nodes:
        if not node.meta.get("custom", {}).keys().isdisjoint((TARGET, STORAGE)):
            annotate(node, **{TARGET: None, STORAGE: None})
    for node in program.ops:
        if node.target is _DEALLOC or (computes and not program.keeps(node)):
            gm.graph.erase_node(node)
        elif is_backward(node):
            node.meta["partitioner_tag"] = "must_be_in_backward"


def _orders_by_blocking(nodes: Sequence[Node]) -> bool:
    """Does the host learn from a copy that what came before it is done, in a program that may launch on another stream
    afterwards, in another frame?
    """
    from torch_overlay._dynamo import registry

    return registry.program_has_streams() and any(blocks_host(n) and not _is_number(n) for n in nodes)


def _number_ranges(nodes: Sequence[Node]) -> None:
    """Note [Ranges], in `streams.ranges`."""
    from torch_overlay._dynamo.range_ops import RANGES

    if not any(node.target in RANGES for node in nodes):
        return
    before = {True: 0, False: 0}  # in the backward, in the forward
    for node in nodes:
        if node.op == "call_function":
            side = bool(is_backward(node))
            annotate(node, **{RANGE: before[side]})
            before[side] += node.target in RANGES


def _is_number(node: Node) -> bool:
    """The upload of a single value, as of a learning rate: nobody takes it for a synchronisation."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.dim() == 0


def _place_copies_of_inputs(graph: Graph) -> None:
    """AOTAutograd copies an input that needs a gradient and is updated in place, ahead of all that the user wrote. The
    copy is made where the first operation of the user's reads it, on that one's stream.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_aten.clone.default):
        is_users = not copy.meta.keys().isdisjoint(("from_node", "source_fn_stack"))
        if is_users or copy.args[0].op != "placeholder":  # type: ignore[union-attr]
            continue
        readers, todo = [], [copy]
        while todo:
            users = [user for user in todo.pop().users if user.op == "call_function" and not is_stream_op(user)]
            todo += filter(is_view, users)
            readers += [user for user in users if not is_view(user)]
        if readers:
            min(copy.users, key=place.__getitem__).prepend(copy)
            annotate(copy, stream=node_stream(min(readers, key=place.__getitem__)) or None)


def _keep_waits(graph: Graph) -> None:
    """A copy that blocks the host and that nobody reads is left out, as may be one of a constant. Streams of this graph
    are ordered as behind it (`_Program.after`). Ahead of a graph break and behind it there may be others, so the host
    waits for the copy's stream.
    """
    from torch_overlay._dynamo import registry

    if not (registry.current().goes_on or registry.current().is_resumed):
        return
    read: set[Any] = set()
    known = constants(graph)
    for node in reversed(graph.nodes):
        if is_stream_op(node) or node.op != "call_function":
            read.update(node.all_input_nodes)
            continue
        is_read = node in read or node.is_impure()
        if is_read:
            # What `copy` overwrites gives it no more than its layout.
            read.update(node.args[1:2] if node.target is _aten.copy.default else node.all_input_nodes)
        is_left_out = not is_read or (node in known and not _is_number(node))
        if blocks_host(node) and not is_backward(node) and is_left_out:
            with graph.inserting_before(node):
                wait = graph.call_function(_streams.synchronize_stream.default, (node_stream(node),))
            wait.meta = {key: node.meta[key] for key in _KEPT_WITH_WAITS if key in node.meta}


def _split_lists(graph: Graph) -> None:
    """`_foreach_copy_` between host and device is one copy after the other, in eager, too."""
    for node in graph.find_nodes(op="call_function", target=_aten._foreach_copy.default):
        targets, sources, *waits = node.args
        devices = {value.meta["val"].device.type for value in (*targets, *sources)}
        if len(devices) == 1:
            continue
        given = (node.kwargs["non_blocking"],) if "non_blocking" in node.kwargs else tuple(waits)
        made = []
        with graph.inserting_before(node):
            for target, source, value in zip(targets, sources, node.meta["val"]):
                made.append(graph.call_function(_aten.copy.default, (target, source, *given)))
                made[-1].meta = {**node.meta, "val": value}
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def place_streams(gm: GraphModule) -> None:
    """Write placement and boundary tokens on the nodes of a forward or joint graph; erase the user's device-side waits.

    A graph without streams is left untouched, but for one that blocks the host in a program that has streams. A block
    on the ambient stream is no placement: upstream's scheduler would take it for a side stream.
    """
    from torch_overlay._dynamo import registry
    from torch_overlay._functorch.streams import autograd_nodes, eager_memory

    if registry.program_has_streams():
        _split_lists(gm.graph)
    nodes = list(gm.graph.nodes)
    _place_subgraphs(gm)
    if not any(is_stream_op(n) or node_stream(n) for n in nodes) and not _orders_by_blocking(nodes):
        for node in nodes:
            if "stream" in node.meta.get("custom", {}):
                annotate(node, stream=None)
        return
    autograd_nodes.note(gm.graph)
    _place_copies_of_inputs(gm.graph)
    _mark_backward(gm)
    _keep_waits(gm.graph)
    eager_memory.record_inputs(gm.graph)
    nodes = list(gm.graph.nodes)
    _place_program(gm, [n for n in nodes if not is_backward(n)])
    _place_program(gm, [n for n in nodes if is_backward(n)])
    _follow_mutations(gm)
    _number_ranges(nodes)
    gm.recompile()


# ---- seams


def wrap_all_sync_nodes(original: Callable[..., Any], gm: GraphModule) -> None:
    """In place of threading values through control_deps: see the module's docstring."""
    if not config.streams:
        return original(gm)
    from torch_overlay._dynamo import registry

    registry.remember()
    return place_streams(gm)


def skip_pass(original: Callable[..., Any], gm: GraphModule) -> None:
    """The pass inserts synchronisation that the planner derives from data dependencies."""
    if not config.streams:
        original(gm)


def stream_or_ambient(original: Callable[..., Any], node: Node) -> int:
    """A node without a stream runs on the ambient stream; upstream registers a fresh stream object for it."""
    if not config.streams:
        return original(node)
    return node_stream(node)


def _note_dropped_outputs(gm: GraphModule, fw_metadata: Any) -> None:
    """An output that is an input, or a view of one, is made anew from the caller's tensor. What the graph returns in
    its place, the last value that was written there, is gone when its code has returned.
    """
    first = fw_metadata.num_mutated_inp_runtime_indices
    nodes = pytree.tree_leaves(gm.graph.output_node().args[0])
    for node, info in zip(nodes[first:], fw_metadata.output_info):
        if info.output_type in (OutputType.alias_of_input, OutputType.is_input) and node.op == "call_function":
            annotate(node, **{DROPPED: True})
            while is_view(node) and node.all_input_nodes and node.all_input_nodes[0] not in nodes:
                node = node.all_input_nodes[0]  # passes may take the view out
                annotate(node, **{DROPPED: True})


def populate_stream_indices(original: Callable[..., Any], gm: GraphModule, fw_metadata: Any) -> None:
    """Inputs that the caller's epilogue mutates are joined into the ambient stream, so no stream index is needed for
    them.
    """
    from torch_overlay._functorch.streams.autograd_nodes import keep_view_streams
    from torch_overlay._functorch.streams.input_mutations import note_promises

    original(gm, fw_metadata)
    is_flat = any(isinstance(meta, SubclassCreationMeta) for meta in fw_metadata.subclass_fw_graph_out_meta)
    if config.streams and any(node_stream(n) for n in gm.graph.nodes) and not is_flat:  # one result, several tensors
        _note_dropped_outputs(gm, fw_metadata)
        keep_view_streams(gm, fw_metadata)
    if config.streams and fw_metadata.mutated_inp_stream_indices:
        note_promises(gm, fw_metadata, len(fw_metadata.mutated_inp_stream_indices))
        fw_metadata.mutated_inp_stream_indices = [None] * len(fw_metadata.mutated_inp_stream_indices)
