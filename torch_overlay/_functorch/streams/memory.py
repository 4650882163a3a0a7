"""Find whose memory a value is in eager, and the memory of other streams that an operation reads there.

Eager frees a tensor with its last reference, and the allocator may at once reuse its block for work of the stream that
allocated it, even if other streams still read it. A program that drops a side stream's tensor like that lives with the
race, and compiled code may do what eager does. But functional graphs have values that eager never allocates:

- The result of an update in place is new memory of the stream that updates. In eager it is the input's memory, or that
  of the stream which made the tensor. The same holds for the result of an operator that was given `out`.
- Of two equal operations on two streams one remains, and the readers of the other one read memory of a stream that they
  never knew.
- A graph that ends at a graph break frees what nobody needs after it. Eager's local variables live to the end of the
  function.
- A forward frees what its backward computes again. Autograd keeps it for the backward in eager.

This memory must not be freed while a stream reads it. So each node of a traced graph keeps, in `Fact.reads`, the
streams whose memory it reads in eager, apart from its own stream's, and what eager does with that memory. The planner's
reader (`streams.reader`) settles at the exit all other reads, and those of a kernel that reads the same stream's memory
in both ways. The caller frees the graph's results, and relies on the stream whose memory each result is in eager: where
generated code allocates a result on another stream, it records eager's stream for the block (`results`).
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._functorch._aot_autograd.descriptors import IntermediateBaseAOTOutput, PlainAOTOutput
from torch._inductor.fx_passes.reinplace import _SCATTER_OP_TO_VIEW
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_overlay._functorch.streams.facts import fact_of, ForeignRead, ResultMemory, Storage
from torch_overlay._functorch.streams.fx import (
    base_of,
    is_backward,
    node_stream,
    RECORD_STREAM,
    storage_node,
    updates_in_place,
    written_arguments,
)


if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Graph, Node

    from torch_overlay.frame_facts import FrameFacts


_aten = torch.ops.aten
SELECT = (_aten.slice.Tensor, _aten.select.int)
UPDATE_SELECTED = (_aten.slice_scatter.default, _aten.select_scatter.default)
Box: TypeAlias = "tuple[range, ...]"  # elements of a value: the indices along each dimension


# Note [Elements that an update left alone]
# `v = x + y; v[:, ::2].add_(z)` is, after functionalization, a new value: `slice_scatter(v, ...)`. A column that the
# update left alone is in eager what it was, and a stream that had waited for `x + y` may read it; the same must hold of
# that column in the new value. Views are followed where they select along dimensions whose sizes are known; any other
# view of fewer elements may have any of its base.


def writers_of_elements(node: Node, box: Box | None = None) -> set[Node | None]:
    """Return the operations that computed the elements of a value that are in the box, or inputs. None is among them
    where some of these may have computed none. See Note [Elements that an update left alone].
    """
    viewed, target = base_of(node), node.target
    args: Any = node.args
    is_all, box = box is None, box or _whole(node)
    if target in UPDATE_SELECTED:
        base, update, found = args[0], args[1], selected(node)
        if box is None or found is None:
            return writers_of_elements(base) | writers_of_elements(update) | _unless(is_all)
        dim, taken = found
        if not _meet(box[dim], taken):
            return writers_of_elements(base, box)
        inside = (range(len(taken)),) if target is _aten.slice_scatter.default else ()
        made = writers_of_elements(update, (*box[:dim], *inside, *box[dim + 1 :]))
        return made if _contains(taken, box[dim]) else made | writers_of_elements(base, box)
    if viewed is None:
        return {node}
    if is_all and _has_all(node, viewed):
        return writers_of_elements(viewed)
    given = None if box is None else _box_in_base(node, viewed, box)
    return writers_of_elements(viewed, given) | _unless(given is not None)


def _unless(are_known: bool) -> set[Node | None]:
    return set() if are_known else {None}


def _box_in_base(node: Node, base: Node, box: Box) -> Box | None:
    """Return the elements of the base that a box of a view has; None if it isn't known."""
    target, args = node.target, node.args
    if target in (_aten.alias.default, _aten.detach.default):
        return box
    if target in SELECT:
        if (found := selected(node)) is None:
            return None
        dim, taken = found
        kept = 1 if target is _aten.slice.Tensor else 0
        indices = taken[box[dim].start : box[dim].stop : box[dim].step] if kept else taken
        return (*box[:dim], indices, *box[dim + kept :])
    if target in (_aten.permute.default, _aten.transpose.int, _aten.t.default):
        permute: Any = target
        order = permute(torch.empty([*range(len(box))], device="meta"), *args[1:]).shape  # where each dimension goes
        return tuple(box[order.index(d)] for d in range(len(box)))
    return _box_before_split(node, base, box) if target is _aten.view.default else None


