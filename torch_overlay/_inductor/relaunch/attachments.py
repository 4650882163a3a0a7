"""Tells captures about the streams of compiled code, and about saved activations in host memory, which know nothing of
captures: Note [Streams of a capture] of `capture.recording`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects
from torch_overlay._functorch.offload import runtime
from torch_overlay._inductor.relaunch.capture.streams import CALLERS, exchanges
from torch_overlay._inductor.relaunch.host_memory import Keeper, keepers


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_overlay._inductor.relaunch.capture.streams import Instead


def exchanged_copy_streams(instead: Instead) -> contextlib.AbstractContextManager[None]:
    return runtime.exchanged(lambda number: instead(("copies", number)))


@contextlib.contextmanager
def exchanged_objects(instead: Instead) -> Iterator[None]:
    """Replace the table of stream objects. An owned stream is made when it is first looked up; events stay."""
    table = objects.current()
    if table is None:
        yield
        return
    exchanged = []
    for index, found in enumerate(table):
        if type(found) is objects.Owned:
            found = found.resolve()
        if isinstance(found, torch.Stream):
            found = instead((found.device_index, found.stream_id) if index else CALLERS)
        exchanged.append(found)
    objects.install(exchanged)
    try:
        yield
    finally:
        objects.install(table)


def attach() -> None:
    """Have every capture of this process replace these streams, and every graph keep addresses of slabs."""
    exchanges[:] = [exchanged_copy_streams, exchanged_objects]
    keepers[:] = [Keeper(runtime.holds, lambda tensor: runtime.identity(tensor) if runtime.is_slab(tensor) else None)]
