"""What generated code calls at run time for a region with streams.

Events belong to the compiled module. A call takes a set of them from the module's pool and gives it back at its end,
so two threads, or a call inside a call, never share one; list operations are atomic, and a call that raises only
leaves its set to be collected.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_overlay._dynamo import objects
from torch_overlay._dynamo.objects import ambient, get as get_object, Owned
from torch_overlay._inductor.stream_native import event_class


set_stream = torch._C._accelerator_setStream
"""Makes a stream the current one of its device, and its device the current one: inside a device guard that is no
change.
"""


def restore_stream(stream: torch.Stream) -> None:
    """Makes a stream the current one of its device, and leaves the current device alone."""
    device = torch._C._cuda_getDevice()
    set_stream(stream)
    if device != stream.device_index:
        torch._C._cuda_setDevice(device)


def _as_cuda_stream(stream: torch.Stream) -> torch.Stream:
    """The torch.cuda.Stream of a device-agnostic torch.Stream, which doesn't show its handle."""
    key = (stream.stream_id, stream.device_index, stream.device_type)
    found = objects._stream_objects.get(key)
    if found is None:
        found = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])
        objects._stream_objects[key] = found
    return found


def get_objects(*indices: int) -> list[Any]:
    """The streams and events of the running graph with these numbers."""
    table = objects._thread.objects
    if table is None:
        return [get_object(index) for index in indices]  # raises
    found = [one.resolve() if type(one := table[index]) is Owned else one for index in indices]
    for i, one in enumerate(found):
        if type(one) is torch.Stream:
            found[i] = _as_cuda_stream(one)
    return found


def new_events(count: int, device_index: int | None) -> tuple[Any, ...]:
    """Events of one device, recorded on raw handles; for None: torch.Event, recorded on streams of any device."""
    if device_index is None:
        return tuple(torch.Event(device="cuda") for _ in range(count))
    make = event_class()
    return tuple(make(device_index) for _ in range(count))


def take(pool: list[tuple[Any, ...]], count: int, device_index: int | None) -> tuple[Any, ...]:
    """A set of `count` events that no other call in flight uses."""
    try:
        return pool.pop()
    except IndexError:
        return new_events(count, device_index)


def align(*streams: torch.Stream) -> None:
    """Order all the streams behind one another.

    The plan takes the caller's streams for different ones, and none for the ambient stream, as they were when the
    function was compiled. Where two of them are one stream in some call, a promise to one is a promise to the other:
    the call orders them fully at its entry and exit instead.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


__all__ = ["align", "ambient", "get_object", "get_objects", "new_events", "restore_stream", "set_stream", "take"]
