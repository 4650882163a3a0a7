"""Turn the user's stream program into placement and boundary effects on FX nodes.

Dynamo leaves the user's synchronisation in the graph as side-effect operations on stream and event indices. This pass
reads them once, in program order, writes on every node what the outside can tell (see Note [Streams are placement,
dependencies are order] in `streams.planner`), and erases them. Two vector-clock walks do it:

- forward: which states of the caller had each stream waited for when this node was issued? -> `Fact.after`
- backward: which streams, events and host synchronisations had the user ordered after this node by the end? ->
  `Fact.before`
- the forward walk's last state: which of the caller's states is each stream ordered after at the end? -> `Fact.leave`,
  the same on every node, because it belongs to the graph. It includes what the host learns from a copy that blocks it,
  which holds even if the copy is left out.

The facts are made of tokens (`streams.tokens`). Operations that the outside can see stay in the graph: records of
events that somebody else can read, host synchronisation, queries. Each carries the token that it makes true in
`Fact.requires`; the scheduler orders it after the nodes that carry the token.

An input that the user mutates becomes, after functionalization, a copy at the graph's end. The copy takes over the
stream and the tokens of the value that it writes: it is ordered by the joins that the user wrote after the mutation,
not by where the copy stands.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch.utils import _pytree as pytree

from torch_overlay import config
from torch_overlay._functorch.streams import autograd_nodes, eager_memory
from torch_overlay._functorch.streams.facts import add_before, fact_of, note_fact
from torch_overlay._functorch.streams.fx import (
    BACKWARD,
    blocks_host,
    constants,
    DEALLOC,
    is_backward,
    is_stream_op,
    is_view,
    launches_kernels,
    node_stream,
    place_on,
    RECORD,
    viewed,
    WAITS,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.input_mutations import Promises, promises_of
from torch_overlay._functorch.streams.program import Program
from torch_overlay._functorch.streams.tokens import CALLER, state, synchronization, Token
from torch_overlay._functorch.streams.view_sources import sources


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.fx import Graph, GraphModule, Node

_KEPT_WITH_WAITS = ("custom", "stack_trace", "partitioner_tag", "seq_nr")  # in `meta`, of what the host waits for

_aten = torch.ops.aten
_streams = torch.ops.streams


def _mark_backward(gm: GraphModule) -> None:
    """Mark the backward's nodes. Upstream's tag is missing on the body of a user's `autograd.Function.backward`; those
    nodes come after the first gradient. The tag of a write-back doesn't count: upstream puts write-backs into the
    backward also in graphs that have none. The nodes after a write-back may be views for the forward's caller, of what
    was updated in place after they were made.
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
    """Return the views that the forward returns, and the views that those are views of."""
    found: set[Node] = set()
    for value, what in zip(pytree.tree_leaves(output.args[0]), output.meta.get("desc") or ()):
        while isinstance(what, PlainAOTOutput) and isinstance(value, torch.fx.Node) and is_view(value):
            found.add(value)
            value = value.args[0]
    return found


