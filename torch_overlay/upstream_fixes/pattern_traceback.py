"""A pattern that doesn't match a node says why by an exception, which the matcher catches and returns.

Its traceback holds the frames that it came through, from the matcher to the user's own, and the matcher's frame holds
the exception: a circle, which only the garbage collector ends. A backward is compiled while it is called, so the frames
have all that the call had: the loss, and the tensors that were saved. Nobody looks at the traceback.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


def match(original: Callable[..., Any], pattern: Any, node: Any) -> Any:
    found = original(pattern, node)
    if isinstance(found, Exception):
        found.__traceback__ = None
    return found
