"""The nodes and edges of a captured graph, read or taken out in one call instead of several for each node.

    structure(graph)    ([node], [its kind], [(before, after, is it a full dependency?)])
    kernels(nodes)      [(func, kern, ctx, grid, block, shared bytes, name, ((offset, value), ...))] of kernel nodes
    count(graph)            how many nodes there are
    cut(graph, clone, wanted)   {node: its handle in the clone} of the wanted ones; the others leave the clone

`kernels` has None for a node that it can't describe; `graph.read` then reads that one through `driver`, which says why.
What a function's parameters look like is asked once a call, not once a node. A clone that `cut` fails on is of no use
any more. It is C: `csrc/graph_reader.c`.
"""

from __future__ import annotations

from typing import Any

from torch_overlay import csrc


def implementation() -> Any:
    """`graph` of the extension module. Raises `csrc.NotBuiltError`."""
    return csrc.extension().graph
