"""Replaces the caller's streams during a capture: Note [Streams of a capture]."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TYPE_CHECKING, TypeAlias

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    Instead: TypeAlias = "Callable[[Hashable], torch.cuda.Stream]"

CALLERS = "the caller's"  # the key of the stream that the region is launched on
# What compiled code uses streams by adds itself here. Each replaces them for the time of a context, by `instead(key)`:
# the same stream for the same key.
exchanges: list[Callable[[Instead], contextlib.AbstractContextManager[Any]]] = []


class Streams:
    """Streams of a device that only captures use. They are made when they are first needed, and kept."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.made: list[torch.cuda.Stream] = []

    def get(self, number: int) -> torch.cuda.Stream:
        while len(self.made) <= number:
            from cuda.bindings import driver  # pyrefly: ignore[missing-module-attribute]

            with torch.cuda.device(self.index):
                code, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            if int(code):
                raise RuntimeError(f"CUDA driver error in cuStreamCreate: {code}")
            self.made.append(torch.cuda.ExternalStream(int(handle), device=self.index))
        return self.made[number]


@functools.cache
def streams_of(index: int) -> Streams:
    return Streams(index)


@contextlib.contextmanager
def exchanged_streams(streams: Streams) -> Iterator[None]:
    """Replace the streams that the `exchanges` know by these. Note [Streams of a capture]."""
    names: dict[Hashable, int] = {CALLERS: 0}

    def instead(key: Hashable) -> torch.cuda.Stream:
        return streams.get(names.setdefault(key, len(names)))

    with contextlib.ExitStack() as stack:
        for exchange in exchanges:
            stack.enter_context(exchange(instead))
        yield
