"""Registers with Inductor's lowerings: attention finds its seeds, a branch of the host's is split off alone, and an
operator that writes to a view in a different type writes to the viewed value."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch import attention_seeds
from torch_overlay.upstream_fixes.bitcast_updates import on_realized_values


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

BRANCHES = (torch.ops.higher_order.cond, torch.ops.higher_order.switch)


def register(module: ModuleType) -> Callable[[], None]:
    """Register at the end of Inductor's module of lowerings. Return a function that undoes it."""
    undo = contextlib.ExitStack()
    undo.callback(attention_seeds.register())
    for operator in BRANCHES:
        undo.callback(_register(module, operator, _split_off_alone))
    undo.callback(_register(module, torch.ops.aten.view.dtype, on_realized_values))
    return undo.close


def _register(module: ModuleType, operator: Any, wrap: Callable[..., Any]) -> Callable[[], None]:
    table = module.lowerings
    before = table[operator]
    ours = module.register_lowering(operator, type_promotion_kind=None)(wrap(before))

    def undo() -> None:
        if table.get(operator) is ours:  # not another library's, which has registered one since
            table[operator] = before

    return undo


def _split_off_alone(lower: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lower)
    def lower_branches(*args: Any, **kwargs: Any) -> Any:
        """Lower a choice of the host's, which takes CUDA graphs from the whole code, and give them back."""
        from torch._inductor.virtualized import V

        from torch_overlay import config
        from torch_overlay._inductor.relaunch import notes

        result = lower(*args, **kwargs)
        if config.cudagraphs == "relaunch":
            notes.give_back_graphs(V.graph)
        return result

    return lower_branches
