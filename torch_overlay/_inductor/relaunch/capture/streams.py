"""Replaces the caller's streams during a capture: Note [Streams of a capture] in `capture.recording`."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.offload import runtime


if TYPE_CHECKING:
    from collections.abc import Iterator


class Streams:
    """Streams of a device that only captures use. They are made when they are first needed, and kept. `blocking`: the
    legacy default stream waits for them, so nothing can be launched there while one is captured."""

    def __init__(self, index: int, blocking: bool) -> None:
        self.index, self.blocking = index, blocking
        self.made: list[torch.cuda.Stream] = []

    def get(self, number: int) -> torch.cuda.Stream:
        while len(self.made) <= number:
            from cuda.bindings import driver  # pyrefly: ignore[missing-module-attribute]

            with torch.cuda.device(self.index):
                kinds = driver.CUstream_flags
                kind = kinds.CU_STREAM_DEFAULT if self.blocking else kinds.CU_STREAM_NON_BLOCKING
                code, handle = driver.cuStreamCreate(kind)
            if int(code):
                raise RuntimeError(f"CUDA driver error in cuStreamCreate: {code}")
            self.made.append(torch.cuda.ExternalStream(int(handle), device=self.index))
        return self.made[number]


@functools.cache
def streams_of(index: int, blocking: bool = False) -> Streams:
    return Streams(index, blocking)


@contextlib.contextmanager
def exchanged_streams(streams: Streams) -> Iterator[None]:
    """Replace the copy streams and the table of stream objects. Note [Streams of a capture]."""
    names: dict[tuple[int, int], int] = {(-1, 0): 0}
    memcpy_nodes = runtime.exchanged(lambda number: streams.get(names.setdefault((-2, number), len(names))))
    with memcpy_nodes, exchanged_table(streams, names):
        yield


@contextlib.contextmanager
def exchanged_table(streams: Streams, names: dict[tuple[int, int], int]) -> Iterator[None]:
    table = objects.current()
    if table is None:
        yield
        return
    exchanged = []
    for index, found in enumerate(table):
        if type(found) is objects.Owned:
            # An owned stream is made when it is first looked up; an owned event is not replaced.
            found = found.resolve()
        if isinstance(found, torch.Stream):
            key = (found.device_index, found.stream_id) if index else (-1, 0)
            found = streams.get(names.setdefault(key, len(names)))
        exchanged.append(found)
    objects.install(exchanged)
    try:
        yield
    finally:
        objects.install(table)
