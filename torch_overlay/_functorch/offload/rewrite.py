"""Rewrites a forward and its backward so that chosen saved tensors wait on the host, or are computed again.

    forward     the slab is taken first; each chosen tensor is stored in it; the slab is saved in place of them all
    backward    the slab is its input; each tensor is loaded where it is first needed, or computed again from others

Views of a tensor that the forward saves are made again in the backward. Where copies are launched is decided later, on
Inductor's final schedule, by the budget, which the nodes carry as `custom["offload_budget"]`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch._inductor.pattern_matcher import stable_topological_sort

from torch_overlay._functorch.offload import ops
from torch_overlay._functorch.offload.checkpoint_policies import OFFLOAD
from torch_overlay._functorch.offload.reader import nbytes
from torch_overlay._functorch.offload.runtime import ALIGNMENT
from torch_overlay._functorch.streams import ids
from torch_overlay._functorch.streams.facts import Fact, replace_fact
from torch_overlay._functorch.streams.fx import place_on
from torch_overlay._functorch.streams.tokens import CALLER


if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from torch_overlay._functorch.offload.candidates import Pair, SavedTensor
    from torch_overlay._functorch.offload.plan import Choice


def rewrite(pair: Pair, choice: Choice, budget: int, strict: bool) -> int:
    """Rewrite both graphs, and return the bytes of the slab. `strict` says whether the slab must be pinned."""
    by_name = {owner.name: saved for owner, saved in pair.saved.items()}
    picked = [by_name[name] for name in choice.chosen]
    again = [by_name[name] for name in choice.recomputed]
    offsets = list(itertools.accumulate((-(-nbytes(s.value) // ALIGNMENT) * ALIGNMENT for s in picked), initial=0))
    assert pair.device is not None
    slab = _store(pair, picked, offsets, ids.written_index(pair.device.index or 0), budget, strict)
    replaced = _drop_outputs(pair, {m for saved in (*picked, *again) for m in saved.members}, slab)
    made = _load(pair, picked, offsets, slab, replaced, budget)
    _compute_again(pair, again, made)
    for saved in (*picked, *again):
        for member in saved.members:
            pair.backward.graph.erase_node(pair.inputs.pop(member.name))
    _name_owners(pair)
    stable_topological_sort(pair.backward.graph)
    for module in (pair.forward, pair.backward):
        module.graph.lint()
        module.recompile()
    return offsets[-1]


def _name_owners(pair: Pair) -> None:
    """Name the tensor that several inputs are views of: they share its memory, which the schedule counts once."""
    for owner, saved in pair.saved.items():
        inputs = [pair.inputs[m.name] for m in saved.members if m.name in pair.inputs]
        for node in inputs if len(inputs) > 1 else ():
            node.meta["custom"] = {**node.meta.get("custom", {}), ops.OWNER: owner.name}


def _store(pair: Pair, picked: list[SavedTensor], offsets: list[int], device: int, budget: int, strict: bool) -> Node:
    graph = pair.forward.graph
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        slab = graph.call_function(ops.SLAB, (offsets[-1], device, strict))
    mode = picked[0].value.fake_mode  # type: ignore[attr-defined]
    with mode:
        slab.meta["val"] = torch.empty(offsets[-1], dtype=torch.uint8)
    for saved, offset in zip(picked, offsets):
        with graph.inserting_after(saved.node):
            node = graph.call_function(ops.STORE, (slab, saved.node, offset))
        node.meta["val"] = None
        _place(node, ids.copy_out_stream(device), saved.node, budget)
    return slab


def _drop_outputs(pair: Pair, members: set[Node], slab: Node) -> Node:
    """Replace the first of the saved `members` by the slab, drop the rest; other outputs keep their order. Return the
    first.
    """
    first = next(i for i, value in enumerate(pair.outputs) if i >= pair.count and value in members)
    outputs, described = [], []
    desc = pair.output.meta.get("desc", ())
    desc = list(desc) if len(desc) == len(pair.outputs) else [None] * len(pair.outputs)
    for i, value in enumerate(pair.outputs):
        is_moved = i >= pair.count and value in members
        if i == first:
            outputs.append(slab)
            described.append(desc[i])
        if not is_moved:
            outputs.append(value)
            described.append(desc[i])
    pair.output.args = (tuple(outputs),)
    if None not in described:
        pair.output.meta["desc"] = described
    return pair.outputs[first]


def _load(
    pair: Pair, picked: list[SavedTensor], offsets: list[int], slab: Node, replaced: Node, budget: int
) -> dict[Node, Node]:
    """Load the picked tensors in the backward. Return the backward's node for each node of the forward."""
    graph = pair.backward.graph
    made: dict[Node, Node] = {}
    with graph.inserting_before(pair.inputs[replaced.name]):
        handle = graph.placeholder(slab.name)
    handle.meta["val"] = slab.meta["val"]
    position = {n: i for i, n in enumerate(graph.nodes)}
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        graph.call_function(ops.IN_USE, (handle,)).meta["val"] = None
    for saved, offset in zip(picked, offsets):
        value = saved.value
        users = [u for m in saved.members for u in pair.inputs[m.name].users]
        where = min(users, key=position.__getitem__)
        arguments = (handle, offset, list(value.shape), list(value.stride()), value.dtype, value.device)
        with graph.inserting_before(where):
            node = graph.call_function(ops.LOAD, arguments, name=f"{saved.node.name}_loaded")
            node.meta["val"] = value
            _place(node, ids.copy_in_stream(ids.written_index(value.device.index or 0)), saved.node, budget)
            made[saved.node] = node
            for member in saved.members:
                pair.inputs[member.name].replace_all_uses_with(_copied(graph, member, made))
    return made


def _compute_again(pair: Pair, again: list[SavedTensor], made: dict[Node, Node]) -> None:
    graph = pair.backward.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    names = {m.name for saved in again for m in saved.members}
    for saved in again:
        users = [u for m in saved.members for u in pair.inputs[m.name].users]
        with graph.inserting_before(min(users, key=position.__getitem__)):
            for node in pair.recipe(saved.node) or ():
                for argument in node.all_input_nodes:
                    if argument.name in pair.inputs and argument.name not in names:
                        made.setdefault(argument, pair.inputs[argument.name])
                _copied(graph, node, made)
            for member in saved.members:
                pair.inputs[member.name].replace_all_uses_with(_copied(graph, member, made))


def _copied(graph: Graph, node: Node, made: dict[Node, Node]) -> Node:
    """Copy a node of the forward into the backward, with the nodes that lead to it, but without its placement on the
    user's streams, which holds in the forward only."""
    if node not in made:
        for argument in node.all_input_nodes:
            _copied(graph, argument, made)
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {key: value for key, value in node.meta.items() if key not in ("recompute", OFFLOAD)}
        custom = {k: v for k, v in node.meta.get("custom", {}).items() if not k.startswith("stream")}
        made[node].meta["custom"] = custom
    return made[node]


def _place(node: Node, stream: int, saved: Node, budget: int) -> None:
    for key in ("stack_trace", "nn_module_stack", "original_aten"):
        if key in saved.meta:
            node.meta[key] = saved.meta[key]
    node.meta["custom"] = {ops.BUDGET: budget, ops.VALUE: saved.name}
    place_on(node, stream)
    replace_fact(node, Fact(after=(CALLER,), promised_to=(CALLER,)))
