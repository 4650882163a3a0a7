"""Has `record_stream` of a lazily conjugated or negated tensor, or of one of zeros without memory, name its memory.

Operators that don't know of these lazy views get a copy of the values. What a mutating operator wrote to the copy is
taken back by way of its result. `record_stream` has no result, so stock records the stream for the copy and raises
"Expected Tensor but got None", or refuses the zeros as immutable. It reads no element, so it needs no copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable

LAZY = ("Conjugate", "Negative", "ZeroTensor")


def register() -> Callable[[], None]:
    """Pass `record_stream` on to the tensor's device. Return a function that undoes it."""
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    for key in LAZY:
        library.impl("record_stream", torch.library.fallthrough_kernel, key)
    return library._destroy
