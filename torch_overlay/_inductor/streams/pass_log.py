"""Log the nodes that a pass over an FX graph makes, and the nodes that they replace.

A pass works in steps: it creates nodes, then replaces or erases the old ones. FX reports each change to hooks of the
graph's module, so the log knows of each new node which nodes it replaces:

- the nodes whose readers it was given to, and what the same step erases of the same operands;
- for a write in place, which nobody reads: the nodes that go in the same step and read the same values.

Where a node is made and replaced within the pass, its replacement also replaces what that node had replaced.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.fx import Graph, GraphModule, Node

COPY_OF = "stream_copy_of"  # in `meta`, of a copy that a pass keeps: the name of the node that it stands for

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


@dataclasses.dataclass
class _Step:
    made: list[Node] = dataclasses.field(default_factory=list)
    replaced: dict[Node, None] = dataclasses.field(default_factory=dict)
    erased: dict[Node, None] = dataclasses.field(default_factory=dict)


class PassLog:
    """The log of one pass over a graph. Its hooks are registered on the graph's module until `close`."""

    def __init__(self, gm: GraphModule, before: dict[Node, Placed]) -> None:
        self.before = before
        self._gm = gm
        self._steps = [_Step()]
        self._step_of: dict[Node, _Step] = {}  # of a node that the pass made
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
                self._steps.append(_Step())
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
        others: Iterable[Iterable[Node]] = (step.replaced, step.erased)
        return next(
            (
                gone
                for nodes in others
                if (gone := self._that_read([n for n in nodes if n not in left and n not in step.made], operands))
            ),
            [],
        )

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


__all__ = ["COPY_OF", "is_write", "PassLog", "Placed"]
