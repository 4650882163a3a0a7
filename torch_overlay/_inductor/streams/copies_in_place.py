"""Make copies between device and host that don't block in the memory that the user names.

`host[1].copy_(y, non_blocking=True)` is, after functionalization, a new value of the row, a new value of all of `host`,
and a copy of that into the caller's tensor. Upstream computes the three as values, through pageable memory and on the
CPU, and blocks the host for it. Here a value that an update makes of another value is put into the memory of that value
again, where nobody reads its old value later: the copy becomes an operation that writes there
(`host_copies.copy_async_`), where the user made it, for what it reads may be written later; the values of all of the
memory become names of it; and nothing is left of the copy into the caller's tensor.

Memory is written like that if it is the caller's and has the new value at the end, or if the graph makes it and
computes it from nothing (`torch.empty`, `torch.zeros`): for other memory it isn't known whether Inductor gives it to
several values. A copy that goes elsewhere, or whose old value is read later, fills new memory, from which the device
takes its value. The new memory of a copy to the host is read by the host, which waits.

Compute into parts of tensors that the program names, and leave the other parts alone.

`torch.mm(x, w, out=out[:n])` is a kernel and a copy of its result after functionalization, and one kernel again here.

Note [No aligned copies of an input in parts] Kernels are compiled for inputs that are aligned; a misaligned one is
copied at a call, as a whole, and back after it is written (Note [Aligned copies and the caller's memory]). Where a
program with streams writes a part of an input, the copy back would write the other parts, too, which other code may be
using by then. Kernels are compiled for such an input without any alignment, and it is never copied.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.fx_passes.reinplace import _SCATTER_OP_TO_VIEW
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from torch_overlay._functorch.streams.facts import fact_of, merged, replace_fact
from torch_overlay._functorch.streams.fx import (
    base_of,
    constants,
    has_streams,
    is_asynchronous_copy,
    is_synchronization,
    names_of,
    node_stream,
    storage_node,
    updated_operands,
    updates_operands,
    view_chain,
)
from torch_overlay._inductor.notes import GraphNotes
from torch_overlay._inductor.streams.host_copies import (
    COPY_ASYNC,
    DESTINATION,
    expression,
    is_pinned,
    MEMORY_LIKE,
)


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.fx import Graph, Node


_aten = torch.ops.aten
IN_PLACE = "stream_in_place"  # in `meta`, of a value whose memory is written in place
READ_LATER = "stream_read_later"  # in `meta`, of a copy to the host that goes into new memory, which the host copies


def make_copies_in_place(graph: Graph) -> None:
    known = constants(graph)  # made on the device, without a copy
    copies = [
        node
        for node in graph.find_nodes(op="call_function", target=_aten.copy.default)
        if is_asynchronous_copy(node)
        # The host would write a constant at once, beside earlier work on the copy's stream.
        if node.args[1].meta["val"].device.type != "cpu"
        or ((root := storage_node(node.args[1])) not in known and root.op != "get_attr")
    ]
    if copies:
        _Rewriter(graph, copies).run()


def _is_made_from_nothing(node: Node) -> bool:
    """True if the value has memory of its own for sure, and may be made once more with the same values."""
    value = node.meta.get("val")
    inputs = (n.meta.get("val") for n in node.all_input_nodes)
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and isinstance(value, torch.Tensor)
        and not any(isinstance(v, torch.Tensor) for v in inputs)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def geometry(value: torch.Tensor) -> tuple[Any, ...]:
    """Return dtype and layout; of sizes that aren't known, the expressions: to compare the sizes would make a guard."""
    return value.dtype, *map(expression, (*value.shape, *value.stride(), value.storage_offset()))


def _is_part(value: Any, base: Node, part: torch.Tensor) -> bool:
    """True if a value is that part of the memory that a base is a view of."""
    if not isinstance(value, torch.fx.Node) or storage_node(value) is not storage_node(base):
        return False
    return geometry(value.meta["val"]) == geometry(part)