def _place_subgraphs(gm: GraphModule) -> None:
    """Place the bodies of regions (invoke_subgraph, cond, ...) on the stream of the node that calls them, which is the
    caller's stream of the body.
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
                if is_stream_op(inner) and inner.target in (*WAITS, DEALLOC):
                    body.graph.erase_node(inner)
                elif node_stream(inner) in (outer, CALLERS_STREAM):
                    place_on(inner, CALLERS_STREAM)
            body.recompile()
            _place_subgraphs(body)


def _producer(value: Any) -> Node | None:
    """Return the operation that computes a value, below aliases and selections of an output."""
    while isinstance(value, torch.fx.Node) and value.target in (operator.getitem, torch.ops.aten.alias.default):
        value = value.args[0]
    return value if isinstance(value, torch.fx.Node) and value.op == "call_function" else None


def _follow_mutations(gm: GraphModule) -> None:
    """Give each write-back copy the stream and the tokens of the value that it writes, not those of a later point."""
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target: Any = copy.args[0]
        value = _producer(copy.args[1])
        if target.op != "placeholder" or value is None:
            continue
        place_on(copy, node_stream(value))
        note_fact(copy, after=fact_of(value).after, before=fact_of(value).before)


def _named(value: Node) -> Iterator[Node]:
    """Yield a value and the views below it, down to the node whose memory the value names."""
    root = viewed(value)
    yield value
    while value is not root:
        value = value.args[0]  # type: ignore[assignment]
        yield value


def _promise_parts(output: Node) -> list[tuple[Node, Node]]:
    """Add the promises of the original operations to each result that holds only elements which an update in place left
    alone. Return the results that the host must wait for instead, and their updates.

    The update makes new memory, and the update's stream fills all of it. Whoever had waited for the operations that
    computed the other elements may read the result. So a record that comes before the update is ordered after it, if no
    operation that the host waits for or asks stands between them. Otherwise, and where the host had waited, it waits
    for the update.
    """
    place = {node: i for i, node in enumerate(output.graph.nodes)}
    records = {fact_of(n).requires: i for n, i in place.items() if n.target is RECORD}
    moves = (RECORD, *WAITS, DEALLOC)
    fixed = [i for n, i in place.items() if blocks_host(n) or (is_stream_op(n) and n.target not in moves)]
    awaited = []
    for value in pytree.tree_leaves(output.args):
        if not isinstance(value, torch.fx.Node) or value.op != "call_function" or is_backward(value):
            continue
        made, root = sources(value), viewed(value)
        if root in made or any(node.op != "call_function" or is_backward(node) for node in made):
            continue
        tokens = [{state(node_stream(n)), *fact_of(n).promises} for n in made]
        known = {
            t for t in set.intersection(*tokens) if not t.is_blocking_copy
        }  # the compiler decides where a blocking copy stands
        late = {
            t
            for t in known
            if t.stream is None and (t not in records or any(records[t] < i < place[root] for i in fixed))
        }
        if not late <= fact_of(root).promises:
            awaited.append((value, root))
        for node in _named(value):
            add_before(node, known - late)
    return awaited


def _wait_for_parts(program: Program, awaited: list[tuple[Node, Node]]) -> None:
    """Make the host wait, after all else, for the streams of the updates that `_promise_parts` returned."""
    # The partitioner leaves what has no operands out of a backward if it stands before it.
    computed = [node for node in program.nodes[0].graph.nodes if node.op == "call_function"]
    last = list(itertools.takewhile(lambda node: not is_backward(node), computed))[-1]
    tokens: dict[int, Token] = {}
    for value, root in awaited:
        stream = node_stream(root)
        if stream not in tokens:
            tokens[stream] = synchronization(len(program.tokens) + len(tokens))
            with last.graph.inserting_after(last):
                wait = last.graph.call_function(_streams.synchronize_stream.default, (stream,))
            wait.meta = {key: root.meta[key] for key in _KEPT_WITH_WAITS if key in root.meta}
            order = len(program.ops) + len(tokens) - 1
            note_fact(
                wait,
                after=(),
                before=(),
                requires=tokens[stream],
                order=order,
                reads=None,
                eager_target=None,
                eager_storage=(),
            )
        for node in _named(value):
            add_before(node, (tokens[stream],))


def _place_program(gm: GraphModule, nodes: Sequence[Node]) -> None:
    """Write the tokens of the forward's nodes, or of the backward's, and erase the user's waits among them."""
    program = Program(nodes)
    output = gm.graph.output_node()
    returned, results = eager_memory.returned_storages(output), eager_memory.result_memory(output, program.streams)
    kept = eager_memory.results_made(output) | eager_memory.saved_in_eager(gm.graph)
    known, values = constants(gm.graph), set(output.all_input_nodes)
    (after, leave), before = program.after(), program.before()
    # A graph that only synchronises, as a frame before its first graph break may, has no node to carry its promises.
    # Nor has a graph that launches no kernel whose result somebody reads. The user's operations stay as they are.
    has_kernels = launches_kernels(gm)
    if not has_kernels:
        leave = ()
    for node in nodes:
        if node.op == "placeholder" and leave and not is_backward(node):
            note_fact(node, leave=leave, results=results)
        if node.op != "call_function":
            continue
        # A view does nothing on a stream. Inductor may give a view that is returned memory of its own, which is filled
        # where the view's base is, and may make a view of a constant a constant of its own.
        made = viewed(node)
        maker = made if made in known or (node in values and made.op == "call_function") else node
        stream = node_stream(maker)
        # Note [A backward is a region of its own], in `streams.backward`
        engine = {CALLER} if stream and is_backward(node) else set()
        # Where the user's waits stay as they are, the operations after them need none of ours.
        waited = after.get(maker, frozenset()) | engine if has_kernels or not is_stream_op(node) else ()
        reads_memory = not (is_backward(node) or is_stream_op(node))
        place_on(node, stream)
        note_fact(
            node,
            after=tuple(sorted(waited)),
            before=tuple(sorted(before.get(maker, frozenset()) | engine)),
            leave=None if is_backward(node) else leave,
            reads=eager_memory.foreign_reads(node, returned, kept) if reads_memory else None,
            results=None if is_backward(node) else results,
            requires=program.tokens.get(node),
            order=program.ops.index(node) if is_stream_op(node) else None,
        )
    is_forward = not all(map(is_backward, nodes))
    if has_kernels and is_forward and (awaited := _promise_parts(output)):
        _wait_for_parts(program, awaited)
    for node in nodes:
        note_fact(node, eager_target=None, eager_storage=())
    for node in program.ops:
        if node.target is DEALLOC or (has_kernels and not program.keeps(node)):
            gm.graph.erase_node(node)
        elif is_backward(node):
            node.meta["partitioner_tag"] = "must_be_in_backward"


