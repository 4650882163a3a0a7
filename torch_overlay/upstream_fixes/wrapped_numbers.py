"""Allow the first call of compiled code to read a number that autograd saved.

For `x * 2` autograd saves the 2, as a tensor that is marked as a Python number. Compiled autograd makes it an input of
the graph, and a kernel on a GPU takes its value, `arg6_1.item()`. In its first call AOTAutograd runs under a mode that
looks for custom operators with aliased results. A mode receives these tensors as the numbers that they stand for, and a
number has no `item`: the call fails. Where Dynamo then traces the handling of the error, it fails with "Attempt to
trace generator".
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


def look_at_operator(
    original: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
        return args[0]
    return original(mode, func, types, args, kwargs)
