"""Enter and leave a region with streams: the functions that generated code calls at run time.

    _region0 = region(device=0, streams={"stream0": "cuda:0", "stream1": 1}, events=2, exit=...,
                      entry=(("record", "ev0", "stream0"), ("wait", "ev0", "stream1")), returns=("stream1_raw",))

    frame0, stream1_raw, = _region0.enter()
    ...
    frame0.leave()

`enter` looks the streams up (a number is an index into the table of the running graph, "cuda:0" the current stream of
that device), records and waits as `entry` says, in its order, and returns the frame of this call and the streams and
events that the code between uses; `leave` records and waits as `exit` says. Events belong to the compiled module: a
call takes a frame, with a set of events, and returns it when it leaves, so two threads, or a call inside a call, never
share a frame; the frame of a call that raises is garbage-collected. The device -1 is the one that is current at a call:
Note [Compiled on one rank] of `streams.ids`.

On one device a region and its events are C (`csrc/region.c`, `csrc/events.c`), which take the raw handles of streams
that generated code has anyway: `torch.Event.record` costs 0.55 us of host time, of which the driver's share is a third,
and a fork and a join of eight streams is 25 such calls. Such an event orders streams of its device; one that crosses
devices is a torch.Event (`EventRegion`).

Note [Boundary events under the caller's capture]
When the caller captures a CUDA graph, a stream is part of the capture from the moment at which it waits for a captured
stream. Work that another stream held before that is no part of the graph, and waiting for it would end the capture:
such a wait is skipped (`record_entry`, `wait_entry`). And a stream that is made to wait for the caller's stream when
the region is left would be part of the capture and never joined: it is joined at once (`wait_exit`), so that it is in
the state in which eager leaves a stream that was forked and joined.

Note [Streams that hold nothing]
Where several streams wait for what the caller's stream held at the entry, `record_busy` asks first whether it holds
anything at all. If the device waits for its host, the stream holds nothing, and there is nothing to record and to wait
for. A kernel after a wait costs the host about a microsecond more than one without. The query itself costs as much for
a stream that has just become idle, so a side stream is not queried: a record and a wait are cheaper.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._C._dynamo.guards import copy_if_misaligned

from torch_overlay import csrc
from torch_overlay._dynamo import objects
from torch_overlay._dynamo.objects import callers_stream, get as get_object, Owned
from torch_overlay._functorch.offload.runtime import copy_stream
from torch_overlay._functorch.streams.ids import CURRENT_DEVICE, index_now, is_copy_stream


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


ALIGNMENT = 16  # bytes: the alignment of inputs that Inductor assumes

set_stream = torch._C._accelerator_setStream
"""Make a stream the current one of its device, and its device the current one: inside that device's guard this changes
no device.
"""


def restore_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device, and leave the current device alone."""
    device = torch._C._cuda_getDevice()
    set_stream(stream)
    if device != stream.device_index:
        torch._C._cuda_setDevice(device)


