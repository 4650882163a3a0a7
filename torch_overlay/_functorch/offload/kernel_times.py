"""Measures how long the library kernels of a graph take: each one once on a device, and its time is kept on disk.

Matmuls, convolutions and attention are most of a training step, and how far they stay below the device's peak depends
on their shapes. So a plan looks up the kernels of its graphs by operator, shapes, strides and types; a kernel that no
process has measured before is run with random values (`offload.profile_cache`). A kernel that can't be run (too little
memory, a user's operator, one that writes its arguments) is estimated from the device's rates, like everything else.
"""

from __future__ import annotations

import logging
from typing import Any, TYPE_CHECKING

import torch
from torch.utils.flop_counter import flop_registry

from torch_overlay._functorch.offload import profile_cache
from torch_overlay._functorch.offload.device_rates import measuring, shortest_us


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Node

log = logging.getLogger(__name__)

MOST_OF_FREE = 0.5  # share of the device's free memory that one measurement may take


def is_measurable(node: Node) -> bool:
    """True if the node is a library kernel whose arguments we can make up."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return target.overloadpacket in flop_registry and not target._schema.is_mutable


def _arguments(node: Node) -> tuple[Any, Any] | None:
    """Return the node's arguments as the graph describes them; None if a size or number is unknown, or a layout is not
    strided."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))  # type: ignore[misc]
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None
        if isinstance(leaf, torch.Tensor):
            sizes = (*leaf.shape, *leaf.stride())
            if leaf.layout is not torch.strided or not all(isinstance(n, int) for n in sizes):
                return None
    return args, kwargs


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cuda" else f" on {value.device.type}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}{where}"
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    return str(value)


def name_of(node: Node) -> str | None:
    """Return the key under which the node's time is kept; None if the node can't be measured."""
    if not is_measurable(node) or (found := _arguments(node)) is None:
        return None
    args, kwargs = found
    given = [*map(_described, args), *(f"{key}={_described(value)}" for key, value in sorted(kwargs.items()))]
    return f"{node.target}({', '.join(map(str, given))})"


def measure(nodes: Iterable[Node], device_index: int) -> dict[str, float]:
    """Return microseconds by `name_of`, for all nodes whose time is known or can be measured."""
    by_name = {name: node for node in nodes if (name := name_of(node)) is not None}

    def run(missing: list[str]) -> dict[str, float]:
        found = {}
        with measuring(device_index):
            for name in missing:
                try:
                    found[name] = _us(by_name[name])
                except Exception as error:  # any kernel may raise
                    log.info("%s is not measured: %s", name, error)
        return found

    try:
        return profile_cache.profile(device_index).get(list(by_name), run)
    except Exception as error:  # no device
        log.info("times of library kernels are estimates: %s", error)
        return {}


def known_us(node: Node, device_index: int) -> float | None:
    """Return the node's time if it has been measured before; None otherwise."""
    if (name := name_of(node)) is None:
        return None
    try:
        return profile_cache.profile(device_index).known.get(name)
    except Exception:  # no device
        return None


def _us(node: Node) -> float:
    found = _arguments(node)
    assert found is not None
    leaves = torch.utils._pytree.tree_leaves((*found, node.meta.get("val")))
    needed = sum(t.untyped_storage().nbytes() for t in leaves if isinstance(t, torch.Tensor))
    free, _ = torch.cuda.mem_get_info()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if 2 * needed > MOST_OF_FREE * (free + unused):
        raise torch.OutOfMemoryError(f"{needed} bytes are needed")
    args, kwargs = torch.utils._pytree.tree_map(_made, found)
    target: Any = node.target
    return shortest_us(lambda: target(*args, **kwargs))


def _made(value: Any) -> Any:
    """Return a real tensor for a fake one: small random numbers for floats of 2 or more bytes, zeros for other types.
    Return other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    # Elements of a view may share memory, so the memory is filled before the view is made.
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride())) if value.numel() else 0
    line = torch.empty(extent, dtype=value.dtype, device=value.device)
    is_float = value.dtype.is_floating_point and value.dtype.itemsize > 1
    return (line.normal_(0, 0.1) if is_float else line.zero_()).as_strided(value.shape, value.stride())
