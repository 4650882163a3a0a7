"""Have an operator that writes to a value through a different type write to the value itself.

    y = x * 2
    pack(y.view(torch.int32))  # a custom operator, or a Triton kernel, that writes to its argument
    return y

Inductor lowers the view to a computation, since nothing has computed `y` yet. The operator gets the result of that
computation, in new memory, and what it wrote there is copied into `y` as numbers: `y` has 1065353216.0 for the 1.0 that
the operator wrote. With `y` in memory before the view, the view is a different type for that memory, and nothing is
copied.
"""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import torch
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

from torch_overlay._functorch.streams.fx import is_view, updated_operands
from torch_overlay.orders import reached


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def on_realized_values(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the lowering of `aten.view.dtype`."""

    @functools.wraps(lower)
    def lower_view(value: Any, dtype: torch.dtype) -> Any:
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        if node.target is torch.ops.aten.view.dtype and _is_written(node):
            value.realize()
        return lower(value, dtype)

    return lower_view


def _is_written(view: Node) -> bool:
    """True if an operation writes to the view, or to a view of it."""
    views = reached([view], lambda n: [user for user in n.users if is_view(user)])
    return any(not views.isdisjoint(_written(user)) for node in views for user in node.users)


def _written(node: Node) -> list[Any]:
    given: Any = node.kwargs
    if node.target is not torch.ops.higher_order.triton_kernel_wrapper_mutation:
        return updated_operands(node)
    values = {name: v.meta["val"] if isinstance(v, torch.fx.Node) else v for name, v in given["kwargs"].items()}
    about = given["kernel_idx"], given["constant_args_idx"], values, given["tma_descriptor_metadata"]
    return [given["kwargs"][name] for name in get_mutated_tensors(*about)]