def aligned(tensor: torch.Tensor, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
    """Return the tensor, or an aligned copy of it that is made on the stream. A stream of None, which `enter` returns
    where a call keeps to the caller's stream, is the current one.
    """
    if not tensor.data_ptr() % ALIGNMENT:
        return tensor
    with torch.cuda.stream(stream):
        return copy_if_misaligned(tensor)


def write_back(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """Copy what was written to an aligned copy into the caller's memory, on the stream, or on the current one."""
    with torch.cuda.stream(stream):
        target.copy_(source)


def _as_cuda_stream(stream: torch.Stream) -> torch.Stream:
    """Return the torch.cuda.Stream of a device-agnostic torch.Stream, which doesn't show its handle."""
    key = (stream.stream_id, stream.device_index, stream.device_type)
    found = objects._stream_objects.get(key)
    if found is None:
        found = torch.cuda.Stream(stream_id=key[0], device_index=key[1], device_type=key[2])
        objects._stream_objects[key] = found
    return found


def resolve(found: Any) -> Any:
    """Return what an entry of a graph's table stands for: a torch.cuda.Stream, or an event."""
    if type(found) is Owned:
        found = found.resolve()
    elif type(found) is int:
        return copy_stream(found)
    return _as_cuda_stream(found) if type(found) is torch.Stream else found


def align(*streams: torch.Stream) -> None:
    """Order all the streams after one another.

    Note [Streams that turn out to be one]
    The plan assumes that the user's streams differ from each other and from the caller's current stream, as they did
    when the function was compiled. Where two of them are one stream in some call, an order that holds for one has to
    hold for the other: such a call orders all of them fully at its entry and exit instead.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        for event in events:
            stream.wait_event(event)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A region as its module defines it. Operations are (kind, event, stream), by the names of the generated code."""

    device: int | None  # None: streams of several devices, ordered by torch.Event
    streams: Mapping[str, int | str]
    events: int
    entry: Sequence[tuple[str, str, str]]
    exit: Sequence[tuple[str, str, str]]
    returns: Sequence[str]
    objects: Mapping[str, int]
    distinct: Sequence[str]
    waits_again: Sequence[str]
    records_again: Sequence[tuple[str, str]]
    idle_streams: Sequence[str] | None = None

    def find(self, stream: str) -> Any:
        where = self.streams[stream]
        if isinstance(where, str):
            return callers_stream(int(where[5:]))
        return resolve(where if is_copy_stream(where) else get_object(where))

    def event(self, name: str) -> int:
        return int(name[2:].partition("_")[0])

    def aliased(self, entering: bool) -> None:
        """Order the streams of a call in which two of them are one: Note [Streams that turn out to be one]."""
        align(*map(self.find, self.distinct))
        if entering:
            for event in self.waits_again:
                resolve(get_object(self.objects[event])).wait(self.find(self.distinct[0]))
        else:
            for event, stream in self.records_again:
                resolve(get_object(self.objects[event])).record(self.find(stream))


class EventFrame:
    """One call of an `EventRegion`."""

    def __init__(self, region: EventRegion) -> None:
        self.region = region
        self.events = [region.make_event() for _ in range(region.spec.events)]
        self.streams: dict[str, Any] = {}
        self.is_aliased = False

    def enter(self) -> None:
        spec = self.region.spec
        self.streams = {name: spec.find(name) for name in spec.streams}
        handles = {self.streams[name].cuda_stream for name in spec.distinct}
        self.is_aliased = len(handles) < len(spec.distinct)
        if self.is_aliased:
            spec.aliased(True)
        self.begin()

    def begin(self) -> None:
        self.run(self.region.spec.entry)

    def end(self) -> None:
        self.run(self.region.spec.exit)

    def handle(self, stream: str) -> Any:
        """Return what the events take for a stream."""
        return self.streams[stream]

    def run(self, operations: Sequence[tuple[str, str, str]]) -> None:
        for kind, event, stream in operations:
            getattr(self.events[self.region.spec.event(event)], kind)(self.handle(stream))

    def result(self, name: str) -> Any:
        spec = self.region.spec
        if name in spec.streams:
            return self.streams[name]
        if name in spec.objects:
            return resolve(get_object(spec.objects[name]))
        if name.endswith("_raw"):
            return self.streams[name[:-4]].cuda_stream
        return self.events[spec.event(name)]

    def leave(self) -> None:
        self.end()
        self.streams = {}
        if self.is_aliased:
            self.region.spec.aliased(False)
        self.region.frames.append(self)  # from here on another thread may take it


class EventRegion:
    """A region that uses torch.Event, which orders streams of several devices."""

    frame = EventFrame

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.frames: list[EventFrame] = []

    def make_event(self) -> Any:
        return torch.Event(device="cuda")

    def enter(self) -> tuple[Any, ...]:
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = self.frame(self)
        frame.enter()
        return frame, *(frame.result(name) for name in self.spec.returns)


def native_region(spec: Spec) -> Any:
    """Make the region of one device, in C. Raises `csrc.NotBuiltError`."""
    slots = {name: slot for slot, name in enumerate(spec.streams)}

    def operations(chosen: Sequence[tuple[str, str, str]]) -> tuple[tuple[str, int, int], ...]:
        return tuple((kind, spec.event(event), slots[stream]) for kind, event, stream in chosen)

    def result(name: str) -> tuple[str, int]:
        if name in slots:
            return "stream", slots[name]
        if name in spec.objects:
            return "object", spec.objects[name]
        if name.startswith("multi_stream"):
            return "multi_stream", 0
        return ("raw", slots[name[:-4]]) if name.endswith("_raw") else ("event", spec.event(name))

    return csrc.extension().events.Region(
        device=spec.device,
        indices=tuple(-1 if isinstance(where, str) else where for where in spec.streams.values()),
        events=spec.events,
        entry=operations(spec.entry),
        exit=operations(spec.exit),
        results=tuple(map(result, spec.returns)),
        distinct=tuple(slots[name] for name in spec.distinct),
        idle_streams=None if spec.idle_streams is None else tuple(slots[name] for name in spec.idle_streams),
        thread=objects._thread,
        stream_type=torch.cuda.Stream,
        current_raw=torch._C._cuda_getCurrentRawStream,
        current=callers_stream,
        resolve=resolve,
        aliased=spec.aliased,
    )


class Region:
    """A region of a generated module. The native module is built at the first call, not when the module is loaded."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.enter: Callable[[], tuple[Any, ...]] = self._enter_first
        self._of_device: dict[int, Any] = {}

    def _enter_first(self) -> tuple[Any, ...]:
        if self.spec.device == CURRENT_DEVICE:
            self.enter = self._enter_here
        else:
            self.enter = (EventRegion if self.spec.device is None else native_region)(self.spec).enter
        return self.enter()

    def _enter_here(self) -> tuple[Any, ...]:
        """Enter the region of the device that is current: its events are that device's."""
        device = index_now(CURRENT_DEVICE)
        region = self._of_device.get(device)
        if region is None:
            region = self._of_device[device] = native_region(dataclasses.replace(self.spec, device=device))
        return region.enter()


def region(
    device: int | None,
    streams: Mapping[str, int | str],
    events: int = 0,
    entry: Sequence[tuple[str, str, str]] = (),
    exit: Sequence[tuple[str, str, str]] = (),
    returns: Sequence[str] = (),
    objects: Mapping[str, int] | None = None,
    distinct: Sequence[str] = (),
    waits_again: Sequence[str] = (),
    records_again: Sequence[tuple[str, str]] = (),
    idle_streams: Sequence[str] | None = None,
) -> Region:
    """Make the region of a generated module.

    `streams` maps names to indices of the running graph's table, or to "cuda:N", the current stream of that device;
    where one of the latter is used by `exit`, it comes first. `objects` are events of the caller. `distinct` are the
    streams that the plan assumes to be different; where two of them are one in a call, all are ordered after one
    another, the first waits again for `waits_again`, and `records_again` (event, stream) are repeated at the end. With
    `idle_streams`, a call that finds these streams and the first one idle runs on the first one, and `multi_stream` is
    False.
    """
    return Region(
        Spec(
            device,
            streams,
            events,
            entry,
            exit,
            returns,
            objects or {},
            distinct,
            waits_again,
            records_again,
            idle_streams,
        )
    )


__all__ = ["align", "aligned", "callers_stream", "get_object", "region", "restore_stream", "set_stream", "write_back"]
