"""A driver that reads the nodes and edges of a captured graph, or removes nodes, in one call of C instead of several
calls of Python for each node.

The C module `graph` has

    structure(graph)    ([node], [its kind], [(before, after, is it a full dependency?)])
    kernels(nodes)      of kernel nodes: [(func, kern, ctx, grid, block, shared bytes, name, ((offset, value), ...),
                        attributes)]
    count(graph)            how many nodes there are
    cut(graph, clone, wanted)   {node: its handle in the clone} of the wanted ones; removes the others

`kernels` has None for a node that it can't describe; `graph.read` then reads that one by itself, which says why. The
driver is asked for a function's parameters once a call, not once a node. If `cut` fails, its clone must be destroyed.
The C source is `csrc/graph_reader.c`.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay import csrc
from torch_overlay._inductor.relaunch.graph.driver import Driver, Edge, Structure


if TYPE_CHECKING:
    from collections.abc import Sequence


class NativeDriver(Driver):
    """What fails in C is done again node by node, which raises the error with more detail. `fast` is the C module, or a
    test's replacement. Raises `csrc.NotBuiltError` if it can't be built."""

    def __init__(self, api: Any = None, fast: Any = None) -> None:
        super().__init__(api)
        self.fast = fast or csrc.extension().graph

    def structure(self, graph: int) -> Structure:
        try:
            nodes, kinds, edges = self.fast.structure(graph)
        except RuntimeError:
            return super().structure(graph)
        return Structure(nodes, kinds, [Edge(*edge) for edge in edges])

    def kernels(self, nodes: Sequence[int]) -> Sequence[tuple[Any, ...] | None]:
        return self.fast.kernels(nodes)

    def count(self, graph: int) -> int:
        try:
            return self.fast.count(graph)
        except RuntimeError:
            return super().count(graph)

    def part(self, graph: int, wanted: set[int]) -> tuple[int, dict[int, int]]:
        clone = self.clone(graph)
        try:
            return clone, self.fast.cut(graph, clone, wanted)
        except RuntimeError:
            self.destroy_graph(clone)
        return super().part(graph, wanted)
