"""Supplies the graphs of compiled autograd with the stream objects of the forwards that a backward belongs to.

The tables are queued while autograd asks its nodes for their cache keys, in the order in which the nodes will run.
Positions in the queue count from its end, because a backward that failed while it was traced leaves its tables there.
"""

from __future__ import annotations

import threading
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay._dynamo import objects


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import GraphModule

    from torch_overlay._dynamo.compiled_backward import StreamObject


class _Thread(threading.local):
    queue: list[objects.Snapshot] | None = None


_thread = _Thread()


def queued() -> list[objects.Snapshot]:
    """Return the tables of this thread's next backward; those of a backward that failed come first."""
    if _thread.queue is None:
        _thread.queue = []
    return _thread.queue


def table_of(ctx: Any) -> objects.Snapshot | None:
    """Return the table that the forward of a compiled function saved with its autograd node; None for other nodes."""
    table = getattr(ctx, "_external_objects", None)
    return table if isinstance(table, objects.Snapshot) else None


def add(table: objects.Snapshot) -> None:
    """Queue a table; one that is queued already moves to the end."""
    queue = queued()
    queue[:] = [*(t for t in queue if t is not table), table]


def from_end(table: objects.Snapshot) -> int:
    """Return the position of a queued table, 1 for the last one."""
    return next(i for i, t in enumerate(reversed(queued()), 1) if t is table)


def _callers(tables: Sequence[objects.Snapshot], here: torch.Stream) -> list[torch.cuda.Stream]:
    """Return the streams on which the forwards were called, except the current stream."""
    streams = [t.objects[0] for t in tables]
    found = {s.cuda_stream: s for s in streams if isinstance(s, torch.cuda.Stream)}
    found.pop(here.cuda_stream, None)  # type: ignore[attr-defined]
    return list(found.values())


def run_backward(call: Callable[[], Any], gm: GraphModule, needed: Sequence[StreamObject]) -> Any:
    """Call the graph of a backward, with the streams and events that it needs of the tables that were queued for it.
    The current stream waits for those on which the forwards were called, and they for it afterwards.
    """
    tables, _thread.queue = queued(), None
    if not tables:
        return call()
    for found in needed:
        setattr(gm, found.name, tables[-found.from_end].objects[found.index])
    # The forwards wrote the saved tensors on the streams that they were called on, which may also own their memory.
    here = objects.callers_stream()
    others = _callers(tables, here)
    for other in others:
        here.wait_stream(other)
    try:
        return call()
    finally:
        for other in others:
            other.wait_stream(here)
        for found in needed:
            setattr(gm, found.name, None)
