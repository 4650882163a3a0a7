"""Notes what later layers need to know of a complete graph with streams, and what functionalization drops from it.

A functional graph shows neither the `out` tensor of an operator nor that the result of an update is in the memory of
the updated tensor, and an unused view, which may be the first reader of an input, isn't in it.
"""

from __future__ import annotations

import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch.utils import _pytree as pytree

from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.fx import first_readers, has_streams, node_stream, updates_in_place


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch._dynamo.output_graph import OutputGraph
    from torch.fx import Node


_CALLS = ("call_function", "call_method")


def note_graph(output: OutputGraph) -> None:
    """Note facts on the nodes of a complete graph and on its frame (registry.py), before code is made for it."""
    nodes = output.graph.nodes
    registry.current().is_resumed = output.root_tx.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
    every = list(_with_bodies(nodes, output.nn_modules))
    if has_streams(every):
        _note_storages(every)
        registry.current().first_readers = weakref.WeakKeyDictionary(first_readers(nodes))
        registry.current().goes_on = output.compile_subgraph_reason.graph_break


def _with_bodies(nodes: Iterable[Node], modules: Mapping[str, Any]) -> Iterator[Node]:
    """Yield the nodes, and before the name of a body (of an `autograd.Function`, say) the nodes of the body."""
    for node in nodes:
        body = modules.get(str(node.target)) if node.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            yield from _with_bodies(body.graph.nodes, dict(body.named_children()))
        yield node


def _given_memory(node: Node) -> list[Node]:
    """Return the tensors that an operator was given as `out`, one for each of its results, or the argument that it
    returns, as `relu(x, inplace=True)` does. Updates in place that are known by their names are left out.
    """
    given: Any = node.kwargs.get("out")
    value = node.meta.get("example_value")
    if given is None and isinstance(value, torch.Tensor) and not updates_in_place(node.target):
        given = next((a for a in node.all_input_nodes if a.meta.get("example_value") is value), None)
    given = given if isinstance(given, (list, tuple)) else [given]
    return [target for target in given if isinstance(target, torch.fx.Node)]


def _note_storages(nodes: Iterable[Node]) -> None:
    """Note on each value in a storage that is updated in place which storage that is (`eager_storage`), and on each
    operator that was given memory for its results that it was.

    A functional update may read nothing of the updated tensor, as that of `zero_` or of an `out` tensor does; and of
    several operators that stand for the update, the first may read a mask. An operator that makes or updates a list of
    tensors (`torch._foreach_add_`) gets one storage per result, by position, unless all are in one storage.
    """
    held: dict[Node, list[int | None]] = {}
    makers: dict[int | None, Node] = {}
    updated: set[int | None] = set()
    for node in nodes:
        storages = _storages(node.meta.get("example_value"))
        if node.op in _CALLS:
            given = _given_memory(node)
            if given or updates_in_place(node.target):
                first: Any = given or next(iter(node.args), None)
                is_list = isinstance(first, (list, tuple))
                storages = [*map(_storage, first)] if is_list else [_storage(first)]
                updated.update(storages)
                # Other updates than these may be of several lists.
                if is_list and not given and not getattr(node.target, "__name__", "").startswith("_foreach_"):
                    storages = []
            if given:
                note_fact(node, is_given=True)
        held[node] = storages
        for storage in storages:
            makers.setdefault(storage, node)
    noted: dict[int | None, tuple[str, int | None]] = {}
    names: set[str] = set()
    for storage in [s for s in makers if s in updated and s is not None]:
        maker = makers[storage]
        name = maker.name if maker.name not in names else f"{maker.name}.{len(names)}"  # of a list, or of two bodies
        names.add(name)
        noted[storage] = name, node_stream(maker) if maker.op in _CALLS else None
    for node, storages in held.items():
        if node.op != "placeholder" and not noted.keys().isdisjoint(storages):
            listed = storages if len({*storages}) > 1 else storages[:1]
            note_fact(node, eager_storage=tuple(map(noted.get, listed)))


def _storage(node: Any) -> int | None:
    found = _storages(node.meta.get("example_value")) if isinstance(node, torch.fx.Node) else []
    return found[0] if len(found) == 1 else None


def _storages(value: Any) -> list[int | None]:
    """Return the storage of each tensor of a value; None for a tensor that has none: a sparse or a functorch tensor."""
    found: list[int | None] = []
    for tensor in pytree.tree_leaves(value):
        try:
            found.append(tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None)
        except (NotImplementedError, RuntimeError):
            found.append(None)
    return found
