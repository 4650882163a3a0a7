"""Keep profiler ranges in their place among the launches of a graph.

Note [Ranges]
A range shows the launches that the host makes while it is open, so `range_push`, `range_pop` and `range_mark` (see
`_dynamo.ops`) are ordered on the host, and nothing on the device waits for them. When streams are placed, each node
notes how many of these operations the program has before it (`number`). From then on an operation of a range comes
after the nodes with its number or a smaller one, and before those with a larger one: in the FX graph, in what is
realized into buffers, in the scheduler. So kernels are not fused across the end of a range. A kernel that computes
nodes of several numbers belongs to the largest. Where a pass has made an order that contradicts this, data dependence
decides.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch._inductor import ir

from torch_overlay._dynamo.ops import NVTX, range_mark, range_push, RANGES
from torch_overlay._functorch.streams.facts import fact_of


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch


RUNTIME = "from torch_overlay._dynamo.ops import pop_range, push_range"


def is_range(node: torch.fx.Node) -> bool:
    return node.target in RANGES


def number(node: torch.fx.Node) -> int | None:
    """Return how many operations of ranges come before the node; for such an operation, its own place among them."""
    return fact_of(node).range


def order(nodes: Sequence[torch.fx.Node]) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """Yield pairs of nodes: the first must come before the second. Operations of ranges are already in order."""
    places = {number(n): n for n in nodes if is_range(n)}
    for node in nodes:
        known = number(node)
        if known is None or is_range(node) or node.op != "call_function":
            continue
        if (following := places.get(known)) is not None:
            yield node, following
        if (previous := places.get(known - 1)) is not None:
            yield previous, node


def realize_before(graph: Any, node: torch.fx.Node) -> None:
    """Realize what the program computes before the operation into buffers before it."""
    for earlier, value in graph.env.items():
        is_constant = earlier.op == "call_function" and not earlier.all_input_nodes
        if isinstance(value, ir.TensorBox) and earlier.op == "call_function" and not is_constant:
            value.realize()


def largest(origins: Iterable[torch.fx.Node]) -> int | None:
    """Return the number of a kernel: the largest of its origins' numbers."""
    return max((known for n in origins if not is_range(n) and (known := number(n)) is not None), default=None)


def write(wrapper: Any, root: Any, node: Any) -> bool:
    """Write an operation of a range as a direct call. False: the node is another operation."""
    overload = node.op_overload
    if overload not in RANGES:
        return False
    arguments = node.constant_args
    if overload is range_mark:
        wrapper.writeline(f"torch.cuda.nvtx.mark({arguments[0]!r})")
    elif arguments[0] == NVTX:
        is_push = overload is range_push
        wrapper.writeline(f"torch.cuda.nvtx.range_push({arguments[1]!r})" if is_push else "torch.cuda.nvtx.range_pop()")
    else:
        if not root.imports.contains(RUNTIME):
            root.imports.writeline(RUNTIME)
        function = "push_range" if overload is range_push else "pop_range"
        wrapper.writeline(f"{function}({', '.join(map(repr, arguments))})")
    return True
