"""Reads FX graphs as the steps of an offload plan.

Memory is estimated as Inductor will allocate it: a pointwise operation that no library kernel reads is fused away, and
its readers read what it read. A library kernel takes its measured time (`kernel_times`). Any other step takes the time
of its memory traffic or of its arithmetic, whichever is longer, at the measured rates of the device.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch.utils.flop_counter import flop_registry

from torch_overlay._functorch.offload.cost_model import Step
from torch_overlay._functorch.offload.kernel_times import name_of
from torch_overlay._functorch.streams.fx import base_of, readers_of, storage_node


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import Graph, Node

    from torch_overlay._functorch.offload.device_rates import Rates

log = logging.getLogger(__name__)

# Inductor materializes a value that reads more than this many others: if it has one reader, or several readers.
MOST_READS, MOST_READS_OF_SHARED = 8, 4
ALSO_POINTWISE = (
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.constant_pad_nd.default,
)


# ---- nodes


def tensor_of(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_static(value: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def nbytes(value: torch.Tensor) -> int:
    count = value.element_size()
    for size in value.shape:
        hint = size if isinstance(size, int) else size.node.hint
        count *= 1 if hint is None else int(hint)
    return count


def is_dense(value: torch.Tensor) -> bool:
    """True if the tensor isn't empty and its elements fill its whole storage, in some order."""
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride()))
    return value.numel() > 0 and extent == value.numel() and value.untyped_storage().nbytes() == nbytes(value)


# ---- what the plan needs to know


class StepReader:
    """The steps of one graph, for the plan."""

    def __init__(
        self,
        graph: Graph,
        kept: set[Node],
        known: Rates,
        device: torch.device,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Read the graph. `times` has the microseconds of library kernels, by `kernel_times.name_of`."""
        self.graph, self.kept, self.rates, self.device = graph, kept, known, device
        self.times = times or {}
        self.inlined: dict[Node, frozenset[str]] = {}  # fused node -> what its readers read in its place
        self.steps: list[Step] = []
        for node in graph.nodes:
            if node.op == "call_function" and base_of(node) is None:
                self.add(node)

    def reads(self, node: Node) -> frozenset[str]:
        found: set[str] = set()
        for argument in node.all_input_nodes:
            owner = storage_node(argument)
            found |= self.inlined.get(owner, {owner.name})
        return frozenset(found)

    def add(self, node: Node) -> None:
        reads, value = self.reads(node), tensor_of(node)
        if value is not None and node not in self.kept and self.is_inlined(node, reads):
            self.inlined[node] = reads
            return
        made = {node.name: nbytes(value)} if value is not None and value.device == self.device else {}
        self.steps.append(Step(node.name, self.us(node), made, reads))

    def is_inlined(self, node: Node, reads: frozenset[str]) -> bool:
        creates = not node.all_input_nodes and not is_library_call(node)
        if not creates and node.target not in ALSO_POINTWISE and not is_pointwise(node):
            return False
        readers = set(readers_of(node))
        if len(reads) > (MOST_READS if len(readers) < 2 else MOST_READS_OF_SHARED):
            return False
        return not any(map(is_library_call, readers))

    def us(self, node: Node) -> float:
        name = name_of(node)
        if name is not None and (measured := self.times.get(name)) is not None:
            return measured
        return estimated_us(node, self.rates, self.device.index or 0)


def estimated_us(node: Node, known: Rates, device_index: int) -> float:
    """Estimate the time of a node by its memory traffic and arithmetic, as far as they are known."""
    if node.target is operator.getitem:
        return 0.0
    moved = sum(nbytes(t) for n in {storage_node(a) for a in node.all_input_nodes} if (t := tensor_of(n)) is not None)
    found = [t for t in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    time = (moved + sum(map(nbytes, found))) / known.bytes
    if (flops := _flops(node)) and found:
        time = max(time, flops / known.flops_of(device_index, found[0].element_size()))
    return time


def is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def is_library_call(node: Node) -> bool:
    """True for a kernel that reads its inputs from memory: nothing is fused into it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and target is not operator.getitem
    return target.overloadpacket in flop_registry or target.namespace not in ("aten", "prims")


def _static(value: Any) -> Any:
    """Return the value with hints in place of symbolic sizes: computing with symbols would add guards."""
    return torch.utils._pytree.tree_map(_hinted, value)


def _hinted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([_hinted(n) for n in value.shape], dtype=value.dtype, device="meta")
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _flops(node: Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: _static(n.meta.get("val")))  # type: ignore[misc]
    try:
        return int(formula(*args, **kwargs, out_val=_static(node.meta.get("val"))))
    except Exception as error:  # a formula for other arguments: the time of its memory traffic remains
        log.debug("no count of operations for %s: %s", node, error)
        return 0