def _orders_by_blocking(nodes: Sequence[Node]) -> bool:
    """True if the host learns from a copy that all work before it is done, in a program that may launch on another
    stream afterwards, in another frame.
    """
    from torch_overlay._dynamo import registry

    return registry.program_has_streams() and any(blocks_host(n) and not _is_number(n) for n in nodes)


def _number_ranges(nodes: Sequence[Node]) -> None:
    """Number the nodes by the operations of profiler ranges before them: Note [Ranges], in `streams.ranges`."""
    from torch_overlay._dynamo.range_ops import RANGES

    if not any(node.target in RANGES for node in nodes):
        return
    before = {True: 0, False: 0}  # in the backward, in the forward
    for node in nodes:
        if node.op == "call_function":
            side = bool(is_backward(node))
            note_fact(node, range=before[side])
            before[side] += node.target in RANGES


def _is_number(node: Node) -> bool:
    """True for the upload of a single value, such as a learning rate: nobody takes it for a synchronisation."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.dim() == 0


def _place_copies_of_inputs(graph: Graph) -> None:
    """Move each copy that AOTAutograd makes of an input that needs a gradient and is updated in place. AOTAutograd puts
    the copy before all that the user wrote; it moves to the first of the user's operations that reads it, on that
    operation's stream.
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
            place_on(copy, node_stream(min(readers, key=place.__getitem__)))