def _evaluate(target: Any, args: Any, kwargs: Any, values: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """Call an operator with the fake values of its arguments, of which `values` has new ones."""
    args, kwargs = torch.fx.map_arg((args, kwargs), lambda n: values.get(n, n.meta.get("val")))
    with V.fake_mode:
        return target(*args, **kwargs)


def _part(scatter: Node, base: Node) -> torch.Tensor:
    """Return the part of a base that a scatter into it writes."""
    return _evaluate(_SCATTER_OP_TO_VIEW[scatter.target], (base, *scatter.args[2:]), scatter.kwargs)  # type: ignore[index]


class _Rewriter:
    def __init__(self, graph: Graph, copies: list[Node]) -> None:
        self.graph, self.copies = graph, dict.fromkeys(copies)
        self.order: dict[Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self.writes: dict[Node, Node] = {}  # by memory: the last copy into it
        filled = (n for n in graph.nodes if updates_operands(n.target))  # by operators that update their operands
        self.filled = {storage_node(value) for node in filled for value in updated_operands(node)}
        self.in_place = self.updates_in_place()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.copies:
                if not any(self.is_put_by(node, user) for user in node.users):
                    self.copy(node)
            elif node in self.in_place or node.target is _aten.copy_.default:
                if self.is_put_by(update := node.args[1], node):
                    self.copy(update)  # type: ignore[arg-type]
                self.scatter(node) if node in self.in_place else self.write_back(node)
        self.drop_overwritten()
        for copy in self.copies:
            if copy.users:
                self.into_new_memory(copy)

    def is_put_by(self, update: Any, user: Node) -> bool:
        """True if `user` puts a copy into its place: where that is, is known when it is that node's turn."""
        is_step = (user in self.in_place and user not in self.copies) or user.target is _aten.copy_.default
        return update in self.copies and update in self.in_place and is_step and user.args[1] is update

    def chain(self, value: Any) -> tuple[Node, list[Node]]:
        """Return what a value was before updates, and the updates, including updates of parts of it."""
        steps: list[Node] = []
        root = storage_node(value)
        while self.is_update(root):
            steps.append(root)
            root = storage_node(root.args[0])  # type: ignore[arg-type]
        for step in list(steps):
            if step not in self.copies and self.is_update(part := step.args[1]):
                base, parts = self.chain(part)
                steps += parts if base is root else ()
        return root, steps

    def is_update(self, value: Any) -> bool:
        return value in self.copies or (isinstance(value, torch.fx.Node) and value.target in _SCATTER_OP_TO_VIEW)

    def updates_in_place(self) -> set[Node]:
        """Return the values that are to be the memory that they update."""
        written: dict[Node, set[Node]] = {}  # the caller's memory -> updates that it gets
        for write in self.graph.find_nodes(op="call_function", target=_aten.copy_.default):
            root, steps = self.chain(write.args[1])
            if root.op == "placeholder" and storage_node(write.args[0]) is root:
                written.setdefault(root, set()).update(steps)
        found: set[Node] = set()
        memory = {n for n in self.graph.nodes if n.op == "call_function" and is_pinned(n)}
        for copy in self.copies:
            root, steps = self.chain(copy)
            if copy in written.get(root, ()):
                found |= written[root]
            elif root in memory or (root.op == "call_function" and _is_made_from_nothing(root)):
                found.update(steps)
                memory.add(root)
        for node in self.graph.nodes:  # scatters of a copy, or of what the host computes
            if node.target not in _SCATTER_OP_TO_VIEW or self.chain(node)[0] not in memory:
                continue
            if node.args[1] in found or node.meta["val"].device.type == "cpu":
                found.add(node)
        return found

    # ---- steps

    def copy(self, node: Node) -> None:
        """Make the copy where it stands, or where its only reader is."""
        if node not in self.in_place:
            return
        base: Any = node.args[0]
        users = list(node.users)
        places = [node, *(users if len(users) == 1 else ())]
        for place in places:
            if place is not node and self.may_change(node.args[1], node, place):  # type: ignore[arg-type]
                continue
            if (given := self.given(base, node, place)) is not None:
                if (values := self.as_memory(node, given)) is not None:
                    self.emit(node, storage_node(given), given.meta["val"], place)
                    self.replace(node, given, values)
                return

    def scatter(self, node: Node) -> None:
        base: Any = node.args[0]
        update, target = node.args[1], _SCATTER_OP_TO_VIEW[node.target]  # type: ignore[index]
        is_made = _is_part(update, base, _part(node, base))  # type: ignore[arg-type]
        if not is_made and (base := self.given(base, node, node)) is None:
            return
        if (values := self.as_memory(node, base)) is None:  # type: ignore[arg-type]
            return
        if not is_made:
            with self.graph.inserting_before(node):
                view = self.graph.call_function(target, (base, *node.args[2:]), node.kwargs)
                write = self.graph.call_function(_aten.copy_.default, (view, update))
            for made in (view, write):
                made.meta = {**node.meta, "val": _part(node, base)}  # type: ignore[arg-type]
            self.order[view] = self.order[write] = self.order[node]
            storage_node(base).meta[IN_PLACE] = True  # type: ignore[arg-type]
        self.replace(node, base, values)

    def write_back(self, node: Node) -> None:
        """Remove a copy of memory into itself, or make a copy of a copied value that copy itself. The caller counts on
        the removed node's tokens, so the last write takes them over.
        """
        target: Any = node.args[0]
        value: Any = node.args[1]
        memory, part = storage_node(target), target.meta["val"]
        if IN_PLACE not in memory.meta or not _is_part(value, target, part):
            if not self.is_only_for(value, node):
                return
            self.emit(value, memory, part, node)
        if (last := self.writes.get(memory)) is not None and node_stream(last) == node_stream(node):
            replace_fact(last, merged(fact_of(last), fact_of(node)))
        node.replace_all_uses_with(target)
        self.graph.erase_node(node)
        if value in self.copies:
            self.graph.erase_node(value)

    def is_only_for(self, value: Node, write: Node) -> bool:
        """True if a copy makes a value that is copied into memory as it is, and goes nowhere else."""
        if value not in self.copies or len(value.users) != 1:
            return False
        made, part = value.meta["val"], write.args[0].meta["val"]  # type: ignore[union-attr]
        alike = made.dtype == part.dtype and [*map(expression, made.shape)] == [*map(expression, part.shape)]
        return alike and not self.may_change(value.args[1], value, write)  # type: ignore[arg-type]

    def drop_overwritten(self) -> None:
        """Leave out updates that are overwritten before they are read: a copy needs its base for the layout only."""
        for copy in self.graph.find_nodes(op="call_function", target=_aten.copy.default):
            while self.is_update(base := copy.args[0]):
                copy.args = (base.args[0], *copy.args[1:])
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (self.is_update(node) or base_of(node) is not None):
                self.graph.erase_node(node)

    def into_new_memory(self, copy: Node) -> None:
        value = copy.meta["val"]
        root = storage_node(copy.args[0])  # type: ignore[arg-type]
        pinned = value.device.type == "cpu" and is_pinned(root)
        with self.graph.inserting_before(copy):
            made = self.graph.call_function(MEMORY_LIKE, (copy.args[0], pinned))
        with V.fake_mode:
            made.meta = {**copy.meta, "val": torch.empty_like(value)}  # without the gaps that a part of memory has
        if (values := self.as_memory(copy, made)) is None:
            made.meta["val"], values = value, {}
        is_read = any(user.op == "call_function" for user in copy.users)
        emitted = self.emit(copy, made, made.meta["val"], copy)
        if value.device.type == "cpu" and is_read:
            emitted.meta[READ_LATER] = True
        self.replace(copy, made, values)

    # ---- what a step needs

    def given(self, base: Any, node: Node, place: Node) -> Node | None:
        """Return the memory to write to, or a view of it: its old values must not be read later. Memory that is
        computed from nothing is computed once more for that; None if the copy can't be made in place.
        """
        root = storage_node(base)
        if root in self.in_place:  # an update that couldn't be made in place
            return None
        if not self.is_read_later(base, node, place):
            return base
        if root in self.writes or root in self.filled:
            return None
        if root.op != "call_function" or not _is_made_from_nothing(root):
            return None
        copies: dict[Node, Node] = {}
        for value, user in list(self.users(root)):
            if self.puts(user, value, node, base.meta["val"]):
                user.replace_input_with(value, self.again(value, copies))
        return self.again(base, copies)

    def again(self, value: Node, copies: dict[Node, Node]) -> Node:
        """Copy a node, and those that it is a view of, in the graph."""
        if value not in copies:
            inputs = {
                n: self.again(n, copies) for n in value.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)
            }
            with self.graph.inserting_before(value.next):
                copies[value] = self.graph.node_copy(value, lambda n: inputs.get(n, n))
            self.order[copies[value]] = self.order[value]
        return copies[value]

    def users(self, memory: Node) -> Iterator[tuple[Node, Node]]:
        """Yield the operations that use memory or a view of it, each with the node that it has as an argument."""
        yield from ((name, user) for name in names_of(memory) for user in list(name.users) if base_of(user) is not name)

    def is_read_later(self, base: Node, node: Node, place: Node) -> bool:
        root, part = storage_node(base), base.meta["val"]
        # Upstream has made the update in place; what is read after it is the new value.
        ends = [
            self.order[u] for u in node.users if u.target is _aten.copy_.default and _is_part(u.args[0], root, part)
        ]
        for value, user in self.users(root):
            is_later = self.order[user] > self.order[place] or user is place is not node
            is_own = (user is node and value is base) or any(self.order[user] > end for end in ends)
            # A copy takes no more than the layout from what it overwrites.
            overwrites = user.target in (_aten.copy.default, _aten.copy_.default) and value not in user.args[1:]
            if is_later and not (is_own or overwrites or self.puts(user, value, node, part)):
                return True
        return False

    def puts(self, user: Node, base: Node, node: Node, part: torch.Tensor) -> bool:
        """True if an update puts a copy into the part of the memory into which it is made anyway."""
        if user.target not in _SCATTER_OP_TO_VIEW or user.args[0] is not base:
            return False
        made, update = _part(user, base), user.args[1]
        if update is node:
            return geometry(made) == geometry(part)
        if not isinstance(update, torch.fx.Node) or update.target not in _SCATTER_OP_TO_VIEW:
            return False
        inner: Any = update.args[0]
        return _is_part(inner, base, made) and self.puts(update, inner, node, part)

    def may_change(self, source: Node, first: Node, last: Node) -> bool:
        """True if what a copy reads is written between two places."""
        root, node = storage_node(source), first.next
        while node is not last:
            if node.op == "call_function" and root in map(storage_node, updated_operands(node)):
                return True
            node = node.next
        return False

    def as_memory(self, node: Node, base: Node) -> dict[Node, Any] | None:
        """Return the new fake values of a value and its views once it is the memory that `base` is; None if there are
        none.
        """
        values: dict[Node, Any] = {node: base.meta["val"]}
        if node.meta["val"].dtype != values[node].dtype or storage_node(base).meta["val"].dtype != values[node].dtype:
            return None
        for view in names_of(node)[1:]:
            try:
                values[view] = _evaluate(view.target, view.args, view.kwargs, values)
            except RuntimeError:  # not of this layout
                return None
        return values

    # ---- changes of the graph

    def emit(self, copy: Node, memory: Node, part: torch.Tensor, place: Node) -> Node:
        with self.graph.inserting_before(place):
            node = self.graph.call_function(COPY_ASYNC, (memory, copy.args[1]))
        node.meta = {**copy.meta, "val": None, DESTINATION: part}
        memory.meta[IN_PLACE] = True
        self.order[node] = self.order[place]
        self.writes[memory] = node
        return node

    def replace(self, node: Node, base: Node, values: dict[Node, Any]) -> None:
        node.replace_all_uses_with(base)
        for view, value in values.items():
            if view is not node:
                view.meta["val"] = value
        self.graph.erase_node(node)


def computed_in_place(graph: Any, node: Node) -> bool:
    """Make a library's kernel write its result into the part that `node` copies it to: `torch.mm(x, w, out=out[:n])`.

    False, with nothing changed, where something else reads the result, the kernel can't write there, or, after the
    kernel, the host waits for others who may use the target's memory, or an operation does.
    """
    if node.target is not _aten.copy_.default:
        return False
    args: Any = node.args
    part, result = args[:2]
    if (
        not isinstance(result, torch.fx.Node)
        or len(result.users) > 1
        or not has_streams(graph.module.graph.nodes, None)
    ):
        return False
    kernel, target = graph.env[result], graph.env[part]
    while isinstance(kernel, ir.MutableBox):
        kernel = kernel.data
    if type(kernel) is not ir.ExternKernelOut or not isinstance(target.data, ir.BaseView) or kernel.output_view:
        return False
    try:
        view = ir.ExternKernel.convert_to_reinterpret_view(target.data)
    except NotImplementedError:
        return False
    same = (view.get_dtype(), view.get_device()) == (kernel.get_dtype(), kernel.get_device())
    if not same or list(view.get_size()) != list(kernel.get_size()) or node_stream(result) != node_stream(node):
        return False
    name = view.get_name()
    graph.mark_buffer_mutated(name)  # what reads the old values becomes an operation
    since = graph.operations[graph.operations.index(kernel) :]
    if any(name in op.get_read_names() or name in op.get_mutation_names() for op in since):
        return False
    if any(is_synchronization(origin) for op in since for origin in op.get_origins()):
        return False
    kernel.layout, kernel.output_view = ir.MutationLayoutSHOULDREMOVE(view), view
    kernel.origins = OrderedSet([*kernel.origins, node])
    return True


def write_back_parts(graph: Graph) -> None:
    """Write back only the part of an input that the program updates, where upstream doesn't find it below other views
    than slices: `z.real.add_(x)`, `x.view(4, -1)[1].add_(y)`. All else that reads the new value has to be results.
    """
    for write in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        args: Any = write.args
        given, new = args[:2]
        if given.op != "placeholder" or not _is_returned_only(new, write):
            continue
        part, value, steps = _updated_part(given, new)
        if not _is_part(value, given, part):  # it is there already after `add_(0)`
            is_known = steps and storage_node(value) is not given and part.dtype == value.meta["val"].dtype
            if not is_known or part.is_complex() or part.device.type == "cpu":
                continue
            with graph.inserting_before(write):
                made = graph.call_function(COPY_ASYNC, (given, value))
            made.meta = {**write.meta, "val": None, DESTINATION: part}
        graph.erase_node(write)
        new.replace_all_uses_with(given)
        for step in steps:
            if not step.users:
                graph.erase_node(step)


def _is_returned_only(value: Node, write: Node) -> bool:
    """True if apart from `write` only the caller gets the value, or views of it."""
    users = {user for name in names_of(value) for user in name.users} - {write}
    same = not users or geometry(value.meta["val"]) == geometry(write.args[0].meta["val"])  # type: ignore[union-attr]
    return same and all(user.op == "output" or base_of(user) is not None for user in users)


def _updated_part(given: Node, new: Node) -> tuple[torch.Tensor, Node, list[Node]]:
    """Return the least part of an input that differs in its new value, as far as scatters tell, that part's new value,
    and the nodes that make all of the new value of it.
    """
    part, value = given.meta["val"], new
    steps: list[Node] = []
    while True:
        views: list[Any] = [*view_chain(value)]
        scatter = views.pop()
        if scatter.target not in _SCATTER_OP_TO_VIEW or storage_node(base := scatter.args[0]) is not given:
            return part, value, steps
        whole = base.meta["val"]
        for view in reversed(views):
            whole = _evaluate(view.target, (whole, *view.args[1:]), view.kwargs)
        is_read = any(len(node.users) > 1 for node in (*views, scatter) if node is not new)
        if is_read or geometry(whole) != geometry(part):
            return part, value, steps
        part = _part(scatter, base)
        steps += [*views, scatter, base]
        value = scatter.args[1]


def inputs_in_parts(graph: Graph) -> set[str]:
    """Return the names of inputs of which a part is written in place."""
    writes = graph.find_nodes(op="call_function", target=COPY_ASYNC)
    writes += [
        n for n in graph.find_nodes(op="call_function", target=_aten.copy_.default) if base_of(n.args[0]) is not None
    ]
    return {str(memory.target) for write in writes if (memory := storage_node(write.args[0])).op == "placeholder"}


def assume_unaligned(graph: Any, names: set[str]) -> None:
    """Compile kernels for these inputs without any alignment: Note [No aligned copies of an input in parts]. `graph` is
    a GraphLowering before it lowers anything.
    """
    inputs = [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"]
    ours = frozenset(i for i in graph.inputs_to_check or () if inputs[i] in names)
    graph.unaligned_buffers.update(names)
    graph.inputs_to_check = [i for i in graph.inputs_to_check or () if i not in ours]
    GraphNotes.of(graph).unchecked |= ours
