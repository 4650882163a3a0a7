"""Has several runs of a function begin with the same random numbers and the same arguments."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
import torch.utils._pytree as pytree


def seed() -> None:
    """Seed the generators of torch, Python and numpy."""
    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(0)


def generators() -> list[torch.Tensor]:
    """Return the states of torch's generators of the host and of the current device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


class SavedArguments:
    """The memory of arguments, of modules among them as well, kept on the host."""

    def __init__(self, args: Any) -> None:
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for leaf in pytree.tree_leaves(args):
            is_module = isinstance(leaf, torch.nn.Module)
            for tensor in [*leaf.parameters(), *leaf.buffers()] if is_module else [leaf]:
                with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):  # no tensor; a sparse one
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.storages:
                        self.storages[storage._cdata] = storage, storage.cpu().clone()

    def restore(self) -> None:
        """Undo what has been written to them."""
        for storage, copy in self.storages.values():
            if storage.nbytes() == copy.nbytes():  # else the function has changed its size
                storage.copy_(copy)
