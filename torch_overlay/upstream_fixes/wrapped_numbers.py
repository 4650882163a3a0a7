"""A number that autograd saved can be read in the first call of compiled code.

Of `x * 2` autograd saves the 2, as a tensor that is marked as a number of Python's. Compiled autograd makes it an input
of the graph, and a kernel on a GPU takes its value, `arg6_1.item()`. In its first call AOTAutograd runs under a mode
that looks for custom operators with aliased results. A mode is given such tensors as the numbers that they stand for,
and there is no `item` of a number: the call fails, and where Dynamo then traces the handling of the error, with
"Attempt to trace generator".
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
