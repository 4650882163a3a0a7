"""Drop the traceback of the exception that says why a pattern doesn't match a node.

The matcher catches the exception and returns it. The traceback holds the frames that the exception came through, from
the matcher to the user's own, and the matcher's frame holds the exception: a reference cycle, which only the garbage
collector ends. A backward is compiled while it is called, so the frames hold all that the call had: the loss, and the
saved tensors. Nobody looks at the traceback.
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
