"""Values that code is run with, in its thread alone."""

from __future__ import annotations

import contextlib
import threading
from typing import Generic, TYPE_CHECKING, TypeVar


if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
V = TypeVar("V")


class ThreadValue(threading.local, Generic[T]):
    """A value of each thread. `value`: that of the innermost `within` that the thread is in; or the one given."""

    def __init__(self, outside: T) -> None:  # called in each thread
        self.value = outside

    @contextlib.contextmanager
    def within(self, value: V) -> Iterator[V]:
        before, self.value = self.value, value  # type: ignore[assignment]
        try:
            yield value
        finally:
            self.value = before