def _has_all(node: Node, base: Node) -> bool:
    """True if a view has all elements of its base."""
    view, whole = node.meta.get("val"), base.meta.get("val")
    if not isinstance(view, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return node.target is not _aten.as_strided.default and statically_known_true(view.numel() == whole.numel())


def _whole(node: Node) -> Box | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(map(range, value.shape))


def selected(node: Node) -> tuple[int, range] | None:
    """Return the dimension of its base along which a node selects or updates indices, and the indices; None for any
    other node, and if they aren't known.
    """
    if node.target not in (*SELECT, *UPDATE_SELECTED) or node.kwargs:
        return None
    arguments: Any = node.args if node.target in SELECT else (node.args[0], *node.args[2:])
    base, dim, *where = arguments if len(arguments) > 1 else (*arguments, 0)
    shape = base.meta["val"].shape
    if not all(n is None or isinstance(n, int) for n in (dim, *where)) or not isinstance(shape[dim], int):
        return None
    if node.target in (_aten.select.int, _aten.select_scatter.default):
        where = [where[0], where[0] + 1 or None]
    start, stop, step = (*where, *(None,) * (3 - len(where)))
    return dim % len(shape), range(shape[dim])[slice(start, stop, step)]


def _box_before_split(node: Node, base: Node, box: Box) -> Box | None:
    """Return the box in the base of a view that only splits one dimension in two, as `unflatten` does; None for other
    views, and if it is none.
    """
    made, given = _whole(node), _whole(base)
    if made is None or given is None or len(made) != len(given) + 1:
        return None
    dim = next((d for d, (a, b) in enumerate(zip(made, given)) if a != b), len(given) - 1)
    if made[dim + 2 :] != given[dim + 1 :]:
        return None
    outer, inner, size = box[dim], box[dim + 1], len(made[dim + 1])
    if len(outer) == 1:
        taken = range(outer[0] * size + inner.start, outer[0] * size + inner.stop, inner.step)
    elif inner == made[dim + 1] and outer.step == 1 and outer:
        taken = range(outer[0] * size, (outer[-1] + 1) * size)
    else:
        return None
    return (*box[:dim], taken, *box[dim + 2 :])


def _meet(a: range, b: range) -> bool:
    """True if the ranges have an index in common. The common indices are equally spaced."""
    if not a or not b:
        return False
    first = max(0, -(-(b[0] - a[0]) // a.step))
    return any(i in b for i in a[first : first + b.step // math.gcd(a.step, b.step)])


def _contains(whole: range, part: range) -> bool:
    return not part or (part[0] in whole and part[-1] in whole and (len(part) == 1 or not part.step % whole.step))


UPDATES = frozenset((_aten.copy.default, *_SCATTER_OP_TO_VIEW))  # operators that put a new value into an old one


def _updates(node: Node) -> bool:
    """True if the user wrote the node as an update in place of its first argument, or if the node puts an update in
    place back into its base.
    """
    stack = node.meta.get("source_fn_stack")
    written = stack[-1][1] if stack else ""
    if node.target in _SCATTER_OP_TO_VIEW:  # the user may call these, too, for a new tensor
        return getattr(written, "__name__", written) != node.target._opname  # type: ignore[union-attr]
    return updates_in_place(written)


def _call_and_indices(node: Node) -> tuple[Node, list[Any]]:
    """Return the operator that a value is a result of, and the indices that select the value from the results."""
    indices: list[Any] = []
    call: Any = node
    while call.target is operator.getitem and isinstance(call.args[0], torch.fx.Node):
        call, index = call.args
        indices.insert(0, index)
    return call, indices


def _new_values(call: Node) -> dict[tuple[Any, ...], Node]:
    """Return the values that one call updates, each by the indices of its new value among the call's results: by an
    operator or a kernel of the user, and by an update of lists of tensors, as `torch._fused_adam_` is, which has a
    result for each list. None are returned for lists if Dynamo noted the storages (`eager_storage`), which is more
    reliable: the node that stands for `torch._foreach_lerp_` may have the other end first.
    """
    found = {(index,): value for index, value in written_arguments(call).items()}
    if not isinstance(call.target, torch._ops.OpOverload) or not _updates(call) or fact_of(call).eager_storage:
        return found
    lists: Any = call.args[: len(call.target._schema.returns)]
    if not all(isinstance(listed, (list, tuple)) for listed in lists):
        return found
    return {(k, i)[len(lists) == 1 :]: value for k, listed in enumerate(lists) for i, value in enumerate(listed)}


def _storage(node: Node) -> Storage | None:
    """Return the storage that Dynamo noted of the value; of several results of an operator, it noted one for each, also
    for each in a list among the results.
    """
    noted = fact_of(node).eager_storage
    if len(noted) > 1:
        call, indices = _call_and_indices(node)
        results, index = call.meta.get("val"), 0
        for i in indices:
            index += len(pytree.tree_leaves(results[:i])) if results else i
            results = results and results[i]
        noted = noted[index:][:1] if indices and not isinstance(results, (list, tuple)) else ()
    return noted[0] if noted else None


class Memory(NamedTuple):
    """The memory of a value. An update in place makes new memory in a functional graph, and none in eager."""

    node: Node  # allocates it: below views
    first: Node  # allocates it in eager: below views and updates in place
    streams: frozenset[int]  # of `first` and of the updates
    stream: int | None  # whose memory it is in eager; None for the caller's
    storage: Storage | None  # name of it, if it is updated in place


class MemoryTable:
    """The memory of each value of a traced graph, by one walk over the graph before its nodes are placed."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.output = graph, graph.output_node()
        self.memory: dict[Node, Memory] = {}
        for node in graph.nodes:
            self.memory[node] = self._memory(node)
        self.kept = results_made(self.output) | saved_in_eager(graph)
        self.returned: dict[Storage | None, set[Node]] = {}  # in storages that are updated in place
        for made in map(self.memory.__getitem__, self.output.all_input_nodes):
            self.returned.setdefault(made.storage, set()).add(made.node)

    def _memory(self, node: Node) -> Memory:
        """Return the memory of a node's value, by that of the value before it: the base of a view, what an update in
        place updates, or the operator that an output is selected from.
        """
        noted, own = _storage(node), node_stream(node)
        if node.op != "call_function":
            return Memory(node, node, frozenset((own,)), None, noted)
        given, updates, (call, indices) = base_of(node), _updates(node), _call_and_indices(node)
        written = new.get(tuple(indices)) if (new := _new_values(call)) else None  # other indices may be slices
        is_output = node.target is operator.getitem  # one of several: a view, a new value, or memory of its own
        operands = node.args[::-1] if node.target is _aten.where.self else node.args  # an update under a mask
        base = written or next((a for a in operands if isinstance(a, torch.fx.Node)), None)
        before = None if base is None else self.memory[base]
        names = given is not None or written is not None
        made = node if given is None else self.memory[given].node
        first, streams, storage, stream = node, frozenset(() if given is not None else (own,)), noted, own
        if before is not None:
            if names or (updates and not is_output):
                first, streams = before.first, streams | before.streams
            # Of an update in several operations, only the last one is in the storage.
            if noted is None and (names or is_output or (updates and node.target in UPDATES)):
                storage = before.storage
        if noted is not None and (fact_of(node).is_given or (updates and written is None)):
            _, stream = noted
        elif before is not None and (names or updates or is_output):
            stream = before.stream
        elif updates:
            stream = None
        return Memory(made, first, streams, stream, storage)

    def results(self, streams: Collection[int], frame: FrameFacts) -> tuple[ResultMemory, ...]:
        """Return the results that a graph's caller gets, by upstream's name, with the streams that the memory of each
        waits for when it is freed: the stream whose memory it is in eager, and those that the user recorded for it
        (`record_stream`) before the last update. Results that are the caller's own memory are left out.

        A variable that lives on after a graph break dies in code that doesn't know whose memory the variable got here.
        If eager's memory is another stream's, then the variable's memory waits for all of the program's `streams` and
        for the streams that the code only made current, as a `with` block around the break does: nothing else keeps
        track of the streams that may read the memory after the break.
        """
        recorded: dict[Storage | None, list[tuple[Node, int]]] = {}
        for record in self.graph.find_nodes(op="call_function", target=RECORD_STREAM):
            memory = self.memory[record.args[0]]
            recorded.setdefault(memory.storage, []).append((memory.node, record.args[1]))
        recorded.pop(None, None)
        known = {*streams, *(info.index for info in frame.objects if info.kind == "stream")} if frame.goes_on else set()
        found = []
        for value, what in zip(pytree.tree_leaves(self.output.args[0]), self.output.meta.get("desc") or ()):
            memory = self.memory.get(value)
            if memory is None or memory.stream is None:
                continue
            if not isinstance(what, (PlainAOTOutput, IntermediateBaseAOTOutput)):
                continue
            others = {s for node, s in recorded.get(memory.storage, ()) if node is not memory.node}
            if frame.goes_on and {memory.stream} != memory.streams:
                others.update(known)  # which stream's memory generated code takes for it is not known yet
            found.append(ResultMemory(what.expr(), (memory.stream, *sorted(others - {memory.stream}))))
        return tuple(found)

    def record_inputs(self) -> None:
        """Make `record_stream` of an input that was updated before name the input, not the value that is written back
        to it.
        """
        written: dict[Any, Node] = {}  # value that is written back, or its storage -> input
        for copy in self.graph.find_nodes(op="call_function", target=_aten.copy_.default):
            given, value, *_ = copy.args
            if given.op == "placeholder":
                written |= {self.memory[value].node: given, self.memory[value].storage: given}
        written.pop(None, None)
        for record in self.graph.find_nodes(op="call_function", target=RECORD_STREAM):
            memory = self.memory[record.args[0]]
            is_input = memory.first.op == "placeholder"
            own = memory.first if is_input else written.get(memory.node) or written.get(memory.storage)
            if own is not None:
                record.args = (own, *record.args[1:])
                record.meta["eager_input_vals"] = ((own.meta["val"], *record.args[1:]), {})

    def foreign_reads(self, node: Node, goes_on: bool = False) -> tuple[ForeignRead, ...]:
        """Return the node's reads of memory of other streams. Eager frees that memory, or keeps it as a result or for
        the backward, or has the value in other memory, or the memory lives on: as the result of this update, or of a
        later one that the graph returns, as the tensor that was given as `out`, or in a variable after a graph break,
        where the frame `goes_on`.
        """
        if base_of(node) is not None:  # a view launches nothing
            return ()
        fact, written = fact_of(node), _new_values(node).values()
        targets = {storage[1] for storage in fact.eager_storage if storage} if fact.is_given else ()
        # The values that a list update writes are known. A kernel of the user may update others of the same storage.
        updates = _updates(node) and not (written and isinstance(node.target, torch._ops.OpOverload))
        found = set()
        for value in node.all_input_nodes:
            # Functionalization makes a new value for each update, in memory of the stream that updates.
            memory = self.memory[value]
            stream = node_stream(memory.node)
            if memory.node.op != "call_function" or stream == node_stream(node):
                continue
            lives_on = goes_on or stream in targets or value in written or (updates and self._is_updated(value, node))
            lives_on |= memory.storage is not None and bool(self.returned.get(memory.storage, set()) - {memory.node})
            if lives_on or memory.stream != stream:
                found.add(ForeignRead(stream, "other"))
            elif memory.node in self.kept:
                found.add(ForeignRead(stream, "kept", memory.node.name))
            else:
                found.add(ForeignRead(stream, "freed"))
        return tuple(sorted(found))

    def _is_updated(self, value: Node, update: Node) -> bool:
        """True if an update in place is one of the memory that the value is in."""
        given, made = self.memory[value], self.memory[update]
        storages = {*fact_of(update).eager_storage, made.storage} - {None}
        # The storage isn't known for a result of an operator with several, as of an update of a list.
        if storages and given.storage is not None:
            return given.storage in storages
        return given.first is made.first


def memory_writer(node: Node) -> Node:
    """Return the operation that a value's memory comes from: below views, and below selections of an output."""
    call, _ = _call_and_indices(storage_node(node))
    return call


def results_made(output: Node) -> set[Node]:
    """Return the nodes whose memory a graph's results name; for an operator with several outputs, the outputs."""
    return {storage_node(value) for value in output.all_input_nodes}


def saved_in_eager(graph: Graph) -> set[Node]:
    """Return the nodes of a joint graph's forward whose memory autograd keeps for the backward in eager: those that the
    backward reads before the partitioner chooses what is computed again instead.
    """
    readers = [node for node in graph.nodes if node.op == "call_function" and is_backward(node)]
    return {storage_node(value) for node in readers for value in node.all_input_nodes if not is_backward(value)}
