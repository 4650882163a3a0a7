"""Find the tensors that an operator reads and writes, from its schema."""

from __future__ import annotations

import re
from typing import Any, TYPE_CHECKING

import torch
import torch._dynamo.compiled_autograd
from torch.utils import _pytree as pytree


if TYPE_CHECKING:
    from collections.abc import Sequence


class Identical:
    """A set of tensors with membership by identity, since `==` compares tensors element by element."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.ids = {id(t) for t in tensors}

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self.ids


class Operator:
    """The tensors that one call of an operator reads, writes and returns, from its schema."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.reads: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []
        self.no_wait = False
        undeclared = _undeclared(func, args, kwargs)
        takes_layout = bool(_LAYOUT_ONLY.fullmatch(func._schema.name))
        aliases = False
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if argument.name == "non_blocking":
                self.no_wait = bool(value)
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
            written = argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
            aliases |= bool(tensors and argument.alias_info and not written)
            if written or not takes_layout:
                (self.writes if written else self.reads).extend(tensors)
            if written and not argument.is_out:  # updated in place
                self.reads.extend(tensors if not func._schema.name.endswith(_OVERWRITE) else ())
        # The schema of _unsafe_view doesn't declare a view. An operator that changes a tensor in place, but not the
        # data in its memory, declares a write. resize_ is no view: to enlarge memory is to copy it.
        names_memory = torch.Tag.inplace_view in func.tags and func._schema.name != "aten::resize_"
        self.is_view = (aliases and not self.writes) or names_memory or func is torch.ops.aten._unsafe_view.default
        known = {t.untyped_storage()._cdata for t in (*self.reads, *self.writes)}
        found = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.results = [t for t in found if t.untyped_storage()._cdata not in known]

    @property
    def touched(self) -> list[torch.Tensor]:
        return [*self.reads, *self.writes, *self.results]


def _undeclared(func: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return the arguments that an operator writes although its schema doesn't declare it."""
    if func._schema.name not in ("aten::native_batch_norm", "aten::cudnn_batch_norm"):
        return ()
    names = [argument.name for argument in func._schema.arguments]
    training = {**dict(zip(names, args)), **kwargs}.get("training")
    return ("running_mean", "running_var") if training else ()


_LAYOUT_ONLY = re.compile(r"aten::(new_\w+|\w+_like)")  # these read only their argument's layout


_OVERWRITE = ("::copy_", "::_foreach_copy_", "::zero_", "::fill_")
