"""Settle where a backward runs, and how it is ordered with its forward and with autograd's engine.

Note [A backward is a region of its own]
The user's stream program is the forward's. It says nothing about the backward, so none of its tokens may reach it. What
the backward is ordered after, and what is ordered after the backward, follows from what autograd's engine does:

- The engine makes the stream of the forward's call current, and orders it after the gradients that come in and before
  those that go out. So an operation on a side stream is ordered after the caller's stream's state at the entry, and the
  caller's stream is ordered after the operation at the exit: the token `CALLER`, both ways.
- A gradient is computed where its forward was, by each autograd node that the operation made. A sum of gradients is
  computed where its consumer runs; the consumer of a sum that leaves the graph is the engine, on the caller's stream.
- An operation that is computed again runs where its consumer runs.
- The engine orders a stream after each gradient that it passes to an autograd node there, whether or not that node
  launches anything. So a side stream that gradients pass through is ordered after the caller's stream's state at the
  entry when the backward is left, and the caller's stream after the side stream's (`engine_streams`).
- A saved value is ordered before its readers by the forward, if the user's own waits order the readers' stream after
  it. A reader on another stream, which only a compiler can place there, waits for the state of the stream that wrote
  the value.
- The memory of a saved value may be the writer's stream's. The backward drops what may be the last reference to it, so
  the plan treats the memory as belonging to that stream and to the caller's, unless the generated forward says whose it
  is (`streams.saved_memory`).

The partitioner takes no notice of streams, so it saves what it saves without them (`streams.cse`).

Note [Inputs that the forward writes to]
An input that is written to when the forward has computed must not be saved: the backward would compute again from the
new value. Upstream tells the partitioner so only for inputs that need gradients. A checkpoint policy may ask to compute
again what is computed from such an input, like a new count of a router's tokens: the partitioner has no way to do that.
The value is saved, if the backward needs it.
"""

from __future__ import annotations

