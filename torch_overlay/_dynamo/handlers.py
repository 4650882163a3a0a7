"""Chooses between two handlers of a method or attribute of a stream or event, or of what they are used in.

Frames whose streams are known for each device (state.py) have handlers of their own; others, of other accelerators,
have those that are given. Tables of handlers are made while torch._dynamo is being imported. So what a handler needs is
imported when it is called.
"""

from __future__ import annotations

import importlib
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


def handler(
    name: str, otherwise: Callable[..., Any] | None, only_cuda: bool = False, module: str = "methods"
) -> Callable[..., Any]:
    """Return a handler that calls `name` of `module` in frames with a StreamState, else `otherwise`; None declines.

    With `only_cuda`, `name` is called for torch.cuda.Stream and classes that derive from it only.
    """

    def handle(variable: Any, tx: Any, *args: Any) -> Any:
        import torch

        from torch_overlay._dynamo.state import handled

        if handled(tx) and (not only_cuda or issubclass(variable.python_type(), torch.cuda.Stream)):
            found = importlib.import_module(f"torch_overlay._dynamo.{module}")
            return getattr(found, name)(variable, tx, *args)
        return None if otherwise is None else otherwise(variable, tx, *args)

    return handle
