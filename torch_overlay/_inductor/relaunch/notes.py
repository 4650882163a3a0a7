"""Notes what only the FX graph says of compiled code, for the code's description (`describe`). The FX graph is not
available later, when the code is taken from a cache: the notes are pickled with it.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from torch_overlay._inductor.relaunch import partitions
from torch_overlay._inductor.relaunch.partitions import Partitions


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def note(compiled: Any, graph: Any, gm: Any) -> None:
    """Note of compiled code which outputs the user sees, what was split off, and which numbers no size depends on.
    `graph`: Inductor's graph, whose code is generated; `gm`: the FX graph that it was lowered from."""
    (output,) = gm.graph.find_nodes(op="output")
    compiled.relaunch_visible_outputs = tuple(output.meta.get("user_visible_output_idxs", ()))
    found = partitions.of_graph(graph)
    compiled.relaunch_partitions = found.plain()
    compiled.relaunch_numbers = free_numbers(gm, found)


def are_there(compiled: Any) -> bool:
    """True if code was noted when it was compiled."""
    return hasattr(compiled, "relaunch_partitions")


def partitions_of(compiled: Any) -> Partitions:
    return Partitions.read(getattr(compiled, "relaunch_partitions", ()))


def numbers_of(compiled: Any, partition: int | None) -> tuple[int, ...]:
    """Return the positions of the numbers that no size depends on, of the code or of one partition."""
    whole, *others = getattr(compiled, "relaunch_numbers", ((),))
    if partition is None:
        return whole
    return others[partition] if partition < len(others) else ()


def first_saved(compiled: Any) -> int | None:
    """Return the number of a forward's first output that is saved for the backward; None if it isn't known. Without
    notes, AOTAutograd knows it while it compiles, not when the code comes from its cache."""
    visible = getattr(compiled, "relaunch_visible_outputs", None)
    if visible is not None:
        return max(visible) + 1 if visible else None
    context = torch._guards.TracingContext.try_get()
    return None if context is None or context.fw_metadata is None else context.fw_metadata.num_forward


def free_numbers(gm: Any, noted: Partitions) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the inputs that are integers on which no tensor's size or stride depends: those of the
    graph, then those of each partition, which count from the end. Offsets don't matter here: where generated code makes
    a view, its offset is computed from the number in sight, and an input's is in its address."""
    in_shapes: set[str] = set()
    for module in gm.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
            for shape in [dims for tensor in tensors for dims in (tensor.size(), tensor.stride())]:
                in_shapes.update(map(str, free_symbols(shape)))
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    names = [str(v.node.expr) if isinstance(v, torch.SymInt) and v.node.expr.is_Symbol else None for v in values]

    def free(symbols: Sequence[str | None]) -> Iterator[int]:
        return (k for k, symbol in enumerate(symbols) if symbol is not None and symbol not in in_shapes)

    of_partitions = [tuple(k - len(symbols) for k in free(symbols)) for _, _, symbols in noted.graphs]
    return tuple(free(names)), *of_partitions