import bisect
import operator
from collections import Counter, defaultdict
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, TangentAOTInput
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from torch_overlay import config
from torch_overlay._functorch.offload.checkpoint_policies import is_slab, note_offload_policies, OFFLOAD
from torch_overlay._functorch.streams import autograd_nodes
from torch_overlay._functorch.streams.cse import split_duplicates
from torch_overlay._functorch.streams.eager_memory import saved_in_eager
from torch_overlay._functorch.streams.facts import (
    add_after,
    add_before,
    Fact,
    fact_of,
    is_placed_program,
    Leave,
    note_fact,
    NOTHING,
    replace_fact,
)
from torch_overlay._functorch.streams.fx import (
    is_backward,
    is_stream_op,
    is_view,
    launches_kernels,
    node_stream,
    place_on,
    viewed,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.tokens import CALLER, state, Token
from torch_overlay._options import offload_settings


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch.fx import Graph, GraphModule, Node


def assign_second_nodes(graph: Graph) -> None:
    """Place the backward nodes of the second and later autograd nodes of an operation where the operation ran. An
    update in place through a view makes two: its own, and one that puts the gradient into the base. Upstream finds the
    forward of a backward node by the number of the first autograd node; the others have the numbers that follow.
    """
    forward: dict[int, Node] = {}  # number of the last autograd node so far -> the last operation then
    for node in graph.nodes:
        if node.op == "call_function" and not is_stream_op(node) and node.meta.get("partitioner_tag") != "is_backward":
            forward[node.meta.get("seq_nr", -1)] = node
    if not any(map(node_stream, forward.values())):
        return
    numbers = sorted(forward)
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if (
            number is not None
            and node.meta.get("partitioner_tag") == "is_backward"
            and "fwd_source_fn_stack" not in node.meta
            and not node.meta.get("is_gradient_acc")
            and (at := bisect.bisect_left(numbers, number))
        ):
            place_on(node, node_stream(forward[numbers[at - 1]]))


def assign_sums(graph: Graph) -> None:
    """Place each sum of gradients where its consumer runs, as autograd does."""
    for node in reversed(graph.nodes):
        if node.meta.get("is_gradient_acc"):
            consumers = [user for user in node.users if user.op == "call_function"]
            place_on(node, node_stream(consumers[0]) if consumers else CALLERS_STREAM)


def _writer(node: Node) -> Node:
    """Return the node that a value's memory comes from: below views, and below selections of an output."""
    while node.op == "call_function" and (is_view(node) or node.target is operator.getitem):
        source: Any = node.args[0]
        if not isinstance(source, torch.fx.Node):
            break
        node = source
    return node


def _readers(value: Node) -> Iterator[Node]:
    """Yield the operations that read a value, itself or through views, and the views."""
    for user in value.users:
        if user.op == "call_function":
            yield user
            if is_view(user):
                yield from _readers(user)


def place_recomputed(graph: Graph) -> None:
    """Place each operation that the partitioner computes again with its consumer, without the forward's tokens."""
    recomputed = [n for n in graph.nodes if n.op == "call_function" and not is_backward(n)]
    for node in reversed(recomputed):
        streams = [node_stream(user) for user in node.users if user.op == "call_function"]
        stream = node_stream(node)
        if streams and stream not in streams:
            stream = streams[0]
        place_on(node, stream)
    for node in recomputed:
        if node.target is operator.getitem:
            place_on(node, node_stream(node.args[0]))  # type: ignore[arg-type]
        inside = (CALLER,) if node_stream(node) else ()
        replace_fact(node, Fact(inside, inside))


def place_computed_early(graph: Graph) -> None:
    """Settle the order of operations that the partitioner moved from the backward into the forward: they need no order
    with autograd's engine. A moved operation may read the caller's memory, so it waits for what the user's operations
    on its stream wait for. Where the user orders the caller's stream after a side stream's last operation, the
    operation moved to that stream is the last one.
    """
    promised: dict[int, set[Token]] = {}
    joined: dict[int, bool] = {}
    waited: dict[int, set[Token]] = {}
    computed = [n for n in graph.nodes if n.op == "call_function" and not is_view(n) and not is_stream_op(n)]
    for node in computed:
        if not is_backward(node):
            fact, stream = fact_of(node), node_stream(node)
            joined[stream] = CALLER in fact.promises
            promised.setdefault(stream, set()).update(fact.promises)
            waited.setdefault(stream, set()).update(fact.after or ())
    for node in graph.nodes:
        if node.op == "call_function" and is_backward(node):
            stream, made = node_stream(node), viewed(node)
            after = waited.get(stream, {CALLER} - {state(stream)})
            before: Collection[Token] = {CALLER} if joined.get(stream) else promised.get(stream, set())
            if made is not node and made.op == "call_function":  # others wait for the node that made the memory
                before = fact_of(made).promises
            note_fact(node, after=tuple(sorted(after)), before=tuple(sorted(before)), range=None)


def _order_late_readers(value: Node, given: Node) -> None:
    """Order streams after the backward's reads of an input of which eager saves nothing; the backward reads it to
    compute something again. These are the streams that the user ordered after all operations that read the input, for
    example the one that loads the next batch.
    """
    readers = [reader for reader in _readers(given) if not is_view(reader) and not is_stream_op(reader)]
    promised = [{state(node_stream(r)), *fact_of(r).promises} for r in readers]
    states = {token for token in set.intersection(*promised) if token.stream is not None} if promised else set()
    for reader in _readers(value):
        add_before(reader, states)


def place_saved(forward: Graph, backward: Graph, unread: Mapping[str, bool]) -> None:
    """Settle whose memory each saved value is, what its readers wait for, and what waits for them. `unread` maps each
    input of which eager saves nothing to whether it is a parameter, which lives on.
    """
    known = {n.name: n for n in forward.nodes if n.op in ("placeholder", "call_function")}
    for value in backward.find_nodes(op="placeholder"):
        place_on(value, CALLERS_STREAM)
        replace_fact(value, NOTHING)
        saved = known.get(value.name)
        writer = _writer(saved) if saved is not None else None
        if writer is not None and writer.op == "placeholder" and writer.name in unread:
            _order_late_readers(value, writer)
            # The caller may order the streams that reuse the input's memory after the forward alone.
            if not unread[writer.name]:
                for stream in sorted({node_stream(reader) for reader in _readers(value)}):
                    _record(value, stream)
        if writer is None or writer.op != "call_function":
            continue
        stream = node_stream(writer)
        note_fact(value, is_computed=True, memory=stream or None)
        promised = fact_of(writer).promises
        for reader in _readers(value):
            if node_stream(reader) != stream and state(node_stream(reader)) not in promised:
                add_after(reader, (state(stream),))


def _launched_by(joint: Graph, chain: Collection[Node]) -> dict[Node, set[Node]]:
    """Map each operation of the forward to the kernels of a joint graph's backward that belong to it."""
    operations = {node.meta.get("seq_nr", -1): node for node in chain}  # the last one of each number
    numbers = sorted(operations)
    found: dict[Node, set[Node]] = defaultdict(set)
    for node in joint.nodes:
        is_launch = node.op == "call_function" and not is_view(node) and node.target is not operator.getitem
        is_own = is_launch and is_backward(node) and not node.meta.get("is_gradient_acc")
        if is_own and (at := bisect.bisect_right(numbers, node.meta.get("seq_nr", -1))):
            found[operations[numbers[at - 1]]].add(node)
    return found


def _bring_gradient(value: Node, chain: Collection[Node], launched: Mapping[Node, set[Node]]) -> set[Node]:
    """Return the kernels of the backward that compute the gradient of a value of the forward."""
    found: set[Node] = set()
    todo = [value]
    while todo:
        for user in todo.pop().users:
            if user in chain:
                found |= launched.get(user, set())
                todo += () if user in launched else (user,)
    sums = list(found)
    while sums:
        added = {user for user in sums.pop().users if user.meta.get("is_gradient_acc")} - found
        found |= added
        sums += added
    return found


def engine_streams(joint: Graph, leaves: Collection[Node]) -> dict[Node, int]:
    """Return the stream on which autograd has a node: for each operation between inputs that get a gradient and outputs
    that bring one, and for each of `leaves` that gets a gradient, the stream on which the gradient is accumulated.
    """
    output = joint.output_node()
    inputs = {node.meta.get("desc"): node for node in joint.find_nodes(op="placeholder")}
    results = dict(zip(output.meta.get("desc") or (), pytree.tree_leaves(output.args[0])))
    begins = {
        inputs.get(what.grad_of) for what, v in results.items() if isinstance(what, GradAOTOutput) and v is not None
    }
    ends = {results.get(what.output) for what in inputs if isinstance(what, TangentAOTInput)}
    after, before = set(begins), set(ends)
    computed = [n for n in joint.nodes if n.op == "call_function" and not is_backward(n)]
    for node in computed:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(computed):
        if not before.isdisjoint(node.users):
            before.add(node)
    streams = {n: node_stream(n) for n in computed if n in after and n in before}
    return streams | {node: autograd_nodes.first_reader(node) for node in leaves if node in begins}


def order_after_gradients(joint: Graph, streams: Mapping[Node, int]) -> None:
    """Order the stream of each node of `engine_streams` that launches nothing after the kernels of the backward that
    compute the gradient which passes through the node.
    """
    if not any(streams.values()):
        return
    chain = dict.fromkeys(node for node in streams if node.op == "call_function")
    launched = _launched_by(joint, chain)
    for node, stream in streams.items():
        if stream and node not in launched:
            for kernel in _bring_gradient(node, chain, launched):
                add_before(kernel, (state(stream),))


def _record(value: Node, stream: int) -> None:
    """Record at the end of a backward that the stream uses a value's memory (`record_stream`)."""
    with value.graph.inserting_before(value.graph.output_node()):
        record = value.graph.call_function(torch.ops.streams.record_stream.default, (value, stream))
    record.meta["partitioner_tag"] = "must_be_in_backward"


def record_saved_gradients(forward: Graph, backward: Graph) -> set[Token]:
    """Record the caller's stream for each gradient that is itself a saved value: it leaves with the memory that it came
    with, and the caller's stream reads it. (For gradients that the backward computes, generated code records the
    stream; a graph that computes nothing has no generated code.) Return the states of streams that the forward left
    without ordering the caller's stream after them.
    """
    computed = {n.name: n for n in forward.nodes if n.op == "call_function"}
    output = next(iter(backward.find_nodes(op="output")))
    unordered = set()
    for value in dict.fromkeys(_writer(v) for v in output.all_input_nodes):
        stream = fact_of(value).memory
        if value.op != "placeholder" or not stream:
            continue
        _record(value, CALLERS_STREAM)
        if CALLER not in fact_of(_writer(computed[value.name])).promises:
            unordered.add(state(stream))
    return unordered


def leave_backward(backward: GraphModule, engine: Collection[int], unordered: Collection[Token]) -> None:
    """Note what streams are ordered after when the backward is left. No code is planned for a graph that launches
    nothing, such as the backward of an addition: there the wait itself is an operation.
    """
    leave: list[Leave] = []
    waits: list[tuple[int, int]] = []
    if launches_kernels(backward):
        leave += [Leave(stream, (CALLER,)) for stream in sorted(engine)]
        unordered = {*unordered, *map(state, engine)}
    else:
        for stream in sorted(engine):
            waits.append((stream, CALLERS_STREAM))
            if state(stream) not in unordered:
                waits.append((CALLERS_STREAM, stream))
    for streams in waits:
        with backward.graph.inserting_before(backward.graph.output_node()):
            wait = backward.graph.call_function(torch.ops.streams.wait_stream.default, streams)
        wait.meta["partitioner_tag"] = "must_be_in_backward"
    if unordered:
        leave.append(Leave(CALLERS_STREAM, tuple(sorted(unordered))))
    for value in backward.graph.find_nodes(op="placeholder"):
        note_fact(value, leave=tuple(leave) or None)


def place_parts(
    forward: GraphModule, backward: GraphModule, engine: Collection[int], unread: Mapping[str, bool]
) -> None:
    """Settle the placement of a backward graph, now that it is known what is saved and what is computed again."""
    if not any(is_placed_program(gm.graph) for gm in (forward, backward)):
        return
    split_duplicates(forward.graph, of_backward=False)
    split_duplicates(backward.graph, of_backward=True)
    place_computed_early(forward.graph)
    place_recomputed(backward.graph)
    place_saved(forward.graph, backward.graph, unread)
    leave_backward(backward, engine, record_saved_gradients(forward.graph, backward.graph))
    forward.recompile()
    backward.recompile()
    context = torch._guards.TracingContext.try_get()
    if context is not None:
        output = next(iter(forward.graph.find_nodes(op="output")))
        names = [v.name if isinstance(v, torch.fx.Node) else "" for v in output.args[0]]  # type: ignore[union-attr]
        context.overlay_saved = names, backward.graph  # type: ignore[attr-defined]


# ---- seams


def assign_backward_streams(original: Callable[..., None], gm: GraphModule) -> None:
    if not config.streams:
        return original(gm)
    assign_second_nodes(gm.graph)
    return assign_sums(gm.graph)


def _inputs(graph: Graph, inner_meta: Any, fw_metadata: Any) -> dict[Node, Any]:
    """Map the forward's inputs in a joint graph to what AOTAutograd knows of them (`InputAliasInfo`)."""
    from torch._functorch._aot_autograd import graph_compile

    inputs = [
        node
        for node in graph.find_nodes(op="placeholder")
        if graph_compile._is_primal(node) and not isinstance(node.meta.get("desc"), graph_compile.ForwardTokenAOTInput)
    ]
    return dict(zip(inputs, graph_compile.compute_inner_input_info_from_subclass_meta(fw_metadata, inner_meta)))


def keep_unsaved(inputs: Mapping[Node, Any]) -> None:
    """Mark inputs, and their views, as not to be saved: Note [Inputs that the forward writes to]."""
    unsaved = [node for node, info in inputs.items() if info.mutates_data]
    while unsaved:
        node = unsaved.pop()
        node.meta["aot_runtime_epilogue_input_mutation"] = True
        unsaved += [user for user in node.users if is_view(user) and user.args[0] is node]
        for user in filter(partitioners.must_recompute, node.users):
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def partition(
    original: Callable[..., Any], joint: GraphModule, inputs: Any, inner_meta: Any, fw_metadata: Any, *args: Any
) -> Any:
    note_offload_policies(joint.graph)
    inputs_of_forward = _inputs(joint.graph, inner_meta, fw_metadata)
    keep_unsaved(inputs_of_forward)
    leaves = [node for node, info in inputs_of_forward.items() if info.is_leaf]
    streams = engine_streams(joint.graph, leaves) if config.streams else {}
    order_after_gradients(joint.graph, streams)
    saved = saved_in_eager(joint.graph)
    unread = {
        node.name: info.is_leaf and info.requires_grad for node, info in inputs_of_forward.items() if node not in saved
    }
    forward, backward, count = original(joint, inputs, inner_meta, fw_metadata, *args)
    if config.streams:
        place_parts(forward, backward, {*streams.values()} - {CALLERS_STREAM}, unread)
    offload_saved(forward, backward, count)
    return forward, backward, count


def offload_saved(forward: GraphModule, backward: GraphModule, count: int) -> None:
    """Offload saved activations to the host, if the configuration or a checkpoint policy asks for it."""
    wanted = offload_settings(config)
    if wanted is None and not (config.streams and any(OFFLOAD in n.meta for n in forward.graph.nodes)):
        return
    from torch_overlay._functorch.offload.rewrite import offload

    offload(forward, backward, count, wanted)


def _read_unordered(forward: Graph) -> set[str]:
    """Return the names of forward outputs that a side stream reads without the user ordering the caller's stream after
    it.
    """
    readers = [n for n in forward.nodes if n.op == "call_function" and node_stream(n) != CALLERS_STREAM]
    late = [n for n in readers if CALLER not in fact_of(n).promises]
    read = {_writer(value) for node in late for value in node.all_input_nodes}
    return {value.name for value in forward.output_node().all_input_nodes if _writer(value) in read} if read else set()


def donated_buffers(
    original: Callable[..., list[int]], forward: GraphModule, backward: GraphModule, metadata: Any
) -> list[int]:
    """Return the saved tensors that the backward may write over: none that shares its memory with another one, none
    whose memory may belong to a side stream, and none that a side stream may still read. A relaunched forward puts what
    it saves into few allocations, and a gradient in one of them would keep the whole allocation alive. So a relaunched
    forward donates nothing, and its stages free the memory instead (`relaunch.memory.arrange`).
    """
    if config.cudagraphs == "relaunch" and torch._inductor.config.triton.cudagraphs:
        return []
    donated = original(forward, backward, metadata)
    if not config.streams:
        return donated
    inputs = backward.graph.find_nodes(op="placeholder")
    unordered = _read_unordered(forward.graph)
    donated = [i for i in donated if not is_slab(inputs[i]) and inputs[i].name not in unordered]
    memory = [fact_of(n).memory for n in inputs]
    if not any(memory):
        return donated
    values = [n.meta.get("val") for n in inputs]
    storages = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else None for v in values]
    count = Counter(storages)
    return [i for i in donated if not memory[i] and count[storages[i]] == 1]
