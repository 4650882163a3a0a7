"""Turn the user's stream program into placement and boundary effects on FX nodes.

Dynamo leaves the user's synchronisation in the graph as side-effect operations on stream and event indices. This pass
reads them once, in program order, writes on every node what the outside can tell (see Note [Streams are placement,
dependencies are order] in `streams.planner`), and erases them. Two vector-clock walks do it:

- forward: which states of the caller had each stream waited for when this node was issued? -> `Fact.after`
- backward: which streams, events and host synchronisations had the user ordered after this node by the end? ->
  `Fact.promised_to`
- the forward walk's last state: which of the caller's states is each stream ordered after at the end? ->
  `Fact.exit_waits`, the same on every node, because it belongs to the graph. It includes what the host learns from a
  copy that blocks it, which holds even if the copy is left out.

The facts are made of tokens (`streams.tokens`). Operations that the outside can see stay in the graph: records of
events that somebody else can read, host synchronisation, queries. Each carries the token that it makes true in
`Fact.requires`; the scheduler orders it after the nodes that carry the token. An update in place makes a new value,
which keeps the promises of the elements that it left alone (`promise_parts`).

An input that the user mutates becomes, after functionalization, a copy at the graph's end. The copy takes over the
stream and the tokens of the value that it writes: it is ordered by the joins that the user wrote after the mutation,
not by where the copy stands.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from torch_overlay._dynamo.ops import RANGES
from torch_overlay._functorch.streams.backward import mark_backward, read_past_updates
from torch_overlay._functorch.streams.epilogue import follow_mutations, note_autograd_nodes, place_first_copies
from torch_overlay._functorch.streams.facts import add_promised, Fact, fact_of, note_fact, replace_fact
from torch_overlay._functorch.streams.fx import (
    blocks_host,
    constants,
    DEALLOC,
    has_streams,
    is_backward,
    is_stream_op,
    launches_kernels,
    node_stream,
    place_on,
    RECORD,
    storage_node,
    view_chain,
    WAITS,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.memory import MemoryTable, writers_of_elements
from torch_overlay._functorch.streams.program import (
    keep_waits,
    KEPT_WITH_WAITS,
    orders_by_blocking,
    Program,
    split_lists,
)
from torch_overlay._functorch.streams.tokens import CALLER, state, synchronization


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node

    from torch_overlay._functorch.streams.tokens import Token
    from torch_overlay.frame_facts import FrameFacts


_streams = torch.ops.streams


def promise_parts(output: Node) -> list[tuple[Node, Node]]:
    """Add the promises of the original operations to each result that holds, or may hold, only elements which an update
    in place left alone. Return the results that the host must wait for instead, and their updates.

    The update makes new memory, and the update's stream fills all of it. Whoever had waited for the operations that
    computed the other elements may read the result. So a record that comes before the update is ordered after it, if no
    operation that the host waits for or asks stands between them. Otherwise, and where the host had waited, it waits
    for the update.
    """
    position = {node: i for i, node in enumerate(output.graph.nodes)}
    records = {fact_of(n).requires: i for n, i in position.items() if n.target is RECORD}
    moves = (RECORD, *WAITS, DEALLOC)
    fixed = [i for n, i in position.items() if blocks_host(n) or (is_stream_op(n) and n.target not in moves)]
    awaited = []
    for value in pytree.tree_leaves(output.args):
        if not isinstance(value, torch.fx.Node) or value.op != "call_function" or is_backward(value):
            continue
        made, root = writers_of_elements(value), storage_node(value)
        nodes = [node for node in made if node is not None]
        if root in made or any(node.op != "call_function" or is_backward(node) for node in nodes):
            continue
        tokens = [{state(node_stream(n)), *fact_of(n).promises} for n in nodes]
        combined = set.union if None in made else set.intersection
        # The compiler decides where a blocking copy stands.
        known = {t for t in combined(*tokens) if not t.is_blocking_copy}
        late = {
            t
            for t in known
            if t.stream is None and (t not in records or any(records[t] < i < position[root] for i in fixed))
        }
        if not late <= fact_of(root).promises:
            awaited.append((value, root))
        for node in view_chain(value):
            add_promised(node, known - late)
    return awaited


def wait_for_parts(program: Program, awaited: list[tuple[Node, Node]]) -> None:
    """Make the host wait, after all else, for the streams of the updates that `promise_parts` returned."""
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
            wait.meta = {key: root.meta[key] for key in KEPT_WITH_WAITS if key in root.meta}
            known, order = fact_of(root), len(program.ops) + len(tokens) - 1
            of_graph = {"exit_waits": known.exit_waits, "results": known.results}
            replace_fact(wait, Fact((), (), requires=tokens[stream], order=order, **of_graph))
        for node in view_chain(value):
            add_promised(node, (tokens[stream],))


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


def _place_program(gm: GraphModule, nodes: Sequence[Node], frame: FrameFacts, memory: MemoryTable) -> None:
    """Write the tokens of the forward's nodes, or of the backward's, and erase the user's waits among them."""
    program = Program(nodes, frame)
    output, results = gm.graph.output_node(), memory.results(program.streams, frame)
    known, values = constants(gm.graph), set(output.all_input_nodes)
    (after, exit_waits), before = program.after(), program.promised_to()
    # A graph that only synchronises, as a frame before its first graph break may, has no node to carry its promises.
    # Nor has a graph that launches no kernel whose result somebody reads. The user's operations stay as they are.
    has_kernels = launches_kernels(gm)
    has_ranges, ranges = any(node.target in RANGES for node in nodes), 0  # Note [Ranges], in `streams.lowering`
    if not has_kernels:
        exit_waits = ()
    for node in nodes:
        if node.op == "placeholder" and exit_waits and not is_backward(node):
            note_fact(node, exit_waits=exit_waits, results=results)
        if node.op != "call_function":
            continue
        # A view does nothing on a stream. Inductor may give a view that is returned memory of its own, which is filled
        # where the view's base is, and may make a view of a constant a constant of its own.
        made = memory.memory[node].node
        maker = made if made in known or (node in values and made.op == "call_function") else node
        stream = node_stream(maker)
        # Note [A backward is a region of its own]
        engine = {CALLER} if stream and is_backward(node) else set()
        # Where the user's waits stay as they are, the operations after them need none of ours.
        waited = after.get(maker, frozenset()) | engine if has_kernels or not is_stream_op(node) else ()
        reads_memory = not (is_backward(node) or is_stream_op(node))
        place_on(node, stream)
        note_fact(
            node,
            after=tuple(sorted(waited)),
            promised_to=tuple(sorted(before.get(maker, frozenset()) | engine)),
            exit_waits=None if is_backward(node) else exit_waits,
            reads=memory.foreign_reads(node, frame.goes_on) if reads_memory else None,
            results=None if is_backward(node) else results,
            requires=program.tokens.get(node),
            order=program.ops.index(node) if is_stream_op(node) else None,
            range=ranges if has_ranges else None,
        )
        ranges += node.target in RANGES
    is_forward = not all(map(is_backward, nodes))
    if has_kernels and is_forward and (awaited := promise_parts(output)):
        wait_for_parts(program, awaited)
    for node in nodes:
        note_fact(node, eager_storage=(), is_given=False)
    for node in program.ops:
        if node.target is DEALLOC or (has_kernels and not program.keeps(node)):
            gm.graph.erase_node(node)
        elif is_backward(node):
            node.meta["partitioner_tag"] = "must_be_in_backward"


def place_streams(gm: GraphModule, frame: FrameFacts) -> None:
    """Write placement and boundary tokens on the nodes of a forward or joint graph; erase the user's device-side waits.

    A graph without streams is left untouched, unless it blocks the host in a program that has streams. A `with` block
    on the caller's stream is no placement: upstream's scheduler would take it for a side stream.
    """
    if frame.program_has_streams:
        split_lists(gm.graph)
    nodes = list(gm.graph.nodes)
    _place_subgraphs(gm)
    if not has_streams(nodes) and not orders_by_blocking(nodes, frame):
        for node in nodes:
            if "stream" in node.meta.get("custom", {}):
                place_on(node, CALLERS_STREAM)
        return
    note_autograd_nodes(gm.graph, frame.first_readers)
    place_first_copies(gm.graph)
    mark_backward(gm.graph)
    read_past_updates(gm.graph)
    keep_waits(gm.graph, frame)
    memory = MemoryTable(gm.graph)
    memory.record_inputs()
    nodes = list(gm.graph.nodes)
    _place_program(gm, [n for n in nodes if not is_backward(n)], frame, memory)
    _place_program(gm, [n for n in nodes if is_backward(n)], frame, memory)
    follow_mutations(gm.graph)
    gm.recompile()
