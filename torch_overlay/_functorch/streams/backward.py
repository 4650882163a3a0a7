"""Prepares a joint graph with streams for the partitioner, and places and orders the backward that it parts off.

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
  is (`streams.graph_facts`).

Note [Inputs that the forward writes to]
An input that is written to when the forward has computed must not be saved: the backward would compute again from the
new value. Upstream tells the partitioner so only for inputs that need gradients. A checkpoint policy may ask to compute
again what is computed from such an input, like a new count of a router's tokens: the partitioner has no way to do that.
The value is saved, if the backward needs it. Otherwise the partitioner saves what it saves without streams
(Note [Duplicates] of `streams.saved_values`).
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTOutput, TangentAOTInput
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from torch_overlay._functorch.streams.epilogue import autograd_stream, first_reader
from torch_overlay._functorch.streams.facts import (
    add_promised,
    ExitWait,
    Fact,
    fact_of,
    is_placed_program,
    note_fact,
    replace_fact,
)
from torch_overlay._functorch.streams.fx import (
    BACKWARD,
    base_of,
    is_backward,
    is_stream_op,
    is_view,
    launches_kernels,
    names_of,
    node_stream,
    place_on,
    storage_node,
    view_chain,
)
from torch_overlay._functorch.streams.ids import CALLERS_STREAM
from torch_overlay._functorch.streams.memory import saved_in_eager, SELECT, selected, UPDATE_SELECTED
from torch_overlay._functorch.streams.saved_values import (
    ContextNotes,
    end_backward_with,
    place_saved,
    record_saved_gradients,
    split_duplicates,
)
from torch_overlay._functorch.streams.tokens import CALLER, state, Token
from torch_overlay.orders import reached


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

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


def place_recomputed(graph: Graph) -> None:
    """Place each operation that the partitioner computes again with its consumer, without the forward's tokens."""
    recomputed = [n for n in graph.nodes if n.op == "call_function" and not is_backward(n)]
    for node in reversed(recomputed):
        streams = [node_stream(user) for user in node.users if user.op == "call_function"]
        if streams and node_stream(node) not in streams:
            place_on(node, streams[0])
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
    computed = [n for n in graph.nodes if n.op == "call_function" and base_of(n) is None and not is_stream_op(n)]
    for node in computed:
        if not is_backward(node):
            fact, stream = fact_of(node), node_stream(node)
            joined[stream] = CALLER in fact.promises
            promised.setdefault(stream, set()).update(fact.promises)
            waited.setdefault(stream, set()).update(fact.after or ())
    for node in graph.nodes:
        if node.op == "call_function" and is_backward(node):
            stream, made = node_stream(node), storage_node(node)
            after = waited.get(stream, {CALLER} - {state(stream)})
            before: Collection[Token] = {CALLER} if joined.get(stream) else promised.get(stream, set())
            if made is not node and made.op == "call_function":  # others wait for the node that made the memory
                before = fact_of(made).promises
            note_fact(node, after=tuple(sorted(after)), promised_to=tuple(sorted(before)), range=None)


def leave_backward(backward: GraphModule, engine: Collection[int], unordered: Collection[Token]) -> None:
    """Note what streams are ordered after when the backward is left. No code is planned for a graph that launches
    nothing, such as the backward of an addition: there the wait itself is an operation.
    """
    exit_waits: list[ExitWait] = []
    waits: list[tuple[int, int]] = []
    if launches_kernels(backward):
        exit_waits += [ExitWait(stream, (CALLER,)) for stream in sorted(engine)]
        unordered = {*unordered, *map(state, engine)}
    else:
        for stream in sorted(engine):
            waits.append((stream, CALLERS_STREAM))
            if state(stream) not in unordered:
                waits.append((CALLERS_STREAM, stream))
    for streams in waits:
        end_backward_with(backward.graph, torch.ops.streams.wait_stream.default, *streams)
    if unordered:
        exit_waits.append(ExitWait(CALLERS_STREAM, tuple(sorted(unordered))))
    for value in backward.graph.find_nodes(op="placeholder"):
        note_fact(value, exit_waits=tuple(exit_waits) or None)


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
        results: Any = forward.graph.output_node().args[0]
        names = [value.name if isinstance(value, torch.fx.Node) else "" for value in results]
        ContextNotes(names, backward.graph).put(context)


def mark_backward(graph: Graph) -> None:
    """Mark the backward's nodes. Upstream's tag is missing on the body of a user's `autograd.Function.backward`; those
    nodes come after the first gradient. The tag of a write-back doesn't count: upstream puts write-backs into the
    backward also in graphs that have none. The nodes after a write-back may be views for the forward's caller, of what
    was updated in place after they were made.
    """
    begun = False
    results = _viewed_results(graph.output_node())
    for node in graph.nodes:
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


# Note [Gradients of rows]
# A program that writes the results of several streams to rows of one tensor (`out[i] = expert(x)`) has a chain for a
# backward: each assignment hands on the gradient of the whole tensor with zeros in its row, and takes that row for its
# own. The rows that later assignments have set to zero are not the one that an earlier one takes. So it takes it from
# the gradient that came in: the streams wait for that one alone, and where nobody needs the gradient of what the tensor
# held before, no copies of it are made.


