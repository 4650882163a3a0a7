"""Calls what has something to forget when `torch._dynamo.reset()` is called, without a seam there.

A reset calls `reset` of each backend that Dynamo has met, and then forgets the backends. What can be reset by it is put
among these, again whenever there is something new to forget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

_forgetting: list[Callable[[], None]] = []


class _Listener:
    """Stands among the backends."""

    def reset(self) -> None:
        for forget in _forgetting:
            forget()


_listener = _Listener()


def on_reset(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that a reset is to call, once for each reset that `listen` was called before."""
    _forgetting.append(forget)
    return forget


def listen() -> None:
    """Have the next reset heard. Does nothing if it is heard already."""
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(_listener), _listener)  # pyrefly: ignore[no-matching-overload]
