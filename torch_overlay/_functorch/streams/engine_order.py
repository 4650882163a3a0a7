"""Orders a backward's streams as autograd's engine does: Note [A backward is a region of its own]."""

from __future__ import annotations

import bisect
import operator
from collections import defaultdict
from typing import TYPE_CHECKING

from torch._functorch._aot_autograd.descriptors import GradAOTOutput, TangentAOTInput
from torch.utils import _pytree as pytree

from torch_overlay._functorch.streams import autograd_nodes
from torch_overlay._functorch.streams.facts import add_before
from torch_overlay._functorch.streams.fx import is_backward, is_stream_op, is_view, node_stream
from torch_overlay._functorch.streams.tokens import state


if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch.fx import Graph, Node


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
    sums = list(found)
    while sums:
        added = {user for user in sums.pop().users if user.meta.get("is_gradient_acc")} - found
        found |= added
        sums += added
    return found


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
    streams = {n: autograd_nodes.stream_of(n) for n in computed if n in after and n in before}
    return given | streams | {node: autograd_nodes.first_reader(node) for node in leaves if node in begins}


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
                add_before(kernel, (state(stream),))