def read_past_updates(graph: Graph) -> None:
    """Take rows of gradients from before the updates of other rows: Note [Gradients of rows]."""
    found = False
    for clone in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        view: Any = clone.args[0]
        # The layout of a contiguous copy does not depend on that of the value.
        if clone.kwargs.get("memory_format") is not torch.contiguous_format or view.target not in SELECT:
            continue
        rows = selected(view) if is_backward(clone) else None
        if rows is None or (value := _before_updates(view.args[0], rows)) is view.args[0]:
            continue
        with graph.inserting_before(clone):
            row = graph.call_function(view.target, (value, *view.args[1:]), view.kwargs)
        row.meta = {**view.meta, "val": view.target(value.meta["val"], *view.args[1:], **view.kwargs)}
        clone.replace_input_with(view, row)
        found = True
    for node in reversed(graph.nodes if found else ()):
        if is_backward(node) and not node.users and not node.is_impure():
            graph.erase_node(node)


def _before_updates(value: Node, rows: tuple[int, range]) -> Node:
    """Return the earliest value that has the same elements in these rows of a dimension."""
    dim, wanted = rows
    while True:
        args: Any = value.args
        at = selected(value) if value.target in UPDATE_SELECTED else None
        if value.target is torch.ops.aten.copy.default:
            old, new = args[1].meta["val"], value.meta["val"]
            if (old.dtype, old.device, old.shape) != (new.dtype, new.device, new.shape):
                return value
            value = args[1]
        elif at is not None and at[0] == dim and _are_apart(at[1], wanted):
            value = args[0]
        else:
            return value


def _are_apart(rows: range, others: range) -> bool:
    return not rows or not others or rows[-1] < others[0] or others[-1] < rows[0]


def _viewed_results(output: Node) -> set[Node]:
    """Return the views that the forward returns, and the views that those are views of."""
    found: set[Node] = set()
    for value, what in zip(pytree.tree_leaves(output.args[0]), output.meta.get("desc") or ()):
        if isinstance(what, PlainAOTOutput) and isinstance(value, torch.fx.Node):
            *views, _ = view_chain(value)
            found.update(views)
    return found


def keep_unsaved(inputs: Mapping[Node, Any]) -> None:
    """Mark inputs, and their views, as not to be saved: Note [Inputs that the forward writes to]."""
    for name in (name for node, info in inputs.items() if info.mutates_data for name in names_of(node)):
        name.meta["aot_runtime_epilogue_input_mutation"] = True
        for user in filter(partitioners.must_recompute, name.users):
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _launched_by(joint: Graph, chain: Collection[Node]) -> dict[Node, set[Node]]:
    """Map each operation of the forward to the kernels of a joint graph's backward that belong to it."""
    operations = {node.meta.get("seq_nr", -1): node for node in chain}  # the last one of each number
    numbers = sorted(operations)
    found: dict[Node, set[Node]] = defaultdict(set)
    for node in joint.nodes:
        is_launch = not is_view(node) and node.target is not operator.getitem
        if (
            is_launch
            and _is_of_autograd_node(node)
            and (at := bisect.bisect_right(numbers, node.meta.get("seq_nr", -1)))
        ):
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
    return reached(found, lambda node: (user for user in node.users if user.meta.get("is_gradient_acc")))


def _is_of_autograd_node(node: Node) -> bool:
    is_operation = node.op == "call_function" and not is_stream_op(node)
    return is_operation and bool(is_backward(node)) and not node.meta.get("is_gradient_acc")


def engine_streams(joint: Graph, leaves: Collection[Node]) -> dict[Node, int]:
    """Return the stream on which autograd has a node: for each operation between inputs that get a gradient and outputs
    that bring one, and for each of `leaves` that gets a gradient, the stream on which the gradient is accumulated.

    An operation whose gradient is a constant, as that of `zero_` is, reads nothing in a functional graph, so what comes
    before it there may be gone from the forward, and what comes after it from the backward: a kernel or view of the
    backward shows as well that a gradient passes.
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
    given = {n: node_stream(n) for n in joint.nodes if _is_of_autograd_node(n)}
    numbers = {n.meta.get("seq_nr") for n in given} - {None}
    for node in computed:
        if node.meta.get("seq_nr") in numbers or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(computed):
        if not before.isdisjoint(node.users):
            before.add(node)
    streams = {n: autograd_stream(n) for n in computed if n in after and n in before}
    return given | streams | {node: first_reader(node) for node in leaves if node in begins}


def order_after_gradients(joint: Graph, streams: Mapping[Node, int]) -> None:
    """Order the stream of each node of `engine_streams` that launches nothing after the kernels of the backward that
    compute the gradient which passes through the node.
    """
    if not any(streams.values()):
        return
    chain = dict.fromkeys(node for node in streams if node.op == "call_function" and not is_backward(node))
    launched = _launched_by(joint, chain)
    for node, stream in streams.items():
        if stream and node not in launched:
            for kernel in _bring_gradient(node, chain, launched):
                add_promised(kernel, (state(stream),))


def prepare_parts(joint: Graph, inputs: Mapping[Node, Any]) -> Callable[[GraphModule, GraphModule], None]:
    """Order the backward's kernels as autograd's engine does, while the whole graph is there to see. Return what places
    the forward and the backward that the partitioner makes of it.

    `inputs` maps the forward's inputs to what AOTAutograd knows of them (`InputAliasInfo`).
    """
    streams = engine_streams(joint, [node for node, info in inputs.items() if info.is_leaf])
    order_after_gradients(joint, streams)
    saved = saved_in_eager(joint)
    unread = {node.name: info.is_leaf and info.requires_grad for node, info in inputs.items() if node not in saved}
    return functools.partial(place_parts, engine={*streams.values()} - {CALLERS_STREAM}, unread=unread)