def _keep_waits(graph: Graph) -> None:
    """Insert a host wait where a copy that blocks the host may be left out: a copy that nobody reads, or one of a
    constant. The streams of this graph are ordered as if after the copy (`Program.after`). Before a graph break and
    after it there may be other streams, so the host waits for the copy's stream.
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
            # `copy` takes no more than the layout from the tensor that it overwrites.
            read.update(node.args[1:2] if node.target is _aten.copy.default else node.all_input_nodes)
        is_left_out = not is_read or (node in known and not _is_number(node))
        if blocks_host(node) and not is_backward(node) and is_left_out:
            with graph.inserting_before(node):
                wait = graph.call_function(_streams.synchronize_stream.default, (node_stream(node),))
            wait.meta = {key: node.meta[key] for key in _KEPT_WITH_WAITS if key in node.meta}


def _split_lists(graph: Graph) -> None:
    """Split `_foreach_copy_` between host and device into single copies, one after the other, as eager does."""
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

    A graph without streams is left untouched, unless it blocks the host in a program that has streams. A `with` block
    on the caller's stream is no placement: upstream's scheduler would take it for a side stream.
    """
    from torch_overlay._dynamo import registry

    if registry.program_has_streams():
        _split_lists(gm.graph)
    nodes = list(gm.graph.nodes)
    _place_subgraphs(gm)
    if not any(is_stream_op(n) or node_stream(n) for n in nodes) and not _orders_by_blocking(nodes):
        for node in nodes:
            if "stream" in node.meta.get("custom", {}):
                place_on(node, CALLERS_STREAM)
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
    """Run `place_streams` in place of threading values through control_deps: see the module's docstring."""
    if not config.streams:
        return original(gm)
    from torch_overlay._dynamo import registry

    registry.remember()
    return place_streams(gm)


def skip_pass(original: Callable[..., Any], gm: GraphModule) -> None:
    """Skip the pass: it inserts synchronisation that the planner derives from data dependencies."""
    if not config.streams:
        original(gm)


def stream_or_callers(original: Callable[..., Any], node: Node) -> int:
    """Return the node's stream. A node without one runs on the caller's stream; upstream registers a fresh stream for
    it.
    """
    if not config.streams:
        return original(node)
    return node_stream(node)


def _note_dropped_outputs(gm: GraphModule, fw_metadata: Any) -> None:
    """Note the outputs that are an input, or a view of one: they are made anew from the caller's tensor. The value that
    the graph returns in their place, the last one that was written there, is dropped when the graph's code has
    returned.
    """
    first = fw_metadata.num_mutated_inp_runtime_indices
    nodes = pytree.tree_leaves(gm.graph.output_node().args[0])
    for node, info in zip(nodes[first:], fw_metadata.output_info):
        if info.output_type in (OutputType.alias_of_input, OutputType.is_input) and node.op == "call_function":
            note_fact(node, is_dropped=True)
            while is_view(node) and node.all_input_nodes and node.all_input_nodes[0] not in nodes:
                node = node.all_input_nodes[0]  # passes may remove the view
                note_fact(node, is_dropped=True)


def populate_stream_indices(original: Callable[..., Any], gm: GraphModule, fw_metadata: Any) -> None:
    """Clear upstream's stream indices of inputs that the caller's epilogue mutates: those inputs are joined into the
    caller's stream, so they need no index.
    """
    original(gm, fw_metadata)
    has_streams = config.streams and any(node_stream(n) for n in gm.graph.nodes)
    # A result that is a subclass is several values of the graph.
    if has_streams and not any(isinstance(m, SubclassCreationMeta) for m in fw_metadata.subclass_fw_graph_out_meta):
        _note_dropped_outputs(gm, fw_metadata)
        autograd_nodes.keep_view_streams(gm, fw_metadata)
    if config.streams and fw_metadata.mutated_inp_stream_indices:
        fw_metadata.overlay_promises = promises_of(gm, len(fw_metadata.mutated_inp_stream_indices))
        fw_metadata.mutated_inp_stream_indices = [None] * len(fw_metadata.mutated_inp_stream_indices)


def create_runtime_wrapper(
    original: Callable[..., Callable[..., Any]], compiled_fn: Any, *, runtime_metadata: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Keep the promises of updates that the epilogue writes back, after the epilogue."""
    wrapper = original(compiled_fn, runtime_metadata=runtime_metadata, **kwargs)
    promises: Promises | None = getattr(runtime_metadata, "overlay_promises", None)
    if promises is None:
        return wrapper

    @functools.wraps(wrapper)
    def keep_promises(*args: Any, **kwargs: Any) -> Any:
        result = wrapper(*args, **kwargs)
        promises.keep()
        return result

    return keep_promises
