"""Reads the nodes and edges of a captured graph, or removes nodes, in one call instead of several for each node.

    structure(graph)    ([node], [its kind], [(before, after, is it a full dependency?)])
    kernels(nodes)      of kernel nodes: [(func, kern, ctx, grid, block, shared bytes, name, ((offset, value), ...),
                        attributes)]
    count(graph)            how many nodes there are
    cut(graph, clone, wanted)   {node: its handle in the clone} of the wanted ones; removes the others

`kernels` has None for a node that it can't describe; `graph.read` then reads that one through `driver`, which says why.
The driver is asked for a function's parameters once a call, not once a node. If `cut` fails, its clone must be
destroyed. The C source is `csrc/graph_reader.c`.
"""

from __future__ import annotations

from typing import Any

from torch_overlay import csrc


def implementation() -> Any:
    """Return `graph` of the extension module. Raises `csrc.NotBuiltError`."""
    return csrc.extension().graph
