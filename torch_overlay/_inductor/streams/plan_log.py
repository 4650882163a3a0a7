"""Publish each stream plan, as it is made, to observers: tools and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_overlay._inductor.streams.plan import Plan


_observers: list[Callable[[Plan], None]] = []


def subscribe(observer: Callable[[Plan], None]) -> Callable[[], None]:
    """Call `observer` with every plan from now on; the function returned ends that."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def publish(plan: Plan) -> None:
    for observer in tuple(_observers):
        observer(plan)
