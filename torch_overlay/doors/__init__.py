"""Hooks that PyTorch lacks: each module is one, as PyTorch would have it, and knows nothing of this package's features.

The seam table installs a door's functions around upstream's. A door asks the object that is registered for it, which
`plugin.OBJECTS` names; with the same doors in PyTorch (`patches/TAG/upstream`), a plugin registers the object in a
configuration of PyTorch's, and nothing is installed. Begin with `stream_policy.StreamPolicy`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch_overlay.hooks import resolve
from torch_overlay.plugin import OBJECTS


@functools.cache
def registered(door: str) -> Any:
    """Return the object that a door asks; it is imported when the door is asked for the first time."""
    return resolve(OBJECTS[door])


__all__ = ["registered"]
