"""What generated code calls at run time for a region with streams.

Events belong to the compiled module. A call takes a set of them from the module's pool and gives it back at its end, so two threads, or a
call inside a call, never share one; list operations are atomic, and a call that raises only leaves its set to be collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch_overlay._dynamo.objects import ambient, get as get_object


if TYPE_CHECKING:
    Events = tuple[torch.Event, ...]


def new_events(count: int) -> Events:
    """Events for ordering: without timing, made by the device when first recorded."""
    return tuple(torch.Event(device="cuda") for _ in range(count))


def take(pool: list[Events], count: int) -> Events:
    """A set of `count` events that no other call in flight uses."""
    try:
        return pool.pop()
    except IndexError:
        return new_events(count)


def set_stream(stream: torch.Stream) -> None:
    """Make `stream` the current stream of its device."""
    torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)


__all__ = ["ambient", "get_object", "new_events", "set_stream", "take"]
